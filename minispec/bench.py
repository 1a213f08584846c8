"""`minispec bench`: tokens per pass and tokens/s of rules and shapes, against plain decoding in the same run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from minispec.advanced import DynamicTree
from minispec.advanced.statistics import acceptance_by_rank
from minispec.decode import generate, speculate
from minispec.drafters import ModelDrafter
from minispec.ngram import NGramDrafter
from minispec.pair import Pair, load_pair, weights_folder
from minispec.planner import Costs, measure
from minispec.result import Result, Step, summarise
from minispec.sampling import Sampling
from minispec.tree import Tree

PROBE = Tree.branching([4, 3, 2])  # what acceptance by child rank is measured with


@dataclass(frozen=True)
class Setup:
    """A way to decode: rule and drafter; None is plain decoding. `nodes` are those scored in a pass."""

    name: str
    rule: str | None
    drafter: Any
    nodes: int


@dataclass(frozen=True)
class Row:
    """Figures of one setup at one temperature. Times are medians over repeats, `spread` their quartiles' distance."""

    setup: str
    temperature: float
    nodes: int
    new_tokens: int
    tokens_per_pass: float
    acceptance_rate: float | None = None
    tokens_per_second: float | None = None
    ratio: float | None = None
    spread: float | None = None
    predicted: float | None = None


def decode(pair: Pair, setup: Setup, prompts: Any, sampling: Sampling, length: int, seed: int) -> list[Result]:
    """Run a setup on one prompt or a batch; always a list."""
    options: dict[str, Any] = {"max_new_tokens": length, "sampling": sampling, "stop": (), "seed": seed}
    if setup.rule is None:
        results = generate(pair.target, prompts, **options)
    else:
        results = speculate(pair.target, setup.drafter, prompts, rule=setup.rule, **options)
    return results if isinstance(results, list) else [results]


def measured_ranks(pair: Pair, prompts: list[list[int]], sampling: Sampling, how: str, length: int = 64) -> list[float]:
    """Acceptance by child rank of a small bushy tree: the vector that `Tree.best` wants."""
    probe = Setup("probe", "match" if how == "top-k" else "rrs", ModelDrafter(pair.draft, PROBE, how), PROBE.size)
    results = decode(pair, probe, list(prompts), sampling, length, seed=10_000)
    return acceptance_by_rank([step for result in results for step in result.steps])


def setups(
    pair: Pair, prompts: list[list[int]], sampling: Sampling, nodes: int, lengths: Sequence[int], probe: int = 64
) -> list[Setup]:
    """Plain decoding, chains, and trees of `nodes` nodes (root included) under the rules that fit."""
    model, chain = pair.draft, Tree.chain(nodes - 1)
    found = [Setup("plain", None, None, 1)]
    ranked = Tree.best(measured_ranks(pair, prompts, sampling, "top-k", probe), nodes)
    if sampling.greedy:
        for k in (*lengths, nodes - 1):
            found.append(Setup(f"match, chain {k}", "match", ModelDrafter(model, Tree.chain(k), "top-k"), k + 1))
    else:
        for k in (*lengths, nodes - 1):
            found.append(Setup(f"token, chain {k}", "token", ModelDrafter(model, Tree.chain(k)), k + 1))
            found.append(Setup(f"block, chain {k}", "block", ModelDrafter(model, Tree.chain(k)), k + 1))
        found.append(Setup(f"coupled, chain {nodes - 1}", "coupled", ModelDrafter(model, chain, "coupled"), nodes))
        best = Tree.best(measured_ranks(pair, prompts, sampling, "without", probe), nodes)
        found.append(Setup("rrs, best tree", "rrs", ModelDrafter(model, best), best.size))
        found.append(Setup("traversal, best tree", "traversal", ModelDrafter(model, best), best.size))
        found.append(Setup("specinfer, best tree", "specinfer", ModelDrafter(model, best, "iid"), best.size))
        found.append(Setup("coupled, best tree", "coupled", ModelDrafter(model, best, "coupled"), best.size))
    found.append(Setup("match, top-k best tree", "match", ModelDrafter(model, ranked, "top-k"), ranked.size))
    dynamic = DynamicTree(model, nodes, max_depth=min(nodes - 1, 12), width=3)
    found.append(Setup("match, dynamic tree", "match", dynamic, nodes))
    found.append(Setup("match, n-gram", "match", NGramDrafter(min(nodes - 1, 8)), nodes))
    return list({setup.name: setup for setup in found}.values())


