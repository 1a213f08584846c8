"""Checks of what a caller hands in: one-line errors, before any forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minispec.model import LanguageModel
from minispec.sampling import Sampling


def check_integer(name: str, value: object, least: int) -> int:
    """`value` if it is an integer >= least (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer >= {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value


def check_sampling(sampling: Sampling | None) -> Sampling:
    """`sampling`, or the default."""
    if sampling is None:
        return Sampling()
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, got {sampling!r}")
    return sampling


def is_batch(prompt: Any) -> bool:
    """Whether this is a list of prompts rather than one."""
    if isinstance(prompt, torch.Tensor):
        return prompt.ndim > 1
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and not isinstance(prompt[0], int)


def prompt_lists(prompt: Any, vocab_size: int, block_size: int) -> list[list[int]]:
    """One list of ids a prompt, checked. Takes lists, tuples and integer tensors of rank 1 (one) or 2 (many)."""
    if isinstance(prompt, torch.Tensor):
        if prompt.ndim not in (1, 2) or prompt.is_floating_point() or prompt.dtype == torch.bool:
            raise TypeError(
                f"prompt must be integer token ids of rank 1 or 2, got {prompt.dtype} of shape {tuple(prompt.shape)}"
            )
        prompt = prompt.tolist()
    if isinstance(prompt, str) or not isinstance(prompt, (list, tuple)):
        raise TypeError(f"prompt must be a list of token ids, or a list of such lists, got {type(prompt).__name__}")
    prompts = prompt if is_batch(prompt) else [prompt]
    for row, ids in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt {row}"
        if isinstance(ids, torch.Tensor) and ids.ndim == 1 and not ids.is_floating_point():
            ids = ids.tolist()
        if not isinstance(ids, (list, tuple)):
            raise TypeError(f"{name} must be a list of token ids, got {type(ids).__name__}")
        if not 1 <= len(ids) <= block_size:
            raise ValueError(f"{name} must have 1..{block_size} tokens (block_size), got {len(ids)}")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"{name} must hold integer token ids, got {token!r}")
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} must hold token ids in 0..{vocab_size - 1}, got {token}")
    return [list(map(int, ids)) for ids in prompts]


def stop_set(stop: Sequence[int] | None, end_of_text: int | None, vocab_size: int) -> frozenset[int]:
    """Stop tokens as a set; None means the end-of-text id where there is one."""
    if stop is None:
        return frozenset() if end_of_text is None else frozenset([end_of_text])
    if isinstance(stop, (str, int)):
        raise TypeError(f"stop must be a list of token ids, got {stop!r}")
    for token in stop:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"stop must hold integer token ids, got {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop must hold token ids in 0..{vocab_size - 1}, got {token}")
    return frozenset(stop)


def check_models(target: LanguageModel, draft: LanguageModel) -> None:
    """Refuse a draft that cannot speak for this target, with both values."""
    if draft.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"draft and target must share one vocabulary: the draft's vocab_size is {draft.config.vocab_size}, "
            f"the target's {target.config.vocab_size}"
        )
    if draft.config.block_size < target.config.block_size:
        raise ValueError(
            f"the draft must read as far as the target: the draft's block_size is {draft.config.block_size}, "
            f"the target's {target.config.block_size}"
        )
    if draft.device != target.device:
        raise ValueError(f"draft and target must be on one device, got {draft.device} and {target.device}")
