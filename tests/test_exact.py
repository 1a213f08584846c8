"""Layer 0: the exact law of the real decoder (real GPT, cache, rollback), every random choice enumerated."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from doubles import TableModel, rows_of

from minispec import GPT, ModelDrafter, NGramDrafter, Randomness, Sampling, Tree, speculate, stream
from minispec.lab import exact_law, target_law, total_variation
from minispec.sampling import Rng

FILTERS = {
    "T=1": Sampling(),
    "T=.7 top-k 2": Sampling(0.7, top_k=2),
    "T=0": Sampling(0),
    "top-p .8": Sampling(top_p=0.8),
}
PROMPT = [0, 1, 2, 0, 1]  # so that a 3-gram, a 2-gram and a 1-gram are found in it


def law_of(target: GPT, draft: object, length: int, **options: object) -> tuple[dict, list]:
    results = []

    def run(rng: Rng) -> tuple[int, ...]:
        results.append(speculate(target, draft, PROMPT, max_new_tokens=length, rng=rng, **options))
        return tuple(results[-1].tokens)

    return exact_law(run), results


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("way", ["token", "match", "ngram"])
def test_the_law_is_the_targets(two: tuple[GPT, GPT], way: str, K: int, sampling: Sampling) -> None:
    target, draft = two
    if way == "ngram":
        law, results = law_of(target, NGramDrafter(K), K + 1, sampling=sampling)
    else:
        law, results = law_of(target, draft, K + 1, sampling=sampling, draft_len=K, rule=way)
    assert total_variation(law, target_law(target, PROMPT, K + 1, sampling)) < 1e-10
    if sampling == Sampling():  # the law says nothing of a rule that never does one of both
        assert any(r.stats.accepted for r in results)
        assert any(r.stats.tested > r.stats.accepted for r in results)


@pytest.mark.parametrize("prompt_length", [1, 2, 3])
def test_short_prompts(two: tuple[GPT, GPT], prompt_length: int) -> None:
    target, draft = two

    def run(rng: Rng) -> tuple[int, ...]:
        return tuple(speculate(target, draft, PROMPT[:prompt_length], max_new_tokens=3, draft_len=2, rng=rng).tokens)

    assert total_variation(exact_law(run), target_law(target, PROMPT[:prompt_length], 3)) < 1e-10


def test_a_stop_token_cuts_the_law_and_nothing_else(two: tuple[GPT, GPT]) -> None:
    target, draft = two
    law, _ = law_of(target, draft, 3, draft_len=2, stop=[1])
    want: dict[tuple[int, ...], float] = {}
    for xs, prob in target_law(target, PROMPT, 3).items():
        cut = xs[: xs.index(1) + 1] if 1 in xs else xs
        want[cut] = want.get(cut, 0.0) + prob
    assert total_variation(law, want) < 1e-10


def test_the_end_of_the_context_cuts_the_draft_and_not_the_law(two: tuple[GPT, GPT]) -> None:
    target, draft = two
    prompt = [0, 1, 2] * 4 + [0]  # 13 of 16 positions

    def run(rng: Rng) -> tuple[int, ...]:
        return tuple(speculate(target, draft, prompt, max_new_tokens=9, draft_len=3, rng=rng).tokens)

    assert total_variation(exact_law(run), target_law(target, prompt, 3)) < 1e-10


@pytest.mark.parametrize("draft_len", [1, 2, 3])
def test_measured_tokens_per_step_equal_the_enumerated_expectation(draft_len: int) -> None:
    """Fixture F5 in small: acceptance .7 at every position gives (1 - .7^(K+1)) / .3 tokens a step."""
    target, draft = TableModel(rows_of(0.5, 0.3, 0.2)), TableModel(rows_of(0.2, 0.5, 0.3))

    def run(rng: Rng) -> int:
        return len(next(stream(target, draft, [0], max_new_tokens=draft_len + 1, draft_len=draft_len, rng=rng)).tokens)

    law = exact_law(run)
    expected = sum(n * prob for n, prob in law.items())
    assert expected == pytest.approx((1 - 0.7 ** (draft_len + 1)) / 0.3, abs=1e-12)


def broken(model: GPT, spoil: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """A target whose passes over more than one token are spoilt, as by a wrong mask or position."""

    class Broken:
        config, device, dtype = model.config, model.device, model.dtype

        def __call__(self, tokens, cache=None, positions=None, mask=None):  # type: ignore[no-untyped-def]
            if tokens.shape[1] == 3:
                positions = spoil(torch.tensor(cache.lengths)[:, None] + torch.arange(3))
            return model(tokens, cache, positions, mask)

    return Broken()


def test_enumeration_sees_a_wrong_position(two: tuple[GPT, GPT]) -> None:
    target, draft = two
    law, _ = law_of(broken(target, lambda positions: positions.clamp(max=5)), draft, 3, draft_len=2)  # type: ignore[arg-type]
    assert total_variation(law, target_law(target, PROMPT, 3)) > 1e-3


def test_enumeration_sees_a_stale_cache_row(two: tuple[GPT, GPT], monkeypatch: pytest.MonkeyPatch) -> None:
    from minispec import KVCache

    target, draft = two
    keep = KVCache.keep

    def stale(self: KVCache, paths, nodes: int) -> None:  # type: ignore[no-untyped-def]
        length = self.lengths[0]
        keep(self, paths, nodes)
        if len(paths[0]) == 1 and nodes == 3:  # after a rejection one row too many is left
            self.lengths = [min(self.lengths[0] + 1, length)]

    monkeypatch.setattr(KVCache, "keep", stale)
    law, _ = law_of(target, draft, 3, draft_len=2)
    assert total_variation(law, target_law(target, PROMPT, 3)) > 1e-2


def test_max_leaves_is_a_limit() -> None:
    with pytest.raises(ValueError, match="more than 5 leaves"):
        exact_law(lambda rng: int(rng.pick(torch.ones(1, 9))), max_leaves=5)


def test_enumerator_refuses_what_it_cannot_follow() -> None:
    with pytest.raises(ValueError, match="follows one row"):
        exact_law(lambda rng: rng.pick(torch.ones(2, 3)).tolist()[0])
    for weights in ([0.0, 0.0], [math.nan, math.nan], [math.nan, 1.0], [0.5, math.inf]):
        with pytest.raises(ValueError, match="all weights are 0, or one of them is no number"):
            exact_law(lambda rng, weights=weights: rng.pick(torch.tensor([weights])).tolist()[0])


def test_exact_law_leaves_out_the_impossible_and_sums_to_one() -> None:
    law = exact_law(lambda rng: (int(rng.pick(torch.tensor([[0.0, 1.0, 3.0]]))), bool(rng.flip(torch.tensor(0.25)))))
    assert law == pytest.approx({(1, True): 1 / 16, (1, False): 3 / 16, (2, True): 3 / 16, (2, False): 9 / 16})


def test_drafter_and_tree_may_be_given_by_hand(two: tuple[GPT, GPT]) -> None:
    target, draft = two
    a = speculate(target, draft, PROMPT, max_new_tokens=9, tree=Tree.chain(3), seed=4)
    b = speculate(target, ModelDrafter(draft, Tree.chain(3)), PROMPT, max_new_tokens=9, rng=Randomness(4))
    assert a == b