def passes(pair: Pair, setup: Setup, prompts: list[list[int]], sampling: Sampling, length: int, seeds: int) -> Row:
    """Tokens per pass over all prompts, in batches: no timing."""
    steps: list[Step] = []
    for seed in range(seeds):
        steps += [step for r in decode(pair, setup, prompts, sampling, length, seed) for step in r.steps]
    stats = summarise(steps)
    per_pass = stats.tokens_per_pass or 0.0
    return Row(setup.name, sampling.temperature, setup.nodes, stats.new_tokens, per_pass, stats.acceptance_rate)


def timings(
    pair: Pair, found: list[Setup], prompts: list[list[int]], sampling: Sampling, length: int, repeats: int, tick: Any
) -> list[Row]:
    """Every setup on every prompt, in turn, `repeats` times; medians of the ratio to plain decoding beside it."""
    rates: dict[str, list[float]] = {setup.name: [] for setup in found}
    steps: dict[str, list[Step]] = {setup.name: [] for setup in found}
    for repeat in range(repeats + 1):  # the first round warms up
        for setup in found:
            results = [decode(pair, setup, prompt, sampling, length, repeat)[0] for prompt in prompts]
            if repeat:
                seconds = sum(r.stats.seconds for r in results)
                rates[setup.name].append(sum(len(r.tokens) for r in results) / seconds)
                steps[setup.name] += [step for r in results for step in r.steps]
            tick()
    rows = []
    for setup in found:
        stats = summarise(steps[setup.name])
        ratios = [a / b for a, b in zip(rates[setup.name], rates["plain"], strict=True)]
        spread = statistics.quantiles(ratios, n=4)[2] - statistics.quantiles(ratios, n=4)[0] if repeats > 1 else 0.0
        row = Row(setup.name, sampling.temperature, setup.nodes, stats.new_tokens, stats.tokens_per_pass or 0.0)
        row = replace(
            row, acceptance_rate=stats.acceptance_rate, tokens_per_second=statistics.median(rates[setup.name])
        )
        rows.append(replace(row, ratio=statistics.median(ratios), spread=spread))
    return rows


