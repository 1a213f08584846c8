"""Verification rules: which draft tokens stand, and which token comes next, so that the law is the target's.

| rule        | paper                  | drafts it accepts (kind)  | guarantee                      | when to use      |
|-------------|------------------------|---------------------------|--------------------------------|------------------|
| `token`     | 2211.17192, 2302.01318 | chain                     | law = p                        | default, chains  |
| `block`     | 2403.10444             | chain                     | law = p; no fewer tokens a     | long chains,     |
|             |                        |                           | step than `token` on average   | T near 1         |
| `match`     | (draw y ~ p, compare)  | any candidates, any shape | law = p; plain decoding, token | T = 0, n-grams,  |
|             |                        |                           | for token, under one seed      | top-k trees      |
| `coupled`   | 2408.07978             | coupled                   | as `match`                     | reproducible     |
|             |                        |                           |                                | output at T > 0  |
| `rrs`       | 2402.12374, 2402.14160 | chain, without            | law = p                        | default, trees   |
| `specinfer` | 2305.09781             | chain, iid                | law = p                        | to compare with  |
| `traversal` | 2505.12398 (advanced/) | chain, without            | law = p; `block` on a chain    | deep trees       |

p is the target's law, q the law that the draft token *was really drawn from*, both after temperature, top-k
and top-p. B rows, N nodes with the root, V tokens. An absent node has token -1 and an all-zero q row: it is
never accepted, and its residual is p itself, so shorter rows need no special case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minispec.sampling import Rng
from minispec.tree import Tree

NOTHING = 1e-9  # a residual with no entry above this is rounding noise
TINY = 1e-15
ANY = frozenset({"chain", "without", "iid", "coupled", "chosen"})  # the kinds of draft there are


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+): what p has and q lacks (2211.17192, eq. 3). p, q (..., V) -> (..., V).

    Falls back to p where nothing is left, which happens with probability 0 (a token is rejected only where
    q > p, and then p > q somewhere else).
    """
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.amax(-1, keepdim=True) > NOTHING, rest, p)
    return rest / rest.sum(-1, keepdim=True)


def at(x: Tensor, node: Tensor) -> Tensor:
    """What each row has at its node: x (B, N, V), node (B,) -> (B, V)."""
    return x.gather(1, node[:, None, None].expand(-1, -1, x.shape[2]))[:, 0]


def count_accepted(accept: Tensor) -> Tensor:
    """Leading True of each row: (B, K) -> (B,). [1, 0, 1, 1] gives 1."""
    return accept.cumprod(1).sum(1)


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
    ratio = (p_x / q_x).masked_fill(q_x <= 0, 0.0)
    accepted = count_accepted(rng.flip(ratio.clamp(max=1)))  # (B,)
    q = torch.cat([q, q.new_zeros(B, 1, q.shape[2])], 1)  # (B, K+1, V): no draft, so the bonus is norm((p - 0)+)
    return accepted, rng.pick(residual(at(p, accepted), at(q, accepted)))


