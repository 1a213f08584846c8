"""`tree="auto"`: the plan, its cache, and that it changes nothing but the speed. No time is asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import mix, random_gpt

from minispec import GPT, NGramDrafter, Sampling, Tree, auto, generate, speculate, stream
from minispec.auto import Search, find_plan
from minispec.decode import search_run
from minispec.planner import Costs, Plan
from minispec.verify import RULES

CHEAP = Costs({1: 1.0, 64: 1.1}, 0.02)  # passes of one price, a draft for nothing
DEAR = Costs({1: 1.0, 2: 9.0, 64: 99.0}, 2.0)  # a pass over two tokens costs nine
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "sampling": Sampling(0.8)}


@pytest.fixture(scope="module")
def models() -> tuple[GPT, GPT]:
    target = random_gpt(1, block=32)
    return target, mix(target, random_gpt(2, block=32), 0.2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINISPEC_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> list[Costs]:
    """Costs that the search is told instead of measuring them; the list holds those to come, the last for good."""
    given = [CHEAP]
    monkeypatch.setattr(auto, "measure", lambda *_, **__: given[0])
    monkeypatch.setattr(Search, "costs", lambda *_, **__: given[0])
    for name, value in (("TEXTS", 4), ("CHAINS", (1, 3, 8)), ("NODES", (5,))):
        monkeypatch.setattr(auto, name, value)
    return given


def search(models: tuple[GPT, GPT], rule: str | None = None, **sampling: float) -> Plan:
    return Search(*models, Sampling(**sampling), rule, search_run(models[0])).plan()  # type: ignore[arg-type]


def test_where_passes_are_cheap_the_plan_speculates(models: tuple[GPT, GPT], prices: list[Costs]) -> None:
    plan = search(models)
    assert not plan.plain
    assert plan.speed_up > 1.2
    assert 1 < plan.tokens_per_step <= plan.tree.max_depth + 1
    assert f"{plan.speed_up:.2f}x expected" in str(plan)


def test_a_busy_machine_is_not_measured_to_the_end(models: tuple[GPT, GPT], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without patience: four chains, which tell the others, no tree, one repeat. With it: all."""
    monkeypatch.setattr(auto, "measure", lambda *_, **__: CHEAP)
    for name, value in (("TEXTS", 2), ("NODES", (5,))):
        monkeypatch.setattr(auto, name, value)
    for patience in (0.0, 1e9):
        decoded: list[tuple[int, int]] = []  # nodes and rows of each run

        def run(drafter: Any, rule: Any, prompts: Any, *rest: Any, decoded: Any = decoded) -> Any:
            decoded.append((drafter.max_nodes, len(prompts)))
            return search_run(models[0])(drafter, rule, prompts, *rest)

        found = Search(*models, Sampling(), None, run, patience=patience)
        plan, texts = found.plan(), [nodes for nodes, rows in decoded[1:] if rows == 2]
        timed = [nodes for nodes, rows in decoded if rows == 1]
        assert texts[:4] == [2, 3, 4, 5]
        assert (len(texts) == 4) == (patience == 0)
        assert timed.count(1) == (2 if patience == 0 else 8)  # plain, of which the first warms up; again beside a tree
        assert plan.plain or plan.speed_up > 1


def test_where_they_are_dear_the_plan_is_plain_decoding(models: tuple[GPT, GPT], prices: list[Costs]) -> None:
    prices[0] = DEAR
    plan = search(models)
    assert plan.plain
    assert plan.speed_up == plan.tokens_per_step == 1
    assert str(plan) == "plain decoding is faster here"


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_given_is_kept(models: tuple[GPT, GPT], prices: list[Costs], rule: str) -> None:
    plan = search(models, rule)
    assert plan.rule == rule
    assert plan.tree.is_chain or RULES[rule].tree is not None


def test_the_best_of_all_candidates_is_chosen(models: tuple[GPT, GPT], prices: list[Costs]) -> None:
    found = Search(*models, Sampling(), None, search_run(models[0]))
    best = found.plan()
    assert best.speed_up > 0.97 * max(plan.speed_up for plan in [*found.chains(), found.tree()])
    for plan in found.chains():
        expected = CHEAP.speed_up(plan.tokens_per_step, plan.tree.size, plan.tree.max_depth)
        assert plan.speed_up == pytest.approx(expected)


