"""From logits to probabilities, and the one object through which every random choice goes.

`Sampling` turns logits into the law that is sampled from: p for the target, q for the draft.
`Randomness` makes the choices, with two methods: `flip` a coin, `pick` an index. Nothing else in minispec is
random, so an object that *enumerates* the outcomes of these two replays the real decoder over all of them and
gives its exact output law (`minispec.lab.exact_law`).
"""

from __future__ import annotations

import copy
import math
import numbers
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minispec.noise import Noise, mix

COLDEST, HOTTEST = 1e-30, 1e30  # temperatures beyond are taken as these: T and 1 / T stay finite in float32


def _number(name: str, value: object, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {allowed}, got {value!r}")
    if not abs(value) <= torch.finfo(torch.float64).max:  # NaN, infinite, or an integer beyond any float
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p; `temperature=0` is greedy.

    temperature: finite, >= 0. At 0 the law is one-hot at the largest logit, ties to the lowest index.
    top_k: keep exactly the k likeliest (ties to the lowest index), or None; k > V keeps all.
    top_p: in (0, 1]: of what is left, renormalised, keep the smallest set of likeliest tokens with mass
        >= top_p (Holtzman et al. 2020), the token that crosses included; None or 1 keeps everything.

    Raises `TypeError`/`ValueError` naming the parameter, the value and the values allowed.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if _number("temperature", self.temperature, "a finite number >= 0") < 0:
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature!r}")
        if self.top_k is not None:
            if isinstance(self.top_k, bool) or not isinstance(self.top_k, int):
                raise TypeError(f"top_k must be an integer >= 1 or None, got {self.top_k!r}")
            if self.top_k < 1:
                raise ValueError(f"top_k must be an integer >= 1 or None, got {self.top_k!r}")
        if self.top_p is not None and not 0 < _number("top_p", self.top_p, "a number in (0, 1] or None") <= 1:
            raise ValueError(f"top_p must be a number in (0, 1] or None, got {self.top_p!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def divisor(self) -> float:
        """What logits are divided by: the temperature, within `COLDEST` and `HOTTEST`."""
        return min(max(self.temperature, COLDEST), HOTTEST)

    def probs(self, logits: Tensor, who: str | None = "model") -> Tensor:
        """The law to sample from: logits (..., V) -> probabilities (..., V), float32 or the logits' float64.

        Raises `ValueError` naming `who` and the place when a row holds a NaN or a +inf, or is all -inf. With who=None,
        and on a GPU, which would have to be waited for, such a row gives a NaN instead (`check_law` looks).
        """
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        checked = logits.is_cpu and who is not None
        if checked and not math.isfinite(float(logits.sum())):  # one number to look at, as a rule
            check_law(logits.amax(-1, keepdim=True), str(who))
        if self.greedy:
            best = logits.argmax(-1, keepdim=True)  # (..., 1), the first of equals
            one = 1.0 if checked else 1 + 0 * logits.gather(-1, best)
            return torch.zeros_like(logits).scatter_(-1, best, one)
        if self.temperature != 1.0:
            logits = (logits - logits.amax(-1, keepdim=True)) / self.divisor
        V = logits.shape[-1]
        if (self.top_k is None or self.top_k >= V) and (self.top_p is None or self.top_p == 1):
            return torch.softmax(logits, -1)
        ordered, index = torch.sort(logits, dim=-1, descending=True, stable=True)  # (..., V): ties lowest first
        if self.top_k is not None:
            ordered[..., self.top_k :] = -math.inf
        probs = torch.softmax(ordered, -1)
        if self.top_p is not None and self.top_p < 1:
            before = probs.cumsum(-1) - probs  # (..., V): mass of the likelier tokens
            before[..., 0] = 0.0  # the likeliest always stays
            probs = probs.masked_fill(before >= self.top_p, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return torch.zeros_like(probs).scatter_(-1, index, probs)  # back to vocabulary order


def check_law(law: Tensor, who: str) -> None:
    """Refuse a law (..., V) with a NaN or an infinity in it: `ValueError` names `who` and the place."""
    if not math.isfinite(float(law.sum())) and (wrong := ~law.isfinite().all(-1)).any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"{who} logits: a NaN, a +inf or nothing but -inf at (row, node) {place}")


class Rng(Protocol):
    """The two random choices. With one row the decoder calls nothing else of an `rng=` object."""

    def flip(self, prob: Tensor) -> Tensor:
        """Coins: prob (...) -> bool (...), True with that probability."""
        ...

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        """Indices: weights (B, V), not negative -> (B,), each drawn in proportion to its row's weights.

        With `at`, a position a row, the choice depends on the row's key and that position alone.
        """
        ...


class Randomness:
    """Pseudo-random `flip` and `pick` from a seed: an integer, one a row, or None for a fresh one.

    Row b of an integer seed s has the key s for b = 0 and a hash of (s, b) otherwise; with one seed a row the
    key is that seed, so that a row draws the same `at` noise alone and in company. Never touches the global
    generators. Draws on the CPU, so that a seed means the same tokens on every device (but for `rrs` and `specinfer`,
    which ask a GPU, so as not to wait for it, for coins that decide nothing).
    """

    def __init__(self, seed: int | Sequence[int] | None = None, rows: int = 1) -> None:
        if seed is None:
            seed = secrets.randbits(63)
        wrong = f"seed must be an integer, or {rows} integers (one a row), got {seed!r}"
        if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
            seed = int(seed)
        given: list[Any] = list(seed) if isinstance(seed, (list, tuple)) else [seed]
        if any(isinstance(key, bool) or not isinstance(key, int) for key in given):
            raise TypeError(wrong)
        keys = given if isinstance(seed, (list, tuple)) else given + [mix(given[0], row) for row in range(1, rows)]
        if len(keys) != rows:
            raise ValueError(wrong)
        self.keys = keys
        self._noise = Noise(mix(keys[0], rows))

    def flip(self, prob: Tensor) -> Tensor:
        dtype = torch.float64 if prob.dtype == torch.float64 else torch.float32
        u = self._noise.coins.next(tuple(prob.shape), dtype)  # in [0, 1): a probability of 1 always passes
        return prob > (u if prob.is_cpu else u.to(prob.device, non_blocking=prob.is_cuda))

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        """An exponential race: the argmax of weights / Exp(1) noise is drawn in proportion to the weights."""
        dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
        B, V = weights.shape
        if at is not None and weights.is_cpu and int(weights.count_nonzero()) == B:
            return weights.argmax(-1)  # one token a row can win, as in greedy decoding: no noise is needed
        made = self._noise
        noise = made.fresh.next((B, V), dtype) if at is None else made.at(self.keys, at, V, dtype)  # (B, V)
        noise = noise if weights.is_cpu else noise.to(weights.device, non_blocking=weights.is_cuda)
        return (weights / noise).argmax(-1)  # (B,)

    def select(self, rows: Sequence[int]) -> Randomness:
        """The same randomness for these rows only; each keeps its key. This object stays as it is."""
        chosen = copy.copy(self)
        chosen.keys = [self.keys[row] for row in rows]
        return chosen


class Shifted:
    """An `rng` whose `at` counts from each row's own offset: rules say a depth, the noise hangs on the position.

    `noise(shape, dtype)` takes now what the next `pick` without `at` would divide by; None of an rng of one's own.
    """

    def __init__(self, rng: Rng, offsets: Sequence[int]) -> None:
        self._rng, self._offsets = rng, offsets
        self.flip, self.noise = rng.flip, rng._noise.fresh.next if type(rng) is Randomness else None

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        if at is None:
            return self._rng.pick(weights)
        return self._rng.pick(weights, [offset + depth for offset, depth in zip(self._offsets, at, strict=True)])