def calibrate(pair: Pair, sampling: Sampling, prompts: list[list[int]], length: int) -> Costs:
    """Costs of the passes, and what plain and speculative steps spend besides, on prompts that are not timed later."""
    costs, chain = measure(pair.target, pair.draft, context=length // 2), Tree.chain(4)
    drafter = ModelDrafter(pair.draft, chain, "top-k" if sampling.greedy else "without")
    step: list[float] = []
    for setup in (Setup("plain", None, None, 1), Setup("chain", "match" if sampling.greedy else "token", drafter, 5)):
        results = [decode(pair, setup, prompt, sampling, length, 20_000)[0] for prompt in prompts]
        step.append(statistics.median(r.stats.seconds / r.stats.target_passes for r in results))
    overhead = step[1] - costs.check(chain.size) - chain.max_depth * costs.draft_step
    return replace(costs, overhead=max(overhead, 0.0), plain_overhead=max(step[0] - costs.check(1), 0.0))


def predict(pair: Pair, row: Row, setup: Setup, costs: Costs, calibration: list[list[int]], length: int) -> Row:
    """The row with the speed-up that the cost model expects, from tokens per pass on the prompts of the calibration."""
    depth = 0 if setup.rule is None else getattr(setup.drafter, "max_depth", None)
    if depth is None and hasattr(setup.drafter, "tree"):
        depth = setup.drafter.tree.max_depth
    if depth is None:  # no draft model, no model of its cost
        return row
    seen = passes(pair, setup, calibration, Sampling(row.temperature), length, 2)
    return replace(row, predicted=costs.speed_up(seen.tokens_per_pass, setup.nodes, depth))


def describe(costs: Costs) -> str:
    """The measured costs in two lines."""
    checks = " ".join(f"t({n}) {costs.check(n) / costs.check(1):.2f}" for n in (2, 4, 6, 8, 12, 16, 32))
    milliseconds = 1e3 * costs.check(1)
    return (
        f"target pass {milliseconds:.2f} ms; relative to it: {checks}\n"
        f"draft step {1e3 * costs.draft_step:.2f} ms, c = {costs.cost_ratio:.3f}; "
        f"overhead of a step {1e3 * costs.overhead:.2f} ms, of a plain one {1e3 * costs.plain_overhead:.2f} ms"
    )


def show(rows: list[Row], title: str) -> Table:
    """A table of figures."""
    table = Table(title=title)
    names = ("T", "nodes", "tokens", "tokens/pass", "acceptance", "tokens/s", "ratio to plain", "predicted")
    for name in ("rule, shape", *names):
        table.add_column(name, justify="left" if name == "rule, shape" else "right")
    for row in rows:
        rate = "n/a" if row.acceptance_rate is None else f"{row.acceptance_rate:.3f}"
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f} ± {(row.spread or 0) / 2:.2f}"
        cells = (f"{row.temperature:g}", str(row.nodes), f"{row.new_tokens:,}", f"{row.tokens_per_pass:.2f}", rate)
        table.add_row(row.setup, *cells, speed, ratio, "" if row.predicted is None else f"{row.predicted:.2f}")
    return table


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    bench = commands.add_parser("bench", help="tokens per pass and speed of rules and shapes, against plain decoding")
    bench.add_argument("--passes", action="store_true", help="tokens per pass only, over many tokens, without timing")
    bench.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.0], metavar="T", help="default 1 0")
    bench.add_argument("--nodes", type=int, default=9, help="nodes of a tree, the root included (default 9)")
    bench.add_argument("--draft-len", type=int, nargs="*", default=[2, 3, 4, 5], metavar="K", help="default 2 3 4 5")
    bench.add_argument("--prompts", type=int, help="shipped prompts to use (default 6 to time, all with --passes)")
    bench.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    bench.add_argument("--repeats", type=int, default=5, help="timed repeats, or seeds with --passes (default 5)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    bench.add_argument("--pair", type=Path, metavar="DIR", help="folder of another pair than the shipped one")
    bench.add_argument("--device", default="cpu")
    bench.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> None:
    args.prompts = args.prompts if args.prompts is not None else 24 if args.passes else 6
    if args.nodes < 2 or args.repeats < 1 or args.prompts < 1:
        raise ValueError(
            f"nodes must be >= 2, repeats and prompts >= 1, got {args.nodes}, {args.repeats} and {args.prompts}"
        )
    pair = load_pair(args.pair, device=args.device)
    texts = (weights_folder() / "prompts.txt").read_text(encoding="utf-8").splitlines()
    prompts = [pair.tokenizer.encode(text) for text in texts]
    timed, console, rows = prompts[-args.prompts :], Console(), []
    width = None if console.is_terminal else 120
    for temperature in args.temperature:
        sampling = Sampling(temperature)
        found = setups(pair, prompts[:8], sampling, args.nodes, args.draft_len, min(64, args.max_new_tokens))
        total = len(found) * (1 if args.passes else args.repeats + 1)
        with Progress(console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as bar:
            tick = partial(bar.advance, bar.add_task(f"T = {temperature:g}", total=total))
            if args.passes:
                for setup in found:
                    rows.append(passes(pair, setup, timed, sampling, args.max_new_tokens, args.repeats))
                    tick()
            else:
                costs = calibrate(pair, sampling, prompts[:3], args.max_new_tokens)
                measured = timings(pair, found, timed, sampling, args.max_new_tokens, args.repeats, tick)
                for row, setup in zip(measured, found, strict=True):
                    rows.append(predict(pair, row, setup, costs, prompts[:12], args.max_new_tokens))
                print(describe(costs))
    threads = torch.get_num_threads()
    Console(width=width).print(show(rows, f"{args.max_new_tokens} new tokens, {threads} threads, {pair.target.device}"))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
