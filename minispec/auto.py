"""`tree="auto"`: measure this machine and this pair once, then take the rule and tree that the cost model likes best.

The search runs the real decoder on texts of the target's own, so acceptance is that of the pair under the sampling
asked for, and times the passes of both models (`planner.measure`). What it finds is kept in the user's cache folder,
by machine, pair and sampling; a file that cannot be read or written is no error, only a new measurement.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from minispec.drafters import Drafter, ModelDrafter, NoDrafter
from minispec.files import write_text
from minispec.model import LanguageModel
from minispec.planner import Costs, Plan
from minispec.result import Result
from minispec.sampling import Sampling
from minispec.stopwatch import SIZES, measure
from minispec.tree import Tree
from minispec.trust import unchanged
from minispec.verify import RULES

FORMAT = "minispec-plan-4"
CHAINS = (1, 2, 3, 4, 6, 8, 12)  # whose yields are measured, which tell those of the lengths between
ENOUGH = 4  # of them, the shortest, which tell the others where there is no time
SPAN = (2, 8)  # the chains that are timed
NODES = (9, 17, 33)  # of the trees that are tried
PROBE = Tree.branching([4, 3, 2])  # what acceptance by child rank is measured with
OPENING, LENGTH, TEXTS = 16, 96, 12  # tokens of an opening, tokens that go on from it, how many texts
SEED = 20_000
PATIENCE = 60.0  # seconds after which a machine that is busy, or slow, is measured no further
ALIKE = 0.97  # of the best predicted speed-up: what is above it is as good, given the noise of times and yields

Run = Callable[..., list[Result]]  # (drafter, rule, prompts, max_new_tokens, sampling, seed)


def find_plan(
    target: LanguageModel,
    draft: LanguageModel,
    sampling: Sampling,
    rule: str | None,
    rows: int,
    run: Run,
    *,
    again: bool = False,
    say: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest way to decode `rows` prompts at once on this machine, from the cache folder or by measuring.

    rule: only plans of that rule; None leaves the choice. `again` measures anew. `say` is told before a measurement.
    """
    path = cache_folder() / f"{fingerprint(target, draft, sampling, rule, rows)}.json"
    plan = None if again else _read(path)
    if plan is None:
        if say is not None:
            say("measuring this machine once, about half a minute")
        plan = Search(target, draft, sampling, rule, run, min(rows, 32), patience=PATIENCE).plan()
        _write(path, plan)
    return plan


def drafter_of(plan: Plan, draft: LanguageModel) -> Drafter:
    """What fills the plan's tree."""
    return NoDrafter() if plan.plain else ModelDrafter(draft, plan.tree, RULES[plan.rule].how)