@pytest.mark.parametrize(
    ("gains", "want"),
    [
        ((1.9, 2.0, 2.05, 2.06), 2),  # of those within 3 % of the best the shortest
        ((1.9, 1.99, 2.05, 2.06), 3),
        ((2.5, 2.0, 2.05, 2.06), 1),
        ((0.99, 1.01, 1.005, 0.9), 2),  # none that is slower than plain decoding
        ((0.9, 0.99, 1.0, 0.9), 0),
    ],
)
def test_of_plans_that_are_alike_the_smallest_is_taken(
    models: tuple[GPT, GPT], monkeypatch: pytest.MonkeyPatch, gains: tuple[float, ...], want: int
) -> None:
    found = Search(*models, Sampling(), None, search_run(models[0]))
    chains = [Plan("block", Tree.chain(i + 1), gain) for i, gain in enumerate(gains[:3])]
    monkeypatch.setattr(Search, "chains", lambda self: chains[::-1])
    monkeypatch.setattr(Search, "tree", lambda self: Plan("traversal", Tree.branching([2, 2]), gains[3]))
    plan = found.plan()
    assert plan.tree == Tree.chain(want)
    assert plan.plain == (want == 0)


def test_the_cost_of_a_draft_step_is_told_from_two_depths(
    models: tuple[GPT, GPT], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that cost t(n) + depth x .05 + .3, plain ones t(1) + .1: each share is found again."""
    passes = Costs({1: 1.0, 2: 1.1, 9: 1.8, 33: 4.2}, draft_step=0.02)
    monkeypatch.setattr(auto, "measure", lambda *_, **__: passes)
    trees = [Tree.chain(2), Tree.chain(8)]
    monkeypatch.setattr(
        Search, "step_times", lambda *_: [1.1] + [passes.check(t.size) + t.max_depth * 0.05 + 0.3 for t in trees]
    )
    found = Search(*models, Sampling(), None, search_run(models[0])).costs([], trees, "token")
    assert (found.draft_step, found.overhead, found.plain_overhead) == pytest.approx((0.05, 0.3, 0.1))
    assert found.pass_time == passes.pass_time
    trees = trees[1:]  # one depth: the draft's pass as measured, and the rest of the step is overhead
    found = Search(*models, Sampling(), None, search_run(models[0])).costs([], trees, "token")
    assert (found.draft_step, found.overhead) == pytest.approx((0.02, 8 * 0.03 + 0.3))


def test_no_plan_expects_more_than_its_tokens_a_pass(models: tuple[GPT, GPT]) -> None:
    """A machine that was busy while plain decoding was timed seems to speculate in no time: 10x at 3 tokens a pass."""
    found, plan = Search(*models, Sampling(), None, search_run(models[0])), Plan("block", Tree.chain(4))
    busy = Costs({1: 10.0, 5: 1.0}, draft_step=0.0, plain_overhead=10.0)
    assert found.expect(plan, busy, 3.0).speed_up == 3.0
    calm = Costs({1: 1.0, 5: 1.2}, draft_step=0.05, overhead=0.1)
    assert found.expect(plan, calm, 3.0).speed_up == pytest.approx(3.0 / 1.5)


def test_a_step_yields_what_the_whole_texts_did(models: tuple[GPT, GPT], prices: list[Costs]) -> None:
    """A draft that is the target: four tokens a step, and the last step of 10 is cut to two."""
    found = Search(models[0], models[0], Sampling(), None, search_run(models[0]), length=10, given=[[0], [1, 2]])
    drafter = auto.drafter_of(Plan("token", Tree.chain(3)), models[0])
    assert found.tokens_per_step(drafter, "token") == pytest.approx(20 / 6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_plan_is_in_the_result_and_makes_the_same_tokens_again(
    models: tuple[GPT, GPT], folder: Path, prices: list[Costs], temperature: float
) -> None:
    target, draft = models
    options = OPTIONS | {"sampling": Sampling(temperature)}
    first = speculate(target, draft, [0, 1], tree="auto", seed=5, **options)
    assert first.plan is not None
    by_hand = auto.drafter_of(first.plan, draft)
    again = speculate(target, by_hand, [0, 1], rule=first.plan.rule, seed=5, **options)
    assert again.tokens == first.tokens
    assert again.plan is None
    assert speculate(target, draft, [0, 1], tree="auto", seed=5, **options) == first
    assert [t for step in stream(target, draft, [0, 1], tree="auto", seed=5, **options) for t in step.tokens] == (
        first.tokens
    )


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_rules_that_do_not_depend_on_the_plan(
    models: tuple[GPT, GPT], folder: Path, prices: list[Costs], rule: str
) -> None:
    target, draft = models
    fast = speculate(target, draft, [[0, 1], [2]], tree="auto", rule=rule, seed=[5, 6], **OPTIONS)
    assert [r.tokens for r in fast] == [r.tokens for r in generate(target, [[0, 1], [2]], seed=[5, 6], **OPTIONS)]


def test_a_plan_is_found_once_and_again_on_demand(models: tuple[GPT, GPT], folder: Path, prices: list[Costs]) -> None:
    said: list[str] = []
    ask: dict[str, Any] = {"say": said.append}
    first = find_plan(*models, Sampling(), None, 1, search_run(models[0]), **ask)
    assert len(said) == len(list(folder.iterdir())) == 1
    prices[0] = DEAR
    assert find_plan(*models, Sampling(), None, 1, search_run(models[0]), **ask) == first
    assert len(said) == 1
    assert find_plan(*models, Sampling(), None, 1, search_run(models[0]), again=True, **ask).plain
    assert find_plan(*models, Sampling(), None, 1, search_run(models[0]), **ask).plain
    assert len(said) == 2


def test_what_a_plan_depends_on_has_a_plan_of_its_own(models: tuple[GPT, GPT], monkeypatch: Any) -> None:
    target, draft = models

    def name(*, target: GPT = target, sampling: Sampling = Sampling(), rule: str | None = None, rows: int = 1) -> str:  # noqa: B008
        return auto.fingerprint(target, draft, sampling, rule, rows)

    names = [name(), name(sampling=Sampling(0)), name(rule="token"), name(rows=4), name(target=random_gpt(9, block=32))]
    assert len(set(names)) == len(names)
    assert name(rows=3) == name(rows=4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert name() not in names


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": "minispec-plan-0"}', '{"format": "minispec-plan-4", "rule": "magic"}',
     '{"format": "minispec-plan-4", "rule": "match", "parents": [0], "speed_up": 2, "tokens_per_step": 3}'],
)  # fmt: skip
def test_a_corrupt_file_is_measured_again(
    models: tuple[GPT, GPT], folder: Path, prices: list[Costs], text: str
) -> None:
    first = find_plan(*models, Sampling(), None, 1, search_run(models[0]))
    (path,) = folder.iterdir()
    path.write_text(text, encoding="utf-8")
    assert find_plan(*models, Sampling(), None, 1, search_run(models[0])) == first
    assert json.loads(path.read_text(encoding="utf-8"))["rule"] == first.rule


def test_a_folder_that_cannot_be_written_is_no_error(
    models: tuple[GPT, GPT], tmp_path: Path, prices: list[Costs], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("MINISPEC_CACHE", str(tmp_path / "file" / "plans"))
    assert not find_plan(*models, Sampling(), None, 1, search_run(models[0])).plain


def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISPEC_CACHE")
    assert auto.cache_folder().name == "minispec"


def test_bad_company_is_refused_before_anything_is_measured(models: tuple[GPT, GPT], prices: list[Costs]) -> None:
    target, draft = models
    prices.clear()  # a measurement would fail
    for bad, message in (
        ({"draft_len": 3}, "got draft_len=3 as well"),
        ({"draft": NGramDrafter(3)}, "got a NGramDrafter as well"),
        ({"rule": replace(RULES["token"], name="mine")}, "rule must be a name or None"),
        ({"rule": "magic"}, "rule must be one of"),
        ({"draft": random_gpt(3, vocab=4, block=32)}, "share one vocabulary"),
        ({"max_new_tokens": -1}, "max_new_tokens must be"),
        ({"prompt": []}, "prompt must have 1..32 tokens"),
    ):
        options: dict[str, Any] = {"draft": draft, "prompt": [0], **OPTIONS, **bad}
        with pytest.raises((ValueError, TypeError), match=message):
            speculate(target, tree="auto", **options)
    with pytest.raises(TypeError, match='tree must be a Tree or "auto"'):
        speculate(target, draft, [0], tree="automatic", **OPTIONS)


def test_a_real_measurement(models: tuple[GPT, GPT], folder: Path) -> None:
    """Nothing is replaced: whatever this machine finds fastest, the plan is one of those it may find."""
    small = random_gpt(1, block=32), random_gpt(2, block=32)
    result = speculate(*small, [0, 1], tree="auto", max_new_tokens=8, seed=0)
    assert result.plan is not None
    assert result.plan.speed_up >= 1
    assert len(result.tokens) == 8
    assert result.plan.tree == Tree.chain(0) or result.plan.rule in ("block", "traversal")


@pytest.mark.parametrize(("first", "next_"), [(0.8, 0.9), (0.5, 0.0), (0.0, 0.5), (1.0, 1.0)])
def test_smoothing_leaves_a_geometric_yield_as_it_is(first: float, next_: float) -> None:
    depths = (1, 2, 3, 4, 6, 8, 12)
    tokens = [1 + first * sum(next_**i for i in range(k)) for k in depths]
    assert auto.smoothed(depths, tokens) == pytest.approx(tokens, abs=1e-9)
    assert auto.smoothed([5], [3.2]) == pytest.approx([3.2], abs=1e-2)


def test_smoothing_tells_the_lengths_between() -> None:
    true = {k: 1 + 0.8 * sum(0.9**i for i in range(k)) for k in range(1, 17)}
    depths = (1, 2, 3, 4, 6, 8, 12)
    found = auto.smoothed(depths, [true[k] for k in depths], range(1, 17))
    assert found == pytest.approx(list(true.values()), abs=1e-9)


def test_a_length_whose_yield_was_not_measured_may_win(models: tuple[GPT, GPT], prices: list[Costs]) -> None:
    """Where a pass over seven tokens costs twice one over six, five guesses are best, measured or not."""
    prices[0] = Costs({1: 1.0, 6: 1.0, 7: 2.0, 64: 2.5}, 0.01)
    for name, lengths in (("match", (1, 3, 8)), ("block", (4, 6)), ("token", (5, 8))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(auto, "CHAINS", lengths)
            plans = Search(*models, Sampling(), name, search_run(models[0])).chains()
        assert [plan.tree for plan in plans] == [Tree.chain(k) for k in range(1, lengths[-1] + 1)]
        assert max(plans, key=lambda plan: plan.speed_up).tree == Tree.chain(5)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 7, 20, 47])
def test_short_contexts(block: int, prices: list[Costs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains as long as half of what a text has room for, measured lengths or not; no search where there is none."""
    monkeypatch.setattr(auto, "CHAINS", (1, 2, 3, 4, 6, 8, 12))
    pair = random_gpt(1, block=block), random_gpt(2, block=block)
    found = Search(*pair, Sampling(), None, search_run(pair[0]))
    if block < 4:
        assert found.plan().plain
    else:
        assert [plan.tree.max_depth for plan in found.chains()] == list(range(1, max(block // 4, 1) + 1))
        assert found.plan().tokens_per_step >= 1


def test_smoothing_takes_noise_out() -> None:
    depths, generator = (1, 2, 3, 4, 6, 8, 12), torch.Generator().manual_seed(0)
    true = [1 + 0.8 * sum(0.88**i for i in range(k)) for k in depths]
    rough = fine = 0.0
    for _ in range(50):
        noisy = [y + 0.15 * float(torch.randn((), generator=generator)) for y in true]
        rough += sum((a - b) ** 2 for a, b in zip(noisy, true, strict=True))
        fine += sum((a - b) ** 2 for a, b in zip(auto.smoothed(depths, noisy), true, strict=True))
    assert fine < 0.5 * rough
