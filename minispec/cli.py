"""The `minispec` command. Errors are one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, cast

from minispec import __version__
from minispec.auto import drafter_of, find_plan
from minispec.bench import commands as bench_commands
from minispec.decode import generate, search_run, speculate, stream
from minispec.drafters import Drafter
from minispec.early_exit import EarlyExitDrafter
from minispec.inputs import DEFAULT_DRAFT_LEN, find_device
from minispec.model import GPT
from minispec.ngram import NGramDrafter
from minispec.pair import Pair, load_pair
from minispec.result import Result, Stats, Step, summarise
from minispec.sampling import Sampling
from minispec.show import commands as show_commands
from minispec.show.commands import Job
from minispec.text import TextStream, cut, stop_strings
from minispec.train import commands as train_commands
from minispec.train import curves, draft_commands
from minispec.tree import Tree
from minispec.verify import RULES

REPEATS = 5  # of each side under --compare


class Parser(argparse.ArgumentParser):
    """argparse, with errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="minispec", description="Speculative decoding: minimal, readable, proved lossless.")
    parser.add_argument("--version", action="version", version=f"minispec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    _add_generate(commands)
    commands_of = cast(Any, commands)
    show_commands.add_commands(commands_of, add_decoding_options, prepare)
    train_commands.add_commands(commands_of)
    draft_commands.add_commands(commands_of)
    bench_commands.add_command(commands_of)
    curves.add_command(commands_of)
    return parser


def _add_generate(commands: Any) -> None:
    command = commands.add_parser("generate", help="continue a text, streaming it as it is committed")
    add = command.add_argument
    add_decoding_options(command)
    add("--colour", "--color", action="store_true", help="show what the draft guessed and what the target supplied")
    add("--show", action="store_true", help="show each guess, what became of it, trees, and a running gauge")
    add("--compare", action="store_true", help="also run plain decoding and print the measured ratio")
    add("--plan", action="store_true", help="measure this machine anew before choosing")
    command.set_defaults(run=run_generate)


def add_decoding_options(command: argparse.ArgumentParser) -> None:
    """What `generate` and `trace` may both be told."""
    add = command.add_argument
    add("prompt", nargs="?", help="the text to continue; read from stdin when it is missing or -")
    add("--max-new-tokens", type=int, default=160, metavar="N", help="default 160, fewer at the end of the context")
    add("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    add("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="keep the likeliest tokens with mass P")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text (may be given again)")
    add("--seed", type=int, help="default: a fresh one, which is printed")
    add("--draft-len", type=int, metavar="K", help="draft tokens a step (default: what is fastest on this machine)")
    add("--tree", type=_widths, metavar="W,W", help="draft a tree, such as 3,2,1: children a node, by depth")
    add(
        "--draft", default="draft", metavar="NAME", help="draft file of the pair (try misaligned), or ngram, early-exit"
    )
    add("--rule", choices=sorted(RULES), help="verification rule (default: token, or match where that is exact)")
    add("--device", default="auto", help="cpu, cuda, mps, or auto (default)")
    add("--pair", type=Path, metavar="DIR", help="folder of another pair than the shipped one")


def _widths(text: str) -> Tree:
    try:
        return Tree.branching([int(part) for part in text.split(",")])
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers >= 1 such as 3,2,1, got {text!r}") from None


def _prompt(text: str | None) -> str:
    if text in (None, "-"):
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError('prompt: give a text, as in: minispec generate "Once upon a time"')
        text = sys.stdin.read().rstrip("\r\n")
    if not text:
        raise ValueError("prompt must not be empty")
    return text


def prepare(args: argparse.Namespace) -> Job:
    """What the decoding options ask for, checked as far as it can be before a model is run."""
    text = _prompt(args.prompt)
    if args.tree is not None and (args.draft_len is not None or args.draft == "ngram"):
        other = "--draft ngram, which has a shape of its own" if args.draft == "ngram" else "--draft-len"
        raise ValueError(f"give either --tree or {other}")
    length = DEFAULT_DRAFT_LEN if args.draft_len is None else args.draft_len
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    name = "draft" if args.draft in ("ngram", "early-exit") else args.draft
    pair = load_pair(args.pair, device=args.device, draft=name)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    draft: GPT | Drafter = pair.draft
    tree = Tree.chain(length) if args.tree is None else args.tree
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": seed}
    shape: dict[str, Any] = {"tree": tree, "rule": args.rule}
    plan, prompt = "", pair.tokenizer.encode(text)
    reader = TextStream(pair.tokenizer, stop_strings(args.stop))
    if args.draft == "ngram":
        draft, shape = NGramDrafter(length), {"rule": args.rule}
    elif args.draft == "early-exit":
        if pair.target.config.n_layer < 2:
            raise ValueError("draft early-exit must leave a layer out, got a target with 1 layer")
        layers = max(pair.target.config.n_layer // 4, 1)
        draft, shape = EarlyExitDrafter(pair.target, layers, tree), {"rule": args.rule}
    elif args.draft_len is None and args.tree is None:
        stream(pair.target, draft, prompt, **options)  # refuses what cannot be decoded before anything is measured
        found = find_plan(
            pair.target, pair.draft, sampling, args.rule, 1, search_run(pair.target), again=args.plan, say=_say
        )
        draft, shape, plan = drafter_of(found, pair.draft), {"rule": found.rule}, f"plan: {found}"
    return Job(pair, draft, text, prompt, options, shape, reader, plan)


def run_generate(args: argparse.Namespace) -> None:
    if args.show and args.stop:
        raise ValueError(f"give either --show or --stop, got --stop {args.stop[0]!r}")
    pair, draft, text, prompt, options, shape, reader, plan = prepare(args)
    steps = stream(pair.target, draft, prompt, **options, **shape)
    if args.show:
        taken, interrupted = show_commands.show_run(pair, text, steps), False
    else:
        taken, interrupted = _stream_text(reader, text, steps, args.colour)
    if args.compare and not interrupted:
        print(compare(pair, draft, prompt, options, shape))
    else:
        print(describe(summarise([step for step, _ in taken], sum(s for _, s in taken))) + f", seed {options['seed']}")
    if plan:
        print(plan)
    if interrupted:
        raise KeyboardInterrupt


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _stream_text(
    reader: TextStream, text: str, steps: Iterator[Step], colour: bool
) -> tuple[list[tuple[Step, float]], bool]:
    """Print the prompt and the steps as they come. Returns each with its seconds, and whether Ctrl-C ended it."""
    taken: list[tuple[Step, float]] = []
    marks = _marks() if colour else (("", ""), ("", ""))
    interrupted = False
    try:
        print(text, end="", flush=True)
        start = perf_counter()
        for step in steps:
            seconds = perf_counter() - start
            taken.append((step, seconds))
            for i, token in enumerate(step.tokens):
                before, after = marks[i >= step.accepted]
                chunk = reader.feed(token)
                print(f"{before}{chunk}{after}" if chunk else "", end="", flush=True)
                if reader.stopped:
                    taken[-1] = (cut(step, i + 1), seconds)
                    break
            if reader.stopped:
                break
            start = perf_counter()
    except KeyboardInterrupt:
        interrupted = True
    print(reader.finish())
    if colour:
        (a, b), (c, d) = marks
        print(f"\n{a}guessed by the draft{b} {c}supplied by the target{d}")
    return taken, interrupted


def _marks() -> tuple[tuple[str, str], tuple[str, str]]:
    """What to print around the draft's and the target's tokens: colours, or brackets where there are none."""
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
        return ("\x1b[32m", "\x1b[0m"), ("\x1b[1;4;35m", "\x1b[0m")
    return ("", ""), ("[", "]")


def describe(stats: Stats) -> str:
    """One line: tokens, tokens per target pass, both acceptance rates, tokens/s."""

    def show(value: float | None, form: str = ".2f") -> str:
        return "n/a" if value is None else format(value, form)

    return (
        f"{stats.new_tokens} tokens, {show(stats.tokens_per_pass)} per target pass, "
        f"acceptance {show(stats.acceptance_rate)} of tested and {show(stats.accepted_per_proposed)} of proposed, "
        f"{show(stats.new_tokens / stats.seconds if stats.seconds else None, '.0f')} tokens/s"
    )


def compare(pair: Pair, draft: Any, prompt: list[int], options: dict[str, Any], shape: dict[str, Any]) -> str:
    """Plain and speculative decoding in turn, several times each; medians and their ratio."""
    plain: list[Result] = []
    fast: list[Result] = []
    for repeat in range(REPEATS + 1):
        again = options | {"seed": options["seed"] + repeat, "stop": ()}
        plain.append(generate(pair.target, prompt, **again))
        fast.append(speculate(pair.target, draft, prompt, **again, **shape))
    lines = []
    rates = []
    for name, results in (("plain", plain[1:]), ("speculative", fast[1:])):  # the first round warms up
        if not results[0].tokens:
            return "nothing to compare: no token was generated"
        rates.append(statistics.median(len(r.tokens) / r.stats.seconds for r in results))
        steps = [step for r in results for step in r.steps]
        lines.append(f"{name + ':':<13}" + describe(summarise(steps, sum(len(r.tokens) for r in results) / rates[-1])))
    return "\n".join([*lines, f"measured ratio: {rates[1] / rates[0]:.2f}x (medians of {REPEATS} interleaved runs)"])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="replace")  # a cp1252 console has no character for everything
    args = build_parser().parse_args(argv)
    try:
        if hasattr(args, "device"):
            args.device = find_device(args.device)
        args.run(args)
    except (ValueError, TypeError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone: nothing more to say
            return 0
        message = " ".join(str(error).split())
        print(f"minispec {args.command}: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0
