"""Layer 2: the real generator, through the public interface, on joint laws; and wrong rules that must fail."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from doubles import TableModel, rows_of
from wrong import WRONG_RULES, LyingDrafter

from minispec import GPT, ModelDrafter, NGramDrafter, Pair, Randomness, Sampling, Tree, generate, speculate
from minispec.lab import chi_squared, target_law, two_sample
from minispec.lab.statistics import merge

LENGTH = 4
BATCH = 5000
PROMPT = [0, 1, 2, 0, 1]


def sample(n: int, seed: int, run, prompt: list[int] = PROMPT, batch: int = BATCH) -> Counter:  # type: ignore[no-untyped-def, type-arg]
    """Counts of n sequences; run(prompts, seed) decodes a batch."""
    counts: Counter = Counter()  # type: ignore[type-arg]
    for i in range(0, n, batch):
        counts.update(tuple(r.tokens) for r in run([prompt] * min(batch, n - i), seed + i))
    return counts


def decoders(target, draft):  # type: ignore[no-untyped-def]
    shared = {"max_new_tokens": LENGTH}
    return {
        "generate": lambda p, s: generate(target, p, seed=s, **shared),
        "token": lambda p, s: speculate(target, draft, p, seed=s, draft_len=2, rule="token", **shared),
        "match": lambda p, s: speculate(target, draft, p, seed=s, draft_len=2, rule="match", **shared),
        "ngram": lambda p, s: speculate(target, NGramDrafter(2), p, seed=s, **shared),
    }


@pytest.mark.parametrize("n", [50_000, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["generate", "ngram"])  # the rules on model drafts: test_trees
def test_joint_law_of_four_tokens(two: tuple[GPT, GPT], name: str, n: int) -> None:
    target, draft = (GPT(m.config) for m in two)
    target.load_state_dict(two[0].state_dict()), draft.load_state_dict(two[1].state_dict())
    verdict = chi_squared(sample(n, 1, decoders(target, draft)[name]), target_law(two[0], PROMPT, LENGTH))
    assert verdict.passed, verdict
    assert verdict.detectable_tv < 0.03
    assert verdict.samples == n


@pytest.mark.parametrize("n", [50_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_two_samples_plain_and_speculative(two: tuple[GPT, GPT], n: int) -> None:
    target, draft = (GPT(m.config) for m in two)
    target.load_state_dict(two[0].state_dict()), draft.load_state_dict(two[1].state_dict())
    runs = decoders(target, draft)
    verdict = two_sample(sample(n // 2, 1, runs["generate"]), sample(n // 2, 10**6, runs["token"]))
    assert verdict.passed, verdict


def test_case_2_filters(two: tuple[GPT, GPT]) -> None:
    """T, top-k and top-p on both models; a token outside the target's nucleus fails outright."""
    target, draft = two
    for T in (0.5, 1.0, 2.0):
        for top_k in (None, 2):
            for top_p in (None, 0.7):
                sampling = Sampling(T, top_k, top_p)
                law = target_law(target, PROMPT, 3, sampling)
                counts = sample(
                    4000,
                    7,
                    lambda p, s, sampling=sampling: speculate(
                        target, draft, p, seed=s, draft_len=2, max_new_tokens=3, sampling=sampling, rule="token"
                    ),
                )
                verdict = chi_squared(counts, law)
                assert verdict.passed, (sampling, verdict)


F1_LAW = {0: 0.5, 1: 0.3, 2: 0.2}


def f1_joint() -> dict[tuple[int, ...], float]:
    table = TableModel(rows_of(*F1_LAW.values()))
    return target_law(table, [0], LENGTH)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*WRONG_RULES, "draft takes argmax", "draft drawn at T = .5", "right"])
def test_f1_wrong_rules_are_rejected_by_the_same_test(name: str) -> None:
    target, small = TableModel(rows_of(0.5, 0.3, 0.2)), TableModel(rows_of(0.2, 0.5, 0.3))
    draft, rule = ModelDrafter(small, Tree.chain(2)), WRONG_RULES.get(name, "token")  # type: ignore[arg-type]
    if name == "draft takes argmax":
        draft = LyingDrafter(draft, Sampling(0))  # type: ignore[assignment]
    if name == "draft drawn at T = .5":
        draft = LyingDrafter(draft, Sampling(0.5))  # type: ignore[assignment]
    counts = sample(
        10_000, 3, lambda p, s: speculate(target, draft, p, seed=s, max_new_tokens=LENGTH, rule=rule), prompt=[0]
    )
    verdict = chi_squared(counts, f1_joint())
    assert verdict.passed == (name == "right"), verdict


