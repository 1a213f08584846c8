"""Random calls of `generate`, `speculate` and `stream` by hypothesis, and what must hold of each.

200 examples in the default run, the same each time; 10,000 new ones under `-m fuzz`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from doubles import caches, mix, random_gpt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minispec import (
    GPT,
    RULES,
    EarlyExitDrafter,
    KVCache,
    NGramDrafter,
    Result,
    Sampling,
    Step,
    Tree,
    generate,
    speculate,
    stream,
)
from minispec.advanced import AdaptiveDrafter, DynamicTree, HeuristicDrafter
from minispec.result import summarise

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Call:
    """One call, in plain values: an example prints as what one may paste into `@example`."""

    vocab: int
    block: int
    layers: tuple[int, int]  # target, draft
    extra: int  # by how much the draft's context is longer
    share: float  # of another model in the draft: 0 is the target itself
    dtype: str
    prompts: list[list[int]]
    budgets: list[int]
    stops: list[list[int] | None]
    seeds: list[int]
    how: str  # what drafts
    shape: list[int]  # the parents of nodes 1.. for a model's tree, or the numbers that another drafter wants
    rule: str | None
    sampling: tuple[float, int | None, float | None]
    end_of_text: int | None
    training: bool

    @property
    def exact(self) -> bool:
        return self.dtype == "float64"


@lru_cache(maxsize=512)
def models(
    vocab: int, block: int, layers: tuple[int, int], extra: int, share: float, dtype: str
) -> tuple[GPT, GPT, dict[str, torch.Tensor]]:
    """Target and draft, and a copy of their parameters to compare with afterwards."""
    target = random_gpt(vocab * 31 + block, vocab, block, layers[0], 8, 2)
    if share == 0 and extra == 0:
        draft = target
    else:
        draft = random_gpt(vocab * 31 + block, vocab, block + extra, layers[1], 8, 2)
        if extra == 0 and layers[0] == layers[1]:
            draft = mix(target, random_gpt(7, vocab, block, layers[1], 8, 2), share)
    target, draft = (m.to(DTYPES[dtype]) for m in (target, draft))
    copy = {f"{i}{n}": w.clone() for i, m in enumerate((target, draft)) for n, w in m.state_dict().items()}
    return target, draft, copy


RULE_OF = {
    "model": [None, *sorted(RULES)],
    "ngram": [None, "match"],
    "dynamic": [None, "match"],
    "early": [None, "token", "block", "rrs", "match"],
    "adaptive": [None, "token", "block", "rrs", "specinfer", "traversal", "match"],
    "heuristic": [None, "token", "block", "rrs", "specinfer", "traversal", "match"],
    "none": [None],
}


@st.composite
def calls(draw: st.DrawFn) -> Call:
    vocab, block = draw(st.integers(3, 6)), draw(st.integers(8, 24))
    rows = draw(st.sampled_from([1, 1, 1, 2, 3, 5]))
    token = st.integers(0, vocab - 1)
    each = lambda one: draw(st.lists(one, min_size=rows, max_size=rows))  # noqa: E731
    how = draw(st.sampled_from(["model"] * 6 + ["ngram", "dynamic", "early", "adaptive", "heuristic", "none"]))
    rule = draw(st.sampled_from(RULE_OF[how]))
    chain = rule in ("token", "block") or how in ("adaptive", "heuristic") or draw(st.booleans())
    if how in ("model", "early"):
        nodes = draw(st.integers(0, 8))
        shape: list[int] = []
        for node in range(nodes):  # breadth-first: parents do not decrease
            least = shape[-1] if shape else 0
            shape.append(node if chain else draw(st.integers(least, node)))
    else:
        shape = draw(st.lists(st.integers(1, 5), min_size=3, max_size=3))
    temperature = draw(st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.3, 0.9, 2.0, 1e-40, 1e6]))
    top_k = draw(st.sampled_from([None, None, 1, 2, vocab, vocab + 3]))
    top_p = draw(st.sampled_from([None, None, 1e-8, 0.5, 0.9, 1.0]))
    return Call(
        vocab, block, draw(st.sampled_from([(1, 1), (2, 1), (2, 2)])), draw(st.sampled_from([0, 0, 0, 3])),
        draw(st.sampled_from([0.0, 0.2, 1.0])), draw(st.sampled_from(["float64"] * 5 + ["float32", "bfloat16", "float16"])),
        each(st.lists(token, min_size=1, max_size=draw(st.sampled_from([3, block])))),
        each(st.integers(0, block + 2)),
        each(st.one_of(st.none(), st.just([]), st.lists(token, max_size=2))),
        each(st.integers(-(2**70), 2**70)), how, shape, rule, (temperature, top_k, top_p),
        draw(st.one_of(st.none(), token)), draw(st.booleans()),
    )  # fmt: skip


def tree_of(call: Call) -> Tree:
    """The tree that a model fills; a chain of one where the drafter has a shape of its own."""
    return Tree(((-1, *call.shape),)) if call.how in ("model", "early") else Tree.chain(1)


def drafter_of(call: Call, target: GPT, draft: GPT) -> tuple[Any, dict[str, Any]]:
    """The draft argument and its options."""
    tree = tree_of(call)
    a, b, c = (call.shape + [1, 1, 1])[:3]
    rule = {} if call.rule is None else {"rule": call.rule}
    if call.how == "model":
        return draft, {"tree": tree, **rule}
    if call.how == "early":
        if call.layers[0] == 1:
            return NGramDrafter(a), {}
        needs = RULES[call.rule].how if call.rule else "without"
        return EarlyExitDrafter(target, 1, tree, needs), rule
    return {
        "ngram": (NGramDrafter(a, b, c), rule),
        "dynamic": (DynamicTree(draft, nodes=a * b, max_depth=b, width=c), rule),
        "adaptive": (AdaptiveDrafter(draft, a + b, 0.05 * c), rule),
        "heuristic": (HeuristicDrafter(draft, a, a + b), rule),
        "none": (draft, {"draft_len": 0}),
    }[call.how]


def check(call: Call) -> None:
    """Everything that must hold of a call, whatever it is."""
    target, draft, before = models(call.vocab, call.block, call.layers, call.extra, call.share, call.dtype)
    target.end_of_text = call.end_of_text
    target.train(call.training)
    sampling = Sampling(*call.sampling)
    drafter, options = drafter_of(call, target, draft)
    shared: dict[str, Any] = {"max_new_tokens": call.budgets, "stop": call.stops, "sampling": sampling}
    torch.manual_seed(11)
    state = torch.get_rng_state()
    results = speculate(target, drafter, call.prompts, seed=call.seeds, **shared, **options)
    plain = generate(target, call.prompts, seed=call.seeds, **shared)
    assert torch.equal(torch.get_rng_state(), state)
    assert target.training == call.training
    now = {f"{i}{n}": w for i, m in enumerate((target, draft)) for n, w in m.state_dict().items()}
    assert all(torch.equal(before[name], weight) for name, weight in now.items())
    for row, result in enumerate(results):
        check_row(call, row, result)
        check_row(call, row, plain[row])
        assert plain[row].stats.proposed == 0
    rule = call.rule or ("match" if sampling.greedy or call.how in ("ngram", "dynamic") else None)
    same = sampling.greedy or sampling.top_k == 1 or rule in ("match", "coupled") or call.how == "ngram"
    if call.exact and same:
        assert [(r.tokens, r.finish_reason) for r in results] == [(r.tokens, r.finish_reason) for r in plain]
    if draft is target and call.exact and sampling.greedy and call.how == "model" and tree_of(call).is_chain:
        kept = [step for result in results for step in result.steps if step.finish_reason != "stop"]
        assert all(step.accepted == step.proposed for step in kept)  # whoever knows what will be said is believed
    check_stream(call, target, drafter, options, results)


def check_row(call: Call, row: int, result: Result) -> None:
    """Right length, nothing after a stop, a reason that is so, statistics that add up, steps that hang together."""
    prompt, budget, stop = call.prompts[row], call.budgets[row], call.stops[row]
    stop = ([] if call.end_of_text is None else [call.end_of_text]) if stop is None else stop
    room = min(budget, call.block - len(prompt))
    assert result.prompt == prompt
    assert len(result.tokens) <= room
    assert all(0 <= token < call.vocab for token in result.tokens)
    assert not set(result.tokens[:-1]) & set(stop)
    stopped = bool(result.tokens) and result.tokens[-1] in stop
    assert (result.finish_reason == "stop") == stopped
    if not stopped:
        assert len(result.tokens) == room
        assert result.finish_reason == ("length" if budget <= call.block - len(prompt) else "context")
    assert [token for step in result.steps for token in step.tokens] == result.tokens
    assert result.stats == summarise(result.steps)
    assert result.stats.target_passes == len(result.steps) <= max(len(result.tokens), 0)
    assert [step.finish_reason for step in result.steps[:-1]] == [None] * max(len(result.steps) - 1, 0)
    done = len(prompt)
    for step in result.steps:
        check_step(step, budget_left=len(prompt) + room - done)
        done += len(step.tokens)


def check_step(step: Step, budget_left: int) -> None:
    nodes = [step.tokens[0], *step.drafted]  # node 0's token is the pending one, which is not looked at
    assert step.path[0] == 0
    assert all(step.parents[b] == a for a, b in zip(step.path, step.path[1:], strict=False))
    accepted = [nodes[node] for node in step.path[1:]]
    assert list(step.tokens[: len(accepted)]) == accepted
    assert len(step.tokens) in (len(accepted), len(accepted) + 1)
    assert len(step.tokens) == len(accepted) + 1 or step.finish_reason == "stop"
    assert 0 <= step.accepted <= step.tested <= step.proposed <= len(step.drafted)
    depth = {0: 0}
    for node, parent in enumerate(step.parents[1:], start=1):
        depth[node] = depth[parent] + 1
        assert nodes[node] < 0 or depth[node] < budget_left  # every drawn token could have been emitted


def check_stream(call: Call, target: GPT, drafter: Any, options: dict[str, Any], results: list[Result]) -> None:
    """A stream of the first row gives its steps; the cache is a prefill after each; it may be left at any point."""
    with caches() as made:
        steps = stream(
            target, drafter, call.prompts[0], max_new_tokens=call.budgets[0], stop=call.stops[0],
            sampling=Sampling(*call.sampling), seed=call.seeds[0], **options,
        )  # fmt: skip
        text = list(call.prompts[0])
        taken = []
        for step in steps:
            taken.append(step)
            text += step.tokens
            if step.finish_reason is None and call.exact:
                check_cache(target, made[0], text)
    if len(call.prompts) == 1:
        assert taken == results[0].steps
    leave = stream(target, drafter, call.prompts[0], max_new_tokens=call.budgets[0], seed=1, **options)
    next(leave, None)
    leave.close()


def check_cache(target: GPT, cache: KVCache, text: list[int]) -> None:
    n = len(text)
    assert cache.lengths == [n - 1]
    fresh = KVCache(target.config, capacity=n, dtype=target.dtype)
    with torch.inference_mode():
        target(torch.tensor([text[:-1]]), fresh)
    assert (cache.kv[..., : n - 1, :] - fresh.kv[..., : n - 1, :]).abs().max() < 1e-9


def valid(call: Call) -> bool:
    """Whether rule and tree fit each other: `test_trees` has those that are refused."""
    return tree_of(call).is_chain or call.rule not in ("token", "block")


HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=HEALTH)
@given(calls())
def test_200_random_calls(call: Call) -> None:
    if valid(call):
        check(call)


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(10))
def test_10000_random_calls(part: int) -> None:
    @settings(max_examples=1000, deadline=None, database=None, print_blob=True, suppress_health_check=HEALTH)
    @given(calls())
    def run(call: Call) -> None:
        if valid(call):
            check(call)

    run()
