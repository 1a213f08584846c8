"""Figures of each setup: tokens per pass over many tokens; times in turn, with what the cost model expected."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minispec.auto import SEED, SPAN, Search, smoothed
from minispec.bench.machine import memory_times
from minispec.bench.setups import Setup, decode
from minispec.decode import search_run
from minispec.pair import Pair
from minispec.planner import Costs
from minispec.result import Step, summarise
from minispec.sampling import Sampling
from minispec.tree import Tree

AMONG = 4  # setups between two plain runs
DRAWS = 4  # of the texts that yields are measured on


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


@dataclass
class Tally:
    """What a setup did in one round; `plainly` is what plain decoding beside it would have taken for its tokens."""

    tokens: int = 0
    seconds: float = 0.0
    plainly: float = 0.0


def timings(
    pair: Pair,
    found: list[Setup],
    prompts: list[list[int]],
    sampling: Sampling,
    length: int,
    repeats: int,
    tick: Callable[[], None],
    after: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Every setup (the first is plain decoding) on every prompt, in turn; medians of `repeats` rounds and of ratios.

    `tick` is called after each prompt, `after` after each round but the first, which warms up.
    """
    rounds: list[dict[str, Tally]] = []
    steps: dict[str, list[Step]] = {setup.name: [] for setup in found}
    for repeat in range(repeats + 1):
        tallies, taken = one_round(pair, found, prompts, sampling, length, repeat, tick)
        if repeat:
            rounds.append(tallies)
            for name, new in taken.items():
                steps[name] += new
            after()
    rows = []
    for setup in found:
        tallies_of = [tallies[setup.name] for tallies in rounds]
        ratios = [tally.plainly / tally.seconds for tally in tallies_of]
        quartiles = statistics.quantiles(ratios, n=4) if repeats > 1 else [0.0, 0.0, 0.0]
        stats = summarise(steps[setup.name])
        rows.append(
            Row(
                setup.name,
                sampling.temperature,
                setup.nodes,
                sum(tally.tokens for tally in tallies_of),
                stats.tokens_per_pass,
                stats.acceptance_rate,
                statistics.median(tally.tokens / tally.seconds for tally in tallies_of),
                statistics.median(ratios),
                quartiles[2] - quartiles[0],
            )
        )
    return rows


def one_round(
    pair: Pair,
    found: list[Setup],
    prompts: list[list[int]],
    sampling: Sampling,
    length: int,
    seed: int,
    tick: Callable[[], None],
) -> tuple[dict[str, Tally], dict[str, list[Step]]]:
    """All setups at each prompt, `AMONG` of them between two runs of plain decoding, whose mean they are set against.

    So a slow spell of the machine, of a second or of a minute, hits both sides of a ratio.
    """
    plain, others = found[0], found[1:]
    order = [plain]
    for start in range(0, len(others), AMONG):
        order += [*others[start : start + AMONG], plain]
    tallies = {setup.name: Tally() for setup in found}
    steps: dict[str, list[Step]] = {setup.name: [] for setup in found}
    for prompt in prompts:
        before, since = 0.0, []  # plain decoding's seconds a token, and who has run since, with how many tokens
        for setup in order:
            count, spent, taken = once(pair, setup, prompt, sampling, length, seed)
            tally = tallies[setup.name]
            tally.tokens += count
            tally.seconds += spent
            steps[setup.name] += taken
            if setup is not plain:
                since.append((tally, count))
                continue
            tally.plainly += spent
            for other, new in since:
                other.plainly += new * (before + spent / count) / 2
            before, since = spent / count, []
        tick()
    return tallies, steps


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

    `measure` after each round of the timing, as a machine changes its mind within minutes: the expectation is the
    median of all rounds.
    """

    def __init__(self, pair: Pair, sampling: Sampling, prompts: list[list[int]], length: int) -> None:
        run = search_run(pair.target)
        self.first = Search(pair.target, pair.draft, sampling, None, run, length=length, given=prompts, repeats=2)
        self.rounds: list[dict[str, Costs]] = []
        self.passes: list[Costs] = []
        self.alone: list[float] = []  # seconds of a one-token pass, and of reading as many bytes
        self.reads: list[float] = []

    def measure(self, found: list[Setup]) -> None:
        """Measure the passes of both models, the memory, and the steps of chains of two lengths and of each tree."""
        texts, turn = self.first.texts, 2 * len(self.rounds) % len(self.first.texts)
        search = replace(self.first, given=texts[turn:] + texts[:turn])  # other texts, and passes of its own
        costs: dict[str, Costs] = {}
        for setup in found:
            name, drafters = self.group(setup)
            if drafters and name not in costs:
                costs[name] = search.costs(drafters, [drafter.tree for drafter in drafters], setup.rule or "")
        self.rounds.append(costs)
        self.passes.append(search.passes)
        for times, new in zip((self.alone, self.reads), memory_times(self.first.target), strict=True):
            times += new

    def typical(self) -> Costs:
        """Medians of the passes' times over all rounds."""
        times = {n: statistics.median(costs.pass_time[n] for costs in self.passes) for n in self.passes[0].pass_time}
        return Costs(times, statistics.median(costs.draft_step for costs in self.passes))

    def tokens_per_step(self, found: list[Setup]) -> dict[str, float]:
        """Mean tokens of a step of each setup whose cost has a model.

        Where decoding is random one draw of the texts is not enough: a rule's many chains share one curve
        (`auto.smoothed`), trees and lone chains get the mean of `DRAWS` draws.
        """
        groups: dict[str, list[Setup]] = {}
        for setup in found:
            if self.group(setup)[1]:
                groups.setdefault(self.group(setup)[0], []).append(setup)
        yields: dict[str, float] = {}
        for group in groups.values():
            draws = 1 if self.first.sampling.greedy or len(group) >= DRAWS else DRAWS
            tokens = [
                statistics.fmean(
                    self.first.tokens_per_step(setup.drafter, setup.rule or "", SEED + draw) for draw in range(draws)
                )
                for setup in group
            ]
            if len(group) > 1:
                tokens = smoothed([setup.depth or 0 for setup in group], tokens)
            yields |= {setup.name: y for setup, y in zip(group, tokens, strict=True)}
        return yields

    def group(self, setup: Setup) -> tuple[str, list[Any]]:
        """Whose costs these are, and the drafters that tell them: two chains for all chains of a rule."""
        if setup.rule is None or setup.depth is None:
            return "", []
        if setup.drafter.tree.is_chain:
            return setup.rule, [replace(setup.drafter, tree=Tree.chain(k)) for k in SPAN]
        return setup.name, [setup.drafter]

    def speed_ups(self, found: list[Setup]) -> dict[str, float | None]:
        """Predicted ratios to plain decoding; None for a drafter whose cost has no model."""
        yields = self.tokens_per_step(found)
        gains: dict[str, float | None] = {}
        for setup in found:
            name, drafters = self.group(setup)
            if drafters:
                tokens, nodes, depth = yields[setup.name], setup.nodes, setup.depth or 0
                gains[setup.name] = statistics.median(c[name].speed_up(tokens, nodes, depth) for c in self.rounds)
            else:
                gains[setup.name] = 1.0 if setup.rule is None and setup.peer is None else None
        return gains
