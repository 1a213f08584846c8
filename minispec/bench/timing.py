"""Figures of each setup: tokens per pass over many tokens; times in turn, with what the cost model expected."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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
    """The cost model's expectation for any setup, measured on prompts that are not timed.

    `measure` before the timing and again after it: a machine changes its mind in the minutes between, and the
    expectation is the mean of both.
    """

    def __init__(self, pair: Pair, sampling: Sampling, prompts: list[list[int]], length: int) -> None:
        run = search_run(pair.target)
        self.first = Search(pair.target, pair.draft, sampling, None, run, length=length, given=prompts, repeats=4)
        self.rounds: list[dict[str, Costs]] = []

    def measure(self, found: list[Setup]) -> None:
        """Measure the passes of both models, and the steps of chains of two lengths and of each tree."""
        search = replace(self.first)  # with passes of its own
        costs: dict[str, Costs] = {}
        for setup in found:
            name, drafters = self.group(setup)
            if drafters and name not in costs:
                costs[name] = search.costs(drafters, [drafter.tree for drafter in drafters], setup.rule or "")
        self.rounds.append(costs)

    def group(self, setup: Setup) -> tuple[str, list[Any]]:
        """Whose costs these are, and the drafters that tell them: two chains for all chains of a rule."""
        if setup.rule is None or setup.depth is None:
            return "", []
        if setup.drafter.tree.is_chain:
            return setup.rule, [replace(setup.drafter, tree=Tree.chain(k)) for k in SPAN]
        return setup.name, [setup.drafter]

    def speed_up(self, setup: Setup) -> float | None:
        """Predicted ratio to plain decoding; None for a drafter whose cost has no model."""
        name, drafters = self.group(setup)
        if not drafters:
            return 1.0 if setup.rule is None and setup.peer is None else None
        tokens = self.first.tokens_per_step(setup.drafter, setup.rule or "")
        gains = [costs[name].speed_up(tokens, setup.nodes, setup.depth or 0) for costs in self.rounds]
        return statistics.fmean(gains)
