"""`minispec trace` and `minispec doctor`, and what `minispec generate --show` prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from minispec.drafters import Drafter
from minispec.inputs import DEFAULT_DRAFT_LEN
from minispec.model import GPT
from minispec.pair import Pair
from minispec.result import Step
from minispec.show import doctor, terminal
from minispec.show.progress import progress
from minispec.show.recorder import Recording, plain_step
from minispec.text import TextStream

PLAIN_STEPS = 12  # timed for the page's running speed-up
WARM_UP = 3  # steps of another run before the one recorded: a process's first ones are slow


class Job(NamedTuple):
    """One decoding run as the command line asks for it."""

    pair: Pair
    draft: GPT | Drafter
    text: str
    prompt: list[int]
    options: dict[str, Any]
    shape: dict[str, Any]
    reader: TextStream  # knows the stop strings
    plan: str = ""  # what was chosen for this machine, in words


def add_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_decoding_options: Callable[[argparse.ArgumentParser], None],
    prepare: Callable[[argparse.Namespace], Job],
) -> None:
    """Declare both commands. `trace` decodes as `generate` does, by the same options."""
    trace = commands.add_parser("trace", help="record a run as JSON, or as a page that plays it in a browser")
    add_decoding_options(trace)
    trace.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="run.json or run.html")
    trace.add_argument("--top", type=int, default=20, metavar="N", help="tokens kept of each distribution (default 20)")
    trace.set_defaults(run=lambda args: run_trace(args, prepare), plan=False)
    health = commands.add_parser("doctor", help="is this machine ready? exit status 1 where generation cannot work")
    health.add_argument("--json", action="store_true", help="print the findings as JSON")
    health.add_argument("--pair", type=Path, metavar="DIR", help="folder of another pair than the shipped one")
    # not `args.device`, which is refused before anything runs: here a missing device is a finding
    health.add_argument("--device", dest="on", default="auto", help="cpu, cuda, mps, or auto (default)")
    health.set_defaults(run=run_doctor)


def run_trace(args: argparse.Namespace, prepare: Callable[[argparse.Namespace], Job]) -> None:
    if args.output.suffix.lower() not in (".json", ".html", ".htm"):
        raise ValueError(f"output must end in .json or .html, got {str(args.output)!r}")
    if args.stop:
        raise ValueError(f"a trace shows tokens and knows no stop strings, got --stop {args.stop[0]!r}")
    if args.draft_len is None and args.tree is None:
        args.draft_len = DEFAULT_DRAFT_LEN  # not the machine's own plan: the same page everywhere
    job = prepare(args)
    tokenizer = job.pair.tokenizer

    def recording() -> Recording:
        return Recording(
            job.pair.target, job.draft, job.prompt, tokenizer=tokenizer, top=args.top, **job.options, **job.shape
        )

    list(islice(recording(), WARM_UP))
    run = recording()
    plain = plain_step(job.pair.target, job.prompt, job.options["sampling"], PLAIN_STEPS)
    with progress("tracing", job.options["max_new_tokens"]) as tick:
        for step in run:
            tick(len(step.tokens))
    trace = run.trace(plain)
    trace.save(args.output)
    size = args.output.stat().st_size / 1000
    stats = trace.data["stats"]
    print(
        f"{args.output}: {stats['target_passes']} steps, {stats['new_tokens']} tokens, {size:.0f} kB, "
        f"seed {trace.data['seed']}"
    )


def run_doctor(args: argparse.Namespace) -> None:
    """Print the findings; exit with 1 where one of them means that generation cannot work."""
    with progress("examining", len(doctor.EXAMINATIONS)) as tick:
        findings = doctor.examine(args.pair, args.on, lambda: tick(1))
    if args.json:
        print(json.dumps(doctor.report(findings), indent=2, allow_nan=False))
    else:
        doctor.show(findings, Console(width=None if sys.stdout.isatty() else 100))
    if not doctor.ready(findings):
        raise SystemExit(1)


def show_run(pair: Pair, text: str, steps: Iterable[Step]) -> list[tuple[Step, float]]:
    """`generate --show`: the steps, each with its share of the time that decoding took."""
    taken, seconds = terminal.show(Console(), pair.tokenizer, text, steps, trees=True)
    return [(step, seconds / len(taken)) for step in taken]
