"""Exponential noise for the race that draws tokens: fresh, or a function of a key and a position."""

from __future__ import annotations

from typing import Any

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

CUT = 16  # and its rows handed out so many draws at a time, as one call of an operator is dear between two passes


class Noise:
    """Exp(1) noise, in the order of the draws (`next`) or as a function of key and position (`at`)."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self._keyed = torch.Generator("cpu")
        self._ahead, self._used = torch.empty(0, 0, device="cpu"), 0  # made, and how many rows of it are used
        self._pieces: list[Tensor] = []  # the noise of the next draws of one shape, the very next one last
        self._shape: tuple[int, int, torch.dtype] | None = None
        self._blocks: dict[tuple[Any, ...], Tensor] = {}

    def next(self, rows: int, V: int, dtype: torch.dtype) -> Tensor:
        """Fresh noise (rows, V)."""
        if not self._pieces or self._shape != (rows, V, dtype):
            left = self._ahead[self._used :]
            if left.shape[1] != V or len(left) < rows or left.dtype != dtype:
                uniform = torch.empty(max(rows, AHEAD // V), V, dtype=torch.float64, device="cpu")
                left = exponential(uniform.uniform_(generator=self.generator), dtype)
            self._ahead, self._used, self._shape = left, 0, (rows, V, dtype)
            count = min(len(left) // rows, CUT)
            self._pieces = list(left[: count * rows].view(count, rows, V))[::-1]
        self._used += rows
        return self._pieces.pop()

    def at(self, key: int, position: int, V: int, dtype: torch.dtype, rows: int) -> Tensor:
        """The noise (V,) of that key and position, whatever was drawn before."""
        size = min(16, max(1, AHEAD // (V * rows)))  # positions made at once: a row goes through them in order
        start = position - position % size
        name = (key, start, size, V, dtype)
        if name not in self._blocks:
            uniform = torch.empty(size, V, dtype=torch.float64, device="cpu")
            for i in range(size):
                self._keyed.manual_seed(mix(key, start + i))
                uniform[i].uniform_(generator=self._keyed)
            while len(self._blocks) >= 2 * rows:  # the block of a draft's end and the one of its beginning
                del self._blocks[next(iter(self._blocks))]
            self._blocks[name] = exponential(uniform, dtype)
        return self._blocks[name][position - start]


def exponential(uniform: Tensor, dtype: torch.dtype) -> Tensor:
    """-log(u) in float64, as float32 has no u between 1 - 6e-8 and 1 and would never draw the rarest tokens.

    Kept in (0, inf), so that a weight of 0 never wins against a positive one. Overwrites `uniform`.
    """
    noise = uniform.log_().neg_().to(dtype)
    return noise.clamp_(torch.finfo(dtype).tiny, torch.finfo(dtype).max)
