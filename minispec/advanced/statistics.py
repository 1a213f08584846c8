"""What a run tells of its drafts: how deep they were accepted, at which child, along which branch."""

from __future__ import annotations

from collections.abc import Sequence

from minispec.result import Step


def accepted_depths(steps: Sequence[Step]) -> list[int]:
    """Histogram of accepted depths: element d counts the steps that accepted d draft tokens."""
    counts = [0] * (max((step.accepted for step in steps), default=0) + 1)
    for step in steps:
        counts[step.accepted] += 1
    return counts


def acceptance_by_depth(steps: Sequence[Step]) -> list[float]:
    """P(depth d is accepted | it was tested) for d = 1, 2, ...: equal values mean that alpha is a constant."""
    deepest = max((step.tested for step in steps), default=0)
    tested = [sum(step.tested >= d for step in steps) for d in range(1, deepest + 1)]
    passed = [sum(step.accepted >= d for step in steps) for d in range(1, deepest + 1)]
    return [a / t for a, t in zip(passed, tested, strict=True)]


def acceptance_by_rank(steps: Sequence[Step]) -> list[float]:
    """P(the j-th child is the one accepted | its parent is accepted, and has such a child): what `Tree.best` wants."""
    offered: list[int] = []
    won: list[int] = []
    for step in steps:
        nodes = step.path if step.tested > step.accepted else step.path[:-1]  # a leaf, or a cut path, tested nothing
        for depth, node in enumerate(nodes):
            children = [i for i, p in enumerate(step.parents) if p == node and i and step.drafted[i - 1] >= 0]
            for rank, child in enumerate(children):
                if rank == len(offered):
                    offered.append(0)
                    won.append(0)
                offered[rank] += 1
                won[rank] += step.path[depth + 1 : depth + 2] == (child,)
    return [w / n for w, n in zip(won, offered, strict=True)]


def winning_branches(steps: Sequence[Step]) -> dict[int, int]:
    """How often each child of the root, by its rank from 0, began the accepted path; -1 counts the steps with none."""
    counts: dict[int, int] = {}
    for step in steps:
        roots = [i for i, parent in enumerate(step.parents) if parent == 0]
        rank = roots.index(step.path[1]) if step.accepted else -1
        counts[rank] = counts.get(rank, 0) + 1
    return dict(sorted(counts.items()))
