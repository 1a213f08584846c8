"""Broken drafters: what they tell of q is not what they drew from. And one that is only slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minispec.drafters import Draft, Drafter, ModelDrafter, ModelSession
from minispec.lab.museum.piece import drafter_piece
from minispec.lab.report import CACHE, EACH, EFFICIENCY, EXACT, FIRST, JOINT, STEPS, TOLD
from minispec.model import LanguageModel, read
from minispec.sampling import Rng, Sampling
from minispec.tree import Tree

CHAIN, SIBLINGS = Tree.chain(2), Tree.branching([2])


@dataclass(frozen=True)
class Spoilt:
    """A model drafter whose sessions are spoilt right after they begin."""

    inner: ModelDrafter
    spoil: Callable[[ModelSession, Sampling], None]

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def max_nodes(self) -> int:
        return self.inner.max_nodes

    @property
    def model(self) -> LanguageModel:
        return self.inner.model

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> ModelSession:
        session = self.inner.begin(prompts, sampling)
        self.spoil(session, sampling)
        return session


def changed(inner: ModelDrafter, change: Callable[[Draft], Draft]) -> Spoilt:
    """Every draft is changed after it was made."""

    def spoil(session: ModelSession, sampling: Sampling) -> None:
        propose = session.propose

        def after(new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
            return change(propose(new_tokens, depth_limit, rng))

        session.propose = after  # type: ignore[method-assign]

    return Spoilt(inner, spoil)


def drawn_under(inner: ModelDrafter, drawn: Callable[[Sampling], Sampling]) -> Spoilt:
    """Draws under one sampling, tells the law of another."""

    def spoil(session: ModelSession, sampling: Sampling) -> None:
        told: list[Tensor] = []
        propose = session.propose

        class Both:
            def probs(self, logits: Tensor, who: str) -> Tensor:
                told.append(sampling.probs(logits, who)[:, 0])
                return drawn(sampling).probs(logits, who)

        def lying(new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
            told.clear()
            draft = propose(new_tokens, depth_limit, rng)
            assert draft.q is not None
            laws = torch.stack([torch.zeros_like(draft.q[:, 0]), *told], 1)[:, : draft.tree.size]  # (B, N, V)
            return replace(draft, q=torch.where(draft.tokens[..., None] >= 0, laws, 0.0))

        session.sampling = Both()  # type: ignore[assignment]
        session.propose = lying  # type: ignore[method-assign]

    return Spoilt(inner, spoil)


@drafter_piece("draft temperature not in q", FIRST, EACH, JOINT, STEPS, EXACT, TOLD)
def temperature_not_told(target: LanguageModel, draft: LanguageModel) -> Drafter:
    """Draws at half the temperature "for a better acceptance", tells the law at the full one.

    The acceptance rate rises, and the text leans to the draft's favourites.
    """
    return drawn_under(ModelDrafter(draft, CHAIN), lambda s: replace(s, temperature=s.temperature / 2))


@drafter_piece("draft takes argmax, ratio uses softmax q", FIRST, EACH, JOINT, STEPS, EXACT, TOLD)
def argmax_told_as_softmax(target: LanguageModel, draft: LanguageModel) -> Drafter:
    """Drafts greedily and gives the softmax as the law of what it drafted.

    The commonest of all: "greedy drafts are accepted more often". A greedy draft's law is a point mass. The text
    loses its variety, as the draft's first choice is accepted far too often.
    """
    return drawn_under(ModelDrafter(draft, CHAIN), lambda s: Sampling(0))


@drafter_piece("siblings without replacement, original q", FIRST, EACH, JOINT, STEPS, EXACT, TOLD, rule="rrs")
def original_q(target: LanguageModel, draft: LanguageModel) -> Drafter:
    """The second sibling is drawn without replacement; the q told is that before the first was taken out.

    A tree drafter that keeps one law a node. The second sibling is accepted too often where the first was likely.
    """

    def change(draft_: Draft) -> Draft:
        assert draft_.q is not None
        q = draft_.q.clone()
        if q.shape[1] > 2:
            q[:, 2] = torch.where(draft_.tokens[:, 2, None] >= 0, q[:, 1], 0.0)
        return replace(draft_, q=q)

    return changed(ModelDrafter(draft, SIBLINGS), change)


@drafter_piece("siblings sorted after the draw", FIRST, EACH, JOINT, EXACT, TOLD, rule="rrs")
def resorted(target: LanguageModel, draft: LanguageModel) -> Drafter:
    """Siblings are drawn, then tried in the order of their probability.

    Every beam-search habit asks for it. The token tried first is no longer a draw from q: likely tokens are tried
    first too often, and accepted too often.
    """

    def change(draft_: Draft) -> Draft:
        assert draft_.q is not None
        if draft_.tree.size < 3:
            return draft_
        x, q = draft_.tokens[:, 1:], draft_.q[:, 1]  # (B, 2), (B, V)
        order = torch.where(x >= 0, q.gather(1, x.clamp(min=0)), -1.0).argsort(dim=1, descending=True, stable=True)
        tokens = torch.cat([draft_.tokens[:, :1], x.gather(1, order)], 1)
        second = q.scatter(1, tokens[:, 1, None].clamp(min=0), 0.0)
        second = second / second.sum(1, keepdim=True).clamp(min=1e-300)
        laws = torch.stack([draft_.q[:, 0], q, torch.where(tokens[:, 2, None] >= 0, second, 0.0)], 1)
        return replace(draft_, tokens=tokens, q=laws)

    return changed(ModelDrafter(draft, SIBLINGS), change)


@drafter_piece("unsure draft dropped after the draw", FIRST, EACH, JOINT, STEPS, EXACT, TOLD)
def dropped_after_the_draw(target: LanguageModel, draft: LanguageModel) -> Drafter:
    """A drafted token of low probability is not submitted.

    "Stop drafting when unsure", decided by the token that was drawn in place of the law it was drawn from. Tokens
    that the draft finds unlikely are never drafted, and come from p alone besides: they come too often.
    """

    def change(draft_: Draft) -> Draft:
        assert draft_.q is not None
        x = draft_.tokens.clamp(min=0)
        sure = draft_.q.gather(2, x[..., None])[..., 0] >= 0.3  # (B, N)
        sure[:, 0] = True
        kept = sure.long().cumprod(1).bool() & (draft_.tokens >= 0)
        q = torch.where(kept[..., None], draft_.q, 0.0)
        return replace(draft_, tokens=torch.where(kept, draft_.tokens, -1), q=q)

    return changed(ModelDrafter(draft, CHAIN), change)


@drafter_piece("draft cache one row short", CACHE, EFFICIENCY, slow=True)
def one_row_short(target: LanguageModel, draft: LanguageModel) -> Drafter:
    """After a full acceptance the last draft token was never read by the draft itself, and nobody reads it later.

    The law stays the target's, as verification takes care of any draft; but after the first full acceptance the
    draft reads at wrong positions, and the acceptance rate decays with the length of the text.
    """

    def spoil(session: ModelSession, sampling: Sampling) -> None:
        def read_last() -> Any:
            have = [min(m, len(text) - 1) for m, text in zip(session.cache.lengths, session.texts, strict=True)]
            session.cache.rollback(have)
            begun = max(have) > 0
            new = [text[-1:] if begun else text for text in session.texts]
            return read(session.model, session.cache, new)

        session.read_last = read_last  # type: ignore[method-assign]

    return Spoilt(ModelDrafter(draft, CHAIN), spoil)
