"""The cost model against the table of the papers' formula, and against brute force. No time is asserted."""

from __future__ import annotations

from typing import Any

import pytest
from doubles import random_gpt
from torch import Tensor

from minispec import GPT, KVCache, Tree
from minispec.planner import Costs, best_draft_len, expected_tokens, speed_up
from minispec.stopwatch import measure

TABLE = {  # acceptance: (best K, speed-up) for c = .02, .05, .1, .2, .3
    0.5: [(4, 1.79), (3, 1.63), (2, 1.46), (1, 1.25), (1, 1.15)],
    0.6: [(6, 2.17), (4, 1.92), (3, 1.67), (2, 1.40), (1, 1.23)],
    0.7: [(8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58), (2, 1.37)],
    0.8: [(11, 3.82), (8, 3.09), (6, 2.47), (4, 1.87), (3, 1.55)],
    0.9: [(19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37), (5, 1.87)],
}


@pytest.mark.parametrize("acceptance", TABLE)
def test_best_draft_length_and_speed_up(acceptance: float) -> None:
    for cost, (k, gain) in zip((0.02, 0.05, 0.1, 0.2, 0.3), TABLE[acceptance], strict=True):
        best, found = best_draft_len(acceptance, cost)
        assert best == k
        assert found == pytest.approx(gain, abs=5e-3)


def test_expected_tokens() -> None:
    assert [round(expected_tokens(0.7, k), 3) for k in (0, 1, 4, 8)] == [1, 1.7, 2.773, 3.199]
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.0, 5) == 1


def test_speculation_pays_only_where_acceptance_exceeds_the_cost() -> None:
    for acceptance, cost in ((0.1, 0.2), (0.3, 0.3), (0.05, 0.5)):
        assert best_draft_len(acceptance, cost) == (0, 1.0)
    assert best_draft_len(0.31, 0.3)[0] == 1
    assert speed_up(0.8, 4, 0.1, check=1.5) == pytest.approx(expected_tokens(0.8, 4) / 1.9)


FLAT = Costs({1: 1.0, 64: 1.0}, 0.05)
LINEAR = Costs({1: 1.0, 64: 1 + 0.05 * 63}, 0.05)
STEEP = Costs({1: 1.0, 64: 1 + 0.2 * 63}, 0.05)
RATES = (0.7, 0.1, 0.05, 0.03)


@pytest.mark.parametrize(
    ("costs", "tree_gain", "chain_gain"), [(FLAT, 3.36, 2.35), (LINEAR, 1.98, 1.98), (STEEP, 1.46, 1.46)]
)
def test_trees_pay_only_where_checking_is_flat(costs: Costs, tree_gain: float, chain_gain: float) -> None:
    tree = costs.best_tree(RATES, sizes=range(1, 65))
    gain = costs.speed_up(tree.expected_tokens(RATES), tree.size, tree.max_depth)
    chain, found = costs.best_chain(0.7, 20)
    assert found == pytest.approx(chain_gain, abs=0.01)
    assert gain == pytest.approx(tree_gain, abs=0.02)
    assert chain > 0


def test_times_between_and_beyond_the_sizes_measured() -> None:
    costs = Costs({1: 1.0, 4: 1.6, 8: 2.0}, 0.1, overhead=0.2, plain_overhead=0.1)
    assert [costs.check(n) for n in (1, 2, 4, 6, 8, 12)] == pytest.approx([1.0, 1.2, 1.6, 1.8, 2.0, 2.4])
    assert costs.cost_ratio == pytest.approx(0.1)
    assert costs.speed_up(3.0, 4, 3) == pytest.approx(3.0 * 1.1 / (1.6 + 0.3 + 0.2))
    assert costs.speed_up(1.0, 1, 0) == 1.0


def test_where_nothing_pays_the_plan_is_plain_decoding() -> None:
    dear = Costs({1: 1.0, 32: 40.0}, 0.9)
    assert dear.best_chain(0.6) == (0, 1.0)
    assert dear.best_tree((0.5, 0.2)) == Tree.chain(0)


def test_measured_costs_are_times() -> None:
    costs = measure(random_gpt(1, block=64), random_gpt(2, block=64), context=16, sizes=(1, 2, 4), repeats=2)
    assert set(costs.pass_time) == {1, 2, 4}
    assert all(t > 0 for t in (*costs.pass_time.values(), costs.draft_step))
    assert costs.overhead == 0


@pytest.mark.parametrize("chained", [True, False])
def test_a_draft_step_is_timed_as_the_loop_makes_it(chained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first behind a target pass is a pass, the next ones are one chain where there is one; each counts its share."""
    target, draft = random_gpt(1, block=64), random_gpt(2, block=64)
    passes: list[tuple[int, ...]] = []  # rows, tokens, cached before
    chains: list[int] = []
    forward = GPT.forward

    def counted(self: GPT, tokens: Tensor, cache: KVCache, *args: Any) -> Tensor:
        if self is draft:
            passes.append((*tokens.shape, cache.lengths[0]))
        return forward(self, tokens, cache, *args)

    def chain(self: GPT, rows: list[list[int]], cache: KVCache, count: int, *args: Any) -> object:
        chains.append(count)
        assert cache.lengths == [16] * len(rows)
        return object() if chained else None

    clock = iter(range(10_000))
    monkeypatch.setattr(GPT, "forward", counted)
    monkeypatch.setattr(GPT, "chain", chain)
    monkeypatch.setattr("minispec.stopwatch.time.perf_counter", lambda: float(next(clock)))
    assert measure(target, draft, context=16, sizes=(1, 2), repeats=2, batch=3) == Costs({1: 1.0, 2: 1.0}, 1 / 4)
    one_round = [(3, 1, 16)] + ([] if chained else [(3, 1, 16 + i) for i in range(4)])
    assert passes == [(3, 16, 0)] + 8 * one_round  # 2 rounds and 2 to warm up, of two sizes
    assert chains == [4] * 8
    assert measure(target, random_gpt(2, block=18), context=16, sizes=(1, 2), repeats=2).draft_step == 1 / 2
