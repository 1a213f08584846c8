"""Models that are watched while a decoder runs: what was read, and whether the cache told the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minispec.around import Around
from minispec.cache import KVCache
from minispec.model import LanguageModel

SAME = 1e-8  # float64 logits of a cached and an uncached pass differ by rounding only


@dataclass(frozen=True)
class Pass:
    """One pass of a watched model: who, the tokens (B, T), the mask given, the logits (B, T, V)."""

    who: str
    tokens: Tensor
    mask: Tensor | None
    logits: Tensor

    @property
    def count(self) -> int:
        """Tokens read a row."""
        return self.tokens.shape[1]

    def sees(self) -> list[list[int]] | None:
        """For each new token of row 0 the new ones that it sees, its own included; None where older ones are masked."""
        T = self.count
        if self.mask is None:
            return [list(range(i + 1)) for i in range(T)]
        mask = self.mask[0] if self.mask.ndim == 3 else self.mask
        if mask.shape[-1] != T:
            return None
        return [row.nonzero()[:, 0].tolist() for row in mask.cpu()]

    @property
    def depth(self) -> int:
        """Tokens on the path of first children, which a draft that is sure of itself fills with its likeliest ones."""
        paths = self.sees() or [[0]]
        leftmost = paths[0]
        for path in paths:
            if path[:-1] == leftmost:
                leftmost = path
        return len(leftmost)


class Watched(Around):
    """A model that writes each of its passes into `log`; several models may share one."""

    def __init__(self, model: LanguageModel, who: str, log: list[Pass], sharpness: float = 1.0) -> None:
        super().__init__(model)
        self.who, self.log, self.sharpness = who, log, sharpness

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        logits = self.model(tokens, cache, positions, mask) * self.sharpness  # sharp enough, a law has one outcome
        self.log.append(Pass(self.who, tokens.clone(), mask, logits.clone()))
        return logits


def cache_error(model: LanguageModel, read: Pass, text: Sequence[int]) -> float | None:
    """How far a target pass is from every uncached pass that it could stand for; None where there is none to compare.

    The pass reads the last token of some prefix of `text`, then draft tokens: the least, over such prefixes, of the
    largest difference of a logit.
    """
    tokens, paths = read.tokens[0].tolist(), read.sees()
    if paths is None:
        return None
    errors = []
    for m in range(1, len(text) + 1):
        deepest = m - 1 + max(map(len, paths))
        if text[m - 1] == tokens[0] and deepest <= model.config.block_size:
            differences = [
                _difference(model, [*text[: m - 1], *(tokens[j] for j in path)], read, path[-1]) for path in paths
            ]
            errors.append(max(differences))
    return min(errors) if errors else None


def draft_error(model: LanguageModel, read: Pass, text: Sequence[int]) -> float | None:
    """The same for the first pass of the draft in a step, which ends with the last token of some prefix of `text`."""
    tokens = read.tokens[0].tolist()
    ends = [m for m in range(len(tokens), len(text) + 1) if list(text[m - len(tokens) : m]) == tokens]
    errors = [_difference(model, text[:m], read, len(tokens) - 1) for m in ends]
    return min(errors) if errors else None


def _difference(model: LanguageModel, context: Sequence[int], read: Pass, place: int) -> float:
    fresh = model(torch.tensor([list(context)], device=model.device))[0, -1]
    return float((fresh - read.logits[0, place]).abs().max())


def first_in_step(log: Sequence[Pass]) -> list[Pass]:
    """The draft's passes that follow one of the target's, or come first of all."""
    return [read for i, read in enumerate(log) if read.who == "draft" and (i == 0 or log[i - 1].who == "target")]
