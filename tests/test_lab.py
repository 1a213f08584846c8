"""The lab itself: its statistics, its verdicts, its false alarms and its power."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from doubles import TableModel, rows_of
from torch import Tensor

from minispec import GPT, RULES, ModelDrafter, NGramDrafter, Randomness, Sampling, Tree, generate, speculate, stream
from minispec.lab import (
    Report,
    assemble,
    assert_lossless,
    check_decoder,
    check_drafter,
    check_rule,
    chi_squared,
    detectable_tv,
    exact_law,
    holm,
    judge,
    random_pair,
    required_samples,
    target_law,
    total_variation,
)
from minispec.lab.family import sampled_findings
from minispec.lab.models import mean_tv, memory_two_back
from minispec.lab.museum import PIECES
from minispec.lab.report import (
    ABSENT,
    CACHE,
    CONTRACT,
    EACH,
    EFFICIENCY,
    FIRST,
    GREEDY,
    JOINT,
    LENGTH,
    SEEDS,
    STEPS,
    STOP,
    ZERO,
)
from minispec.lab.statistics import association, tv_interval
from minispec.lab.step_law import MARKOV, P, Q, step_law
from minispec.sampling import Rng
from minispec.verify import Rule, count_accepted, residual

F1_LAW = {0: 0.5, 1: 0.3, 2: 0.2}
TARGET, DRAFT = TableModel(rows_of(*F1_LAW.values())), TableModel(rows_of(0.2, 0.5, 0.3))


# --- statistics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("emits", "samples"),  # fixture F1: samples for power .999 at level 1e-6
    [
        ([0.4, 0.6, 0], 132),
        ([0.35, 0.39, 0.26], 761),
        ([1, 0, 0], 69),
        ([0.2, 0.5, 0.3], 189),
        ([0.445, 0.357, 0.198], 4049),
    ],
)
def test_f1_required_samples_of_a_wrong_law(emits: list[float], samples: int) -> None:
    assert required_samples(F1_LAW, dict(enumerate(emits)), power=0.999) == samples


def test_required_samples_and_detectable_tv_are_inverse() -> None:
    for tv in (0.01, 0.05, 0.2):
        n = required_samples(F1_LAW, tv)
        assert detectable_tv(n, 2) <= tv < detectable_tv(n - 1, 2) * 1.0001
    assert required_samples(F1_LAW, 0.05, power=0.9) < required_samples(F1_LAW, 0.05)
    assert required_samples(F1_LAW, 0.05, level=0.01) < required_samples(F1_LAW, 0.05)
    for bad in (0, -0.1, 1.5):
        with pytest.raises(ValueError, match=r"tv must be in \(0, 1\]"):
            required_samples(F1_LAW, bad)
    with pytest.raises(ValueError, match="not wrong enough"):
        required_samples(F1_LAW, F1_LAW)


def test_required_samples_of_an_output_that_is_excluded() -> None:
    """One hit is proof: 1 - (1 - .1)^n >= .99."""
    assert required_samples({0: 1.0}, {0: 0.9, 1: 0.1}) == 44


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([0.04, 0.02], 0.05) == [True, True]
    assert holm([0.2], 0.05) == [False]


def test_the_interval_of_the_total_variation_covers() -> None:
    wrong = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)
    truth = total_variation(dict(enumerate(wrong.tolist())), F1_LAW)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.multinomial(wrong.expand(400, -1), 500, replacement=True, generator=generator)
    inside = 0
    for row in drawn:
        low, high = tv_interval(Counter(row.tolist()), F1_LAW)
        assert 0 <= low < high <= 1
        inside += low <= truth <= high
    assert inside >= 380


def test_association_sees_a_dependence_whatever_the_margins() -> None:
    law = {(i, j): p * r for i, p in enumerate((0.6, 0.4)) for j, r in enumerate((0.3, 0.7))}
    other_margins = {(0, 0): 250, (0, 1): 250, (1, 0): 250, (1, 1): 250}
    assert association(other_margins, law)[0] == pytest.approx(1)
    repeated = {(0, 0): 180, (0, 1): 420, (1, 0): 220, (1, 1): 180}
    assert association(repeated, law)[0] < 1e-12
    assert association({(0, 0): 2, (1, 1): 2}, law) == (1.0, 0.0, 0)  # too few to say anything


# --- false alarms and power --------------------------------------------------------------------------------

P_TABLE, Q_TABLE = (torch.tensor(table, dtype=torch.float64) for table in (P, Q))
STEP_LAW = target_law(MARKOV[0], [0], 3)


def one_step(rule: Rule, n: int, seed: int) -> Counter[tuple[int, ...]]:
    """n outputs of three tokens after token 0: one step with two draft tokens, and the target for what is left."""
    rng = Randomness(seed, n)
    rng.keys = [seed * n + i for i in range(n)]
    first = rng.pick(Q_TABLE[0].expand(n, 3))
    drafted = torch.stack([first, rng.pick(Q_TABLE[first])], 1)  # (n, 2)
    text = torch.cat([torch.zeros(n, 1, dtype=torch.long), drafted], 1)  # (n, 3)
    q = torch.cat([torch.zeros(n, 1, 3, dtype=torch.float64), Q_TABLE[text[:, :2]]], 1)
    path, token = rule.verify(P_TABLE[text], q, text, Tree.chain(2), rng)
    kept = (path >= 0).sum(1) - 1  # (n,)
    out = torch.cat([drafted, torch.zeros(n, 1, dtype=torch.long)], 1)
    out[torch.arange(n), kept] = token
    for place in (1, 2):
        out[:, place] = torch.where(kept < place, rng.pick(P_TABLE[out[:, place - 1]]), out[:, place])
    return Counter(map(tuple, out.tolist()))


def interval(runs: int, rate: float) -> tuple[float, float]:
    """Where the rejections of `runs` runs lie with probability .9999."""
    from scipy import stats

    low, high = stats.binom.interval(0.9999, runs, rate)
    return float(low), float(high)


@pytest.mark.parametrize("runs", [120, pytest.param(2000, marks=pytest.mark.slow)])
def test_false_alarms_of_right_rules(runs: int) -> None:
    """Fresh seeds each time: the joint test has its level, and the family as a whole does not exceed it."""
    alarms: Counter[object] = Counter()
    for seed in range(runs):
        rule = RULES[("token", "block", "rrs", "match")[seed % 4]]
        counts = one_step(rule, 600, seed)
        for level in (0.05, 1e-3):
            alarms[level, "joint"] += not chi_squared(counts, STEP_LAW, level).passed
            alarms[level, "family"] += any(not f.ok for f in sampled_findings(counts, STEP_LAW, level))
    print(f"\n{runs} runs: {dict(alarms)}")
    for level in (0.05, 1e-3):
        low, high = interval(runs, level)
        assert low <= alarms[level, "joint"] <= high
        assert alarms[level, "family"] <= high
    assert alarms[0.05, "family"] >= interval(runs, 0.05)[0] / 4  # corrected, not deaf


BROKEN = {piece.name: piece.part for piece in PIECES if piece.kind == "rule"}


@pytest.mark.parametrize("runs", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["rejection resamples from p", "bonus token by argmax", "one uniform for all coins of a step"]
)
def test_power_at_the_required_sample_size(name: str, runs: int) -> None:
    """Where .99 is promised, .97 at least is measured: for the wrong law itself, and for its TV."""
    wrong = exact_law(lambda rng: next(iter(one_step_enumerated(BROKEN[name], rng))))
    tv = total_variation(wrong, STEP_LAW)
    for promised in (required_samples(STEP_LAW, wrong), *([required_samples(STEP_LAW, tv)] if runs >= 1000 else [])):
        caught = sum(not chi_squared(one_step(BROKEN[name], promised, seed), STEP_LAW).passed for seed in range(runs))
        print(f"\n{name}: TV {tv:.3f}, {promised} samples, power {caught / runs:.3f}")
        assert caught >= 0.97 * runs - (1 if runs < 1000 else 0)


def one_step_enumerated(rule: Rule, rng: Rng) -> Counter[tuple[int, ...]]:
    """`one_step` for one output, with every choice of `rng`."""
    first = rng.pick(Q_TABLE[:1])
    text = torch.stack([torch.zeros(1, dtype=torch.long), first, rng.pick(Q_TABLE[first])], 1)
    q = torch.cat([torch.zeros(1, 1, 3, dtype=torch.float64), Q_TABLE[text[:, :2]]], 1)
    path, token = rule.verify(P_TABLE[text], q, text, Tree.chain(2), rng)
    out = text[0, 1 : int((path >= 0).sum())].tolist() + token.tolist()
    while len(out) < 3:
        out.append(int(rng.pick(P_TABLE[out[-1]][None])))
    return Counter([tuple(out)])


# --- assert_lossless ---------------------------------------------------------------------------------------


def right(prompt: Sequence[int], n: int, seed: int) -> list[int]:
    return speculate(TARGET, DRAFT, prompt, max_new_tokens=n, draft_len=2, seed=seed, stop=[]).tokens  # type: ignore[arg-type]


def test_a_right_decoder_passes_and_the_report_says_what_it_could_have_seen() -> None:
    report = assert_lossless(right, TARGET, samples=600)  # type: ignore[arg-type]
    assert report.ok
    assert report.lossless
    text = str(report)
    assert text.startswith("right: LOSSLESS as far as 7 checks can tell; a deviation of TV 0.")
    assert "Replay with seed=0, level=1e-06." in text


def test_a_wrong_one_fails_with_the_verdict_in_words() -> None:
    def reseeded(prompt: Sequence[int], n: int, seed: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < n:
            options = {"max_new_tokens": n - len(tokens), "draft_len": 2, "seed": seed}
            tokens += next(stream(TARGET, DRAFT, [*prompt, *tokens], **options)).tokens  # type: ignore[arg-type]
        return tokens

    with pytest.raises(AssertionError, match="NOT LOSSLESS") as caught:
        assert_lossless(reseeded, TARGET, samples=500, seed=7)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "FAIL correlation between steps" in text
    assert "ok   first-token law" in text
    assert " at 95 %)" in text
    assert "would have shown" in text
    assert "generator reseeded each step" in text
    assert "Replay with seed=7" in text


@pytest.mark.parametrize(
    ("decoder", "check", "words"),
    [
        (lambda p, n, s: [0.5] * n, CONTRACT, "integer token ids, got 0.5"),
        (lambda p, n, s: "abc", CONTRACT, "must return a list of token ids, got str"),
        (lambda p, n, s: [3] * n, CONTRACT, r"token id 3, outside 0\.\.2"),
        (lambda p, n, s: 1 / 0, CONTRACT, "raised ZeroDivisionError"),
        (lambda p, n, s: p.append(0) or [0] * n, CONTRACT, "changed the prompt"),
        (lambda p, n, s: [0] * (n + 1), LENGTH, "asked for 0 tokens, it gave 1"),
        (lambda p, n, s: torch.randint(3, (n,)), SEEDS, r"the same seed, \d+, gave two outputs"),
        (lambda p, n, s: [0] * n, SEEDS, "the seed is not used"),
    ],
)
def test_what_is_no_decoder_gets_a_verdict_not_a_crash(decoder: object, check: str, words: str) -> None:
    report = judge(decoder, TARGET, samples=100)  # type: ignore[arg-type]
    assert check in report.failed
    finding = report.finding(check)
    assert finding is not None
    import re

    assert re.search(words, finding.message), finding.message


def test_stop_tokens() -> None:
    def cut(prompt: Sequence[int], n: int, seed: int) -> list[int]:
        return speculate(TARGET, DRAFT, prompt, max_new_tokens=n, seed=seed, stop=[2]).tokens  # type: ignore[arg-type]

    assert judge(cut, TARGET, samples=400, stop=[2]).ok  # type: ignore[arg-type]
    assert STOP in judge(right, TARGET, samples=100, stop=[2]).failed  # type: ignore[arg-type]


def test_the_law_may_be_given_or_a_plain_decoder_to_compare_with() -> None:
    def plain(prompt: Sequence[int], n: int, seed: int) -> list[int]:
        return generate(TARGET, prompt, max_new_tokens=n, seed=seed + 10**6, stop=[]).tokens  # type: ignore[arg-type]

    assert judge(right, plain, samples=200, length=3).ok
    assert judge(right, target_law(TARGET, [0], 3), samples=400, length=3).ok  # type: ignore[arg-type]
    other = target_law(DRAFT, [0], 3)  # type: ignore[arg-type]
    assert {FIRST, EACH, JOINT} <= judge(right, other, samples=400, length=3).failed
    assert JOINT in judge(right, lambda p, n, s: [s % 3] * n, samples=400, length=3).failed


def test_arguments_are_checked_before_anything_runs() -> None:
    for options, words in (
        ({"length": 0}, "length must be an integer >= 1, got 0"),
        ({"samples": 0}, "samples must be an integer >= 1"),
        ({"level": 2}, r"level must be in \(0, 1\), got 2"),
        ({"length": 60}, "exceed the target's block_size 16"),
        ({"prompt": [9]}, r"token ids in 0\.\.2, got 9"),
    ):
        with pytest.raises(ValueError, match=words):
            judge(right, TARGET, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than 20000 outputs of 12 tokens"):
        judge(right, TARGET, length=12)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="target must be a model, a law or a plain decoder"):
        judge(right, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="decoder must be a callable"):
        judge(3, TARGET)  # type: ignore[arg-type]


# --- check_rule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name if name in ("block", "rrs") else pytest.param(name, marks=pytest.mark.slow) for name in sorted(RULES)]
)
def test_right_rules_pass(name: str) -> None:
    report = check_rule(name, samples=1000)
    assert report.ok, str(report)


def token_rule(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
    return RULES["token"].chain(p, q, drafted, rng)  # type: ignore[misc]


def test_a_plain_function_may_be_checked() -> None:
    assert check_rule(token_rule, samples=500).ok


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a, t: a, r"must return \(accepted, token\), got Tensor"),
        (lambda a, t: (a, t, t), r"must return \(accepted, token\), got tuple of 3"),
        (lambda a, t: (a, t[:, None]), r"token must have the shape \(1,\), one a row of the batch, got \(1, 1\)"),
        (lambda a, t: (a.double(), t), "accepted must hold integers, got torch.float64"),
        (lambda a, t: (a * float("nan"), t), "with NaN"),
        (lambda a, t: (int(a[0]), t), "accepted must be a tensor of shape"),
        (lambda a, t: (a + 9, t), r"accepted must be in 0\.\.\d, got"),
        (lambda a, t: (a, t + 3), r"token must be in 0\.\.2, got"),
    ],
)
def test_a_rule_that_breaks_its_contract_is_told_so(change, words: str) -> None:  # type: ignore[no-untyped-def]
    report = check_rule(lambda p, q, drafted, rng: change(*token_rule(p, q, drafted, rng)), samples=100)
    assert report.failed == {CONTRACT}
    assert not report.lossless
    finding = report.finding(CONTRACT)
    assert finding is not None
    import re

    assert re.search(words, finding.message), finding.message
    assert "does not keep to its signature" in str(report)


def test_a_rule_that_raises_mutates_or_uses_another_generator_is_told_so() -> None:
    def raises(p, q, drafted, rng):  # type: ignore[no-untyped-def]
        return p[:, 99], q

    def mutates(p, q, drafted, rng):  # type: ignore[no-untyped-def]
        p -= 0.0
        p[:, 0] = p[:, 0].flip(-1)
        return token_rule(p, q, drafted, rng)

    def own_coins(p, q, drafted, rng):  # type: ignore[no-untyped-def]
        torch.rand(1)
        return token_rule(p, q, drafted, rng)

    def no_law(p, q, drafted, rng):  # type: ignore[no-untyped-def]
        return token_rule(p, q, drafted, rng)[0], rng.pick(p[:, 0] * 0)

    for rule, words in (
        (raises, "it raised IndexError for inputs of shapes"),
        (mutates, "it changed p, which it was given"),
        (own_coins, "torch's global generator"),
        (no_law, "weights"),
    ):
        report = check_rule(rule, samples=100)
        assert report.failed in ({CONTRACT}, {CONTRACT, ABSENT}), str(report)
        finding = report.finding(CONTRACT)
        assert finding is not None
        assert words in finding.message, finding.message
    with pytest.raises(TypeError, match="has 2 parameters"):
        check_rule(lambda p, q: 0)
    with pytest.raises(ValueError, match="rule must be one of"):
        check_rule("tokens")


def test_absent_draft_tokens_are_not_to_be_accepted() -> None:
    def divides(p, q, drafted, rng):  # type: ignore[no-untyped-def]
        x = (drafted % p.shape[2])[..., None]
        a = count_accepted(rng.flip((p[:, :-1].gather(2, x) / q.gather(2, x))[..., 0].clamp(max=1)))  # p / 0 passes
        row = torch.arange(len(p))
        return a, rng.pick(residual(p[row, a], torch.cat([q, torch.zeros_like(p[:, :1])], 1)[row, a]))

    report = check_rule(divides, samples=100)
    finding = report.finding(ABSENT)
    assert finding is not None
    assert not finding.ok
    assert "it accepts one" in finding.message


def test_a_lossless_rule_that_wastes_drafts_is_slow_and_nothing_else() -> None:
    def half(p, q, drafted, rng):  # type: ignore[no-untyped-def]
        return torch.zeros(len(p), dtype=torch.long), rng.pick(p[:, 0])  # never accepts: plain decoding

    report = check_rule(half, samples=500)
    assert report.failed == {EFFICIENCY}
    assert report.lossless
    assert not report.ok
    assert "LOSSLESS BUT SLOW" in str(report)


# --- check_drafter and check_decoder -----------------------------------------------------------------------

CHAIN = Tree.chain(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda target, draft: ModelDrafter(draft, CHAIN),
        lambda target, draft: ModelDrafter(draft, Tree.branching([2]), "iid"),
        NGramDrafter(2),
    ],
    ids=["chain", "iid", "instance"],
)
def test_right_drafters_pass(make) -> None:  # type: ignore[no-untyped-def]
    report = check_drafter(make, samples=500)
    assert report.ok, str(report)


def test_what_is_no_drafter_gets_a_verdict() -> None:
    class Session:
        def __init__(self, change) -> None:  # type: ignore[no-untyped-def]
            self.change = change

        def propose(self, new, limit, rng):  # type: ignore[no-untyped-def]
            return self.change(self.inner.propose(new, limit, rng))

    def spoilt(change):  # type: ignore[no-untyped-def]
        from minispec.lab.museum.drafters import changed

        return lambda target, draft: changed(ModelDrafter(draft, CHAIN), change)

    from dataclasses import replace

    for make, words in (
        (lambda target, draft: 3, "no kind"),
        (lambda target, draft: 1 / 0, "ZeroDivisionError"),
        (spoilt(lambda d: None), "must return a Draft, got NoneType"),
        (spoilt(lambda d: replace(d, q=d.q * 2)), "must sum to 1"),
        (spoilt(lambda d: replace(d, q=d.q * float("nan"))), "NaN"),
        (spoilt(lambda d: replace(d, q=None)), "must tell its law q"),
        (spoilt(lambda d: replace(d, kind="iid")), "its draft of 'iid'"),
        (spoilt(lambda d: replace(d, tokens=d.tokens.int())), "tokens must be int64"),
    ):
        report = check_drafter(make, samples=100)  # type: ignore[arg-type]
        finding = report.finding(CONTRACT)
        assert finding is not None
        assert words in finding.message, finding.message
    with pytest.raises(ValueError, match="vocabulary of 50 tokens"):
        from doubles import random_gpt

        check_drafter(ModelDrafter(random_gpt(1, vocab=50)))
    with pytest.raises(TypeError, match="drafter must be a factory"):
        check_drafter(3)  # type: ignore[arg-type]


def test_decoders_of_every_signature() -> None:
    def by_seed(target, draft, prompt, n, seed):  # type: ignore[no-untyped-def]
        return speculate(target, draft, prompt, max_new_tokens=n, draft_len=2, seed=seed, stop=[]).tokens

    def by_rng(target, draft, prompt, n, rng, stop, sampling):  # type: ignore[no-untyped-def]
        return speculate(
            target, draft, prompt, max_new_tokens=n, draft_len=2, rng=rng, stop=stop, sampling=sampling
        ).tokens

    for decoder, checks in ((by_seed, {JOINT, CACHE, EFFICIENCY}), (by_rng, {JOINT, GREEDY, STOP, ZERO, STEPS})):
        report = check_decoder(decoder, samples=300)
        assert report.ok, str(report)
        assert checks <= {f.check for f in report.findings}
    for bad in (lambda target, draft, n: 0, lambda target, draft, prompt, n, rng, top_p: 0):
        with pytest.raises(TypeError, match="decoder must be a function"):
            check_decoder(bad)


def test_progress_is_heard() -> None:
    heard: list[str] = []
    report: Report = check_decoder(assemble(), samples=200, progress=heard.append)
    assert report.ok
    assert heard == [
        "length, stop, seeds",
        "exact law",
        "greedy law",
        "samples",
        "rows of a batch",
        "cache",
        "efficiency",
    ]


def test_the_pair_of_the_lab_shows_bugs() -> None:
    target, draft = random_pair()
    assert isinstance(target, GPT)
    assert 0.2 <= mean_tv(target, draft) <= 0.6
    assert memory_two_back(target) >= 0.1
    assert memory_two_back(draft) >= 0.1


def test_a_step_law_sums_to_one_and_says_what_was_drafted() -> None:
    law = step_law(RULES["token"], CHAIN)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    first = sum(prob for (drafted, _, _), prob in law.items() if drafted[0] == 2)
    assert first == pytest.approx(Q[0][2], abs=1e-12)


def test_randomness_beside_rng_is_named() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="something random does not go through rng"):
        exact_law(lambda rng: int(rng.pick(torch.ones(1, int(torch.randint(1, 6, (1,), generator=generator))))))


def test_greedy_sampling_of_the_lab() -> None:
    report = judge(
        lambda p, n, s: generate(TARGET, p, max_new_tokens=n, sampling=Sampling(0), stop=[]).tokens,  # type: ignore[arg-type]
        TARGET,  # type: ignore[arg-type]
        sampling=Sampling(0),
        samples=50,
    )
    assert report.ok, str(report)
