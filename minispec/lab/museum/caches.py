"""Broken caches: the target reads what is not there, or not what is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minispec.cache import CacheShape, KVCache
from minispec.lab.museum.piece import cache_piece
from minispec.lab.report import CACHE, EACH, EXACT, GREEDY, JOINT, STEPS, ZERO
from minispec.tree import Tree


@cache_piece("stale cache row after a rejection", ZERO, EACH, JOINT, STEPS, EXACT, GREEDY, CACHE)
class StaleRow(KVCache):
    """After a rejection the row of the rejected token stays.

    Rolling back by one too few. The next step sees a token that was never emitted: the first step is right, later
    text wanders off, and short tests with friendly drafts pass.
    """

    def __init__(self, config: CacheShape, batch: int = 1, capacity: int = 1024, **options: Any) -> None:
        super().__init__(config, batch, 2 * capacity, **options)  # room for what is never dropped

    def keep(self, paths: Sequence[Sequence[int]], nodes: int) -> None:
        before = list(self.lengths)
        super().keep(paths, nodes)
        pairs = zip(self.lengths, paths, before, strict=True)
        self.lengths = [length + (len(path) < nodes <= old) for length, path, old in pairs]


@cache_piece("path written before it is gathered", ZERO, CACHE, rule="rrs", tree=Tree.from_parents([-1, 0, 0, 2]))
class Overwritten(KVCache):
    """The accepted path is moved to the front slot by slot, from its end, each move reading what the last one wrote.

    Source and destination overlap. Only paths that go through later branches are hurt, and those with two moves or
    more, so chains and most trees in tests look right.
    """

    def keep(self, paths: Sequence[Sequence[int]], nodes: int) -> None:
        bases = [length - nodes for length in self.lengths]
        for row, (base, path) in enumerate(zip(bases, paths, strict=True)):
            for place, node in reversed(list(enumerate(path))):
                self.kv[:, :, row, :, base + place] = self.kv[:, :, row, :, base + node]
        self.lengths = [base + len(path) for base, path in zip(bases, paths, strict=True)]
