"""What decoders return: checked, and cut at stop tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minispec.inputs import is_integer
from minispec.lab.report import ContractError

Tokens = tuple[int, ...]


def check_tokens(returned: Any, vocabulary: int | None) -> Tokens:
    """What a decoder returned, as a tuple of ints; `ContractError` says what it is instead."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if isinstance(returned, str) or not isinstance(returned, (list, tuple)):
        raise ContractError(f"the decoder must return a list of token ids, got {type(returned).__name__}")
    for token in returned:
        if not is_integer(token):
            raise ContractError(f"the decoder must return integer token ids, got {token!r} among them")
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            allowed = "0.." if vocabulary is None else f"0..{vocabulary - 1}"
            raise ContractError(f"the decoder returned the token id {token}, outside {allowed}")
    return tuple(map(int, returned))


def cut(tokens: Tokens, stop: frozenset[int]) -> Tokens:
    """`tokens` up to and including the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop), None)
    return tokens[:end]


def cut_law(law: Mapping[Tokens, float], stop: Sequence[int]) -> dict[Tokens, float]:
    """The law of outputs that end with their first stop token."""
    out: dict[Tokens, float] = {}
    for tokens, prob in law.items():
        short = cut(tokens, frozenset(stop))
        out[short] = out.get(short, 0.0) + prob
    return out
