"""The cost model: when does speculation pay, and with which draft length or tree?

A step costs one target pass over its N nodes, one draft pass a level, and the loop's own overhead; it yields the
accepted run and one token more. So, with plain decoding as the unit,

    speed-up = E[tokens per step] t(1)' / (t(N) + D d + overhead),     t(1)' = t(1) + plain decoding's overhead.

Times are measured on the machine at hand (`stopwatch`); acceptance comes in as a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minispec.tree import Tree


def expected_tokens(acceptance_rate: float, draft_len: int) -> float:
    """E[tokens per step] of a chain: (1 - a^(K+1)) / (1 - a), a being the chance of acceptance (2211.17192, eq. 1)."""
    return sum(acceptance_rate**k for k in range(draft_len + 1))


def speed_up(acceptance_rate: float, draft_len: int, cost_ratio: float, check: float = 1.0) -> float:
    """Gain over plain decoding: E / (check + K c) (2211.17192, theorem 3.8, where check is 1).

    cost_ratio: draft step / target single-token time c. check: t(K+1) / t(1), what a pass over K+1 tokens costs.
    """
    return expected_tokens(acceptance_rate, draft_len) / (check + draft_len * cost_ratio)


def best_draft_len(acceptance_rate: float, cost_ratio: float, longest: int = 64) -> tuple[int, float]:
    """The K with the largest speed-up, and that speed-up, where checking costs the same whatever K; K = 0 is plain."""
    gains = [speed_up(acceptance_rate, k, cost_ratio) for k in range(longest + 1)]
    best = max(range(len(gains)), key=gains.__getitem__)
    return best, gains[best]


@dataclass(frozen=True)
class Costs:
    """Measured seconds. pass_time[n]: a target pass over n tokens; draft_step: a draft pass inside the loop.

    overhead: what a speculative step spends besides its passes; plain_overhead: the same of a plain step.
    """

    pass_time: dict[int, float]
    draft_step: float
    overhead: float = 0.0
    plain_overhead: float = 0.0

    def check(self, nodes: int) -> float:
        """t(n), interpolated between the sizes measured and continued beyond."""
        sizes = sorted(self.pass_time)
        if nodes in self.pass_time:
            return self.pass_time[nodes]
        right = next((i for i, size in enumerate(sizes) if size > nodes), len(sizes) - 1)
        a, b = sizes[max(right - 1, 0)], sizes[max(right, 1)]
        slope = (self.pass_time[b] - self.pass_time[a]) / (b - a)
        return self.pass_time[a] + slope * (nodes - a)

    @property
    def cost_ratio(self) -> float:
        """c = draft step / target single-token time."""
        return self.draft_step / self.check(1)

    def speed_up(self, tokens_per_step: float, nodes: int, depth: int) -> float:
        """Gain over plain decoding of steps that score `nodes` nodes, draft `depth` levels, yield that many tokens."""
        plain = self.check(1) + self.plain_overhead
        if depth == 0:
            return tokens_per_step
        return tokens_per_step * plain / (self.check(nodes) + depth * self.draft_step + self.overhead)

    def best_chain(self, acceptance_rate: float, longest: int = 12) -> tuple[int, float]:
        """The chain that pays most and its speed-up; K = 0 says that plain decoding is faster here."""
        gains = [self.speed_up(expected_tokens(acceptance_rate, k), k + 1, k) for k in range(longest + 1)]
        best = max(range(len(gains)), key=gains.__getitem__)
        return best, gains[best]

    def best_tree(
        self, acceptance_by_rank: Sequence[float], sizes: Sequence[int] = (3, 5, 7, 9, 13, 17, 25, 33)
    ) -> Tree:
        """Sequoia's hardware-aware choice (2402.12374, section 3.3): best shape of each size, then best size."""
        trees = [Tree.best(acceptance_by_rank, n, depth) for n in sizes for depth in (1, 2, 3, 4, 6, 8, 10)]
        trees.append(Tree.chain(0))
        return max(trees, key=lambda t: self.speed_up(t.expected_tokens(acceptance_by_rank), t.size, t.max_depth))


@dataclass(frozen=True)
class Plan:
    """How to decode: a rule and a tree, and what the cost model expects of them.

    speed_up: tokens a second against plain decoding. tokens_per_step: E[tokens per target pass] (both 1 for plain
    decoding, of which the tree is `Tree.chain(0)`).
    """

    rule: str
    tree: Tree
    speed_up: float = 1.0
    tokens_per_step: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether plain decoding is the fastest here."""
        return self.tree.size == 1

    @property
    def shape(self) -> str:
        """Rule and shape in words."""
        if self.plain:
            return "plain decoding"
        if self.tree.is_chain:
            return f"{self.rule}, chain {self.tree.max_depth}"
        return f"{self.rule}, tree of {self.tree.size} nodes"

    def __str__(self) -> str:
        if self.plain:
            return "plain decoding is faster here"
        return f"{self.shape}: {self.speed_up:.2f}x expected, {self.tokens_per_step:.2f} tokens per target pass"
