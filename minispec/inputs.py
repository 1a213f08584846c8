"""What a caller or a drafter hands in, checked: one-line errors, and the drafter and rule of a call."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias, TypedDict, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import Required

from minispec.drafters import Draft, Drafter, ModelDrafter
from minispec.model import LanguageModel
from minispec.sampling import Rng, Sampling, check_law
from minispec.tree import Tree
from minispec.verify import Rule, check_kind, find_rule

DEFAULT_DRAFT_LEN = 4
Stop: TypeAlias = Collection[int] | Sequence[Collection[int] | None]  # for all rows, or one a row


class Common(TypedDict, total=False):
    """What every way to decode may be told."""

    max_new_tokens: Required[int | Sequence[int]]
    sampling: Sampling | None
    seed: int | Sequence[int] | None
    rng: Rng | None


class Shape(TypedDict, total=False):
    """How to draft and to verify."""

    tree: Tree | str | None
    draft_len: int | None
    rule: str | Rule | None


class Options(Common, total=False):
    """What `generate` may be told."""

    stop: Stop | None


class DraftOptions(Options, Shape, total=False):
    """What `speculate` and `stream` may be told."""


class TextOptions(Common, Shape, total=False):
    """What `Pair.complete` may be told, which stops at strings."""


def check_integer(name: str, value: object, least: int) -> int:
    """`value` if it is an integer >= least (a bool is none)."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer >= {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return int(value)


def is_integer(value: object) -> TypeGuard[int]:
    """An int, or what NumPy has for one; a bool is none."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def check_rng(rng: Any, rows: int) -> None:
    """Refuse an `rng` that lacks a method, or has no key for a row."""
    wanted = ["flip", "pick"] + (["select"] if rows > 1 else [])
    missing = [name for name in wanted if not callable(getattr(rng, name, None))]
    if missing:
        raise TypeError(f"rng must have {', '.join(wanted)} for {rows} rows, {type(rng).__name__} lacks {missing[0]}")
    if len(getattr(rng, "keys", range(rows))) != rows:
        raise ValueError(f"rng has keys for {len(rng.keys)} rows, got {rows} prompts")


def check_sampling(sampling: Sampling | None) -> Sampling:
    """`sampling`, or the default."""
    if sampling is None:
        return Sampling()
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, got {sampling!r}")
    return sampling


def find_device(name: str | torch.device) -> torch.device:
    """A device by name, `auto` being CUDA where there is one, else the CPU. ValueError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        allowed = "device must be cpu, cuda, mps or auto as far as this machine has it"
        raise ValueError(f"{allowed}, got {name!r}: {str(error).splitlines()[0]}") from None
    return device


