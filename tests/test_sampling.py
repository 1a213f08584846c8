"""Logits to laws (cases 1-7), and the two random choices."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from minispec import Randomness, Sampling, noise
from minispec.sampling import Shifted

pytestmark = pytest.mark.core

WITH_LAW = torch.tensor


def logits_of(*law: float) -> torch.Tensor:
    return torch.tensor(law, dtype=torch.float64).log()


def close(got: torch.Tensor, want: list[float], tol: float = 1e-12) -> None:
    assert torch.allclose(got, torch.tensor(want, dtype=got.dtype), atol=tol, rtol=0), got.tolist()


def test_plain_is_softmax() -> None:
    logits = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Sampling().probs(logits), logits.softmax(-1))


@pytest.mark.parametrize(
    ("law", "top_p", "kept"),
    [
        ([0.5, 0.41, 0.09], 0.9, [0, 1]),
        ([0.1, 0.2, 0.3, 0.4], 0.6, [2, 3]),
        ([0.1, 0.2, 0.3, 0.4], 1e-8, [3]),
        ([0.25, 0.25, 0.25, 0.25], 0.5, [0, 1]),
    ],
)
def test_case_5_top_p_keeps_the_token_that_crosses(law: list[float], top_p: float, kept: list[int]) -> None:
    got = Sampling(top_p=top_p).probs(logits_of(*law))
    total = sum(law[i] for i in kept)
    close(got, [x / total if i in kept else 0.0 for i, x in enumerate(law)])


def test_case_5_top_p_of_one_keeps_everything_bit_for_bit() -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Sampling(top_p=1.0).probs(logits), Sampling().probs(logits))


def test_case_6_top_k_keeps_exactly_k_ties_to_the_lowest_index() -> None:
    close(Sampling(top_k=2).probs(torch.tensor([1.0, 1.0, 1.0, 0.0])), [0.5, 0.5, 0, 0], 1e-7)
    close(Sampling(top_k=1).probs(torch.tensor([0.0, 2.0, 2.0])), [0, 1, 0])
    assert torch.equal(Sampling(top_k=99).probs(torch.tensor([0.0, 2.0])), Sampling().probs(torch.tensor([0.0, 2.0])))


def test_case_6_top_k_comes_before_top_p_and_is_renormalised() -> None:
    # top-k 2 leaves [.4, .3] -> [4/7, 3/7]; of these top-p .57 keeps the first alone (of the whole law it would keep two)
    close(Sampling(top_k=2, top_p=0.57).probs(logits_of(0.4, 0.3, 0.2, 0.1)), [1, 0, 0, 0])
    close(Sampling(top_p=0.57).probs(logits_of(0.4, 0.3, 0.2, 0.1)), [4 / 7, 3 / 7, 0, 0])


def test_case_6_temperature_comes_before_top_p() -> None:
    # at T = .5 [.4, .3, .2, .1] becomes [16, 9, 4, 1] / 30
    close(Sampling(0.5, top_p=0.8).probs(logits_of(0.4, 0.3, 0.2, 0.1)), [16 / 25, 9 / 25, 0, 0])


def test_case_6_one_token_vocabulary() -> None:
    for sampling in (Sampling(), Sampling(0), Sampling(0.3, 1, 0.5)):
        assert sampling.probs(torch.tensor([[-3.0]])).tolist() == [[1.0]]


def test_case_7_extreme_temperatures() -> None:
    logits = torch.tensor([0.1, 0.3, 0.2999])
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(Sampling(1e-40).probs(logits.to(dtype)), Sampling(0).probs(logits.to(dtype)))
        for hot in (1e6, 1e39, 1e300):
            close(Sampling(hot).probs(logits.to(dtype)), [1 / 3] * 3, 1e-4)


def test_greedy_ties_go_to_the_lowest_index() -> None:
    assert Sampling(0).probs(torch.tensor([1.0, 5.0, 5.0])).tolist() == [0, 1, 0]


def test_the_largest_float_is_a_temperature() -> None:
    close(Sampling(sys.float_info.max).probs(torch.tensor([1.0, 2.0])), [0.5, 0.5], 1e-7)


@pytest.mark.parametrize("temperature", [-1, math.nan, math.inf, "0.7", True, None, 10**400])
def test_case_7_bad_temperature(temperature: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"temperature must be a finite number >= 0, got"):
        Sampling(temperature)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_k", [0, -1, 1.5, True, "3"])
def test_case_6_bad_top_k(top_k: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"top_k must be an integer >= 1 or None, got"):
        Sampling(top_k=top_k)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_p", [0, -0.1, 1.1, math.nan, "0.5", True])
def test_bad_top_p(top_p: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"top_p must be a number in \(0, 1\] or None, got"):
        Sampling(top_p=top_p)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7), Sampling(0), Sampling(top_k=2), Sampling(top_p=0.9)])
def test_case_4_masked_logits(sampling: Sampling) -> None:
    law = sampling.probs(torch.tensor([[0.3, -math.inf, 0.2], [-math.inf, 1.0, -math.inf]]))
    assert law[0, 1] == 0
    assert law[1].tolist() == [0, 1, 0]


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5), Sampling(0), Sampling(top_k=1), Sampling(top_p=0.5)])
def test_case_4_bad_logits_name_the_model_and_the_place(bad: list[float], sampling: Sampling) -> None:
    logits = torch.zeros(2, 3, 2)
    logits[1, 2] = torch.tensor(bad)
    with pytest.raises(ValueError, match=r"draft logits: a NaN, a \+inf or nothing but -inf .*\(1, 2\)"):
        sampling.probs(logits, "draft")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_give_float32_laws(dtype: torch.dtype) -> None:
    law = Sampling(0.5).probs(torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(dtype))
    assert law.dtype == torch.float32
    assert torch.allclose(law.sum(-1), torch.ones(2), atol=1e-6)


def test_flip_is_certain_at_0_and_1_and_fair_between() -> None:
    rng = Randomness(3)
    assert not rng.flip(torch.zeros(10_000)).any()
    assert rng.flip(torch.ones(10_000)).all()
    assert abs(float(rng.flip(torch.full((40_000,), 0.3)).float().mean()) - 0.3) < 6 * 0.0023


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keyed", [False, True])
def test_pick_draws_in_proportion_and_never_a_zero(dtype: torch.dtype, keyed: bool) -> None:
    weights = torch.tensor([0.0, 2.0, 1.0, 0.0, 1.0], dtype=dtype)
    rng, counts = Randomness(5), torch.zeros(5)
    if keyed:
        drawn = torch.stack([rng.pick(weights[None], at=[i])[0] for i in range(4000)])
    else:
        drawn = rng.pick(weights.expand(40_000, 5))
    counts = torch.bincount(drawn, minlength=5) / len(drawn)
    assert counts[[0, 3]].sum() == 0
    assert torch.allclose(counts[[1, 2, 4]], torch.tensor([0.5, 0.25, 0.25]), atol=6 * 0.5 / len(drawn) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_host_programs_defaults_do_not_matter(dtype: torch.dtype) -> None:
    want = Randomness(1).flip(torch.full((50,), 0.5)), Randomness(1).pick(torch.ones(2, 9))
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        got = (
            Randomness(1).flip(torch.full((50,), 0.5, dtype=torch.float32)),
            Randomness(1).pick(torch.ones(2, 9, dtype=torch.float32)),
        )
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    with torch.device("meta"):  # a default device
        weights = torch.ones(1, 3, device="cpu")
        assert Randomness(1).pick(weights).device.type == "cpu"
        assert Randomness(1).flip(weights).all()
        assert Randomness(1).flip(weights[:, :0]).device.type == "cpu"


def test_pick_survives_noise_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0]])
    for u in (0.0, 1.0):  # -log(1 - u) is zero, or infinite
        monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, u=u, generator=None: self.fill_(u))
        monkeypatch.setattr(noise, "uniform", lambda source, n, dtype, u=u: torch.full((n,), u, dtype=dtype))
        assert Randomness(0).pick(weights).tolist() == [1]
        assert Randomness(0).pick(weights, at=[3]).tolist() == [1]


def test_keyed_picks_depend_on_row_key_and_position_alone() -> None:
    weights = torch.ones(1, 1000)
    a, b = Randomness(7), Randomness([1, 7], rows=2)
    b.pick(torch.ones(2, 1000))  # an un-keyed draw in between changes nothing
    both = b.pick(weights.expand(2, -1), at=[4, 9])
    assert a.pick(weights, at=[9]) == both[1]
    assert a.pick(weights, at=[9]) == both[1]
    assert a.pick(weights, at=[10]) != both[1]
    assert b.select([1]).pick(weights, at=[9]) == both[1]
    assert b.keys == [1, 7]  # the object itself stays as it is
    assert Shifted(a, [5]).pick(weights, at=[4]) == both[1]


def test_row_keys_of_one_seed() -> None:
    rng = Randomness(7, rows=3)
    assert rng.keys[0] == 7
    assert len(set(rng.keys)) == 3


def test_case_23_the_global_generator_is_neither_read_nor_advanced() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = Randomness(1).pick(torch.ones(1, 50))
    Randomness().flip(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert Randomness(1).pick(torch.ones(1, 50)) == first


@pytest.mark.parametrize("seed", [1.5, "1", True, [1], [1, 2, 3], [1, "2"], [1, True]])
def test_bad_seed(seed: object) -> None:
    with pytest.raises((ValueError, TypeError), match="seed must be an integer, or 2 integers"):
        Randomness(seed, rows=2)  # type: ignore[arg-type]
