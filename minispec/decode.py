"""The one decoding loop: draft, score, verify, commit.

Plain decoding is the same loop with an empty draft. Between steps, with n tokens in a row of which the last is
*pending* (emitted, not yet read), the target's cache holds n-1 entries; each step is exactly one target pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from minispec import planner
from minispec.auto import Run, drafter_of, find_plan
from minispec.cache import KVCache
from minispec.drafters import Drafter, ModelDrafter, NoDrafter
from minispec.inputs import (
    DraftOptions,
    Options,
    Stop,
    budgets,
    check_auto,
    check_draft,
    check_dropout,
    check_laws,
    check_rng,
    check_sampling,
    choose,
    flaws,
    is_batch,
    prompt_lists,
    stop_sets,
)
from minispec.model import GPT, LanguageModel, read
from minispec.result import Result, Step, summarise
from minispec.sampling import Randomness, Rng, Sampling, Shifted
from minispec.tree import Tree
from minispec.trust import unchanged
from minispec.verify import RULES, Rule, find_rule

Prompt = Sequence[int]
OURS = {GPT, ModelDrafter, NoDrafter, Randomness}


@dataclass
class Row:
    """One prompt on its way. `limit` is the length at which it ends, `new` what the last step emitted."""

    index: int
    tokens: list[int]
    limit: int
    reason: str  # for reaching the limit: "length" or "context"
    stop: frozenset[int]
    new: tuple[int, ...] = ()

    @property
    def depth_limit(self) -> int:
        """Deepest draft of which every token could still be emitted, one token of the target's own after it."""
        return self.limit - len(self.tokens) - 1


@dataclass(frozen=True)
class Plan:
    """A checked call: everything the loop needs."""

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    sampling: Sampling
    rng: Rng
    rows: list[Row]
    shape: planner.Plan | None = None  # what tree="auto" found

    @property
    def ours(self) -> bool:
        """Whether no code but this package's runs in it, so that no weight changes meanwhile."""
        parts = (self.target, self.drafter, getattr(self.drafter, "model", self.target), self.rng)
        return self.rule is RULES.get(self.rule.name) and {*map(type, parts)} <= OURS


@overload
def generate(target: LanguageModel, prompt: Prompt, **options: Unpack[Options]) -> Result: ...
@overload
def generate(target: LanguageModel, prompt: Sequence[Prompt], **options: Unpack[Options]) -> list[Result]: ...
def generate(
    target: LanguageModel,
    prompt: Any,
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | None = None,
    stop: Stop | None = None,
    seed: int | Sequence[int] | None = None,
    rng: Rng | None = None,
) -> Result | list[Result]:
    """Plain decoding: one token a target pass. Arguments, results and errors as for `speculate`, less the draft."""
    sampling = check_sampling(sampling)
    chosen = NoDrafter(), find_rule("match")
    return _collect(_plan(target, *chosen, prompt, max_new_tokens, sampling, stop, seed, rng), is_batch(prompt))


@overload
def speculate(
    target: LanguageModel, draft: LanguageModel | Drafter, prompt: Prompt, **options: Unpack[DraftOptions]
) -> Result: ...
@overload
def speculate(
    target: LanguageModel, draft: LanguageModel | Drafter, prompt: Sequence[Prompt], **options: Unpack[DraftOptions]
) -> list[Result]: ...
def speculate(
    target: LanguageModel,
    draft: LanguageModel | Drafter,
    prompt: Any,
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | None = None,
    tree: Tree | str | None = None,
    draft_len: int | None = None,
    rule: str | Rule | None = None,
    stop: Stop | None = None,
    seed: int | Sequence[int] | None = None,
    rng: Rng | None = None,
) -> Result | list[Result]:
    """Speculative decoding: `draft` proposes, `target` checks all of it in one pass; the law stays the target's.

    draft: a model (GPT) or any `Drafter`.
    prompt: token ids (n,), or a list of such; 1 <= n <= block_size. One prompt gives one `Result`, a list a list.
    max_new_tokens: at most this many, one number or one a row; fewer at a stop token or at the end of the context.
    sampling: `Sampling(temperature, top_k, top_p)`, default temperature 1.
    tree or draft_len: shape of a model's draft, default `Tree.chain(4)`. (A `Drafter` has its own.) tree="auto"
        takes the rule (unless given) and tree that are fastest on this machine, or plain decoding where that is;
        the first call measures for about half a minute and keeps what it finds (`auto.find_plan`). See `Result.plan`.
    rule: name of a rule in `verify.RULES`, or a `Rule`. Default: "match" for greedy decoding and for chosen
        candidates, else "token" for a chain and "rrs" for a tree. A model fills its tree as the rule needs it.
    stop: token ids that end a row, one set or a list of one a row; default the target's end-of-text id where it
        has one.
    seed: an integer, one a row, or None for a fresh one; or `rng`, any object with `flip` and `pick`.

    Memory beside the weights: 2 x n_layer x n_embd numbers a slot, the target's cache having rows x (the longest row's
    prompt and budget + nodes) slots and the draft's rows x (block_size + nodes), and p and q of one step, rows x nodes
    x V each; a mask of slots x slots bytes in each cache; noise made ahead, 65,536 numbers or rows x V if that is more
    (three times that where it hangs on the position), and coins, 4,096. Nothing grows while decoding.

    Raises `ValueError`/`TypeError` before any forward pass, naming the parameter, the value and what is allowed.
    """
    call = _choose(target, draft, prompt, max_new_tokens, sampling, tree, draft_len, rule, stop, seed, rng)
    return _collect(call, is_batch(prompt))