@dataclass
class Search:
    """One search for a plan: measured costs, measured yields, arithmetic.

    texts: prompts to measure on, of one length or many; by default openings of the target's own, so that no caller's
    prompt decides what others find in the cache folder.
    """

    target: LanguageModel
    draft: LanguageModel
    sampling: Sampling
    rule: str | None
    run: Run
    rows: int = 1
    length: int = LENGTH
    given: list[list[int]] | None = None
    repeats: int = 3  # of what is timed
    patience: float = math.inf  # seconds after which longer chains and trees are left out, and less is repeated

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.patience

    def plan(self) -> Plan:
        """The candidate with the largest predicted speed-up, or plain decoding where none gains.

        Of those that are as good, to what such a measurement can tell, the one with the smallest draft.
        """
        plain = Plan("match", Tree.chain(0))
        if self.target.config.block_size < 4:
            return plain  # a text that has no room to measure in
        plans = [plain, *self.chains()]
        if self.tree_rule is not None and not self.late:
            plans.append(self.tree())
        best = max(plans, key=lambda plan: plan.speed_up)
        alike = [plan for plan in plans if plan.speed_up > max(ALIKE * best.speed_up, 1.0)]
        return min(alike, key=lambda plan: plan.tree.size, default=plain)

    @property
    def late(self) -> bool:
        """Whether patience is at an end."""
        return time.monotonic() > self.end

    @property
    def chain_rule(self) -> str:
        """The rule of the chains that are tried: `block` is never worse than `token`."""
        return self.rule or ("match" if self.sampling.greedy else "block")

    @property
    def tree_rule(self) -> str | None:
        """The rule of the trees that are tried; None where only chains are allowed."""
        sampled = "traversal" if self.target.device.type == "cpu" else "rrs"  # traversal waits for each coin
        rule = self.rule or ("match" if self.sampling.greedy else sampled)
        return rule if RULES[rule].chain is None else None

    @cached_property
    def passes(self) -> Costs:
        """Times of both models' passes."""
        context = min(64, self.target.config.block_size // 4)
        sizes = [n for n in SIZES if context + n <= self.target.config.block_size]
        with unchanged():
            return measure(self.target, self.draft, context, sizes, batch=self.rows)

    def costs(self, drafters: Sequence[Drafter], trees: Sequence[Tree], rule: str) -> Costs:
        """The passes' times, and what whole steps, plain ones and these drafters', spend besides.

        All are timed in turn, so that a slow spell of the machine hits all of them. With trees of two depths, what the
        deeper one spends more is the cost of a draft step *in the loop*, the drawing of its token included. What is
        left is overhead; it may come out negative where a pass inside the loop is quicker than alone.
        """
        plain, *steps = self.step_times([(NoDrafter(), "match"), *((drafter, rule) for drafter in drafters)])
        spent = [step - self.passes.check(tree.size) for step, tree in zip(steps, trees, strict=True)]
        levels, draft_step = trees[-1].max_depth - trees[0].max_depth, self.passes.draft_step
        if levels:
            draft_step = max((spent[-1] - spent[0]) / levels, 0.0)
        overhead = spent[0] - trees[0].max_depth * draft_step
        plain_overhead = plain - self.passes.check(1)
        return replace(self.passes, draft_step=draft_step, overhead=overhead, plain_overhead=plain_overhead)

    def chains(self) -> list[Plan]:
        """A chain of each length up to the last of `CHAINS`: yield by what was measured, predicted time."""
        name = self.chain_rule
        depths = [k for k in CHAINS if k <= self.deepest]
        few = [Plan(name, Tree.chain(min(k, self.deepest))) for k in SPAN]
        costs = self.costs([drafter_of(plan, self.draft) for plan in few], [plan.tree for plan in few], name)
        tokens: list[float] = []
        for k in depths:
            if len(tokens) < ENOUGH or not self.late:
                tokens.append(self.tokens_per_step(drafter_of(Plan(name, Tree.chain(k)), self.draft), name))
        lengths = range(1, min(CHAINS[-1], self.deepest) + 1)
        yields = smoothed(depths[: len(tokens)], tokens, lengths)
        return [self.expect(Plan(name, Tree.chain(k)), costs, y) for k, y in zip(lengths, yields, strict=True)]

    def tree(self) -> Plan:
        """The most promising tree by the acceptance of child ranks, then measured itself."""
        assert self.tree_rule is not None
        probe = Plan("rrs" if self.tree_rule == "traversal" else self.tree_rule, PROBE)
        ranks = acceptance_by_rank(self.decode(drafter_of(probe, self.draft), probe.rule, self.texts, self.length // 2))
        found = {Tree.best(ranks, nodes, min(depth, self.deepest)) for nodes in NODES for depth in (4, 6, 8, 12)}
        best = max(
            sorted(found, key=lambda tree: tree.rows),
            key=lambda tree: self.passes.speed_up(tree.expected_tokens(ranks), tree.size, tree.max_depth),
        )
        plan, drafter = Plan(self.tree_rule, best), drafter_of(Plan(self.tree_rule, best), self.draft)
        costs = self.costs([drafter], [best], plan.rule)
        return self.expect(plan, costs, self.tokens_per_step(drafter, plan.rule))

    @property
    def deepest(self) -> int:
        """The deepest draft worth a try: half of what a text has room for."""
        return max(self.target.config.block_size // 4, 1)

    def expect(self, plan: Plan, costs: Costs, tokens: float) -> Plan:
        """The plan with its yield and predicted speed-up, which is no larger: no step is quicker than a plain one.

        Times that say so come from a machine that was busy with something else.
        """
        gain = min(costs.speed_up(tokens, plan.tree.size, plan.tree.max_depth), tokens)
        return replace(plan, tokens_per_step=tokens, speed_up=gain)

    def tokens_per_step(self, drafter: Drafter, rule: str, seed: int = SEED) -> float:
        """Mean tokens of a step, the last ones of a text, cut short, included: their times are in `costs` too."""
        results = self.decode(drafter, rule, self.texts, self.length, seed)
        return sum(len(r.tokens) for r in results) / max(sum(len(r.steps) for r in results), 1)

    @cached_property
    def texts(self) -> list[list[int]]:
        """The prompts to measure on."""
        if self.given is not None:
            return self.given
        vocabulary, end = self.target.config.vocab_size, getattr(self.target, "end_of_text", None)
        starts = [[(i * 7) % vocabulary if end is None else end] for i in range(TEXTS)]
        length = min(OPENING, self.target.config.block_size // 4)
        opened = self.run(NoDrafter(), "match", starts, length, Sampling(), SEED)
        return [result.prompt + result.tokens for result in opened]

    def decode(
        self, drafter: Drafter, rule: str, prompts: list[list[int]], length: int, seed: int = SEED
    ) -> list[Result]:
        length = min(length, self.target.config.block_size - max(map(len, prompts)))
        return self.run(drafter, rule, prompts, length, self.sampling, seed)

    def step_times(self, ways: Sequence[tuple[Drafter, str]]) -> list[float]:
        """Median seconds of a step of each (drafter, rule), `rows` rows at once, in turn; the prefill has its share."""
        found: list[list[float]] = [[] for _ in ways]
        for repeat in range(self.repeats + 1):  # the first warms up
            if repeat > 1 and self.late:
                break
            prompts = [self.texts[(repeat + row) % len(self.texts)] for row in range(self.rows)]
            for times, (drafter, rule) in zip(found, ways, strict=True):
                results = self.decode(drafter, rule, prompts, self.length, SEED + repeat)
                times.append(results[0].stats.seconds / max(len(result.steps) for result in results))
        return [statistics.median(times[1:]) for times in found]


def smoothed(depths: Sequence[int], tokens: Sequence[float], lengths: Sequence[int] | None = None) -> list[float]:
    """Tokens a step of chains of these lengths, less the noise of a short run: 1 + a (1 + b + ... + b^(K-1)).

    a is the acceptance of the first draft token, b that of each next one. Least squares, b in steps of 1/200.
    `lengths` asks for others than those of `depths`, which `tokens` were measured with.
    """
    best = (math.inf, 0.0, 0.0)
    for b in (i / 200 for i in range(201)):
        sums = [sum(b**i for i in range(K)) for K in depths]
        a = min(max(sum(g * (y - 1) for g, y in zip(sums, tokens, strict=True)) / sum(g * g for g in sums), 0.0), 1.0)
        best = min(best, (sum((1 + a * g - y) ** 2 for g, y in zip(sums, tokens, strict=True)), a, b))
    return [1 + best[1] * sum(best[2] ** i for i in range(K)) for K in (depths if lengths is None else lengths)]


def cache_folder() -> Path:
    """Where plans are kept: `$MINISPEC_CACHE`, or the user's cache folder as the system has it."""
    if "MINISPEC_CACHE" in os.environ:
        return Path(os.environ["MINISPEC_CACHE"])
    from platformdirs import user_cache_path

    return user_cache_path("minispec", appauthor=False)


def fingerprint(target: LanguageModel, draft: LanguageModel, sampling: Sampling, rule: str | None, rows: int) -> str:
    """A name for all that a plan depends on: machine, threads, versions, both models' weights, sampling, batch."""
    digest = hashlib.sha256()
    bucket = 1 << (min(rows, 32) - 1).bit_length()
    machine = (platform.node(), platform.machine(), torch.__version__, torch.get_num_threads(), str(target.device))
    digest.update(repr((FORMAT, machine, sampling, rule, bucket, str(target.dtype))).encode())
    for model in (target, draft):
        digest.update(repr(model.config).encode())
        for parameter in getattr(model, "parameters", list)():
            digest.update(parameter.detach().flatten()[:32].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:24]


def _read(path: Path) -> Plan | None:
    """A plan that was kept; None when there is none, or none that makes sense."""
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != FORMAT or kept["rule"] not in RULES:
            return None
        return Plan(kept["rule"], Tree.from_parents(kept["parents"]), kept["speed_up"], kept["tokens_per_step"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(path: Path, plan: Plan) -> None:
    kept: dict[str, Any] = {"format": FORMAT, "rule": plan.rule, "parents": list(plan.tree.rows[0])}
    kept |= {"speed_up": plan.speed_up, "tokens_per_step": plan.tokens_per_step}
    try:
        write_text(path, json.dumps(kept) + "\n")
    except OSError:  # a folder that cannot be written: measured again next time
        return


def acceptance_by_rank(results: Sequence[Result]) -> list[float]:
    """Acceptance by child rank over all steps (`advanced.statistics.acceptance_by_rank`), a rate of 1 at most."""
    from minispec.advanced.statistics import acceptance_by_rank as by_rank

    return by_rank([step for result in results for step in result.steps])
