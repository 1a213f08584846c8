"""Which node each random choice of a verification rule was about, and which law the node was tested against."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minispec.advanced.traversal import traversal
from minispec.tree import Tree
from minispec.verify import Rule, block, match, residual, rrs, token

Places = list[list[int | None]]  # for each choice the node of each of its outcomes


def places(
    rule: Rule,
    outcomes: Sequence[Sequence[int]],
    tokens: Sequence[int],
    tree: Tree,
    path: Sequence[int],
    early: bool = True,
) -> Places:
    """The nodes that the choices of one row were about; None where a choice was about none, or the rule is unknown.

    outcomes: of every choice in turn, a flip's coins or the one index of a pick. path: what the rule returned. A pick
    is about the node behind which its token stands. early: whether rules stop asking when nothing is open, as they do
    on a CPU.
    """
    if rule.chain in (token, block):
        return [list(range(1, tree.size)), [path[-1]]]
    if rule.tree is match:
        return _match(outcomes, tokens, tree)
    if rule.tree is rrs:
        return [*_rrs(outcomes[:-1], tree, early), [path[-1]]]
    if rule.tree is traversal:
        return [*_traversal(outcomes[:-1], tokens, tree), [path[-1]]]
    return [[None] * len(outcome) for outcome in outcomes]


def _match(outcomes: Sequence[Sequence[int]], tokens: Sequence[int], tree: Tree) -> Places:
    found: Places = []
    node: int | None = 0
    for (y,) in outcomes:
        found.append([node])
        here = [] if node is None else [c for c in tree.children(node) if tokens[c] == y]
        node = here[0] if here else None
    return found


def _rrs(outcomes: Sequence[Sequence[int]], tree: Tree, early: bool) -> Places:
    """Children in draw order until one passes, then its children; coins beyond those are about nothing."""
    found: Places = []
    width = tree.child_table.shape[2]
    node: int | None = 0  # None once the path has ended
    asked, passed = 0, -1
    for (outcome,) in outcomes:
        children = tree.children(node) if node is not None and passed < 0 else []
        here = children[asked] if asked < len(children) else None
        found.append([here])
        asked += 1
        if outcome and here is not None:
            passed = here
        if asked == width or (early and passed >= 0):
            node, asked, passed = (passed if passed >= 0 else None), 0, -1
    return found


def _traversal(outcomes: Sequence[Sequence[int]], tokens: Sequence[int], tree: Tree) -> Places:
    """A walk to a leaf by first surviving children before each coin; tails drops the leaf."""
    left = [[c for c in tree.children(u) if tokens[c] >= 0] for u in range(tree.size)]

    def leaf() -> list[int]:
        path = [0]
        while left[path[-1]]:
            path.append(left[path[-1]][0])
        return path

    found: Places = []
    for (outcome,) in outcomes:
        path = leaf()
        found.append([path[-1]])
        if not outcome:
            left[path[-2]].pop(0)
    return found


def laws(rule: Rule, about: Places, p: Tensor, q: Tensor | None, tree: Tree) -> list[Tensor]:
    """The target's law that each node was tested against: p (N, V), q (N, V) -> N times (V,).

    That of its parent, but under recursive rejection what the siblings rejected before it left of that law.
    """
    parents = tree.of_row(0)
    found = [p[max(parent, 0)] for parent in parents]
    if rule.tree is not rrs or q is None:
        return found
    tested = {node for place in about[:-1] for node in place if node is not None}
    for node in range(tree.size):
        children = [child for child in tree.children(node) if child in tested]
        law = p[node]
        for child in children:
            found[child] = law
            law = residual(law, q[child])
    return found
