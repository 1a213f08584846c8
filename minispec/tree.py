"""The shape of a draft: a tree of tokens, of which a chain is the one with a single branch.

Node 0 is the pending token (emitted, not yet read by the target); draft nodes follow in breadth-first order.
Node i lies in cache slot n-1+i, at *position* n-1+depth(i), and sees itself and its ancestors: siblings share
a position and never see each other, which is what lets one pass score all branches (SpecInfer, 2305.09781).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from minispec.sequoia import best_parents


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
        if not isinstance(parents, Sequence) or isinstance(parents, str):
            raise TypeError(f"parents must be a list of integers, or one such list a row, got {parents!r}")
        if any(isinstance(parent, int) for parent in parents):
            return Tree((tuple(parents),))  # type: ignore[arg-type]
        return Tree(tuple(tuple(row) for row in parents))  # type: ignore[arg-type]

    @staticmethod
    def branching(widths: Sequence[int]) -> Tree:
        """Every node at depth d has widths[d] children: [3, 2, 1] is 3 + 6 + 6 draft nodes. ValueError below 1."""
        if any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in widths):
            raise ValueError(f"widths must be integers >= 1, got {list(widths)!r}")
        parents, level = [-1], [0]
        for width in widths:
            start = len(parents)
            parents += [node for node in level for _ in range(width)]
            level = list(range(start, len(parents)))
        return Tree((tuple(parents),))

    @staticmethod
    def best(acceptance_by_rank: Sequence[float], nodes: int, max_depth: int | None = None) -> Tree:
        """The tree of `nodes` nodes (root included) with most expected tokens: Sequoia, 2402.12374, section 3.1.

        acceptance_by_rank[j]: P(the j-th child is the one accepted | its parent is), the same at every node. Then
        F(n, d) = 1 + max over splits of n - 1 nodes among ranked children of sum_j a_j F(n_j, d - 1), n nodes
        and d levels of children being at hand; the root counts 1, it is the bonus token.
        Raises `ValueError` for rates outside 0..1 (measured ones may add up to a little over 1), or no node.
        """
        depth = nodes - 1 if max_depth is None else max_depth
        return Tree((best_parents(tuple(map(float, acceptance_by_rank)), nodes, depth),))

    def expected_tokens(self, acceptance_by_rank: Sequence[float]) -> float:
        """Sum over nodes of the product of rates along the path; children beyond the last rate count 0."""
        reach = [1.0]
        for node, parent in enumerate(self.rows[0][1:], start=1):
            rank = self.children(parent).index(node)
            rate = acceptance_by_rank[rank] if rank < len(acceptance_by_rank) else 0.0
            reach.append(reach[parent] * rate)
        return sum(reach)

    def of_row(self, row: int) -> tuple[int, ...]:
        """The parents of that row's nodes."""
        return self.rows[row if len(self.rows) > 1 else 0]

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
        lists = []
        for row in self.rows:
            depths = [0]
            for parent in row[1:]:
                depths.append(depths[parent] + 1)
            lists.append(depths)
        return constant(lists)

    @cached_property
    def max_depth(self) -> int:
        return int(self.depths.max())

    @cached_property
    def parents(self) -> Tensor:
        """Parent of each node, -1 for the root: (1 or B, N)."""
        return constant(self.rows)

    @cached_property
    def mask(self) -> Tensor:
        """mask[r, i, j]: node i sees node j, being itself or below it in the tree: (1 or B, N, N)."""
        masks = []
        for row in self.rows:
            mask = [[i == j for j in range(self.size)] for i in range(self.size)]
            for node, parent in enumerate(row[1:], start=1):
                mask[node] = [own or above for own, above in zip(mask[node], mask[parent], strict=True)]
            masks.append(mask)
        return constant(masks).bool()

    @cached_property
    def _children(self) -> list[list[list[int]]]:
        """Children by row and node."""
        found: list[list[list[int]]] = [[[] for _ in row] for row in self.rows]
        for lists, row in zip(found, self.rows, strict=True):
            for child, parent in enumerate(row[1:], start=1):
                lists[parent].append(child)
        return found

    @cached_property
    def child_table(self) -> Tensor:
        """Children of each node in draw order, padded with -1: (1 or B, N, C)."""
        C = max(len(lists) for row in self._children for lists in row)
        padded = [[[*lists, *[-1] * (C - len(lists))] for lists in row] for row in self._children]
        return constant(padded)

    @cached_property
    def levels(self) -> list[list[int]]:
        """Nodes of each depth; the tree must be one for all rows."""
        depths = self.depths[0].tolist()
        return [[i for i, d in enumerate(depths) if d == depth] for depth in range(self.max_depth + 1)]

    def children(self, node: int, row: int = 0) -> list[int]:
        """Children of a node, in draw order."""
        return self._children[row][node]

    @lru_cache(maxsize=1024)  # noqa: B019 - trees are small, immutable and few
    def cut(self, depth: int) -> Tree:
        """The tree without its nodes deeper than `depth` (a row with fewer nodes left keeps N equal by rows)."""
        if depth >= self.max_depth:
            return self
        kept = max(int((row <= depth).sum()) for row in self.depths)
        return Tree(tuple(row[:kept] for row in self.rows))


def constant(values: Any) -> Tensor:
    """Integers on the CPU, whatever the default device; no inference tensor, as it outlives the call."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.long, device="cpu")