def stream(
    target: LanguageModel,
    draft: LanguageModel | Drafter,
    prompt: Prompt,
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | None = None,
    tree: Tree | str | None = None,
    draft_len: int | None = None,
    rule: str | Rule | None = None,
    stop: Stop | None = None,
    seed: int | Sequence[int] | None = None,
    rng: Rng | None = None,
) -> Iterator[Step]:
    """`speculate` for one prompt, a `Step` at a time. Checks its arguments at once, not at the first step."""
    if is_batch(prompt):
        raise TypeError("prompt: stream takes one prompt, a list of token ids; use speculate for many")
    call = _choose(target, draft, prompt, max_new_tokens, sampling, tree, draft_len, rule, stop, seed, rng)
    rounds = torch.inference_mode()(decode)(call)  # left at every yield, as the caller may want gradients
    return (step for steps in rounds for _, step in steps)


def _choose(
    target: LanguageModel,
    draft: Any,
    prompt: Any,
    max_new_tokens: Any,
    sampling: Sampling | None,
    tree: Tree | str | None,
    draft_len: int | None,
    rule: str | Rule | None,
    stop: Any,
    seed: Any,
    rng: Rng | None,
) -> Plan:
    """The checked call, with the drafter and rule asked for or, for `tree="auto"`, found to be fastest."""
    sampling = check_sampling(sampling)
    if tree != "auto":
        chosen = choose(target, draft, sampling, tree, draft_len, rule)
        return _plan(target, *chosen, prompt, max_new_tokens, sampling, stop, seed, rng)
    name = check_auto(target, draft, sampling, draft_len, rule)
    call = _plan(target, NoDrafter(), find_rule("match"), prompt, max_new_tokens, sampling, stop, seed, rng)
    shape = find_plan(target, draft, sampling, name, len(call.rows), search_run(target))
    return replace(call, drafter=drafter_of(shape, draft), rule=find_rule(shape.rule), shape=shape)


def search_run(target: LanguageModel) -> Run:
    """What a search for a plan (`auto.Search`) decodes with."""

    def run(
        drafter: Drafter, rule: str, prompts: list[list[int]], length: int, sampling: Sampling, seed: int
    ) -> list[Result]:
        results = _collect(_plan(target, drafter, find_rule(rule), prompts, length, sampling, (), seed, None), True)
        assert isinstance(results, list)
        return results

    return run


def _plan(
    target: LanguageModel,
    drafter: Drafter,
    rule: Rule,
    prompt: Any,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    stop: Stop | None,
    seed: int | Sequence[int] | None,
    rng: Rng | None,
) -> Plan:
    """Check everything that can be checked before a forward pass."""
    check_dropout("target", target)
    config = target.config
    prompts = prompt_lists(prompt, config.vocab_size, config.block_size)
    if seed is not None and rng is not None:
        raise ValueError(f"give either seed or rng, got seed={seed!r} and a {type(rng).__name__}")
    if rng is not None:
        check_rng(rng, len(prompts))
    new = budgets(max_new_tokens, len(prompts))
    ends = stop_sets(stop, getattr(target, "end_of_text", None), config.vocab_size, len(prompts))
    rows = []
    for index, ids in enumerate(prompts):
        limit = min(len(ids) + new[index], config.block_size)
        reason = "length" if limit == len(ids) + new[index] else "context"
        rows.append(Row(index, ids, limit, reason, ends[index]))
    rng = Randomness(seed, len(rows)) if rng is None else rng
    return Plan(target, drafter, rule, sampling, rng, rows)


