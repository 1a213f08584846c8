"""Wrappers that look on while the decoder works: a model, a source of randomness, a drafter, a rule.

Each passes every call through unchanged and writes down what it saw. The decoder knows nothing of them, so a run
that is not recorded pays nothing. One row only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from minispec.around import Around
from minispec.cache import KVCache
from minispec.drafters import Draft, Drafter, Session
from minispec.model import LanguageModel
from minispec.sampling import Rng, Sampling
from minispec.tree import Tree
from minispec.verify import Rule

T = TypeVar("T")


@dataclass(frozen=True)
class Pass:
    """One call of a model: the cache's length before it, the tokens read, milliseconds."""

    before: int
    tokens: int
    ms: float


@dataclass(frozen=True)
class Choice:
    """One call of `rng`: `flip` with its probabilities and outcomes, or `pick` with its weights (V,) and one index."""

    op: str
    weights: Tensor
    outcome: list[int]
    at: int | None = None


@dataclass
class Seen:
    """What happened in one step, as the wrappers saw it."""

    draft: Draft | None = None
    p: Tensor | None = None  # (N, V)
    path: list[int] = field(default_factory=list)
    token: int = -1
    draws: list[Choice] = field(default_factory=list)  # choices made while drafting
    coins: list[Choice] = field(default_factory=list)  # choices made while verifying
    target_passes: list[Pass] = field(default_factory=list)
    draft_passes: list[Pass] = field(default_factory=list)
    draft_before: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0


class WatchedModel(Around):
    """A model that notes the length of its cache, the tokens and the time of each pass."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.cache: KVCache | None = None
        self.passes: list[Pass] = []

    @property
    def length(self) -> int:
        """Entries in its cache now."""
        return 0 if self.cache is None else self.cache.lengths[0]

    def __call__(self, tokens: Tensor, cache: KVCache | None = None, *args: Any, **kwargs: Any) -> Tensor:
        self.cache = cache
        before = self.length
        logits, ms = timed(lambda: self.model(tokens, cache, *args, **kwargs), self.device)
        self.passes.append(Pass(before, tokens.shape[1], ms))
        return logits

    def take(self) -> list[Pass]:
        """The passes since the last call of `take`."""
        taken, self.passes = self.passes, []
        return taken


class WatchedRng:
    """An `rng` that notes every choice; `choices` is the list that it writes to."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.choices: list[Choice] = []

    def flip(self, prob: Tensor) -> Tensor:
        coins = self.rng.flip(prob)
        outcome = [int(coin) for coin in coins.flatten().tolist()]
        self.choices.append(Choice("flip", prob.detach().flatten().cpu(), outcome))
        return coins

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        token = self.rng.pick(weights) if at is None else self.rng.pick(weights, at=at)
        place = None if at is None else int(at[0])
        self.choices.append(Choice("pick", weights[0].detach().cpu().clone(), token.tolist(), place))
        return token


class Watch:
    """The wrappers of one run, and what they saw in the step that is under way (`seen`)."""

    def __init__(self, target: LanguageModel, drafter: Drafter, rule: Rule, rng: Rng) -> None:
        self.target, self.rng, self.seen = WatchedModel(target), WatchedRng(rng), Seen()
        self.small: WatchedModel | None = None
        model = getattr(drafter, "model", None)
        if is_dataclass(drafter) and not isinstance(drafter, type) and model is not None:
            self.small = WatchedModel(model)
            drafter = replace(drafter, model=self.small)
        self.drafter = WatchedDrafter(drafter, self)
        self.rule = Rule(rule.name, rule.kinds, rule.how, tree=self._verify(rule))

    def begin_step(self) -> None:
        """Forget the step before. What the target read since then was the prompt."""
        self.seen = Seen(draft_before=0 if self.small is None else self.small.length)
        self.target.take()
        self.rng.choices = self.seen.draws

    def end_draft(self, draft: Draft, ms: float) -> None:
        self.seen.draft, self.seen.draft_ms = draft, ms
        self.seen.draft_passes = [] if self.small is None else self.small.take()

    def _verify(self, rule: Rule) -> Callable[[Tensor, Tensor | None, Tensor, Tree, Rng], tuple[Tensor, Tensor]]:
        def verify(p: Tensor, q: Tensor | None, tokens: Tensor, tree: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
            seen = self.seen
            seen.target_passes = self.target.take()
            seen.p = p[0].detach().cpu().clone()
            self.rng.choices = seen.coins
            (path, token), seen.verify_ms = timed(lambda: rule.verify(p, q, tokens, tree, rng), p.device)
            seen.path, seen.token = [node for node in path[0].tolist() if node >= 0], int(token[0])
            return path, token

        return verify


class WatchedDrafter:
    """A drafter whose sessions tell the watch of their drafts."""

    def __init__(self, drafter: Drafter, watch: Watch) -> None:
        self.drafter, self.watch = drafter, watch

    @property
    def kind(self) -> str:
        return self.drafter.kind

    @property
    def max_nodes(self) -> int:
        return self.drafter.max_nodes

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> WatchedSession:
        return WatchedSession(self.drafter.begin(prompts, sampling), self.watch)


class WatchedSession:
    def __init__(self, session: Session, watch: Watch) -> None:
        self.session, self.watch = session, watch
        self.commit, self.select = session.commit, session.select

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        self.watch.begin_step()
        work = partial(self.session.propose, new_tokens, depth_limit, rng)
        draft, ms = timed(work, self.watch.target.device)
        self.watch.end_draft(draft, ms)
        return draft


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What `work` returns, and the milliseconds it took, the device's queue included."""
    wait: Any = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    wait()
    start = time.perf_counter()
    value = work()
    wait()
    return value, 1e3 * (time.perf_counter() - start)
