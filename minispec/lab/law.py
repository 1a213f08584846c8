"""The exact output law of a decoder, by replaying it over every outcome of every random choice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from minispec.model import LanguageModel
from minispec.sampling import Rng, Sampling

Output = TypeVar("Output", bound=Hashable)


class Enumerator:
    """An `rng` that follows a given prefix of choices, takes the first outcome afterwards, and keeps account.

    trace: (outcome taken, number of outcomes) of each choice; prob: probability of the path so far. Outcomes of
    probability 0 are not outcomes. One row only.
    """

    def __init__(self, prefix: Sequence[int] = ()) -> None:
        self.prefix = list(prefix)
        self.trace: list[tuple[int, int]] = []
        self.prob = 1.0

    def _choose(self, weights: Sequence[float]) -> int:
        outcomes = [i for i, weight in enumerate(weights) if weight > 0]
        if not outcomes or not math.isfinite(sum(weights)):
            raise ValueError("a choice without a possible outcome: all weights are 0, or one of them is no number")
        taken = self.prefix[len(self.trace)] if len(self.trace) < len(self.prefix) else 0
        if taken >= len(outcomes):
            raise ValueError("the same choices led to other ones: something random does not go through rng")
        self.trace.append((taken, len(outcomes)))
        self.prob *= weights[outcomes[taken]] / sum(weights)
        return outcomes[taken]

    def flip(self, prob: Tensor) -> Tensor:
        coins = [bool(self._choose([1 - a, a])) for a in prob.clamp(0, 1).flatten().tolist()]
        return torch.tensor(coins, dtype=torch.bool, device=prob.device).view(prob.shape)

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        if weights.shape[0] != 1:
            raise ValueError(f"an enumerator follows one row, got weights of {weights.shape[0]}")
        return torch.tensor([self._choose(weights[0].tolist())], device=weights.device)


def exact_law(fn: Callable[[Rng], Output], max_leaves: int = 100_000) -> dict[Output, float]:
    """{output: probability} of `fn(rng)`, every random choice of which goes through rng.

    Replays `fn` once for each leaf of the tree of choices. Raises `ValueError` past `max_leaves`.
    """
    law: dict[Output, float] = defaultdict(float)
    prefix: list[int] = []
    for _ in range(max_leaves):
        rng = Enumerator(prefix)
        law[fn(rng)] += rng.prob
        trace = rng.trace
        while trace and trace[-1][0] == trace[-1][1] - 1:
            trace.pop()
        if not trace:
            return dict(law)
        prefix = [taken for taken, _ in trace[:-1]] + [trace[-1][0] + 1]
    raise ValueError(f"more than {max_leaves} leaves: fewer tokens, a smaller vocabulary or a smaller tree")


@torch.inference_mode()
def target_law(
    target: LanguageModel,
    prompt: Sequence[int],
    length: int,
    sampling: Sampling | None = None,
    largest: int = 1_000_000,
) -> dict[tuple[int, ...], float]:
    """{(x_1, ..., x_length): probability} of plain sampling, from uncached passes over every prefix.

    Raises `ValueError` once there are more than `largest` outputs.
    """
    sampling = Sampling() if sampling is None else sampling
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        prefixes = list(law)
        tokens = torch.tensor([[*prompt, *prefix] for prefix in prefixes], device=target.device)
        probs = sampling.probs(target(tokens)[:, -1], "target").tolist()  # (prefixes, V)
        law = {
            (*prefix, x): law[prefix] * p
            for prefix, row in zip(prefixes, probs, strict=True)
            for x, p in enumerate(row)
            if p > 0
        }
        if len(law) > largest:
            raise ValueError(
                f"the target's law has more than {largest} outputs of {length} tokens: fewer tokens, a smaller "
                "vocabulary, or a plain decoder to compare with in place of the law"
            )
    return law


def total_variation(a: Mapping[Output, float], b: Mapping[Output, float]) -> float:
    """TV(a, b) = half the sum of |a - b|."""
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())
