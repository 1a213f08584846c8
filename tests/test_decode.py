"""The loop through its public interface: greedy equality, limits, stops, seeds, batches, streams, efficiency."""

from __future__ import annotations

import gc
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from doubles import Counting, TableModel, assert_prefilled, caches, random_gpt, rows_of

from minispec import (
    GPT,
    Draft,
    GPTConfig,
    ModelDrafter,
    NGramDrafter,
    Randomness,
    Sampling,
    Tree,
    generate,
    speculate,
    stream,
)
from minispec.around import Around
from minispec.drafters import ModelSession
from minispec.ngram import lookup

GREEDY = Sampling(0)


def long_gpt(seed: int, block: int = 128, **shape: int) -> GPT:
    return random_gpt(seed, vocab=11, block=block, width=16, heads=4, scale=0.4, **shape)


@pytest.fixture(scope="module")
def pair11() -> tuple[GPT, GPT]:
    return long_gpt(1), long_gpt(2, layers=1)


class AlwaysWrong:
    """A draft that gives the least likely token of the target."""

    def __init__(self, model: GPT) -> None:
        self.model, self.config, self.device, self.dtype = model, model.config, model.device, model.dtype

    def __call__(self, tokens, cache=None, positions=None, mask=None):  # type: ignore[no-untyped-def]
        return -self.model(tokens, cache, positions, mask)


# --- case 9: greedy speculation is plain greedy decoding ---------------------------------------------------


