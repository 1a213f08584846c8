"""Figures of each setup: tokens per pass over many tokens; times in turn, with what the cost model expected."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from minispec.auto import SPAN, Search
from minispec.bench.setups import Setup, decode
from minispec.decode import search_run
from minispec.pair import Pair
from minispec.planner import Costs
from minispec.result import Step, summarise
from minispec.sampling import Sampling
from minispec.tree import Tree


@dataclass(frozen=True)
class Row:
    """Figures of one setup at one temperature. Times are medians over repeats, `spread` their quartiles' distance."""

    setup: str
    temperature: float
    nodes: int
    new_tokens: int
    tokens_per_pass: float | None
    acceptance_rate: float | None = None
    tokens_per_second: float | None = None
    ratio: float | None = None
    spread: float | None = None
    predicted: float | None = None


def passes(pair: Pair, setup: Setup, prompts: list[list[int]], sampling: Sampling, length: int, seeds: int) -> Row:
    """Tokens per pass over all prompts, in batches: no timing. Greedy decoding has one outcome, so one seed."""
    steps: list[Step] = []
    for seed in range(1 if sampling.greedy else seeds):
        steps += [step for r in decode(pair, setup, prompts, sampling, length, seed) for step in r.steps]
    stats = summarise(steps)
    per_pass = stats.tokens_per_pass or 0.0
    return Row(setup.name, sampling.temperature, setup.nodes, stats.new_tokens, per_pass, stats.acceptance_rate)


def timings(
    pair: Pair,
    found: list[Setup],
    prompts: list[list[int]],
    sampling: Sampling,
    length: int,
    repeats: int,
    tick: Callable[[], None],
) -> list[Row]:
    """Every setup on every prompt, in turn, `repeats` times; medians of the ratio to plain decoding beside it."""
    rates: dict[str, list[float]] = {setup.name: [] for setup in found}
    steps: dict[str, list[Step]] = {setup.name: [] for setup in found}
    for repeat in range(repeats + 1):  # the first round warms up
        seconds = dict.fromkeys(rates, 0.0)
        tokens = dict.fromkeys(rates, 0)
        for prompt in prompts:  # setups take turns at each prompt, so that a slow spell hits all of them
            for setup in found:
                count, spent, taken = once(pair, setup, prompt, sampling, length, repeat)
                seconds[setup.name] += spent
                tokens[setup.name] += count
                steps[setup.name] += taken if repeat else []
            tick()
        for name in rates if repeat else ():
            rates[name].append(tokens[name] / seconds[name])
    rows = []
    for setup in found:
        stats = summarise(steps[setup.name])
        ratios = [a / b for a, b in zip(rates[setup.name], rates[found[0].name], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if repeats > 1 else [0.0, 0.0, 0.0]
        rows.append(
            Row(
                setup.name,
                sampling.temperature,
                setup.nodes,
                stats.new_tokens or repeats * len(prompts) * length,
                stats.tokens_per_pass,
                stats.acceptance_rate,
                statistics.median(rates[setup.name]),
                statistics.median(ratios),
                quartiles[2] - quartiles[0],
            )
        )
    return rows


def once(
    pair: Pair, setup: Setup, prompt: list[int], sampling: Sampling, length: int, seed: int
) -> tuple[int, float, list[Step]]:
    """Decode once: new tokens, seconds, steps (none of another library's)."""
    if setup.peer is None:
        result = decode(pair, setup, prompt, sampling, length, seed)[0]
        return len(result.tokens), result.stats.seconds, result.steps
    start = time.perf_counter()
    tokens = setup.peer(prompt, length, seed)
    return len(tokens), time.perf_counter() - start, []


class Predictor:
    """The cost model's expectation for any setup, measured on prompts that are not timed later."""

    def __init__(self, pair: Pair, sampling: Sampling, prompts: list[list[int]], length: int) -> None:
        run = search_run(pair.target)
        self.search = Search(pair.target, pair.draft, sampling, None, run, length=length, given=prompts, repeats=7)
        self._costs: dict[str, Costs] = {}

    def speed_up(self, setup: Setup) -> float | None:
        """Predicted ratio to plain decoding; None for a drafter whose cost has no model."""
        if setup.plan is not None:  # found without these prompts as well
            return setup.plan.speed_up
        if setup.depth is None:
            return None
        if setup.rule is None:
            return 1.0
        tokens = self.search.tokens_per_step(setup.drafter, setup.rule)
        return self.costs(setup, setup.rule).speed_up(tokens, setup.nodes, setup.depth)

    def costs(self, setup: Setup, rule: str) -> Costs:
        """From two chains for all chains of a rule; a tree's from itself."""
        name, drafters = setup.name, [setup.drafter]
        if setup.drafter.tree.is_chain:
            name, drafters = rule, [replace(setup.drafter, tree=Tree.chain(k)) for k in SPAN]
        if name not in self._costs:
            self._costs[name] = self.search.costs(drafters, [drafter.tree for drafter in drafters], rule)
        return self._costs[name]
