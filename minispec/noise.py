"""Coins, and exponential noise for the race that draws tokens: fresh, or a function of a key and a position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(key: int, value: int) -> int:
    """A 64-bit hash of two integers (the finaliser of SplitMix64; Steele, Lea & Flood 2014)."""
    z = (key * 0x9E3779B97F4A7C15 + value * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


AHEAD = 1 << 16  # noise is made this many numbers ahead, so that one call of each operator serves many draws
COINS = 1 << 12  # and so are the uniforms of coins, of which a step takes few
CUT = 16  # handed out so many draws at a time, as one call of an operator is dear between two passes


class Ahead:
    """One endless sequence of uniforms in [0, 1), made a block of `size` numbers ahead of their use.

    make: (source, n, dtype) -> what is made of its next n uniforms, (n,). The source is NumPy's SFC64 (Doty-Humphrey),
    which is quicker than torch's generator.
    """

    def __init__(self, seed: int, size: int, make: Callable[[np.random.Generator, int, torch.dtype], Tensor]) -> None:
        self._source, self._size, self._make = np.random.Generator(np.random.SFC64(seed)), size, make
        self._block, self._used = torch.empty(0, device="cpu"), 0  # made, and how many of them are used
        self._pieces: list[Tensor] = []  # those of the next draws of one shape, the very next one last
        self._cut: tuple[tuple[int, ...], torch.dtype] | None = None  # that shape

    def next(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next ones, in this shape. What is left of a block is given up where it is too little."""
        n = math.prod(shape)
        if n == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if not self._pieces or self._cut != (shape, dtype):
            left = self._block[self._used :]
            if len(left) < n or left.dtype != dtype:
                with torch.inference_mode(False):  # whoever draws next may want gradients
                    left = self._make(self._source, max(1, self._size // n) * n, dtype)
            count = min(len(left) // n, CUT)
            self._block, self._used, self._cut = left, 0, (shape, dtype)
            self._pieces = list(left[: count * n].view(count, *shape))[::-1]
        self._used += n
        return self._pieces.pop()


class Noise:
    """Exp(1) noise in the order of the draws (`fresh`) or as a function of key and position (`at`), and `coins`."""

    def __init__(self, seed: int) -> None:
        self.fresh, self.coins = Ahead(seed, AHEAD, race), Ahead(mix(seed, 1), COINS, uniform)
        self._keyed = torch.Generator("cpu")
        self._blocks: dict[tuple[Any, ...], Tensor] = {}

    def at(self, keys: Sequence[int], positions: Sequence[int], V: int, dtype: torch.dtype) -> Tensor:
        """The noise (B, V) of each row's key and position, whatever was drawn before."""
        size = min(16, max(1, AHEAD // (V * len(keys))))  # positions made at once: a row goes through them in order
        names = [(key, at - at % size, size, V, dtype) for key, at in zip(keys, positions, strict=True)]
        if missing := [name for name in dict.fromkeys(names) if name not in self._blocks]:
            with torch.inference_mode(False):
                u = torch.empty(len(missing), size, V, dtype=torch.float64, device="cpu")
                for (key, start, *_), block in zip(missing, u, strict=True):
                    for i, line in enumerate(block):
                        line.uniform_(generator=self._keyed.manual_seed(mix(key, start + i)))
                self._blocks.update(zip(missing, exponential(u, dtype), strict=True))
        noise = [self._blocks[name][at % size] for name, at in zip(names, positions, strict=True)]
        while len(self._blocks) > 2 * len(keys):  # of each row the block of a draft's end and the one of its beginning
            del self._blocks[next(iter(self._blocks))]
        return noise[0][None] if len(noise) == 1 else torch.stack(noise)


def uniform(source: np.random.Generator, n: int, dtype: torch.dtype) -> Tensor:
    """n numbers in [0, 1), float32 or float64."""
    return torch.from_numpy(source.random(n, np.float64 if dtype == torch.float64 else np.float32))


def race(source: np.random.Generator, n: int, dtype: torch.dtype) -> Tensor:
    """n numbers of Exp(1)."""
    return exponential(uniform(source, n, torch.float64), dtype)


def exponential(u: Tensor, dtype: torch.dtype) -> Tensor:
    """-log(1 - u) of uniforms u in [0, 1], float64; overwrites them.

    By log1p: the least of the noise wins, and in float32 a small u has all its digits where 1 - u would have none, so
    that the rarest tokens are drawn as well. Kept in (0, inf), so that a weight of 0 never wins against a positive one.
    """
    info = torch.finfo(dtype)
    return u.to(dtype).clamp_(info.tiny, 1 - info.eps / 2).neg_().log1p_().neg_()