def block(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
    """Block verification (Sun et al. 2403.10444, algorithm 2): the *last* success wins, not the run up to a failure.

    w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), so a surplus at one place repays a deficit before it. The prefix x^i
    passes with probability h_i = s_i / (s_i + 1 - w_i), s_i = sum (w_i p_{i+1} - q_{i+1})+, so that it is
    kept with probability w_i; the next token is drawn from norm((w p - q)+) at the longest prefix that passed.
    With C_i the product of the first i ratios, C_0 = 1, all w at once are w_i = C_i / max(C_0, .., C_i), by logarithms.

    p (B, K+1, V), q (B, K, V), drafted (B, K) -> accepted (B,) in 0..K, next token (B,). Exact; accepts at least as
    many tokens as `token` in expectation, and as many as any rule can that sees one draft.
    """
    B, K = drafted.shape
    x = drafted.clamp(min=0)[..., None]  # (B, K, 1)
    p_x, q_x = p[:, :K].gather(2, x)[..., 0], q.gather(2, x)[..., 0]  # (B, K)
    gain = (p_x.log() - q_x.log()).masked_fill(q_x <= 0, -torch.inf)  # (B, K): log of the ratio, which may be any
    total = torch.cat([p.new_zeros(B, 1), gain], 1).cumsum(1)  # (B, K+1)
    w = (total - total.cummax(1).values).exp()  # (B, K+1); on an Apple GPU cummax wants torch 2.9
    q = torch.cat([q, q.new_zeros(B, 1, q.shape[2])], 1)  # (B, K+1, V): behind the last token h = w, as s = w there
    rest = (w[..., None] * p - q).clamp(min=0)  # (B, K+1, V)
    s = rest.sum(-1)  # (B, K+1)
    room = s + 1 - w
    h = (s / room).masked_fill(room <= TINY, 1.0)  # 0 / 0 where p = q and w = 1: all of it passes
    passed = rng.flip(h[:, 1:])  # (B, K)
    accepted = passed.flip(1).cummax(1).values.sum(1)  # (B,): all up to the last success
    law = torch.where(s[..., None] > NOTHING, rest / s[..., None], p)
    return accepted, rng.pick(at(law, accepted))


def match(p: Tensor, q: Tensor | None, tokens: Tensor, tree: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
    """Sample-and-match: draw y ~ p at the node reached; if y is one of its children descend, else emit y.

    p (B, N, V), q unused, tokens (B, N) -> path (B, D+1) of nodes padded with -1, next token (B,).
    Exact for *any* candidates however chosen, since each y is drawn from p before the draft is looked at. The
    noise hangs on the position (`at`), so the output is plain decoding's, token for token, under one seed.
    """
    B = tokens.shape[0]
    if B == 1 and p.is_cpu:
        return _match_one(p, tokens, tree, rng)
    row = torch.arange(B, device=p.device)
    parents = tree.parents.to(p.device, non_blocking=True)  # (1 or B, N)
    node = torch.zeros(B, dtype=torch.long, device=p.device)  # (B,): where the path has come to
    path, emitted, alive = [node], node, torch.ones_like(node, dtype=torch.bool)
    for depth in range(1, tree.max_depth + 2):
        y = rng.pick(p[row, node], at=[depth] * B)  # (B,): drawn for a node at this depth
        emitted = torch.where(alive, y, emitted)
        child = (parents == node[:, None]) & (tokens == y[:, None])  # (B, N)
        found, node = child.max(1)  # the first such child; node 0 where there is none
        alive = alive & found
        path.append(torch.where(alive, node, -1))
        if _nobody(alive):
            break
    return torch.stack(path[: tree.max_depth + 1], 1), emitted


def _match_one(p: Tensor, tokens: Tensor, tree: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
    """`match` of a single row by the host, which a CPU does not have to wait for."""
    drafted, path = tokens[0].tolist(), [0]
    while True:
        y = rng.pick(p[:, path[-1]], at=[len(path)])  # (1,)
        child = next((node for node in tree.children(path[-1]) if drafted[node] == int(y)), None)
        if child is None:
            return torch.tensor([[*path, -1][: tree.max_depth + 1]], device=p.device), y
        path.append(child)


def rrs(p: Tensor, q: Tensor | None, tokens: Tensor, tree: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
    """Recursive rejection sampling (SpecInfer 2305.09781, algorithm 2; Sequoia 2402.12374; RSD 2402.14160).

    At each node try its children in draw order: accept x with probability min(1, p(x) / q_x(x)), q_x being the law
    that child was drawn from given its earlier siblings; after a rejection p becomes norm((p - q_x)+). When none is
    left draw from what p has become.

    p (B, N, V), q (B, N, V): q[:, i] the law of node i, tokens (B, N) -> path (B, D+1), next token (B,).
    Exact for siblings drawn without replacement (q_x renormalised) and for i.i.d. ones (a rejected duplicate has
    p(x) = 0, and its update must still be made): each stage is the token rule for the p of that stage.
    """
    assert q is not None
    row = torch.arange(tokens.shape[0], device=p.device)
    table = tree.child_table.to(p.device, non_blocking=True).expand(len(row), -1, -1)  # (B, N, C)
    node = torch.zeros_like(row)
    law, path, alive = p[:, 0], [node], torch.ones_like(node, dtype=torch.bool)
    for _ in range(tree.max_depth):
        found, open_ = torch.full_like(node, -1), alive  # the child accepted; rows still looking for one
        for c in range(table.shape[2]):
            child = table[row, node, c]  # (B,), -1 where there is no such child
            trying = open_ & (child >= 0)
            x, q_x = tokens[row, child].clamp(min=0), q[row, child]  # (B,), (B, V)
            ratio = torch.where(q_x[row, x] > 0, law[row, x] / q_x[row, x], 0.0)
            ok = rng.flip(torch.where(trying, ratio, 0.0).clamp(max=1))
            found = torch.where(ok, child, found)
            open_ = open_ & ~ok
            law = torch.where((trying & ~ok)[:, None], residual(law, q_x), law)
            if _nobody(open_):
                break
        alive = found >= 0
        node = torch.where(alive, found, node)
        path.append(found)
        law = torch.where(alive[:, None], p[row, node], law)
        if _nobody(alive):
            break
    return torch.stack(path, 1), rng.pick(law)


def _nobody(alive: Tensor) -> bool:
    """Whether a loop may end early. Looking costs a CPU nothing and makes a GPU wait, so only a CPU looks."""
    return alive.is_cpu and not bool(alive.any())


@dataclass(frozen=True)
class Rule:
    """A verification rule as the decoder sees it. Make one to plug in a function of your own.

    chain: a function (p, q, drafted, rng) -> (accepted, token), or None.
    tree: a function (p, q, tokens, tree, rng) -> (path, token), or None.
    kinds: the kinds of draft for which it is exact: "chain" (drawn from q one after the other), "without" (siblings
        drawn without replacement), "iid" (siblings drawn independently), "coupled" (drawn by the noise that the
        target will use), "chosen" (picked by any other means).
    how: the way a model draft fills its tree under this rule, one of `drafters.WAYS`.
    """

    name: str
    kinds: frozenset[str]
    how: str
    chain: Callable[[Tensor, Tensor, Tensor, Rng], tuple[Tensor, Tensor]] | None = None
    tree: Callable[[Tensor, Tensor | None, Tensor, Tree, Rng], tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        if (self.chain is None) == (self.tree is None):
            raise ValueError(f"rule {self.name!r} must have either a chain function or a tree function")
        unknown = sorted(self.kinds - ANY)
        if unknown or not self.kinds:
            raise ValueError(f"rule {self.name!r}: kinds must be some of {', '.join(sorted(ANY))}, got {unknown}")

    @property
    def needs_q(self) -> bool:
        """Whether it looks at the draft's law: one that takes chosen candidates cannot."""
        return "chosen" not in self.kinds and "coupled" not in self.kinds

    def verify(self, p: Tensor, q: Tensor | None, tokens: Tensor, tree: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
        """Path (B, D+1) padded with -1 and next token (B,), for a chain rule as for a tree rule."""
        if self.tree is not None:
            return self.tree(p, q, tokens, tree, rng)
        assert self.chain is not None
        assert q is not None
        accepted, emitted = self.chain(p, q[:, 1:], tokens[:, 1:], rng)
        nodes = tree.depths.to(p.device, non_blocking=True)  # (1, N): on a chain node i has depth i
        return nodes.masked_fill(nodes > accepted[:, None], -1), emitted


RULES = {
    "token": Rule("token", frozenset({"chain"}), "without", chain=token),
    "block": Rule("block", frozenset({"chain"}), "without", chain=block),
    "match": Rule("match", ANY, "top-k", tree=match),
    "coupled": Rule("coupled", frozenset({"coupled"}), "coupled", tree=match),
    "rrs": Rule("rrs", frozenset({"chain", "without"}), "without", tree=rrs),
    "specinfer": Rule("specinfer", frozenset({"chain", "iid"}), "iid", tree=rrs),
}
WHY_NOT = {
    "chosen": "a ratio test needs the law that each draft token was drawn from, and chosen, pruned, re-ranked or "
    "re-sorted candidates have none: testing them with p/q would change the output distribution",
    "without": "the rule does not know that a sibling's law depends on the siblings drawn before it",
    "iid": "the rule takes siblings to be drawn without replacement, or to have none",
    "coupled": "tokens drawn by the noise that verification will use again are not independent of its coins",
    "chain": "the rule wants its draft drawn by the target's own noise",
}


def find_rule(rule: str | Rule) -> Rule:
    """The rule of that name, or the rule itself. ValueError lists the names."""
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(sorted(RULES))}, got {rule!r}")
    return RULES[rule]


def check_kind(rule: Rule, kind: str) -> None:
    """Refuse a draft for which the rule is not exact, with the reason."""
    if kind not in ANY:
        raise ValueError(f"kind of a draft must be one of {', '.join(sorted(ANY))}, got {kind!r}")
    if kind not in rule.kinds:
        accepted = ", ".join(sorted(rule.kinds))
        raise ValueError(
            f"rule {rule.name!r} does not accept a draft of kind {kind!r} (only {accepted}): {WHY_NOT[kind]}"
        )
