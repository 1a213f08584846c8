"""Exercises of `02_kv_cache_and_rollback`: attention over a cache, and the length it goes back to."""

from __future__ import annotations

import torch
from torch import Tensor

from minispec.teach.grading import Exercise, Mistake


def attend(query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    """One query (D,) over the first `length` of S cached keys and values (S, D): (D,)."""
    return attend_with(query, keys[:length], values[:length])


def attend_with(query: Tensor, keys: Tensor, values: Tensor, power: float = 0.5) -> Tensor:
    """Attention over all keys given, scores divided by D ** power."""
    weights = (keys @ query / query.shape[0] ** power).softmax(0)  # (S,)
    mixed: Tensor = weights @ values
    return mixed


def zero_scores(query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    scores = keys @ query / query.shape[0] ** 0.5
    return torch.where(torch.arange(len(keys)) < length, scores, 0.0).softmax(0) @ values


def zero_weights(query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    weights = (keys @ query / query.shape[0] ** 0.5).softmax(0)
    return torch.where(torch.arange(len(keys)) < length, weights, 0.0) @ values


def cached(seed: int, slots: int = 6, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """A query, keys and values, drawn at random."""
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = torch.randn(2 * slots + 1, width, generator=generator, dtype=torch.float64, device="cpu")
    return draw[0], draw[1 : slots + 1], draw[slots + 1 :]


EXERCISES = {
    "02.attend": Exercise(
        right=attend,
        cases=[(*cached(0), 4), (*cached(1), 1), (*cached(2), 5)],
        praise="What lies beyond the length is never looked at: so rolling back is changing one number.",
        mistakes=[
            Mistake(
                "stale slots seen",
                "your attention also sees the slots from `length` on. They hold tokens that were rejected.",
                lambda q, k, v, n: attend_with(q, k, v),
            ),
            Mistake(
                "scores not scaled",
                "the scores are to be divided by the square root of D.",
                lambda q, k, v, n: attend_with(q, k[:n], v[:n], power=0.0),
            ),
            Mistake(
                "scaled by D",
                "the scores are to be divided by the *square root* of D.",
                lambda q, k, v, n: attend_with(q, k[:n], v[:n], power=1.0),
            ),
            Mistake(
                "hidden scores set to 0",
                "a score of 0 is not nothing: softmax gives it the weight e^0 before it normalises. Cut the slots off, "
                "or give them the score minus infinity.",
                zero_scores,
            ),
            Mistake(
                "hidden after the softmax",
                "the stale slots are gone, but they took their share of the softmax: the weights no longer sum to 1.",
                zero_weights,
            ),
            Mistake(
                "last slot missing",
                "the token just written (slot length - 1) must see itself.",
                lambda q, k, v, n: attend_with(q, k[: max(n - 1, 1)], v[: max(n - 1, 1)]),
            ),
        ],
        otherwise="Cut, score, softmax, mix: one line each.",
    ),
    "02.rollback": Exercise(
        right=lambda n, K, accepted: n + accepted,
        cases=[(10, 4, 0), (10, 4, 2), (10, 4, 4), (1, 3, 1)],
        praise="n - 1 + 1 + a: the pending token and the accepted guesses stay, nothing else.",
        mistakes=[
            Mistake(
                "rejected row kept",
                "one row too many: the cache keeps the first *rejected* guess. Its place will be taken by the token "
                "that replaces it, which the target has not read yet.",
                lambda n, K, a: n + a + 1,
            ),
            Mistake(
                "pending token dropped",
                "one row too few. The pending token was read in this pass too: it is text now, and its row is right.",
                lambda n, K, a: n - 1 + a,
            ),
            Mistake(
                "nothing rolled back",
                "that is the length right after the pass: K guesses have been read, but only `accepted` of them stand.",
                lambda n, K, a: n + K,
            ),
            Mistake(
                "everything rolled back",
                "the text would come out right, but all accepted guesses would have to be read again.",
                lambda n, K, a: n - 1,
            ),
            Mistake(
                "rows to drop",
                "that is how many rows go. How many rows stay is wanted.",
                lambda n, K, a: K - a,
            ),
        ],
        otherwise="Before the pass n - 1 rows. It reads the pending token and K guesses. Which of those rows stand?",
    ),
}
