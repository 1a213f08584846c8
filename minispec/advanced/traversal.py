"""Traversal verification: block verification on trees, from the leaves to the root (2505.12398)."""

from __future__ import annotations

import torch
from torch import Tensor

from minispec.sampling import Rng
from minispec.tree import Tree
from minispec.verify import RULES, TINY, Rule


def traversal(p: Tensor, q: Tensor | None, tokens: Tensor, tree: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
    """Walk to a leaf by first surviving children; keep its whole path with probability w, else drop the leaf.

    A node reached for the first time gets w = min(1, w_u P_u(x) / Q_u(x)), u being its parent. Dropping it leaves
    R = (w_u P_u - Q_u)+ at u: P_u becomes norm(R) and w_u = sum R / (sum R + 1 - w_u). A w once given is not
    computed again on a later walk: that would take the parent's change into account twice.

    p (B, N, V), q (B, N, V), tokens (B, N) -> path (B, D+1) padded with -1, next token (B,). Exact for siblings
    drawn without replacement; on a chain it is `block`. Row by row, with a look at each coin.
    """
    assert q is not None
    paths, emitted = [], []
    for row in range(tokens.shape[0]):
        path, law = _row(p[row].clone(), q[row], tokens[row].tolist(), tree.of_row(row), rng)
        paths.append(path + [-1] * (tree.max_depth + 1 - len(path)))
        emitted.append(rng.pick(law[None]))
    return torch.tensor(paths, device=p.device), torch.cat(emitted)


def _row(p: Tensor, q: Tensor, tokens: list[int], parents: tuple[int, ...], rng: Rng) -> tuple[list[int], Tensor]:
    """The path kept in one row and the law (V,) of its next token. p (N, V) is overwritten."""
    children = [[c for c, parent in enumerate(parents) if parent == u and tokens[c] >= 0] for u in range(len(parents))]
    w: dict[int, Tensor] = {0: torch.ones((), dtype=p.dtype, device=p.device)}
    while True:
        path = [0]
        while children[path[-1]]:
            u, v = path[-1], children[path[-1]][0]
            if v not in w:
                w[v] = (w[u] * p[u, tokens[v]] / q[v, tokens[v]]).clamp(max=1)
            path.append(v)
        v = path[-1]
        if v == 0 or bool(rng.flip(w[v][None])[0]):
            return path, p[v]
        u = path[-2]
        children[u].pop(0)
        rest = (w[u] * p[u] - q[v]).clamp(min=0)  # q[v] is the law left at u when v was drawn
        mass = rest.sum()
        room = mass + 1 - w[u]
        w[u] = mass / room if room > TINY else torch.ones_like(mass)
        if mass > TINY:
            p[u] = rest / mass


RULES["traversal"] = Rule("traversal", frozenset({"chain", "without"}), "without", tree=traversal)
