"""A drafter beside a fresh copy of itself: what a session keeps from step to step must change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minispec.drafters import Draft, Drafter, Session
from minispec.lab.report import ContractError
from minispec.sampling import Rng, Sampling
from minispec.verify import ANY


class Recorder:
    """An `rng` that remembers what it answered."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.answers: list[Tensor] = []

    def flip(self, prob: Tensor) -> Tensor:
        self.answers.append(self.rng.flip(prob))
        return self.answers[-1]

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        self.answers.append(self.rng.pick(weights, at=at))
        return self.answers[-1]


class Replay:
    """An `rng` that gives recorded answers again, and the likeliest when there are no more."""

    def __init__(self, answers: Sequence[Tensor]) -> None:
        self.answers = list(answers)

    def flip(self, prob: Tensor) -> Tensor:
        return self.answers.pop(0) if self.answers else prob >= 0.5

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        return self.answers.pop(0) if self.answers else weights.argmax(-1)


class Mirrored:
    """A drafter whose drafts are compared with those of a session that begins afresh at every step.

    errors: for each step the largest difference between the two laws told of one node, infinite where the tokens of
    chosen candidates differ. One row only.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.errors = drafter, [0.0]

    @property
    def kind(self) -> str:
        return self.drafter.kind

    @property
    def max_nodes(self) -> int:
        return self.drafter.max_nodes

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> MirrorSession:
        return MirrorSession(self, prompts, sampling)


class MirrorSession:
    def __init__(self, mirrored: Mirrored, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        self.mirrored, self.sampling = mirrored, sampling
        self.texts = [list(prompt) for prompt in prompts]
        self.session = mirrored.drafter.begin([list(prompt) for prompt in prompts], sampling)

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        for text, new in zip(self.texts, new_tokens, strict=True):
            text += new
        recorder = Recorder(rng)
        draft = self.session.propose(new_tokens, depth_limit, recorder)
        fresh = self.mirrored.drafter.begin([list(text) for text in self.texts], self.sampling)
        other = fresh.propose([() for _ in self.texts], depth_limit, Replay(recorder.answers))
        self.mirrored.errors.append(_difference(draft, other))
        return draft

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.session.commit(paths)

    def select(self, rows: Sequence[int]) -> None:
        self.session.select(rows)


def _difference(a: Draft, b: Draft) -> float:
    """The largest difference of what two drafts say of the nodes that both have."""
    size = min(a.tree.size, b.tree.size)
    same = [i for i in range(size) if a.tree.of_row(0)[: i + 1] == b.tree.of_row(0)[: i + 1]]
    if a.q is None or b.q is None:
        return 0.0 if a.tokens[0, same].tolist() == b.tokens[0, same].tolist() else float("inf")
    both = [i for i in same if int(a.tokens[0, i]) >= 0 and int(b.tokens[0, i]) >= 0]
    return float((a.q[0, both] - b.q[0, both]).abs().max()) if both else 0.0


class Strict:
    """A drafter whose drafts are checked beyond what the decoder checks; a fault raises `ContractError`."""

    def __init__(self, drafter: Drafter, vocabulary: int) -> None:
        self.drafter, self.vocabulary = drafter, vocabulary
        missing = [name for name in ("kind", "max_nodes", "begin") if not hasattr(drafter, name)]
        if missing:
            raise ContractError(f"a drafter has kind, max_nodes and begin(prompts, sampling); this has no {missing[0]}")
        if drafter.kind not in ANY:
            raise ContractError(f"its kind must be one of {', '.join(sorted(ANY))}, got {drafter.kind!r}")
        self.kind, self.max_nodes = drafter.kind, drafter.max_nodes

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> StrictSession:
        given = [list(prompt) for prompt in prompts]
        session = self.drafter.begin(given, sampling)
        missing = [name for name in ("propose", "commit", "select") if not hasattr(session, name)]
        if missing:
            raise ContractError(f"begin must return a session with propose, commit and select; it has no {missing[0]}")
        return StrictSession(self, session)


class StrictSession:
    def __init__(self, strict: Strict, session: Session) -> None:
        self.strict, self.session = strict, session
        self.commit, self.select = session.commit, session.select

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        draft: Any = self.session.propose(new_tokens, depth_limit, rng)
        if not isinstance(draft, Draft):
            raise ContractError(f"propose must return a Draft, got {type(draft).__name__}")
        B, N, V = len(new_tokens), draft.tree.size, self.strict.vocabulary
        if draft.tokens.shape != (B, N) or draft.tokens.dtype != torch.int64:
            found = f"{draft.tokens.dtype} {tuple(draft.tokens.shape)}"
            raise ContractError(f"tokens must be int64 of shape {(B, N)}, as the tree has {N} nodes, got {found}")
        if self.strict.max_nodes < N:
            raise ContractError(f"a draft of {N} nodes exceeds max_nodes, {self.strict.max_nodes}")
        if draft.kind != self.strict.kind:
            raise ContractError(f"the drafter is of kind {self.strict.kind!r}, its draft of {draft.kind!r}")
        if draft.q is not None:
            _check_laws(draft.q, draft.tokens, (B, N, V))
        elif draft.kind not in ("chosen", "coupled"):
            raise ContractError(f"a draft of kind {draft.kind!r} must tell its law q, got None")
        return draft


def _check_laws(q: Tensor, tokens: Tensor, shape: tuple[int, int, int]) -> None:
    if q.shape != shape:
        raise ContractError(f"q must have the shape {shape}, got {tuple(q.shape)}")
    if bool(q.isnan().any()) or bool((q < 0).any()):
        raise ContractError("q holds a NaN or a negative number")
    sums, present = q.sum(-1), tokens >= 0
    present[:, 0] = False
    if bool((present & ((sums - 1).abs() > 1e-5)).any()):
        raise ContractError(f"q of a node must sum to 1, got sums {sums[0].tolist()}")
    if bool(((tokens < 0) & (sums > 0)).any()):
        raise ContractError("q of an absent node (token -1) must be all zeros")
    drawn = q.gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    if bool((present & (drawn <= 0)).any()):
        raise ContractError("a drafted token has probability 0 in the q told of it")