def test_successive_tokens_are_drawn_independently() -> None:
    """Noise that is used twice leaves each token's law intact and shows in the joint law of 6 tokens only."""
    target, draft = TableModel(rows_of(0.6, 0.4)), TableModel(rows_of(0.3, 0.7))
    law = target_law(target, [0], 6)  # type: ignore[arg-type]
    for rule in ("token", "match"):
        counts = sample(
            15_000,
            5,
            lambda p, s, rule=rule: speculate(target, draft, p, seed=s, max_new_tokens=6, draft_len=2, rule=rule),
            prompt=[0],
        )
        assert chi_squared(counts, law).passed


def test_pick_draws_the_rarest_tokens_too() -> None:
    """A million tokens of 1e-8 each: their noise must be finer than a float32 uniform, whose steps are 6e-8."""
    weights = torch.full((1, 1_000_001), 1e-8)
    weights[0, 0] = 1.0
    rng = Randomness(2)
    hits = sum(int(rng.pick(weights)[0]) != 0 for _ in range(300))
    assert 1 <= hits <= 12  # 300 x .0099 = 3


def test_chi_squared_fails_what_is_wrong_and_says_how_much_it_saw() -> None:
    law = {0: 0.5, 1: 0.3, 2: 0.2, 3: 0.0}
    right, wrong = {0: 5000, 1: 3000, 2: 2000}, {0: 5500, 1: 2700, 2: 1800}
    verdict = chi_squared(right, law)
    assert (verdict.passed, verdict.p_value, verdict.df) == (True, 1.0, 2)
    verdict = chi_squared(wrong, law)
    assert not verdict.passed
    assert verdict.tv == pytest.approx(0.05)
    assert verdict.statistic == pytest.approx(500**2 / 5000 + 300**2 / 3000 + 200**2 / 2000)
    impossible = chi_squared({**right, 3: 1}, law)
    assert not impossible.passed
    assert impossible.impossible == (3,)
    with pytest.raises(ValueError, match="the sample is empty"):
        chi_squared({}, law)
    with pytest.raises(ValueError, match=r"must sum to 1"):
        chi_squared({0: 3}, {0: 0.5})


def test_small_cells_are_merged_and_nothing_is_lost() -> None:
    expected, observed = merge([0.5, 1, 2, 3, 6, 20], [1, 0, 2, 4, 5, 20], 5)
    assert expected.tolist() == [6.5, 6, 20]
    assert observed.tolist() == [7, 5, 20]
    expected, _ = merge([1, 1, 1], [1, 1, 1], 5)
    assert expected.tolist() == [3]


@pytest.mark.parametrize(("df", "want"), [(15, 81), (63, 122)])
def test_noncentrality_of_power_99_at_level_1e_6(df: int, want: float) -> None:
    from minispec.lab.statistics import detectable_tv, noncentrality

    assert noncentrality(df, 1e-6, 0.99) == pytest.approx(want, abs=1)
    assert detectable_tv(304_000, 63) == pytest.approx(0.01, rel=0.01)


LAWS = {"skewed": [(i + 1) ** 2 for i in range(27)], "flat": [1] * 150, "tailed": [80] * 10 + [1] * 200}


@pytest.mark.parametrize("shape", LAWS)
@pytest.mark.parametrize("arms", [1, 2])
def test_the_test_has_its_size(shape: str, arms: int) -> None:
    """1,000 samples of the law itself: rejections at level .05 lie in their binomial interval, cells merged or not."""
    law = torch.tensor(LAWS[shape], dtype=torch.float64)
    law /= law.sum()
    generator, table, rejected = torch.Generator().manual_seed(0), dict(enumerate(law.tolist())), 0
    drawn = torch.multinomial(law.expand(1000 * arms, -1), 300, replacement=True, generator=generator)
    for i in range(1000):
        counts = [Counter(drawn[arms * i + k].tolist()) for k in range(arms)]
        verdict = chi_squared(*counts, table, level=0.05) if arms == 1 else two_sample(*counts, level=0.05)
        rejected += not verdict.passed
    assert 22 <= rejected <= 78  # 50 +- 4.1 standard deviations


@pytest.mark.slow
def test_two_samples_of_the_shipped_pair(shipped: Pair) -> None:
    """float32, top-p, a real vocabulary: the first three tokens after a prompt, rare outputs pooled."""
    prompt = shipped.tokenizer.encode("Once upon a time there was a")
    sampling = Sampling(0.9, top_p=0.6)
    options = {"max_new_tokens": 3, "sampling": sampling}
    plain = sample(8000, 1, lambda p, s: generate(shipped.target, p, seed=s, **options), prompt, batch=500)
    for rule in ("token", "match"):
        fast = sample(
            8000,
            10**6,
            lambda p, s, rule=rule: speculate(
                shipped.target, shipped.draft, p, seed=s, draft_len=2, rule=rule, **options
            ),
            prompt,
            batch=500,
        )
        assert two_sample(plain, fast).passed
