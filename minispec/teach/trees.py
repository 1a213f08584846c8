"""Exercises of `06_trees`: who sees whom, where a node stands, how siblings are drawn, what a tree yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minispec.teach.grading import Exercise, Mistake
from minispec.teach.rejection import law, norm
from minispec.tree import Tree

Parents = Sequence[int]
SHAPES = ([-1, 0, 0, 1, 2], [-1, 0, 0, 0, 1, 1, 4], [-1, 0, 1, 2])
RATES = (0.6, 0.2, 0.1)


def mask(parents: Parents) -> list[list[bool]]:
    """mask[i][j]: node i sees node j: (N, N)."""
    return [[j in line(parents, i) for j in range(len(parents))] for i in range(len(parents))]


def line(parents: Parents, node: int) -> list[int]:
    """The node and its ancestors, from the node up."""
    found = [node]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def relation(sees: Callable[[Parents, int, int], bool]) -> Callable[[Parents], list[list[bool]]]:
    """A mask from a relation between nodes."""
    return lambda parents: [[sees(parents, i, j) for j in range(len(parents))] for i in range(len(parents))]


def positions(parents: Parents, n: int) -> list[int]:
    """The position of each node behind a text of n tokens: n - 1 + depth."""
    return [n - 2 + len(line(parents, node)) for node in range(len(parents))]


def next_law(q: Tensor, x: int) -> Tensor:
    """The law of the next sibling once x has been drawn: (V,)."""
    return norm(without(q, x))


def without(q: Tensor, x: int) -> Tensor:
    return q.scatter(0, torch.tensor(x, device=q.device), 0.0)


def expected_tokens(parents: Parents, rates: Sequence[float]) -> float:
    """Expected tokens of a step with this tree; rates[j]: P(child of rank j is the one accepted | its parent is)."""
    return Tree.from_parents(list(parents)).expected_tokens(rates)


def reach(parents: Parents, rates: Sequence[float], node: int) -> list[float]:
    """The rates along the path to a node."""
    found = []
    for child in line(parents, node)[:-1]:
        rank = [c for c, p in enumerate(parents) if p == parents[child]].index(child)
        found.append(rates[rank])
    return found


MASK = Exercise(
    right=mask,
    cases=[(shape,) for shape in SHAPES],
    praise="Siblings never see each other, so one pass scores every branch as if it were alone.",
    mistakes=[
        Mistake(
            "causal",
            "that is the causal mask of a chain: node 2 sees its sibling node 1, whose token is not in its text.",
            relation(lambda parents, i, j: j <= i),
        ),
        Mistake(
            "parent only",
            "a node must see *all* its ancestors, not just itself and its parent: they are its text.",
            relation(lambda parents, i, j: j in (i, parents[i])),
        ),
        Mistake(
            "itself left out",
            "a node must see itself too: its own key and value carry its token.",
            relation(lambda parents, i, j: j != i and j in line(parents, i)),
        ),
        Mistake(
            "transposed",
            "rows and columns are swapped: mask[i][j] says whether node *i* sees node *j*.",
            relation(lambda parents, i, j: i in line(parents, j)),
        ),
        Mistake(
            "whole level above",
            "a node sees its own ancestors only, not every node that is less deep.",
            relation(lambda parents, i, j: i == j or len(line(parents, j)) < len(line(parents, i))),
        ),
    ],
    otherwise="Start at node i and walk up: node, parent, parent's parent ... until -1. Those it sees.",
)

POSITIONS = Exercise(
    right=positions,
    cases=[(shape, n) for shape in SHAPES for n in (1, 10)],
    praise="Siblings share a position: both claim to be the next token. Their *slots* in the cache differ.",
    mistakes=[
        Mistake(
            "slot taken for position",
            "that is the *slot* in the cache. Two siblings lie in different slots, but both stand right after their "
            "parent.",
            lambda parents, n: [n - 1 + i for i in range(len(parents))],
        ),
        Mistake(
            "depth alone",
            "the tree hangs on a text: the root is its last token, at position n - 1.",
            lambda parents, n: [p - n + 1 for p in positions(parents, n)],
        ),
        Mistake(
            "one too far",
            "the root is the pending token, the *last* of the n tokens. Positions count from 0: where does it stand?",
            lambda parents, n: [p + 1 for p in positions(parents, n)],
        ),
        Mistake(
            "parent's slot plus one",
            "right for children of the root, wrong below: add 1 to the parent's *position*, not to its index.",
            lambda parents, n: [n + p for p in parents],
        ),
    ],
    otherwise="The root stands at n - 1; every node stands one place after its parent.",
)

NEXT_LAW = Exercise(
    right=next_law,
    cases=[(law(0.1, 0.2, 0.3, 0.4), 3), (law(0.5, 0.3, 0.2), 0), (law(0.05, 0.9, 0.05), 1)],
    praise="That is the law the second sibling is really drawn from, and so the q that its coin must use.",
    mistakes=[
        Mistake(
            "not renormalised",
            "x is ruled out, but what is left no longer sums to 1. With this as q the coin passes too often.",
            without,
        ),
        Mistake(
            "q unchanged",
            "that is the law of an independent second draw. Without replacement x cannot come again.",
            lambda q, x: q,
        ),
        Mistake(
            "softmax of the rest",
            "softmax is for logits. Probabilities are divided by their sum.",
            lambda q, x: without(q, x).softmax(0),
        ),
        Mistake(
            "uniform over the rest",
            "the other tokens are not equally likely: they keep their proportions.",
            lambda q, x: norm(without(torch.ones_like(q), x)),
        ),
    ],
    otherwise="Set q(x) to 0 and let the rest keep its proportions.",
)

EXPECTED = Exercise(
    right=expected_tokens,
    cases=[(shape, RATES) for shape in SHAPES] + [([-1], RATES)],
    praise="Each node adds the chance that it is reached. That is all that a tree search needs.",
    mistakes=[
        Mistake(
            "bonus forgotten",
            "the root counts 1: whatever happens to the guesses, the target adds a token of its own.",
            lambda parents, rates: expected_tokens(parents, rates) - 1,
        ),
        Mistake(
            "rates not multiplied",
            "a node deep down is reached only if every node above it was accepted: multiply along the path.",
            lambda parents, rates: 1 + sum(reach(parents, rates, i)[0] for i in range(1, len(parents))),
        ),
        Mistake(
            "every child the first",
            "the second child is accepted less often than the first: use the rate of its rank among its siblings.",
            lambda parents, rates: expected_tokens(parents, [rates[0]] * 9),
        ),
        Mistake(
            "deepest path only",
            "all nodes count, not only those on the path to the deepest one.",
            lambda parents, rates: sum(
                torch.tensor([1.0, *reach(parents, rates, len(parents) - 1)[::-1]], dtype=torch.float64)
                .cumprod(0)
                .tolist()
            ),
        ),
    ],
    otherwise="For each node: the product of the rates from the root down to it (1 for the root). Add them up.",
)

EXERCISES = {"06.mask": MASK, "06.positions": POSITIONS, "06.next_law": NEXT_LAW, "06.expected_tokens": EXPECTED}
