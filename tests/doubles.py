"""Test doubles: the models of `minispec.lab.models`, and an rng that is told what to answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from minispec import GPT, KVCache, decode
from minispec.lab.models import Counting, TableModel, mean_tv, memory_two_back, mix, random_gpt, rows_of

__all__ = ["Counting", "Scripted", "TableModel", "mean_tv", "memory_two_back", "mix", "random_gpt", "rows_of"]


class Scripted:
    """An `rng` that takes its answers from lists and says what it was asked."""

    def __init__(self, flips: list[bool] = (), picks: list[int] = ()) -> None:  # type: ignore[assignment]
        self.flips, self.picks, self.asked = list(flips), list(picks), []

    def flip(self, prob: Tensor) -> Tensor:
        self.asked.append(("flip", prob.clone()))
        return torch.tensor([self.flips.pop(0) for _ in range(prob.numel())]).view(prob.shape)

    def pick(self, weights: Tensor, at=None) -> Tensor:  # type: ignore[no-untyped-def]
        self.asked.append(("pick", weights.clone()))
        return torch.tensor([self.picks.pop(0) for _ in range(len(weights))])


def stored(tensors: list[Tensor]) -> int:
    """Bytes of memory behind these tensors, which may be views of one another."""
    real = [t for t in tensors if not isinstance(t, FakeTensor) and t.device.type != "meta" and not t.is_mkldnn]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in real)}.values())


@contextmanager
def caches() -> Iterator[list[KVCache]]:
    """The caches that the target gets, in order."""
    made: list[KVCache] = []

    class Watched(KVCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    original, decode.KVCache = decode.KVCache, Watched
    try:
        yield made
    finally:
        decode.KVCache = original


def assert_prefilled(cache: KVCache, target: GPT, text: list[int]) -> None:
    """The one row of the cache holds all of `text` but its pending last token, as a fresh prefill would."""
    n = len(text) - 1
    fresh = KVCache(target.config, capacity=n, dtype=torch.float64)
    target(torch.tensor([text[:-1]]), fresh)
    assert cache.lengths == [n]
    assert (cache.kv[..., :n, :] - fresh.kv[..., :n, :]).abs().max() < 1e-10
