"""The shape of a draft: a tree of tokens, of which a chain is the one with a single branch.

Node 0 is the pending token (emitted, not yet read by the target); draft nodes follow in breadth-first order.
Node i lies in cache slot n-1+i, at *position* n-1+depth(i), and sees itself and its ancestors: siblings share
a position and never see each other, which is what lets one pass score all branches (SpecInfer, 2305.09781).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """One tree for all rows of a batch, or one a row with equal numbers of nodes.

    rows: for each row (or one for all) the parents of its N nodes: rows[r][0] = -1, otherwise
        0 <= parent < node, depths not decreasing (breadth-first). Raises `ValueError` for anything else.
    """

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows or any(len(row) != len(self.rows[0]) for row in self.rows):
            raise ValueError("tree: every row needs the same number of nodes, and there must be a row")
        for row in self.rows:
            if not row or row[0] != -1:
                raise ValueError(f"tree: node 0 must have the parent -1, got parents {list(row)}")
            depth = [0]
            for node, parent in enumerate(row[1:], start=1):
                if isinstance(parent, bool) or not isinstance(parent, int) or not 0 <= parent < node:
                    raise ValueError(f"tree: the parent of node {node} must be in 0..{node - 1}, got {parent!r}")
                depth.append(depth[parent] + 1)
            if depth != sorted(depth):
                raise ValueError(f"tree: nodes must come breadth-first, got depths {depth}")

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(k: int) -> Tree:
        """k draft tokens one after the other: k + 1 nodes. k = 0 is plain decoding."""
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"draft_len must be an integer >= 0, got {k!r}")
        if k < 0:
            raise ValueError(f"draft_len must be an integer >= 0, got {k!r}")
        return Tree((tuple(range(-1, k)),))

    @staticmethod
    def from_parents(parents: Sequence[int] | Sequence[Sequence[int]]) -> Tree:
        """From parents (N,) for all rows, or (B, N) a row, breadth-first, the root's being -1."""
        if any(isinstance(parent, int) for parent in parents):
            return Tree((tuple(parents),))  # type: ignore[arg-type]
        return Tree(tuple(tuple(row) for row in parents))  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        """Nodes N, the root included."""
        return len(self.rows[0])

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for row in self.rows for node, parent in enumerate(row))

    @cached_property
    def depths(self) -> Tensor:
        """Depth of each node: (1 or B, N)."""
        out = torch.zeros(len(self.rows), self.size, dtype=torch.long)
        for r, row in enumerate(self.rows):
            for node, parent in enumerate(row[1:], start=1):
                out[r, node] = out[r, parent] + 1
        return out

    @cached_property
    def max_depth(self) -> int:
        return int(self.depths.max())

    @cached_property
    def parents(self) -> Tensor:
        """Parent of each node, -1 for the root: (1 or B, N)."""
        return torch.tensor(self.rows)

    @cached_property
    def mask(self) -> Tensor:
        """mask[r, i, j]: node i sees node j, being itself or below it in the tree: (1 or B, N, N)."""
        out = torch.eye(self.size, dtype=torch.bool).repeat(len(self.rows), 1, 1)
        for r, row in enumerate(self.rows):
            for node, parent in enumerate(row[1:], start=1):
                out[r, node] |= out[r, parent]
        return out

    def children(self, node: int, row: int = 0) -> list[int]:
        """Children of a node, in draw order."""
        return [child for child, parent in enumerate(self.rows[row]) if parent == node]

    @lru_cache(maxsize=1024)  # noqa: B019 - trees are small, immutable and few
    def cut(self, depth: int) -> Tree:
        """The tree without its nodes deeper than `depth` (a row with fewer nodes left keeps N equal by rows)."""
        if depth >= self.max_depth:
            return self
        kept = max(int((row <= depth).sum()) for row in self.depths)
        return Tree(tuple(row[:kept] for row in self.rows))