@pytest.mark.parametrize("K", range(9))
@pytest.mark.parametrize("who", ["target", "other", "wrong"])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_case_9_greedy_equals_plain(pair11: tuple[GPT, GPT], K: int, who: str, length: int) -> None:
    target, other = pair11
    draft = {"target": target, "other": other, "wrong": AlwaysWrong(target)}[who]
    prompt = [3, 1, 4, 1, 5][:length]
    plain = generate(target, prompt, max_new_tokens=100, sampling=GREEDY)
    for rule in ("match", "token") if length == 2 else ("match",):
        fast = speculate(target, draft, prompt, max_new_tokens=100, sampling=GREEDY, draft_len=K, rule=rule)
        assert fast.tokens == plain.tokens
        assert len(fast.tokens) == 100
    if who == "wrong" and K:
        assert fast.stats.accepted == 0
        assert fast.stats.target_passes == 100
    if who == "target":
        assert fast.stats.target_passes == -(-100 // (K + 1))


def test_ngram_drafts_keep_greedy_decoding_as_it_is(pair11: tuple[GPT, GPT]) -> None:
    target, _ = pair11
    plain = generate(target, [3, 1, 4], max_new_tokens=100, sampling=GREEDY)
    fast = speculate(target, NGramDrafter(5), [3, 1, 4], max_new_tokens=100, sampling=GREEDY)
    assert fast.tokens == plain.tokens
    assert fast.stats.accepted > 0


def test_match_equals_plain_sampling_token_for_token_under_one_seed(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    for seed, sampling in itertools.product(range(10), (Sampling(), Sampling(0.8, top_p=0.9))):
        options = {"max_new_tokens": 40, "sampling": sampling, "seed": seed}
        plain = generate(target, [1, 2], **options)
        for K in (0, 1, 4):
            assert speculate(target, draft, [1, 2], draft_len=K, rule="match", **options).tokens == plain.tokens
        assert speculate(target, NGramDrafter(3), [1, 2], **options).tokens == plain.tokens


# --- efficiency: what the law cannot see -------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_case_12_draft_equal_to_target_accepts_everything(pair11: tuple[GPT, GPT], K: int, sampling: Sampling) -> None:
    target, _ = pair11
    result = (
        speculate(target, target, [1], max_new_tokens=50 * (K + 1), draft_len=K, sampling=sampling, seed=1)
        if (50 * (K + 1) < 127)
        else speculate(target, target, [1], max_new_tokens=25 * (K + 1), draft_len=K, sampling=sampling, seed=1)
    )
    assert all(step.accepted == K for step in result.steps)
    assert result.stats.acceptance_rate == 1


def test_case_3_equal_laws_accept_ten_thousand_of_ten_thousand() -> None:
    target = TableModel(rows_of(0.5, 0.3, 0.2), block_size=2600, dtype=torch.float32)
    results = speculate(target, target, [[0]] * 4, max_new_tokens=2500 * 2, draft_len=1, seed=0)
    assert sum(r.stats.accepted for r in results) == sum(r.stats.tested for r in results) > 5000


def test_case_12_the_drafts_cached_logits_equal_an_uncached_pass_before_every_step(
    pair11: tuple[GPT, GPT], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair11
    checked = 0
    read_last = ModelSession.read_last

    def watched(self: ModelSession) -> torch.Tensor:
        nonlocal checked
        logits = read_last(self)
        for b, text in enumerate(self.texts):
            assert (logits[b] - draft(torch.tensor([text]))[0, -1]).abs().max() < 1e-10
            checked += 1
        return logits

    monkeypatch.setattr(ModelSession, "read_last", watched)
    speculate(target, draft, [[1, 2, 3], [4]], max_new_tokens=60, draft_len=3, seed=0)
    assert checked > 40


def test_cache_equals_a_fresh_prefill_after_every_step(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    text = [1, 2, 3]
    with caches() as made:
        for step in stream(target, draft, text, max_new_tokens=60, draft_len=3, seed=0):
            text = [*text, *step.tokens]
            assert_prefilled(made[0], target, text)


class Lengths:
    """A model drafter with its own draft length at each step."""

    kind, max_nodes = "chain", 9

    def __init__(self, model: GPT, lengths: list[int]) -> None:
        self.inner, self.lengths = ModelDrafter(model, Tree.chain(8)), lengths

    def begin(self, prompts, sampling):  # type: ignore[no-untyped-def]
        session, lengths = self.inner.begin(prompts, sampling), iter(self.lengths)

        class Session:
            commit, select = session.commit, session.select

            def propose(self, new, limit, rng):  # type: ignore[no-untyped-def]
                k = next(lengths)
                return session.propose(new, [min(k, m) for m in limit], rng)

        return Session()


def test_case_13_draft_lengths_in_turn(pair11: tuple[GPT, GPT]) -> None:
    target, _ = pair11
    result = speculate(target, Lengths(target, [3, 0, 0, 3]), [1], max_new_tokens=10, sampling=GREEDY, rule="token")
    assert [step.accepted for step in result.steps] == [3, 0, 0, 3]


def test_case_13_no_draft_is_plain_decoding(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    result = speculate(target, draft, [1], max_new_tokens=9, draft_len=0, seed=0)
    assert result.stats.acceptance_rate is None
    assert result.stats.accepted_per_proposed is None
    assert result.stats.tokens_per_pass == 1


@pytest.mark.parametrize("K", [1, 2, 5])
def test_one_target_pass_and_k_draft_passes_a_step(pair11: tuple[GPT, GPT], K: int) -> None:
    target, draft = map(Counting, pair11)
    result = speculate(target, draft, [1, 2, 3], max_new_tokens=60, draft_len=K, seed=0)
    shortened = [max(len(s.drafted), 0) for s in result.steps]
    assert target.passes[0] == (1, 2)  # prefill over prompt[:-1]
    assert target.passes[1:] == [(1, k + 1) for k in shortened]
    assert shortened.count(K) >= len(shortened) - K - 1  # only the last steps are cut short
    assert len(draft.passes) == sum(shortened)
    assert all(size[1] <= 2 for size in draft.passes[1:])  # the re-read, then one token each


def test_case_16_zero_new_tokens_call_no_model(pair11: tuple[GPT, GPT]) -> None:
    target, draft = map(Counting, pair11)
    result = speculate(target, draft, [1, 2], max_new_tokens=0)
    assert (result.tokens, result.finish_reason, result.steps) == ([], "length", [])
    assert result.stats.tokens_per_pass is None
    full = speculate(target, draft, [1] * 128, max_new_tokens=5)
    assert (full.tokens, full.finish_reason) == ([], "context")
    assert target.passes == draft.passes == []


# --- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", range(9))
def test_case_16_exact_length_and_context_for_every_prompt(K: int) -> None:
    target, draft = random_gpt(1), random_gpt(2)
    for length, new in itertools.product(range(1, 17), [*range(K + 3), 20]):
        prompt = [i % 3 for i in range(length)]
        plain = generate(target, prompt, max_new_tokens=new, sampling=GREEDY)
        for draft_ in (target, draft):
            fast = speculate(target, draft_, prompt, max_new_tokens=new, sampling=GREEDY, draft_len=K)
            assert fast.tokens == plain.tokens
            assert fast.finish_reason == plain.finish_reason
        assert len(fast.tokens) == min(new, 16 - length)
        assert fast.finish_reason == ("length" if len(fast.tokens) == new else "context")


def test_case_17_a_draft_with_a_shorter_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"draft's block_size is 8, the target's 16"):
        speculate(random_gpt(1), random_gpt(2, block=8), [0] * 6, max_new_tokens=4)


def test_case_19_another_vocabulary_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"draft's vocab_size is 4, the target's 3"):
        speculate(random_gpt(1), random_gpt(2, vocab=4), [0], max_new_tokens=4)


BAD = [
    ({"prompt": []}, r"prompt must have 1\.\.16 tokens \(block_size\), got 0"),
    ({"prompt": [0] * 17}, r"prompt must have 1\.\.16 tokens \(block_size\), got 17"),
    ({"prompt": [0, 3]}, r"prompt must hold token ids in 0\.\.2, got 3"),
    ({"prompt": [-1]}, r"prompt must hold token ids in 0\.\.2, got -1"),
    ({"prompt": [0, 1.5]}, r"prompt must hold integer token ids, got 1\.5"),
    ({"prompt": [True]}, r"prompt must hold integer token ids, got True"),
    ({"prompt": "abc"}, r"prompt must be a list of token ids"),
    ({"prompt": None}, r"prompt must be a list of token ids"),
    ({"prompt": torch.zeros(2)}, r"prompt must be integer token ids of rank 1 or 2, got torch.float32"),
    ({"prompt": torch.zeros(1, 1, 1, dtype=torch.long)}, r"rank 1 or 2, got torch.int64 of shape \(1, 1, 1\)"),
    ({"prompt": [[0], []]}, r"prompt 1 must have 1\.\.16 tokens"),
    ({"draft_len": -1}, r"draft_len must be an integer >= 0, got -1"),
    ({"draft_len": 1.9}, r"draft_len must be an integer >= 0, got 1\.9"),
    ({"draft_len": True}, r"draft_len must be an integer >= 0, got True"),
    ({"draft_len": "4"}, r"draft_len must be an integer >= 0, got '4'"),
    ({"max_new_tokens": -1}, r"max_new_tokens must be an integer >= 0, got -1"),
    ({"max_new_tokens": 2.5}, r"max_new_tokens must be an integer >= 0, got 2\.5"),
    ({"rule": "tokens"}, r"rule must be one of block, .*, got 'tokens'"),
    ({"sampling": 0.7}, r"sampling must be a Sampling, got 0\.7"),
    ({"stop": [3]}, r"stop must hold token ids in 0\.\.2, got 3"),
    ({"stop": 1}, r"stop must be a list of token ids, or one such list a row, got 1"),
    ({"stop": ["a"]}, r"stop must hold integer token ids, got 'a'"),
    ({"tree": 4}, r'tree must be a Tree or "auto", got 4'),
    ({"tree": Tree.chain(1), "draft_len": 1}, r"give either tree or draft_len"),
    ({"tree": Tree.from_parents([[-1, 0], [-1, 0]])}, r"a model fills one tree for all rows, got 2 trees"),
    (
        {"tree": Tree.from_parents([-1, 0, 0]), "rule": "token"},
        r"rule 'token' does not accept a draft of kind 'without'",
    ),
    ({"seed": 1, "rng": Randomness(1)}, r"give either seed or rng"),
    ({"seed": "1"}, r"seed must be an integer, or 1 integers"),
    ({"rng": 5}, r"rng must have flip, pick for 1 rows, int lacks flip"),
    ({"prompt": [[0], [1]], "rng": Randomness(1)}, r"rng has keys for 1 rows, got 2 prompts"),
    ({"draft": "gpt2"}, r"draft must be a GPT or a Drafter, got str"),
    ({"draft": NGramDrafter(2), "draft_len": 2}, r"this drafter has a shape of its own"),
    (
        {"draft": NGramDrafter(2), "rule": "token"},
        r"rule 'token' does not accept a draft of kind 'chosen' .*: a ratio test",
    ),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[re.sub(r" object at 0x\w+", "", str(b)) for b, _ in BAD])
def test_case_18_bad_input_is_refused_before_any_pass(bad: dict, message: str) -> None:
    target, draft = Counting(random_gpt(1)), Counting(random_gpt(2))
    call = {"draft": draft, "prompt": [0], "max_new_tokens": 3} | bad
    many = any(text in message for text in ("prompt 1", "shape", "2 prompts"))  # a stream takes one prompt only
    for function in (speculate,) if many else (speculate, stream):
        with pytest.raises((ValueError, TypeError), match=message):
            function(target, **call)
    assert target.passes == draft.passes == []


def test_bad_drafters_are_refused() -> None:
    for make, message in (
        (lambda: NGramDrafter(-1), "draft_len must be"),
        (lambda: NGramDrafter(2, 0), "max_n must be an integer >= 1, got 0"),
        (lambda: ModelDrafter(random_gpt(1), how="best"), "how must be one of without, iid, top-k, coupled, got"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rule", ["token", "block", "match", "coupled", "rrs", "specinfer", "traversal"])
def test_a_bad_draft_is_named_before_the_target_is_asked(rule: str, temperature: float) -> None:
    """Wherever in it the NaN is: q is looked at as a whole, top-k's laws, which nobody keeps, level by level."""

    class Bad(Around):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            return self.model(*args, **kwargs) * (math.nan if self.calls == 3 else 1)

    target, tree = Counting(random_gpt(1)), Tree.chain(4) if rule in ("token", "block") else Tree.branching([2, 1, 2])
    place = r"\(0, 0\)" if rule == "match" else rf"\(0, {3 if tree.is_chain else 5}\)"
    with pytest.raises(ValueError, match=rf"^draft logits: a NaN.* at \(row, node\) {place}$"):
        speculate(
            target, Bad(random_gpt(2)), [0], max_new_tokens=9, tree=tree, rule=rule, sampling=Sampling(temperature)
        )
    assert not target.passes


def test_a_drafters_law_with_a_nan_is_refused(pair11: tuple[GPT, GPT]) -> None:
    class Nan:
        kind, max_nodes = "chain", 2

        def begin(self, prompts: Any, sampling: Any) -> Any:
            return self

        def propose(self, new: Any, limit: Any, rng: Any) -> Draft:
            q = torch.full((1, 2, 11), 1 / 11)
            q[0, 0], q[0, 1, 4] = 0, math.nan
            return Draft(Tree.chain(1), torch.tensor([[3, 4]]), q, "chain")

    with pytest.raises(ValueError, match=r"^draft logits: a NaN.* at \(row, node\) \(0, 1\)$"):
        speculate(pair11[0], Nan(), [3], max_new_tokens=9)


def test_bad_logits_name_the_model() -> None:
    target, draft = random_gpt(1), random_gpt(2)
    for model, name in ((target, "target"), (draft, "draft")):
        weight = model.ln_f.bias.clone()
        model.ln_f.bias[0] = float("nan")
        with pytest.raises(ValueError, match=f"{name} logits: a NaN"):
            speculate(target, draft, [0], max_new_tokens=3)
        model.ln_f.bias.copy_(weight)


# --- stop tokens -------------------------------------------------------------------------------------------


def test_case_20_each_token_in_turn_as_the_stop_token(pair11: tuple[GPT, GPT]) -> None:
    target, _ = pair11
    plain = generate(target, [3, 1], max_new_tokens=40, sampling=GREEDY)
    for stop in sorted(set(plain.tokens)):
        end = plain.tokens.index(stop) + 1
        for draft in (target, NGramDrafter(6)):
            shape = {"draft_len": 6} if draft is target else {}
            options = {"max_new_tokens": 40, "sampling": GREEDY, "stop": [stop], **shape}
            fast = speculate(target, draft, [3, 1], **options)
            assert fast.tokens == plain.tokens[:end]
            assert fast.finish_reason == "stop"
            assert (
                fast.stats.new_tokens
                == end
                == sum(s.accepted + 1 for s in fast.steps[:-1]) + len(fast.steps[-1].tokens)
            )
            assert [t for s in stream(target, draft, [3, 1], **options) for t in s.tokens] == fast.tokens


def test_case_20_a_stop_token_in_the_prompt_stops_nothing(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    plain = generate(target, [3, 1], max_new_tokens=20, sampling=GREEDY)
    unused = next(t for t in range(11) if t not in plain.tokens)
    changed = generate(target, [unused, 3, 1], max_new_tokens=20, sampling=GREEDY, stop=[unused])
    assert len(changed.tokens) == 20 or changed.finish_reason == "stop"
    assert speculate(target, draft, [3, 1], max_new_tokens=20, sampling=GREEDY, stop=[3, 1][:0]).tokens == plain.tokens


def test_case_20_a_draft_that_always_proposes_the_stop_token_changes_nothing(pair11: tuple[GPT, GPT]) -> None:
    target, _ = pair11
    plain = generate(target, [3, 1], max_new_tokens=20, sampling=GREEDY)
    unused = next(t for t in range(11) if t not in plain.tokens)
    stopper = TableModel(rows_of(*[1.0 if t == unused else 0.0 for t in range(11)]), block_size=128)
    fast = speculate(target, stopper, [3, 1], max_new_tokens=20, sampling=GREEDY, stop=[unused], draft_len=4)
    assert (fast.tokens, fast.finish_reason) == (plain.tokens, "length")


def test_case_21_a_stop_inside_the_accepted_run_and_a_length_limit() -> None:
    chain = torch.zeros(30, 30, dtype=torch.float64)
    for a, b in itertools.pairwise([0, 10, 11, 7, 20, 21, 22, 23]):
        chain[a, b] = 1
    chain[chain.sum(1) == 0, 0] = 1
    target = TableModel(chain, block_size=32)
    for new, stop, tokens, reason in (
        (5, [7], [10, 11, 7], "stop"),
        (3, [7], [10, 11, 7], "stop"),
        (2, [7], [10, 11], "length"),
    ):
        result = speculate(target, target, [0], max_new_tokens=new, stop=stop, draft_len=4)
        assert (result.tokens, result.finish_reason) == (tokens, reason)
    result = speculate(target, target, [0], max_new_tokens=6, stop=[7], draft_len=5)
    assert result.stats.accepted == result.stats.tested == 3


def test_the_targets_end_of_text_stops_by_default(pair11: tuple[GPT, GPT]) -> None:
    target, draft = long_gpt(1), pair11[1]
    plain = generate(target, [3, 1], max_new_tokens=40, sampling=GREEDY)
    target.end_of_text = plain.tokens[4]
    assert generate(target, [3, 1], max_new_tokens=40, sampling=GREEDY).finish_reason == "stop"
    assert speculate(target, draft, [3, 1], max_new_tokens=40, sampling=GREEDY).tokens[-1] == plain.tokens[4]
    assert generate(target, [3, 1], max_new_tokens=40, sampling=GREEDY, stop=()).tokens == plain.tokens


# --- seeds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "match"])
def test_case_23_seeds(rule: str) -> None:
    target = TableModel(rows_of(*[1 / 11] * 11), block_size=64)
    options = {"max_new_tokens": 20, "rule": rule}
    runs = [speculate(target, target, [0], seed=seed, **options) for seed in range(1, 21)]
    assert len({tuple(r.tokens) for r in runs}) >= 15
    assert speculate(target, target, [0], seed=1, **options) == runs[0]
    assert speculate(target, target, [0], **options) != speculate(target, target, [0], **options)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert speculate(target, target, [0], seed=1, **options) == runs[0]
    assert torch.equal(torch.get_rng_state(), before)


def test_case_14_calls_leave_nothing_behind(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    drafter = ModelDrafter(draft, Tree.chain(3))
    a = {"prompt": [1, 2], "max_new_tokens": 30, "seed": 1}
    first = speculate(target, drafter, **a)
    speculate(target, drafter, [5], max_new_tokens=40, seed=2)
    assert speculate(target, drafter, **a) == first
    abandoned = stream(target, drafter, **a)
    next(abandoned)
    abandoned.close()
    assert speculate(target, drafter, **a) == first

    class Breaks(Lengths):
        pass

    with pytest.raises(RuntimeError, match="StopIteration"), torch.inference_mode(False):
        speculate(target, Breaks(draft, [3, 3]), [1, 2], max_new_tokens=60, seed=1)
    assert speculate(target, drafter, **a) == first
    assert not torch.is_inference_mode_enabled()


# --- batches -----------------------------------------------------------------------------------------------


def test_rows_of_a_batch_equal_solo_runs_at_temperature_0(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    prompts = [[1], [2, 3, 4, 5, 6, 7, 8], [9, 10], [0] * 120, [5] * 128, [4, 4, 4]]
    solo = [speculate(target, draft, p, max_new_tokens=50, sampling=GREEDY, draft_len=4, stop=[7]) for p in prompts]
    batch = speculate(target, draft, prompts, max_new_tokens=50, sampling=GREEDY, draft_len=4, stop=[7])
    assert [r.tokens for r in batch] == [r.tokens for r in solo]
    assert [r.finish_reason for r in batch] == [r.finish_reason for r in solo]
    assert [r.stats for r in batch] == [r.stats for r in solo]
    assert len({len(r.steps) for r in batch}) > 2  # rows finish at different times
    ngram = speculate(target, NGramDrafter(4), prompts, max_new_tokens=50, sampling=GREEDY, stop=[7])
    assert [r.tokens for r in ngram] == [r.tokens for r in solo]


def test_rows_under_match_equal_solo_runs_of_their_own_seed(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    prompts, seeds = [[1], [2, 3, 4, 5, 6], [9, 10]], [5, 6, 7]
    batch = speculate(target, draft, prompts, max_new_tokens=50, rule="match", seed=seeds)
    for prompt, seed, row in zip(prompts, seeds, batch, strict=True):
        assert generate(target, prompt, max_new_tokens=50, seed=seed).tokens == row.tokens
    one = speculate(target, draft, prompts, max_new_tokens=50, rule="match", seed=5)
    assert one[0].tokens == batch[0].tokens


def test_finished_rows_cost_nothing(pair11: tuple[GPT, GPT]) -> None:
    target, draft = map(Counting, pair11)
    speculate(target, draft, [[0] * 120, [1], [2]], max_new_tokens=60, seed=0)
    sizes = [B for B, _ in target.passes]
    assert sizes[:3] == [3, 3, 3]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 3


def test_a_batch_of_one_and_an_empty_batch(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    rows = speculate(target, draft, [[1, 2]], max_new_tokens=10, seed=3)
    assert isinstance(rows, list)
    assert rows[0] == speculate(target, draft, [1, 2], max_new_tokens=10, seed=3)
    with pytest.raises(ValueError, match="prompt must have"):
        speculate(target, draft, [], max_new_tokens=10)


def test_tensor_prompts(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    want = speculate(target, draft, [1, 2], max_new_tokens=10, seed=3)
    assert speculate(target, draft, torch.tensor([1, 2]), max_new_tokens=10, seed=3) == want
    assert speculate(target, draft, torch.tensor([[1, 2]]), max_new_tokens=10, seed=3) == [want]


# --- the rest ----------------------------------------------------------------------------------------------


def test_numpy_integers_and_arrays_are_integers(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    want = speculate(target, draft, [1, 2], max_new_tokens=10, seed=3, stop=[7])
    for prompt in (np.array([1, 2]), [np.int64(1), np.int32(2)], (1, 2)):
        got = speculate(target, draft, prompt, max_new_tokens=np.int64(10), seed=np.int64(3), stop=np.array([7]))
        assert got == want
    assert speculate(target, draft, np.array([[1, 2]]), max_new_tokens=10, seed=3, stop=[7]) == [want]
    for prompt in (np.array([1.0]), np.zeros((1, 1, 1), dtype=int), np.array([True])):
        with pytest.raises(TypeError, match="prompt must be integer token ids of rank 1 or 2"):
            speculate(target, draft, prompt, max_new_tokens=3)


def test_an_rng_object_may_serve_again(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    rng = Randomness(3, rows=2)
    speculate(target, draft, [[0] * 126, [1]], max_new_tokens=20, rng=rng)
    assert len(rng.keys) == 2
    again = speculate(target, draft, [[0] * 126, [1]], max_new_tokens=20, rng=rng, rule="match")
    assert [r.tokens for r in again] == [
        r.tokens for r in generate(target, [[0] * 126, [1]], max_new_tokens=20, seed=3)
    ]


def test_decoding_leaves_training_possible(pair11: tuple[GPT, GPT]) -> None:
    tree = Tree.from_parents([-1, 0, 0, 1])
    speculate(*pair11, [1], max_new_tokens=9, tree=tree, seed=0)
    model = random_gpt(1).requires_grad_(True)
    model(torch.tensor([[0, 1, 2, 0]]), None, tree.depths, tree.mask).sum().backward()
    assert model.wpe.weight.grad is not None


def test_stream_yields_the_steps_of_speculate(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11
    result = speculate(target, draft, [1, 2], max_new_tokens=30, seed=3)
    assert list(stream(target, draft, [1, 2], max_new_tokens=30, seed=3)) == result.steps
    with pytest.raises(TypeError, match="stream takes one prompt"):
        stream(target, draft, [[1], [2]], max_new_tokens=3)


def test_an_rng_of_ones_own(pair11: tuple[GPT, GPT]) -> None:
    target, draft = pair11

    class Mine:
        def __init__(self) -> None:
            self.inner = Randomness(3)
            self.flip, self.pick = self.inner.flip, self.inner.pick

    want = speculate(target, draft, [1, 2], max_new_tokens=30, seed=3)
    assert speculate(target, draft, [1, 2], max_new_tokens=30, rng=Mine()) == want
    with pytest.raises(TypeError, match=r"rng must have flip, pick, select for 2 rows, Mine lacks select"):
        speculate(target, draft, [[1], [2]], max_new_tokens=30, rng=Mine())


def test_a_drafter_of_ones_own(pair11: tuple[GPT, GPT]) -> None:
    class Constant:
        kind, max_nodes = "chosen", 3

        def begin(self, prompts, sampling):  # type: ignore[no-untyped-def]
            pending = [p[-1] for p in prompts]

            class Session:
                def propose(self, new, limit, rng):  # type: ignore[no-untyped-def]
                    k = min(2, max(limit))
                    rows = [
                        [n[-1] if n else p, *[4] * min(k, m), *[-1] * (k - min(k, m))]
                        for n, p, m in zip(new, pending, limit, strict=True)
                    ]
                    return Draft(Tree.chain(k), torch.tensor(rows), None, "chosen")

                def commit(self, paths):  # type: ignore[no-untyped-def]
                    pass

            return Session()

    target, _ = pair11
    want = generate(target, [1, 2], max_new_tokens=30, seed=3)
    assert speculate(target, Constant(), [1, 2], max_new_tokens=30, seed=3).tokens == want.tokens


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),  # the longest match
        ([1, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2]),  # the latest hit
        ([7, 3, 8, 2, 3], [8, 2, 3]),  # falls back to one token
        ([4, 4], [4]),  # as much as there is
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_prompt_lookup(text: list[int], want: list[int]) -> None:
    assert lookup(text, 3, 3) == ([want] if want else [])
    assert lookup(text, 3, 0) == []


def test_f5_both_rates_and_tokens_per_step() -> None:
    target, draft = TableModel(rows_of(0.5, 0.3, 0.2), 400), TableModel(rows_of(0.2, 0.5, 0.3), 400)
    for K, per_proposed, per_step in ((1, 0.700, 1.700), (4, 0.443, 2.773), (8, 0.275, 3.199)):
        results = speculate(target, draft, [[0]] * 40, max_new_tokens=380, draft_len=K, seed=K)
        steps = [s for r in results for s in r.steps if s.proposed == K]
        n = len(steps)
        accepted = sum(s.accepted for s in steps)
        assert abs(accepted / sum(s.tested for s in steps) - 0.700) < 0.02
        assert abs(accepted / (n * K) - per_proposed) < 0.02
        assert abs(sum(len(s.tokens) for s in steps) / n - per_step) < 0.06


def test_memory_is_flat_over_200_generations() -> None:
    target, draft = random_gpt(1), random_gpt(2)

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    counts = []
    for i in range(200):
        speculate(target, draft, [0, 1], max_new_tokens=14, draft_len=1 + i % 4, seed=i % 48)
        if i in (50, 199):  # after 48 every shape of draft has been seen, and trees are remembered
            counts.append(live())
    assert counts[1] <= counts[0]


def test_models_run_on_every_device(device: str) -> None:
    target, draft = (m.float().to(device) for m in (random_gpt(1), random_gpt(2)))
    for rule in ("token", "match"):
        result = speculate(target, draft, [0, 1], max_new_tokens=14, seed=1, rule=rule)
        assert len(result.tokens) == 14
    assert generate(target, [0, 1], max_new_tokens=14, seed=1).tokens == result.tokens


@pytest.mark.parametrize(
    "bad", [{"vocab_size": 0}, {"n_layer": 1.5}, {"n_head": 3}, {"block_size": True}, {"n_embd": -4}], ids=str
)
def test_bad_shapes(bad: dict) -> None:
    shape = {"vocab_size": 3, "block_size": 4, "n_layer": 1, "n_head": 2, "n_embd": 4} | bad
    with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
        GPTConfig(**shape)
