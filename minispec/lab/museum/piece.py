"""What a piece of the museum is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from minispec.lab.parts import FullDecoder, assemble
from minispec.tree import Tree

Function = TypeVar("Function", bound=Callable[..., Any])
PIECES: list[Piece] = []


@dataclass(frozen=True)
class Piece:
    """One bug.

    kind: "rule", "drafter", "cache", "sampler" or "decoder". part: the broken thing itself; decoder: minispec's loop
    with it, (target, draft, prompts, n, rng or seed, ...). caught_by: the checks that fail. bench: the models that it
    is shown on: "gpt", a random pair; "markov", laws written by hand that hang on the last token; or "flat", fixture
    F1, laws that hang on nothing.
    """

    name: str
    kind: str
    story: str
    part: Any
    decoder: FullDecoder
    caught_by: frozenset[str]
    bench: str = "gpt"
    lossless_but_slow: bool = False


def rule_piece(
    name: str, *caught_by: str, rule: str | None = None, tree: Tree | None = None
) -> Callable[[Function], Function]:
    """Hang a broken rule function in the museum. `rule`: the name of the rule whose drafts it takes."""

    def hang(function: Function) -> Function:
        from minispec.lab.parts import as_rule
        from minispec.verify import RULES

        like = RULES[rule] if rule else None
        part = as_rule(function) if like is None else as_rule(function, sorted(like.kinds), like.how)
        PIECES.append(_piece(name, "rule", function, part, assemble(rule=part, tree=tree), caught_by, "markov"))
        return function

    return hang


def drafter_piece(
    name: str, *caught_by: str, rule: str = "token", slow: bool = False
) -> Callable[[Function], Function]:
    """Hang a factory (target, draft) -> Drafter in the museum."""

    def hang(function: Function) -> Function:
        decoder = assemble(rule=rule, drafter=function)
        PIECES.append(_piece(name, "drafter", function, function, decoder, caught_by, slow=slow))
        return function

    return hang


def decoder_piece(
    name: str, *caught_by: str, kind: str = "decoder", bench: str = "gpt", slow: bool = False
) -> Callable[[Function], Function]:
    """Hang a whole decoder, or what is wrong with its chance or its filters, in the museum."""

    def hang(function: Function) -> Function:
        PIECES.append(_piece(name, kind, function, function, function, caught_by, bench, slow))
        return function

    return hang


def cache_piece(name: str, *caught_by: str, tree: Tree | None = None, rule: str = "token") -> Callable[[type], type]:
    """Hang a cache class in the museum."""

    def hang(cache: type) -> type:
        decoder = assemble(rule=rule, tree=tree, cache=cache, draft_cache=cache)
        PIECES.append(_piece(name, "cache", cache, cache, decoder, caught_by))
        return cache

    return hang


def _piece(
    name: str,
    kind: str,
    thing: Any,
    part: Any,
    decoder: FullDecoder,
    caught_by: tuple[str, ...],
    bench: str = "gpt",
    slow: bool = False,
) -> Piece:
    story = inspect.cleandoc(thing.__doc__ or "")
    return Piece(name, kind, story, part, decoder, frozenset(caught_by), bench, slow)