def check_dtype(dtype: Any) -> None:
    """Refuse what a model's weights cannot be."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"dtype must be torch.float32, float64, bfloat16 or float16, got {dtype!r}")


def is_batch(prompt: Any) -> bool:
    """Whether this is a list of prompts rather than one."""
    if hasattr(prompt, "ndim"):  # a tensor or an array
        return bool(prompt.ndim > 1)
    several = (list, tuple, Tensor, np.ndarray)
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], several)


def prompt_lists(prompt: Any, vocab_size: int, block_size: int) -> list[list[int]]:
    """One list of ids a prompt, checked. Takes lists, tuples and integer tensors of rank 1 (one) or 2 (many)."""
    if isinstance(prompt, (Tensor, np.ndarray)):
        kind = f"{prompt.dtype} of shape {tuple(prompt.shape)}"
        if prompt.ndim not in (1, 2) or any(name in str(prompt.dtype) for name in ("float", "bool", "complex")):
            raise TypeError(f"prompt must be integer token ids of rank 1 or 2, got {kind}")
        prompt = prompt.tolist()
    if isinstance(prompt, str) or not isinstance(prompt, (list, tuple)):
        raise TypeError(f"prompt must be a list of token ids, or a list of such lists, got {type(prompt).__name__}")
    prompts = prompt if is_batch(prompt) else [prompt]
    for row, ids in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt {row}"
        if isinstance(ids, (Tensor, np.ndarray)) and ids.ndim == 1:
            ids = ids.tolist()
        if not isinstance(ids, (list, tuple)):
            raise TypeError(f"{name} must be a list of token ids, got {type(ids).__name__}")
        if not 1 <= len(ids) <= block_size:
            raise ValueError(f"{name} must have 1..{block_size} tokens (block_size), got {len(ids)}")
        for token in ids:
            if not is_integer(token):
                raise TypeError(f"{name} must hold integer token ids, got {token!r}")
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} must hold token ids in 0..{vocab_size - 1}, got {token}")
    return [list(map(int, ids)) for ids in prompts]


def budgets(max_new_tokens: Any, rows: int) -> list[int]:
    """New tokens allowed to each row: one number for all, or one a row."""
    if not is_several(max_new_tokens):
        return [check_integer("max_new_tokens", max_new_tokens, 0)] * rows
    if len(max_new_tokens) != rows or isinstance(max_new_tokens, (set, frozenset)):
        raise ValueError(f"max_new_tokens must be one integer, or {rows} (one a row), got {max_new_tokens!r}")
    return [check_integer("max_new_tokens", value, 0) for value in listed(max_new_tokens)]


def stop_sets(stop: Any, end_of_text: int | None, vocab_size: int, rows: int) -> list[frozenset[int]]:
    """Stop tokens of each row: one set for all, or one a row. None means the end-of-text id where there is one."""
    if stop is not None and not is_several(stop):
        raise TypeError(f"stop must be a list of token ids, or one such list a row, got {stop!r}")
    if stop is None or not any(value is None or is_several(value) for value in listed(stop)):
        return [stop_set(stop, end_of_text, vocab_size)] * rows
    if len(stop) != rows:
        raise ValueError(f"stop must be one list of token ids, or {rows} (one a row), got {stop!r}")
    return [stop_set(one, end_of_text, vocab_size) for one in listed(stop)]


def stop_set(stop: Any, end_of_text: int | None, vocab_size: int) -> frozenset[int]:
    """The stop tokens of one row, checked."""
    if stop is None:
        return frozenset() if end_of_text is None else frozenset([end_of_text])
    if not is_several(stop):
        raise TypeError(f"stop must hold a list of token ids for every row or for none, got {stop!r} for one")
    for token in listed(stop):
        if not is_integer(token):
            raise TypeError(f"stop must hold integer token ids, got {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop must hold token ids in 0..{vocab_size - 1}, got {token}")
    return frozenset(map(int, listed(stop)))


def is_several(value: Any) -> bool:
    """Whether this may hold one value a row, or token ids."""
    kinds = (list, tuple, set, frozenset, range, Tensor, np.ndarray)
    return isinstance(value, kinds) and getattr(value, "ndim", 1) > 0


def listed(values: Any) -> list[Any]:
    """The members of a collection; those of a tensor or an array as numbers or lists."""
    return cast("list[Any]", values.tolist()) if hasattr(values, "tolist") else list(values)


def check_draft(draft: Draft, rule: Rule, pending: Sequence[int], depth_limit: Sequence[int], vocab_size: int) -> None:
    """Refuse a draft that is not what its kind says, or does not continue the text. ValueError says what is wrong."""
    tree, tokens = draft.tree, draft.tokens
    check_kind(rule, draft.kind)
    if draft.kind == "chain" and not tree.is_chain:
        raise ValueError(f"draft of kind 'chain' has the parents {tree.rows}")
    if rule.needs_q and draft.q is None:
        raise ValueError(f"rule {rule.name!r} needs q, the law of each draft token; this draft has none")
    if tokens.shape != (len(pending), tree.size):
        raise ValueError(f"draft: tokens must have the shape {(len(pending), tree.size)}, got {tuple(tokens.shape)}")
    if tree.max_depth > min(depth_limit):
        limit = torch.tensor(depth_limit, device=tokens.device)[:, None]  # (B, 1)
        if bool(((tree.depths.to(tokens.device) > limit) & (tokens >= 0)).any()):
            raise ValueError(f"draft goes deeper than depth_limit {list(depth_limit)}")
    if tokens.is_cpu:  # to look at a GPU's tokens would mean to wait for them
        host = tokens.tolist()
        roots, largest = [line[0] for line in host], max(map(max, host))
        if roots != list(pending):
            raise ValueError(f"draft: node 0 must hold the last token, {list(pending)}, got {roots}")
        if largest >= vocab_size:
            raise ValueError(f"draft: tokens must be ids in 0..{vocab_size - 1} or -1, got {largest}")
        if draft.q is not None:
            check_law(draft.q, "draft")


def flaws(p: Tensor, q: Tensor | None) -> list[Tensor]:
    """Nothing on a CPU, where laws are checked as they are made; else a column (B, 1), True for a NaN in p or q."""
    if p.is_cpu:
        return []
    sums = p.sum((1, 2)) if q is None else p.sum((1, 2)) + q.sum((1, 2))  # (B,)
    return [sums.isnan()[:, None]]


def check_laws(p: Tensor, q: Tensor | None) -> None:
    """Refuse p and q (B, N, V) with a NaN in them."""
    check_law(p, "target")
    if q is not None:
        check_law(q, "draft")


def check_dropout(name: str, model: Any) -> None:
    """Refuse a model whose dropout is at work: it would change the law, and draw from the global generator."""
    if isinstance(model, torch.nn.Module) and model.training:
        for part, module in model.named_modules():
            if isinstance(module, _DropoutNd) and module.training and module.p > 0:
                found = f"in training mode with dropout {module.p} in {part!r}"
                raise ValueError(f"{name} must be in eval mode, or without dropout, got a model {found}")


def check_models(target: LanguageModel, draft: LanguageModel) -> None:
    """Refuse a draft that cannot speak for this target, with both values."""
    check_dropout("draft", draft)
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


def choose(
    target: LanguageModel,
    draft: LanguageModel | Drafter,
    sampling: Sampling,
    tree: Tree | str | None,
    draft_len: int | None,
    rule: str | Rule | None,
) -> tuple[Drafter, Rule]:
    """The drafter and the rule of a call, refused where they do not fit each other or the target."""
    if tree is not None and draft_len is not None:
        raise ValueError(f"give either tree or draft_len, got tree={tree} and draft_len={draft_len}")
    if tree is not None and not isinstance(tree, Tree):
        raise TypeError(f'tree must be a Tree or "auto", got {tree!r}')
    if draft_len is not None:
        tree = Tree.chain(draft_len)
    if hasattr(draft, "begin"):
        drafter = cast(Drafter, draft)
        if hasattr(drafter, "model"):
            check_models(target, drafter.model)
        if tree is not None:
            shape = f"tree={tree}" if draft_len is None else f"draft_len={draft_len}"
            raise ValueError(
                f"tree and draft_len shape a model's draft, this drafter has a shape of its own, got {shape}"
            )
        found = find_rule(default_rule(sampling, drafter.kind) if rule is None else rule)
    elif hasattr(draft, "config"):
        check_models(target, draft)
        tree = Tree.chain(DEFAULT_DRAFT_LEN) if tree is None else tree
        kind = "chain" if tree.is_chain else "without"
        found = find_rule(default_rule(sampling, kind) if rule is None else rule)
        drafter = ModelDrafter(draft, tree, found.how)
    else:
        raise TypeError(f"draft must be a GPT or a Drafter, got {type(draft).__name__}")
    check_kind(found, drafter.kind)
    return drafter, found


def check_auto(
    target: LanguageModel, draft: Any, sampling: Sampling, draft_len: int | None, rule: str | Rule | None
) -> str | None:
    """The name of the rule that `tree="auto"` is held to, if any; ValueError/TypeError for what cannot go with it."""
    if hasattr(draft, "begin") or draft_len is not None:
        given = f"draft_len={draft_len}" if draft_len is not None else f"a {type(draft).__name__}"
        raise ValueError(f'tree="auto" chooses the shape of a model\'s draft, got {given} as well')
    if isinstance(rule, Rule):
        raise TypeError(f'rule must be a name or None with tree="auto", got the Rule {rule.name!r}')
    choose(target, draft, sampling, None, None, None)  # do these models fit?
    return None if rule is None else find_rule(rule).name


def default_rule(sampling: Sampling, kind: str) -> str:
    """The rule for a draft of this kind where none is asked for."""
    if sampling.greedy or kind == "chosen":
        return "match"
    return {"chain": "token", "without": "rrs", "iid": "specinfer", "coupled": "coupled"}.get(kind, "match")
