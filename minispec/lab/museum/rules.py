"""Broken verification rules. All but the last are the token rule with one line of it changed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minispec.lab.museum.piece import rule_piece
from minispec.lab.report import EACH, EXACT, FIRST, GREEDY, JOINT, STEPS, ZERO
from minispec.sampling import Rng
from minispec.tree import Tree
from minispec.verify import count_accepted, match, residual

Step = tuple[Tensor, Tensor]


def token_with(
    p: Tensor,
    q: Tensor,
    drafted: Tensor,
    rng: Rng,
    accept: Callable[[Tensor, Tensor], Tensor] = lambda p_x, q_x: p_x / q_x,
    rest: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda p, q, x: residual(p, q),
    bonus: Callable[[Tensor, Tensor], Tensor] = lambda p, q: p,
    flip: Callable[[Tensor, Rng], Tensor] | None = None,
    shift: int = 0,
) -> Step:
    """The token rule, its parts open: as it stands it is right.

    accept(p(x), q(x)): the probability of acceptance. rest(p, q, x): the law (B, V) after a rejection of x (B,).
    bonus(p_{K+1}, q_K): the law after none. flip: how the coins (B, K) are thrown. shift: the p that `rest` is given,
    counted from the rejected place.
    """
    K, row = drafted.shape[1], torch.arange(len(p), device=p.device)
    if K == 0:
        return row * 0, rng.pick(p[:, 0])
    x = drafted.clamp(min=0)
    p_x, q_x = (law[:, :K].gather(2, x[..., None])[..., 0] for law in (p, q))  # (B, K)
    chance = torch.where(q_x > 0, accept(p_x, q_x), 0.0).clamp(0, 1)
    a = count_accepted(rng.flip(chance) if flip is None else flip(chance, rng))  # (B,)
    at = a.clamp(max=K - 1)
    wrong_here = rest(p[row, at + shift], q[row, at], x[row, at])  # (B, V)
    present = q[row, at].sum(-1) > 0  # no draft here: nothing to reject
    law = torch.where(((a < K) & present)[:, None], wrong_here, p[row, a])
    law = torch.where((a == K)[:, None], bonus(p[:, K], q[:, K - 1]), law)
    return a, rng.pick(law)


@rule_piece("rejection resamples from p", FIRST, EACH, JOINT, STEPS, EXACT)
def resample_from_p(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> Step:
    """After a rejection the next token is drawn from p itself.

    Several small repositories call "sample from the target" here. What the draft likes has had its chance and gets
    another: text reads as if the model were a little more like the draft.
    """
    return token_with(p, q, drafted, rng, rest=lambda p, q, x: p)


@rule_piece("residual abs(p - q)", ZERO, FIRST, EACH, JOINT, STEPS, EXACT, GREEDY)
def absolute_residual(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> Step:
    """The residual is normalised |p - q|, in place of max(p - q, 0).

    A misreading of (p - q)+. Tokens that were rejected for being too likely in the draft come back through the
    residual.
    """
    return token_with(p, q, drafted, rng, rest=lambda p, q, x: (p - q).abs() + 1e-12)


@rule_piece("residual is p without the rejected token", FIRST, EACH, JOINT, STEPS, EXACT)
def only_zeroed(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> Step:
    """After a rejection p is only stripped of the rejected token.

    Looks careful, and repeats no rejected token; but other tokens with q > p come too often.
    """
    return token_with(p, q, drafted, rng, rest=lambda p, q, x: p.scatter(1, x[:, None], 0.0) + 1e-300)


@rule_piece("ratio inverted", ZERO, FIRST, EACH, JOINT, STEPS, EXACT, GREEDY)
def ratio_inverted(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> Step:
    """Accepts with min(1, q(x) / p(x)).

    p and q change places between papers. The acceptance rate looks fine, and the output follows the draft.
    """
    return token_with(p, q, drafted, rng, accept=lambda p_x, q_x: q_x / p_x.clamp(min=1e-300))


@rule_piece("accept where p >= q, no coin", FIRST, EACH, JOINT, EXACT)
def no_coin(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> Step:
    """Accepts exactly when p(x) >= q(x).

    "Deterministic acceptance". Tokens that the draft overrates never survive: the text is duller than the target's.
    """
    return token_with(p, q, drafted, rng, accept=lambda p_x, q_x: (p_x >= q_x).to(p_x.dtype))


@rule_piece("bonus token from the draft", ZERO, EACH, JOINT, STEPS, EXACT)
def bonus_from_draft(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> Step:
    """When all draft tokens are accepted, the bonus token is drawn from the draft's law.

    The first token is right, so a look at first tokens shows nothing; the better the draft, the more bonus tokens.
    """
    return token_with(p, q, drafted, rng, bonus=lambda p, q: q)


@rule_piece("bonus token by argmax", EACH, JOINT, STEPS, EXACT)
def bonus_by_argmax(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> Step:
    """The bonus token is the target's likeliest.

    Left over from a greedy version. Every (K+1)-th token of a good run is too predictable; texts fall into loops.
    """
    return token_with(p, q, drafted, rng, bonus=lambda p, q: torch.zeros_like(p).scatter(1, p.argmax(1)[:, None], 1.0))


@rule_piece("residual one position off", EACH, JOINT, STEPS, EXACT)
def residual_off_by_one(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> Step:
    """The residual takes p from the place after the rejected token.

    An index that counts the pending token in one array and not in the other. Where laws hardly depend on the place
    it is invisible; on text it gives words that would fit one place later.
    """
    return token_with(p, q, drafted, rng, rest=lambda p, q, x: residual(p, q), shift=1)


@rule_piece("one uniform for all coins of a step", JOINT, STEPS, EXACT)
def one_uniform(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> Step:
    """One random number is compared with all the ratios of a step.

    `torch.rand(1)` outside the loop. If the first token passed, the number was small, and the others pass too easily:
    the first token is right, and what follows an accepted one leans to the draft.
    """

    def flip(chance: Tensor, rng: Rng) -> Tensor:
        ordered, order = chance.sort(dim=1)  # u falls between two neighbours: an index with their distance as weight
        edges = torch.cat([torch.zeros_like(chance[:, :1]), ordered, torch.ones_like(chance[:, :1])], 1)  # (B, K+2)
        passed_from = rng.pick(edges.diff(dim=1))  # (B,): coins whose ratio is above u, counted in that order
        return order.argsort(1) >= passed_from[:, None]

    return token_with(p, q, drafted, rng, flip=flip)


@rule_piece("match draws again on a mismatch", FIRST, EACH, JOINT, STEPS, EXACT, rule="match")
def match_draws_again(p: Tensor, q: Tensor | None, tokens: Tensor, tree: Tree, rng: Rng) -> Step:
    """Draws y ~ p, finds that y is not a draft token, throws y away and draws another.

    y was already the answer. Draft tokens get a second chance, so that text leans to what the draft proposes.
    """
    path, token = match(p, q, tokens, tree, rng)
    last = (path >= 0).sum(1) - 1
    again = rng.pick(p[torch.arange(len(p), device=p.device), path.gather(1, last[:, None])[:, 0]])
    return path, torch.where(last < tree.max_depth, again, token)
