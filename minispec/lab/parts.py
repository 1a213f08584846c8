"""From parts to a decoder: a rule, a drafter or a cache of one's own in the decoding loop of minispec."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from minispec.cache import KVCache
from minispec.decode import speculate
from minispec.drafters import Drafter, ModelDrafter
from minispec.lab.output import Tokens, check_tokens
from minispec.lab.report import ContractError
from minispec.model import LanguageModel
from minispec.sampling import Randomness, Rng, Sampling
from minispec.tree import Tree
from minispec.verify import Rule, find_rule

MakeDrafter = Callable[[LanguageModel, LanguageModel], Drafter]
FullDecoder = Callable[..., Any]


def assemble(
    *,
    rule: str | Rule | Callable[..., Any] = "token",
    drafter: MakeDrafter | Drafter | None = None,
    tree: Tree | None = None,
    cache: type[KVCache] = KVCache,
    draft_cache: type[KVCache] = KVCache,
) -> FullDecoder:
    """A decoder (target, draft, prompts, n, rng, sampling, stop) -> token lists, with these parts in minispec's loop.

    rule: a name, a `Rule`, or a chain or tree function. drafter: a factory (target, draft) -> Drafter, or a
    `Drafter`; by default the draft model fills `tree` (`Tree.chain(2)`). cache, draft_cache: classes in place of
    `KVCache`, for the target and for a model drafter.
    """
    found = as_rule(rule)
    shape = Tree.chain(2) if tree is None else tree

    def decode(
        target: LanguageModel,
        draft: LanguageModel,
        prompts: Sequence[Sequence[int]],
        n: int,
        rng: Rng,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
    ) -> list[list[int]]:
        source = ModelDrafter(draft, shape, found.how) if drafter is None else make(drafter, target, draft)
        options: dict[str, Any] = {"max_new_tokens": n, "rule": found, "sampling": sampling, "stop": stop, "rng": rng}
        with _exchanged("minispec.decode.KVCache", cache), _exchanged("minispec.drafters.KVCache", draft_cache):
            return [result.tokens for result in speculate(target, source, prompts, **options)]

    return decode


def make(drafter: MakeDrafter | Drafter, target: LanguageModel, draft: LanguageModel) -> Drafter:
    """The drafter that a factory makes of these models; a drafter is itself."""
    return cast(Drafter, drafter if hasattr(drafter, "begin") else drafter(target, draft))


@contextmanager
def _exchanged(name: str, cache: type[KVCache]) -> Iterator[None]:
    """The loop makes its own caches; this changes of which class, for as long as it lasts."""
    if cache is KVCache:
        yield
    else:
        with mock.patch(name, cache):
            yield


def as_rule(rule: str | Rule | Callable[..., Any], kinds: Sequence[str] | None = None, how: str | None = None) -> Rule:
    """A `Rule` from a name, a rule or a function: (p, q, drafted, rng) of chains, (p, q, tokens, tree, rng) of trees.

    kinds, how: as in `Rule`; a function is taken for a ratio test, exact for chains and, of trees, for siblings drawn
    without replacement. Raises `TypeError` for a function of other than four or five parameters.
    """
    if isinstance(rule, (str, Rule)):
        found = find_rule(rule)
        return replace(found, kinds=frozenset(kinds or found.kinds), how=how or found.how)
    if not callable(rule):
        raise TypeError(f"rule must be a name, a Rule or a function, got {rule!r}")
    count = _parameters(rule)
    name = getattr(rule, "__name__", type(rule).__name__)
    if count == 4:
        return Rule(name, frozenset(kinds or {"chain"}), how or "without", chain=rule)
    if count == 5:
        return Rule(name, frozenset(kinds or {"chain", "without"}), how or "without", tree=rule)
    raise TypeError(f"rule must be (p, q, drafted, rng) or (p, q, tokens, tree, rng), {name} has {count} parameters")


def _parameters(function: Callable[..., Any]) -> int:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def guarded(rule: Rule) -> Rule:
    """The rule, with everything that it returns checked; a fault raises `ContractError`, which says what it is."""
    if rule.chain is not None:
        inner = rule.chain

        def chain(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
            returned = _call(inner, (p, q, drafted), (rng,))
            accepted, token = _two(returned, "(accepted, token)")
            _integers("accepted", accepted, (len(p),), drafted.shape[1])
            _integers("token", token, (len(p),), p.shape[2] - 1)
            return accepted, token

        return replace(rule, chain=chain)
    assert rule.tree is not None
    whole = rule.tree

    def tree_rule(p: Tensor, q: Tensor | None, tokens: Tensor, tree: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
        returned = _call(whole, (p, q, tokens), (tree, rng))
        path, token = _two(returned, "(path, token)")
        columns = path.shape[-1] if isinstance(path, Tensor) and path.ndim == 2 else 0  # it may end early
        _integers("path", path, (len(p), min(max(columns, 1), tree.max_depth + 1)), tree.size - 1, -1)
        _integers("token", token, (len(p),), p.shape[2] - 1)
        _paths(path, tokens, tree)
        return path, token

    return replace(rule, tree=tree_rule)


def _call(function: Callable[..., Any], tensors: tuple[Tensor | None, ...], others: tuple[Any, ...]) -> Any:
    before = [None if t is None else t.clone() for t in tensors]
    state = torch.get_rng_state()
    try:
        returned = function(*tensors, *others)
    except Exception as error:
        shapes = ", ".join("None" if t is None else str(tuple(t.shape)) for t in tensors)
        raise ContractError(f"it raised {type(error).__name__} for inputs of shapes {shapes}: {error}") from error
    for name, old, new in zip(("p", "q", "the drafted tokens"), before, tensors, strict=True):
        if old is not None and new is not None and not torch.equal(old, new):
            raise ContractError(f"it changed {name}, which it was given; work on a clone")
    if not torch.equal(state, torch.get_rng_state()):
        raise ContractError("it drew from torch's global generator; every random choice must go through rng")
    return returned


def _two(returned: Any, names: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        size = f" of {len(returned)}" if isinstance(returned, (tuple, list)) else ""
        raise ContractError(f"it must return {names}, got {type(returned).__name__}{size}")
    return returned[0], returned[1]


def _integers(name: str, value: Any, shape: tuple[int, ...], most: int, least: int = 0) -> None:
    if not isinstance(value, Tensor):
        raise ContractError(f"{name} must be a tensor of shape {shape}, got {type(value).__name__} {value!r}")
    if value.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        nan = " with NaN" if value.is_floating_point() and bool(value.isnan().any()) else ""
        raise ContractError(f"{name} must hold integers, got {value.dtype}{nan}")
    if value.shape != shape:
        raise ContractError(f"{name} must have the shape {shape}, one a row of the batch, got {tuple(value.shape)}")
    if value.numel() and not least <= int(value.min()) <= int(value.max()) <= most:
        raise ContractError(f"{name} must be in {least}..{most}, got {int(value.min())}..{int(value.max())}")


def _paths(path: Tensor, tokens: Tensor, tree: Tree) -> None:
    for row, nodes in enumerate(path.tolist()):
        kept = [node for node in nodes if node >= 0]
        parents = tree.of_row(row)
        linked = all(parents[b] == a for a, b in pairwise(kept))
        if nodes[0] != 0 or nodes[: len(kept)] != kept or not linked:
            raise ContractError(f"path must go from the root, 0, from parent to child, then -1, got {nodes}")
        if any(int(tokens[row, node]) < 0 for node in kept):
            raise ContractError(f"path accepts a node that is absent (token -1), got {nodes}")


@dataclass(frozen=True)
class Adapted:
    """A decoder of one of the admitted signatures, called in one way. What it returns is checked."""

    decoder: FullDecoder
    batched: bool  # takes a list of prompts
    enumerable: bool  # takes an rng
    samples_with: bool  # takes sampling
    stops: bool  # takes stop

    def __call__(
        self,
        models: tuple[LanguageModel, LanguageModel],
        prompts: Sequence[Sequence[int]],
        n: int,
        chance: Rng | int,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
    ) -> list[Tokens]:
        if self.enumerable and isinstance(chance, int):
            chance = Randomness(chance, len(prompts))
        options: dict[str, Any] = {}
        if self.samples_with:
            options["sampling"] = Sampling() if sampling is None else sampling
        if self.stops:
            options["stop"] = list(stop)
        given = [list(prompt) for prompt in prompts]
        try:
            if self.batched:
                returned = self.decoder(*models, given, n, chance, **options)
            else:
                returned = [self.decoder(*models, prompt, n, chance, **options) for prompt in given]
        except ContractError:
            raise
        except Exception as error:
            if "a choice without a possible outcome" in str(error):
                raise ContractError(
                    f"it asked rng to choose among weights that are all 0 or not numbers: {error}"
                ) from error
            raise ContractError(f"it raised {type(error).__name__} for n = {n}: {error}") from error
        if len(returned) != len(prompts):
            raise ContractError(f"it returned {len(returned)} outputs for {len(prompts)} prompts")
        if given != [list(prompt) for prompt in prompts]:
            raise ContractError("it changed the prompt that it was given")
        return [check_tokens(tokens, models[0].config.vocab_size) for tokens in returned]


def adapt(decoder: FullDecoder) -> Adapted:
    """See how a decoder wants to be called: (target, draft, prompt or prompts, n, rng or seed[, sampling][, stop]).

    Raises `TypeError` for any other signature.
    """
    names = list(inspect.signature(decoder).parameters)
    shape = "(target, draft, prompt, n, rng), with prompts for prompt, seed for rng, and sampling and stop behind"
    if len(names) < 5 or names[2] not in ("prompt", "prompts") or names[4] not in ("rng", "seed"):
        raise TypeError(f"decoder must be a function {shape} as they are taken, got ({', '.join(names)})")
    unknown = set(names[5:]) - {"sampling", "stop"}
    if unknown:
        raise TypeError(f"decoder must be a function {shape} as they are taken, got also {', '.join(sorted(unknown))}")
    return Adapted(decoder, names[2] == "prompts", names[4] == "rng", "sampling" in names, "stop" in names)
