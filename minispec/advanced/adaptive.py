"""Draft lengths that follow the text.

Whether x_i is submitted must be decided *before* x_i is drawn: from the context, earlier draws, and the law q_i
itself, never from x_i. Then the length is a stopping time and every chain rule stays exact. "Draw, look, drop when
q(x) is low" is not: it changes the output law (TV .15 and more on small models).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minispec.drafters import Draft, ModelDrafter, ModelSession
from minispec.inputs import check_integer
from minispec.model import LanguageModel
from minispec.sampling import Rng, Sampling
from minispec.tree import Tree


@dataclass(frozen=True)
class AdaptiveDrafter:
    """Draw on while P(the next token is accepted) >= speed_up x cost: the rule of an optimal draft length.

    P is estimated by the product of max q_j over the chain so far, the next place included: known before the draw.
    cost: what one more draft token costs, in target passes (draft step and wider check). speed_up: the gain over
    plain decoding that is being had.
    """

    model: LanguageModel
    max_len: int = 12
    cost: float = 0.1
    speed_up: float = 2.0

    def __post_init__(self) -> None:
        check_integer("max_len", self.max_len, 0)
        if not (0 <= self.cost < math.inf and 0 < self.speed_up < math.inf):
            raise ValueError(f"cost must be >= 0 and speed_up > 0, got {self.cost} and {self.speed_up}")

    @property
    def kind(self) -> str:
        return "chain"

    @property
    def max_nodes(self) -> int:
        return self.max_len + 1

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> AdaptiveSession:
        return AdaptiveSession(self, prompts, sampling)


class AdaptiveSession:
    """A chain that each row ends for itself; a row that has ended has absent nodes."""

    def __init__(self, drafter: AdaptiveDrafter, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        self.drafter, self.sampling = drafter, sampling
        self.inner = ModelSession(ModelDrafter(drafter.model, Tree.chain(drafter.max_len)), prompts, sampling)
        self.commit, self.select = self.inner.commit, self.inner.select

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        inner, device = self.inner, self.drafter.model.device
        for text, new in zip(inner.texts, new_tokens, strict=True):
            text += new
        limit = torch.tensor(depth_limit, device=device)  # (B,)
        tokens = [torch.tensor([text[-1] for text in inner.texts], device=device)]
        q = [inner.no_law]
        reach, going = torch.ones(len(inner.texts), device=device), limit > 0  # (B,)
        for depth in range(1, min(self.drafter.max_len, max(depth_limit)) + 1):
            tree = Tree.chain(depth)
            logits = inner.read_last() if depth == 1 else inner.read_level(tree, [depth - 1], tokens)[:, 0]  # (B, V)
            law = self.sampling.probs(logits, "draft")
            reach = reach * law.amax(-1)
            going = going & (depth <= limit) & (reach >= self.drafter.speed_up * self.drafter.cost)
            if not bool(going.any()):
                break
            law = law.masked_fill(~going[:, None], 0.0)
            tokens.append(inner.draw(law, depth, rng))
            q.append(law)
        return Draft(Tree.chain(len(tokens) - 1), torch.stack(tokens, 1), torch.stack(q, 1), "chain")


@dataclass(frozen=True)
class HeuristicDrafter:
    """Two tokens more after a step that accepted all, one less after a step that did not (the rule of thumb)."""

    model: LanguageModel
    first: int = 4
    max_len: int = 12

    def __post_init__(self) -> None:
        check_integer("first", self.first, 1)
        check_integer("max_len", self.max_len, self.first)

    @property
    def kind(self) -> str:
        return "chain"

    @property
    def max_nodes(self) -> int:
        return self.max_len + 1

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> HeuristicSession:
        return HeuristicSession(self, prompts, sampling)


class HeuristicSession:
    """A length a row, changed by the outcome of the step before."""

    def __init__(self, drafter: HeuristicDrafter, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        self.drafter, self.lengths = drafter, [drafter.first] * len(prompts)
        self.inner = ModelSession(ModelDrafter(drafter.model, Tree.chain(drafter.max_len)), prompts, sampling)

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        limits = [min(k, limit) for k, limit in zip(self.lengths, depth_limit, strict=True)]
        self._submitted = limits
        return self.inner.propose(new_tokens, limits, rng)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.inner.commit(paths)
        for row, (path, submitted) in enumerate(zip(paths, self._submitted, strict=True)):
            step = 2 if len(path) - 1 == submitted else -1
            self.lengths[row] = min(max(self.lengths[row] + step, 1), self.drafter.max_len)

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)
        self.lengths = [self.lengths[row] for row in rows]
