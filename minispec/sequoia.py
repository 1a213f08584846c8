"""The tree with most expected tokens, by dynamic programming (Sequoia, 2402.12374, section 3.1): see `Tree.best`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=64)
def best_parents(rates: tuple[float, ...], nodes: int, max_depth: int) -> tuple[int, ...]:
    """Parents of the nodes, breadth-first, the root's being -1. Raises `ValueError` as `Tree.best` says."""
    if any(not 0 <= a <= 1 for a in rates):
        raise ValueError(f"acceptance_by_rank must be rates in 0..1, got {list(rates)}")
    if nodes < 1 or max_depth < 0:
        raise ValueError(f"nodes must be >= 1 and max_depth >= 0, got {nodes} and {max_depth}")
    values = [np.concatenate([[0.0], np.ones(nodes)])]  # F(n, d) of all n, a level of depth after the other
    choices: list[list[np.ndarray]] = [[]]  # size of the child of each rank, where n nodes are left for it and the rest
    for _ in range(min(max_depth, nodes - 1)):
        gain = np.zeros(nodes + 1)
        sizes: list[np.ndarray] = []
        for rate in reversed(rates):
            best, size = np.zeros(nodes + 1), np.zeros(nodes + 1, dtype=int)
            for n in range(1, nodes + 1):  # this child takes s = 1..n of them, the later ones the rest
                options = rate * values[-1][1 : n + 1] + gain[n - 1 :: -1][:n]
                s = int(options.argmax())
                if options[s] > 1e-15:
                    best[n], size[n] = options[s], s + 1
            gain = best
            sizes.insert(0, size)
        choices.append(sizes)
        values.append(np.concatenate([[0.0], 1 + gain[:nodes]]))
    parents, queue = [-1], [(0, nodes, len(values) - 1)]
    while queue:  # breadth-first
        node, n, depth = queue.pop(0)
        left = n - 1
        for size in choices[depth]:
            if left < 1 or not size[left]:
                break
            parents.append(node)
            queue.append((len(parents) - 1, int(size[left]), depth - 1))
            left -= int(size[left])
    return tuple(parents)
