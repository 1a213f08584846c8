"""Verification rules: which draft tokens stand, and which token comes next, so that the law is the target's.

| rule    | paper                  | drafts it accepts          | guarantee            | when to use              |
|---------|------------------------|----------------------------|----------------------|--------------------------|
| `token` | 2211.17192, 2302.01318 | a chain drawn from q       | output law = p       | sampling with a chain    |
| `match` | (draw y ~ p, compare)  | any candidates, any shape  | output law = p, and  | T = 0, n-grams, top-k,   |
|         |                        |                            | plain decoding token | any draft whose law is   |
|         |                        |                            | for token, by seed   | not known                |

p is the target's law, q the law that the draft token *was really drawn from*, both after temperature, top-k
and top-p. B rows, N = K + 1 nodes with the root, V tokens. An absent node has token -1 and an all-zero q row:
it is never accepted, and its residual is p itself, so shorter rows need no special case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minispec.sampling import Rng
from minispec.tree import Tree

NOTHING = 1e-9  # a residual with no entry above this is rounding noise


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+): what p has and q lacks (2211.17192, eq. 3). p, q (..., V) -> (..., V).

    Falls back to p where nothing is left, which happens with probability 0 (a token is rejected only where
    q > p, and then p > q somewhere else).
    """
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.amax(-1, keepdim=True) > NOTHING, rest, p)
    return rest / rest.sum(-1, keepdim=True)


def count_accepted(accept: Tensor) -> Tensor:
    """Leading True of each row: (B, K) -> (B,). [1, 0, 1, 1] gives 1."""
    return accept.long().cumprod(1).sum(1)


def token(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
    """Token verification (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2).

    Accept x_i with probability min(1, p_i(x_i) / q_i(x_i)); at the first rejection draw from
    norm((p_i - q_i)+); if all K are accepted draw the bonus token from p_{K+1}.

    p (B, K+1, V), q (B, K, V), drafted (B, K) -> accepted (B,) in 0..K, next token (B,).
    Exact: min(p, q) + (1 - sum min(p, q)) norm((p - q)+) = p. P(accept) = sum min(p, q) = 1 - TV(p, q).
    """
    B, K = drafted.shape
    x = drafted.clamp(min=0)[..., None]  # (B, K, 1)
    p_x = p[:, :K].gather(2, x)[..., 0]  # (B, K)
    q_x = q.gather(2, x)[..., 0]  # (B, K)
    ratio = torch.where(q_x > 0, p_x / q_x, 0.0)
    accepted = count_accepted(rng.flip(ratio.clamp(max=1)))  # (B,)
    row = torch.arange(B, device=p.device)
    q = torch.cat([q, q.new_zeros(B, 1, q.shape[2])], 1)  # (B, K+1, V): no draft, so the bonus is norm((p - 0)+)
    return accepted, rng.pick(residual(p[row, accepted], q[row, accepted]))


def match(p: Tensor, q: Tensor | None, tokens: Tensor, tree: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
    """Sample-and-match: draw y ~ p at the node reached; if y is one of its children descend, else emit y.

    p (B, N, V), q unused, tokens (B, N) -> path (B, D+1) of nodes padded with -1, next token (B,).
    Exact for *any* candidates however chosen, since each y is drawn from p before the draft is looked at. The
    noise hangs on the position (`at`), so the output is plain decoding's, token for token, under one seed.
    """
    B = tokens.shape[0]
    row = torch.arange(B, device=p.device)
    parents = tree.parents.to(p.device)  # (1 or B, N)
    node = torch.zeros(B, dtype=torch.long, device=p.device)  # (B,): where the path has come to
    path, emitted, alive = [node], node, torch.ones_like(node, dtype=torch.bool)
    for depth in range(1, tree.max_depth + 2):
        y = rng.pick(p[row, node], at=[depth] * B)  # (B,): drawn for a node at this depth
        emitted = torch.where(alive, y, emitted)
        child = (parents == node[:, None]) & (tokens == y[:, None])  # (B, N)
        alive = alive & child.any(1)
        node = torch.where(alive, child.long().argmax(1), node)
        path.append(torch.where(alive, node, -1))
        if _nobody(alive):
            break
    return torch.stack(path[: tree.max_depth + 1], 1), emitted


def _nobody(alive: Tensor) -> bool:
    """Whether a loop may end early. Looking costs a CPU nothing and makes a GPU wait, so only a CPU looks."""
    return alive.device.type == "cpu" and not bool(alive.any())


@dataclass(frozen=True)
class Rule:
    """A verification rule as the decoder sees it. Make one to plug in a function of your own.

    chain: a function (p, q, drafted, rng) -> (accepted, token), or None.
    tree: a function (p, q, tokens, tree, rng) -> (path, token), or None.
    kinds: the kinds of draft for which it is exact: "chain" (drawn from q one after the other), "chosen" (picked
        by any means), "without" (siblings drawn without replacement), "iid" (siblings drawn independently),
        "coupled" (drawn by the noise the target will use).
    how: the way a model draft fills its tree under this rule, "sampled" or "top-k".
    """

    name: str
    kinds: frozenset[str]
    how: str
    chain: Callable[[Tensor, Tensor, Tensor, Rng], tuple[Tensor, Tensor]] | None = None
    tree: Callable[[Tensor, Tensor | None, Tensor, Tree, Rng], tuple[Tensor, Tensor]] | None = None

    def verify(self, p: Tensor, q: Tensor | None, tokens: Tensor, tree: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
        """Path (B, D+1) padded with -1 and next token (B,), for a chain rule as for a tree rule."""
        if self.tree is not None:
            return self.tree(p, q, tokens, tree, rng)
        assert self.chain is not None
        assert q is not None
        accepted, emitted = self.chain(p, q[:, 1:], tokens[:, 1:], rng)
        nodes = torch.arange(tree.size, device=p.device)  # (N,)
        return torch.where(nodes <= accepted[:, None], nodes, -1), emitted


RULES = {
    "token": Rule("token", frozenset({"chain"}), "sampled", chain=token),
    "match": Rule("match", frozenset({"chain", "chosen", "without", "iid", "coupled"}), "top-k", tree=match),
}
WHY_NOT = (
    "a ratio test needs the law that each draft token was drawn from, and chosen candidates have none: "
    "testing them with p/q would change the output distribution"
)


def find_rule(rule: str | Rule) -> Rule:
    """The rule of that name, or the rule itself. ValueError lists the names."""
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(sorted(RULES))}, got {rule!r}")
    return RULES[rule]


def check_kind(rule: Rule, kind: str) -> None:
    """Refuse a draft for which the rule is not exact, with the reason."""
    if kind not in rule.kinds:
        reason = WHY_NOT if kind == "chosen" else f"it is exact for {', '.join(sorted(rule.kinds))} drafts only"
        raise ValueError(f"rule {rule.name!r} does not accept a draft of kind {kind!r}: {reason}")
