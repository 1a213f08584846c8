"""Wrong rules and drafters (fixture F1), as real implementations had them: the tests must reject each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minispec import Draft, ModelDrafter, Rule, Sampling, Tree
from minispec.sampling import Rng
from minispec.verify import RULES, count_accepted, residual


def chain_rule(accept, rest):  # type: ignore[no-untyped-def]
    """The token rule with its acceptance probability (p_x, q_x) and its residual (p, q, x) exchanged."""

    def rule(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
        x = drafted.clamp(min=0)
        p_x = p[:, :-1].gather(2, x[..., None])[..., 0]
        q_x = q.gather(2, x[..., None])[..., 0]
        ok = rng.flip(torch.where(q_x > 0, accept(p_x, q_x).clamp(max=1), 0.0))
        a = count_accepted(ok)
        row = torch.arange(len(p))
        q = torch.cat([q, torch.zeros_like(p[:, :1])], 1)
        x = torch.cat([x, x.new_zeros(len(p), 1)], 1)
        bonus = a == drafted.shape[1]
        law = torch.where(bonus[:, None], p[:, -1], rest(p[row, a], q[row, a], x[row, a]))
        return a, rng.pick(law)

    return Rule("wrong", frozenset({"chain"}), "without", chain=rule)


def ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    return p_x / q_x


def zero_rejected(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return p.scatter(1, x[:, None], 0.0)


def match_then_draw_again(p: Tensor, q: Tensor | None, tokens: Tensor, tree: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
    """On a mismatch the token that showed it is thrown away and another is drawn."""
    path, token = RULES["match"].tree(p, q, tokens, tree, rng)  # type: ignore[misc]
    last = (path >= 0).sum(1) - 1
    mismatch = last < tree.max_depth
    again = rng.pick(p[torch.arange(len(p)), last])
    return path, torch.where(mismatch, again, token)


WRONG_RULES = {
    "rejection resamples from p": chain_rule(ratio, lambda p, q, x: p),
    "rejection only zeroes the rejected token in p": chain_rule(ratio, zero_rejected),
    "accept iff p >= q, no coin": chain_rule(lambda p, q: (p >= q).to(p.dtype), lambda p, q, x: residual(p, q)),
    "ratio inverted": chain_rule(lambda p, q: q / p, lambda p, q, x: residual(p, q)),
    "match with a second draw on mismatch": Rule(
        "wrong", frozenset({"chain", "chosen"}), "without", tree=match_then_draw_again
    ),
}


@dataclass(frozen=True)
class LyingDrafter:
    """Draws under one sampling (`drawn`), reports the law of another."""

    inner: ModelDrafter
    drawn: Sampling
    kind: str = "chain"
    max_nodes: int = 9

    def begin(self, prompts, sampling):  # type: ignore[no-untyped-def]
        session = self.inner.begin(prompts, sampling)
        told, drawn = sampling, self.drawn

        class Both:
            """Two laws from the same logits: one to draw from, one to tell."""

            def probs(self, logits: Tensor, who: str) -> Tensor:
                told_laws.append(told.probs(logits, who)[:, 0])
                return drawn.probs(logits, who)

        told_laws: list[Tensor] = []
        session.sampling = Both()
        propose = session.propose

        def lying(new, limit, rng):  # type: ignore[no-untyped-def]
            told_laws.clear()
            draft = propose(new, limit, rng)
            q = draft.q.clone()
            for depth, law in enumerate(told_laws, start=1):
                q[:, depth] = torch.where(draft.tokens[:, depth, None] >= 0, law, 0.0)
            return Draft(draft.tree, draft.tokens, q, "chain")

        session.propose = lying
        return session