def _collect(plan: Plan, many: bool) -> Result | list[Result]:
    prompts = [list(row.tokens) for row in plan.rows]
    steps: list[list[Step]] = [[] for _ in plan.rows]
    start = time.perf_counter()
    with torch.inference_mode(), unchanged(plan.ours):
        for round_ in decode(plan):
            for index, step in round_:
                steps[index].append(step)
    seconds = time.perf_counter() - start
    results = []
    for row, prompt, taken in zip(plan.rows, prompts, steps, strict=True):
        tokens = [token for step in taken for token in step.tokens]
        reason = (taken[-1].finish_reason if taken else None) or row.reason
        results.append(Result(prompt, tokens, reason, taken, summarise(taken, seconds), plan.shape))
    return results if many else results[0]


def decode(plan: Plan) -> Iterator[list[tuple[int, Step]]]:
    """The loop, to be run in inference mode. Yields, for each target pass, row index and `Step` of each row in it."""
    target, rng = plan.target, plan.rng
    rows = [row for row in plan.rows if len(row.tokens) < row.limit]
    if not rows:
        return
    if len(rows) < len(plan.rows):
        rng = rng.select([row.index for row in rows])  # type: ignore[attr-defined]
    capacity = max(row.limit for row in rows) + plan.drafter.max_nodes
    cache = KVCache(target.config, len(rows), capacity, device=target.device, dtype=target.dtype)
    session = plan.drafter.begin([row.tokens for row in rows], plan.sampling)
    if max(len(row.tokens) for row in rows) > 1:
        read(target, cache, [row.tokens[:-1] for row in rows])  # prefill is not a step: no token comes of it
    while rows:
        here = Shifted(rng, [len(row.tokens) - 1 for row in rows])
        depths = [row.depth_limit for row in rows]
        draft = session.propose([row.new for row in rows], depths, here)
        tokens = draft.tokens.to(cache.kv.device)  # (B, N)
        check_draft(draft, plan.rule, [row.tokens[-1] for row in rows], depths, target.config.vocab_size)
        p = _score(target, cache, draft.tree, tokens, plan.sampling)
        path, token = plan.rule.verify(p, draft.q, tokens, draft.tree, here)
        unseen = flaws(p, draft.q)
        host = torch.cat([path, token[:, None], tokens, *unseen], 1).tolist()  # the one wait for the device
        if unseen and sum(line.pop() for line in host):
            check_laws(p, draft.q)
        paths = [[node for node in line[: path.shape[1]] if node >= 0] for line in host]
        cache.keep(paths, draft.tree.size)
        session.commit(paths)
        steps = [
            _emit(row, draft.tree.of_row(i), paths[i], line[path.shape[1]], line[path.shape[1] + 1 :])
            for i, (row, line) in enumerate(zip(rows, host, strict=True))
        ]
        done = [(row.index, step) for row, step in zip(rows, steps, strict=True)]
        going = [i for i, step in enumerate(steps) if step.finish_reason is None]
        if 0 < len(going) < len(rows):
            cache.select(going)
            session.select(going)
            rng = rng.select(going)  # type: ignore[attr-defined]
        rows = [rows[i] for i in going]
        yield done


def _score(target: LanguageModel, cache: KVCache, tree: Tree, tokens: Tensor, sampling: Sampling) -> Tensor:
    """p at every node of the draft, by one pass of the target: (B, N, V)."""
    chain, last = tree.is_chain, target.config.block_size - 1
    mask = None if chain else tree.mask.to(target.device, non_blocking=True)  # (1 or B, N, N)
    positions = None  # the slots, as a rule
    if not chain or max(cache.lengths) + tree.max_depth > last:
        start = torch.tensor(cache.lengths, device=target.device)[:, None]  # (B, 1)
        positions = (start + tree.depths.to(target.device, non_blocking=True)).clamp(
            max=last
        )  # (B, N); absent nodes may be out
    logits = target(tokens.clamp(min=0), cache, positions, mask)  # (B, N, V)
    return sampling.probs(logits, "target")


def _emit(row: Row, parents: tuple[int, ...], path: list[int], token: int, nodes: list[int]) -> Step:
    """Put what was verified into the row: the accepted run and one more token, cut after the first stop token."""
    run = [nodes[node] for node in path[1:]] + [token]
    end = next((i + 1 for i, t in enumerate(run) if t in row.stop), None)
    reason = "stop" if end is not None else None
    run = run[:end]
    row.tokens, row.new = row.tokens + run, tuple(run)
    if reason is None and len(row.tokens) >= row.limit:
        reason = row.reason
    return Step(tuple(run), tuple(nodes[1:]), parents, tuple(path[: len(run) + 1]), reason)
