"""The `minispec bench` command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from minispec.bars import bar
from minispec.bench.machine import (
    BATCHES,
    CONTEXTS,
    CONTINUED,
    Shares,
    bytes_read,
    emulate_layers,
    growth,
    middle,
    shares,
)
from minispec.bench.report import describe, figures, growth_table, plot, where
from minispec.bench.setups import automatic, model_setup, peers, setups
from minispec.bench.timing import Predictor, Row, passes, timings
from minispec.decode import generate
from minispec.pair import Pair, load_pair, weights_folder
from minispec.sampling import Sampling
from minispec.tree import Tree


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    bench = commands.add_parser("bench", help="tokens per pass and speed of rules and shapes, against plain decoding")
    add = bench.add_argument
    add("--passes", action="store_true", help="tokens per pass only, over many tokens, without timing")
    add("--growth", action="store_true", help="instead: time a token by context length and by batch")
    add("--temperature", type=float, nargs="+", default=[1.0, 0.0], metavar="T", help="default 1 0")
    add("--nodes", type=int, default=9, help="nodes of a tree, the root included (default 9)")
    add("--draft-len", type=int, nargs="*", default=[1, 2, 3, 4, 5, 6, 7, 8], metavar="K", help="default 1 to 8")
    add("--prompts", type=int, help="shipped prompts to use (default 6 to time, all with --passes)")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    add("--repeats", type=int, default=5, help="timed repeats, or seeds with --passes (default 5)")
    add("--peers", action="store_true", help="also Hugging Face generation of the same weights (extra: peers)")
    add("--emulate-layers", type=int, default=0, metavar="N", help="target with N more layers that change nothing")
    add("--again", action="store_true", help="measure the automatic plan anew")
    add("--json", type=Path, metavar="FILE", help="write the figures here as well")
    add("--plot", type=Path, metavar="FILE", help="draw measured and predicted ratios (PNG, SVG, PDF)")
    add("--pair", type=Path, metavar="DIR", help="folder of another pair than the shipped one")
    add("--device", default="cpu")
    bench.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> None:
    args.prompts = args.prompts if args.prompts is not None else 24 if args.passes else 6
    if args.nodes < 2 or args.repeats < 1 or args.prompts < 1 or args.emulate_layers < 0:
        raise ValueError(
            f"nodes must be >= 2, repeats and prompts >= 1, emulate-layers >= 0, got {args.nodes}, {args.repeats}, "
            f"{args.prompts} and {args.emulate_layers}"
        )
    pair = load_pair(args.pair, device=args.device)
    if args.emulate_layers:
        pair = replace(pair, target=emulate_layers(pair.target, args.emulate_layers))
    texts = (weights_folder() / "prompts.txt").read_text(encoding="utf-8").splitlines()
    prompts = [pair.tokenizer.encode(text) for text in texts]
    title = f"{args.max_new_tokens} new tokens, {torch.get_num_threads()} threads, {pair.target.device}"
    if args.emulate_layers:
        title += f"; EMULATION: {args.emulate_layers} layers added that cost time and change nothing"
    console = Console(width=None if Console().is_terminal else 120)
    with bar(*Progress.get_default_columns()) as shown:
        if args.growth:
            found: dict[str, Any] = {"growth": _growth(args, pair, prompts, console, shown)}
        else:
            found = _compare(args, pair, prompts, console, shown, title)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _compare(
    args: argparse.Namespace, pair: Pair, prompts: list[list[int]], console: Console, bar: Progress, title: str
) -> dict[str, Any]:
    """All setups at all temperatures."""
    timed, others, length = prompts[-args.prompts :], prompts[: -args.prompts] or prompts, args.max_new_tokens
    rows: list[Row] = []
    times: dict[str, Shares] = {}
    for temperature in args.temperature:
        sampling = Sampling(temperature)
        found = setups(pair, others[:8], sampling, args.nodes, args.draft_len, min(64, length))
        if args.passes:
            tick = partial(bar.advance, bar.add_task(f"T = {temperature:g}", total=len(found)))
            for setup in found:
                rows.append(passes(pair, setup, timed, sampling, length, args.repeats))
                tick()
            continue
        found.append(automatic(pair, sampling, args.again))
        found += peers(pair, sampling, 5) if args.peers else []
        tick = partial(bar.advance, bar.add_task(f"T = {temperature:g}", total=(args.repeats + 1) * len(timed)))
        predictor = Predictor(pair, sampling, others[:16], length)
        timed_rows = timings(
            pair, found, timed, sampling, length, args.repeats, tick, partial(predictor.measure, found)
        )
        expected = predictor.speed_ups(found)
        rows += [replace(row, predicted=expected[row.setup]) for row in timed_rows]
        weights, held = bytes_read(pair.target), bytes_read(pair.target, held=True)
        print(describe(predictor.typical(), weights, held, predictor.alone, predictor.reads))
        for setup in found:
            if (setup.plan is not None or setup.name.endswith("chain 5")) and setup.peer is None:
                parts = [shares(pair, setup, timed, sampling, length) for _ in range(args.repeats)]
                usual = middle([part for part in parts if part is not None])
                times |= {} if usual is None else {f"T = {temperature:g}: {setup.name}": usual}
    console.print(figures(rows, title))
    if times:
        console.print(where(times))
    if args.plot is not None:
        plot(rows, args.plot)
    return {"rows": [asdict(row) for row in rows], "shares": {name: asdict(part) for name, part in times.items()}}


def _growth(
    args: argparse.Namespace, pair: Pair, prompts: list[list[int]], console: Console, bar: Progress
) -> list[dict[str, Any]]:
    """Time a token by context and batch, chain of 5."""
    text = generate(pair.target, prompts[0], max_new_tokens=pair.target.config.block_size, stop=(), seed=0)
    rows: list[dict[str, Any]] = []
    for temperature in args.temperature:
        rule = "match" if temperature == 0 else "token"
        setup = model_setup(pair, rule, Tree.chain(5), "top-k" if temperature == 0 else "without", "chain 5")
        tick: Callable[[], None] = partial(
            bar.advance, bar.add_task(f"T = {temperature:g}", total=len(CONTEXTS) + len(BATCHES))
        )
        found = growth(pair, setup, text.prompt + text.tokens, Sampling(temperature), args.repeats, tick)
        console.print(growth_table(found, f"{setup.name}, T = {temperature:g}, {CONTINUED} new tokens"))
        rows += [{"temperature": temperature} | row for row in found]
    return rows
