"""Trees through the public interface: shapes, refusals, coupled noise, passes counted, statistics, chi-squared."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter

import pytest
import torch
from doubles import Counting, TableModel, assert_prefilled, caches, random_gpt, rows_of
from test_chi_squared import LENGTH, PROMPT, f1_joint, sample

from minispec import (
    GPT,
    RULES,
    Draft,
    EarlyExitDrafter,
    ModelDrafter,
    NGramDrafter,
    Rule,
    Sampling,
    Step,
    Tree,
    generate,
    speculate,
    stream,
)
from minispec.advanced import AdaptiveDrafter, DynamicTree, HeuristicDrafter
from minispec.advanced.statistics import acceptance_by_depth, acceptance_by_rank, accepted_depths, winning_branches
from minispec.lab import chi_squared, exact_law, target_law

core = pytest.mark.core

# --- shapes ------------------------------------------------------------------------------------------------


@core
def test_shapes() -> None:
    assert Tree.chain(3).rows == ((-1, 0, 1, 2),)
    assert Tree.branching([2, 1]).rows == ((-1, 0, 0, 1, 2),)
    assert Tree.branching([3, 2, 1]).size == 1 + 3 + 6 + 6
    assert Tree.branching([]).rows == Tree.chain(0).rows
    assert Tree.branching([2, 2]).levels == [[0], [1, 2], [3, 4, 5, 6]]
    assert Tree.branching([2, 1]).child_table.tolist() == [[[1, 2], [3, -1], [4, -1], [-1, -1], [-1, -1]]]
    assert Tree.chain(2).is_chain
    assert not Tree.branching([2]).is_chain
    assert Tree.branching([2, 2]).cut(1).rows == ((-1, 0, 0),)
    assert Tree.branching([2, 2]).cut(9).size == 7
    assert Tree.chain(5).cut(0).size == 1


@core
@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "there must be a row"),
        ([0], "node 0 must have the parent -1"),
        ([-1, 1], r"parent of node 1 must be in 0\.\.0, got 1"),
        ([-1, -1], r"parent of node 1 must be in 0\.\.0, got -1"),
        ([-1, 0, 1.0], r"parent of node 2 must be in 0\.\.1, got 1\.0"),
        ([-1, 0, 1, 0], "nodes must come breadth-first"),
        ([[-1, 0], [-1]], "the same number of nodes"),
    ],
)
def test_bad_shapes(parents: list, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        Tree.from_parents(parents) if parents else Tree(())


@core
@pytest.mark.parametrize("widths", [[0], [2, -1], [1.5], [True]])
def test_bad_widths(widths: list) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match="widths must be integers >= 1"):
        Tree.branching(widths)


# --- the best tree (F8) ------------------------------------------------------------------------------------

F8 = (0.80, 0.08, 0.03, 0.02)


@core
@pytest.mark.parametrize(("nodes", "want"), [(9, 4.33), (17, 4.99), (33, 5.61), (65, 6.26)])
def test_f8_best_trees(nodes: int, want: float) -> None:
    tree = Tree.best(F8, nodes)
    assert tree.size == nodes
    assert tree.expected_tokens(F8) == pytest.approx(want, abs=5e-3)


@core
def test_f8_a_chain_of_65_nodes() -> None:
    assert Tree.chain(64).expected_tokens(F8) == pytest.approx(5.00, abs=5e-3)


def heap_value(rates: tuple[float, ...], nodes: int, max_depth: int) -> float:
    """Sum of the `nodes` largest path products."""
    heap, total = [(-1.0, 0)], 0.0
    for _ in range(nodes):
        if not heap:
            break
        value, depth = heapq.heappop(heap)
        total -= value
        if depth < max_depth:
            for rate in rates:
                heapq.heappush(heap, (value * rate, depth + 1))
    return total


@core
@pytest.mark.parametrize("seed", range(40))
def test_best_equals_the_heap_for_falling_rates(seed: int) -> None:
    chance = random.Random(seed)
    rates = sorted((chance.random() for _ in range(chance.randint(1, 4))), reverse=True)
    total = sum(rates) + chance.random()
    rates = tuple(a / total for a in rates)
    nodes, depth = chance.randint(1, 30), chance.randint(1, 8)
    tree = Tree.best(rates, nodes, depth)
    assert tree.max_depth <= depth
    assert tree.size <= nodes
    assert tree.expected_tokens(rates) == pytest.approx(heap_value(rates, nodes, depth), abs=1e-9)


def all_trees(nodes: int) -> set[tuple[int, ...]]:
    """Every breadth-first list of parents."""
    found = {(-1,)}
    for node in range(1, nodes):
        found = {(*t, p) for t in found for p in range(max(t[-1], 0), node)}
    return {t for t in found if depths(t) == sorted(depths(t))}


def depths(parents: tuple[int, ...]) -> list[int]:
    out = [0]
    for parent in parents[1:]:
        out.append(out[parent] + 1)
    return out


@core
@pytest.mark.parametrize("rates", [(0.3, 0.05, 0.6), (0.5, 0.4), (0.1, 0.9), (0.6, 0.2, 0.1), (0.0, 0.7)])
@pytest.mark.parametrize("nodes", range(1, 7))
def test_best_equals_brute_force_for_any_rates(rates: tuple[float, ...], nodes: int) -> None:
    for depth in (1, 2, 5):
        brute = max(
            Tree.from_parents(t).expected_tokens(rates)
            for n in range(1, nodes + 1)
            for t in all_trees(n)
            if max(depths(t)) <= depth
        )
        assert Tree.best(rates, nodes, depth).expected_tokens(rates) == pytest.approx(brute, abs=1e-12)


@core
def test_measured_rates_may_add_up_to_a_little_over_1() -> None:
    assert Tree.best((0.85, 0.114, 0.031, 0.008), 6).size == 6


def test_best_of_many_nodes() -> None:
    tree = Tree.best((0.6, 0.2, 0.1), 400)
    assert tree.size == 400
    assert tree.expected_tokens((0.6, 0.2, 0.1)) == pytest.approx(heap_value((0.6, 0.2, 0.1), 400, 399))


@core
def test_best_where_the_heap_fails() -> None:
    assert Tree.best((0.3, 0.05, 0.6), 4).expected_tokens((0.3, 0.05, 0.6)) == pytest.approx(1.95)


@core
@pytest.mark.parametrize(
    ("rates", "nodes", "depth"), [((-0.1,), 3, 2), ((1.2, 0.6), 3, 2), ((0.5,), 0, 2), ((0.5,), 3, -1)]
)
def test_best_refuses_nonsense(rates: tuple[float, ...], nodes: int, depth: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Tree.best(rates, nodes, depth)


# --- the lossy combinations are refused ----------------------------------------------------------------------

LOSSY = [
    (lambda m: ModelDrafter(m, Tree.branching([2]), "top-k"), "rrs", "chosen, pruned, re-ranked or re-sorted"),
    (lambda m: ModelDrafter(m, Tree.chain(2), "top-k"), "token", "chosen, pruned, re-ranked or re-sorted"),
    (lambda m: ModelDrafter(m, Tree.chain(2), "top-k"), "block", "chosen, pruned, re-ranked or re-sorted"),
    (lambda m: DynamicTree(m), "rrs", "chosen, pruned, re-ranked or re-sorted"),
    (lambda m: DynamicTree(m), "traversal", "chosen, pruned, re-ranked or re-sorted"),
    (lambda m: ModelDrafter(m, Tree.branching([2]), "without"), "specinfer", "depends on the siblings drawn before"),
    (lambda m: ModelDrafter(m, Tree.branching([2]), "without"), "token", "depends on the siblings drawn before"),
    (lambda m: ModelDrafter(m, Tree.branching([2]), "iid"), "rrs", "drawn without replacement, or to have none"),
    (lambda m: ModelDrafter(m, Tree.branching([2]), "iid"), "traversal", "drawn without replacement, or to have none"),
    (lambda m: ModelDrafter(m, Tree.chain(2), "coupled"), "token", "not independent of its coins"),
    (lambda m: ModelDrafter(m, Tree.chain(2)), "coupled", "by the target's own noise"),
    (lambda m: NGramDrafter(2), "block", "chosen, pruned, re-ranked or re-sorted"),
]


@core
@pytest.mark.parametrize(("make", "rule", "reason"), LOSSY, ids=[f"{rule}-{i}" for i, (_, rule, _) in enumerate(LOSSY)])
def test_lossy_combinations_are_refused_with_the_reason(make, rule: str, reason: str) -> None:  # type: ignore[no-untyped-def]
    target, draft = Counting(random_gpt(1)), random_gpt(2)
    with pytest.raises(ValueError, match=rf"rule '{rule}' does not accept a draft of kind .* \(only .*\): .*{reason}"):
        speculate(target, make(draft), [0], max_new_tokens=3, rule=rule)
    assert target.passes == []


@core
def test_a_drafter_whose_drafts_are_not_of_its_kind_is_caught() -> None:
    target, draft = random_gpt(1), random_gpt(2)

    class Liar:
        kind, max_nodes = "chain", 3

        def begin(self, prompts, sampling):  # type: ignore[no-untyped-def]
            return ModelDrafter(draft, Tree.chain(2), "top-k").begin(prompts, sampling)

    with pytest.raises(ValueError, match="does not accept a draft of kind 'chosen'"):
        speculate(target, Liar(), [0], max_new_tokens=9, rule="token")

    class Unknown(Liar):
        kind = "guessed"

    with pytest.raises(ValueError, match=r"kind of a draft must be one of .*, got 'guessed'"):
        speculate(target, Unknown(), [0], max_new_tokens=3, rule="token")


class Fixed:
    """A drafter that makes the draft it is told to make."""

    max_nodes = 9

    def __init__(self, kind: str, make) -> None:  # type: ignore[no-untyped-def]
        self.kind, self.make = kind, make

    def begin(self, prompts, sampling):  # type: ignore[no-untyped-def]
        outer = self

        class Session:
            def propose(self, new, limit, rng):  # type: ignore[no-untyped-def]
                return outer.make()

        return Session()


LAW = torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)
BROKEN = [
    (
        "chain",
        "token",
        lambda: Draft(Tree.branching([2]), torch.tensor([[0, 1, 2]]), LAW, "chain"),
        "kind 'chain' has the parents",
    ),
    ("chain", "token", lambda: Draft(Tree.chain(2), torch.tensor([[0, 1, 2]]), None, "chain"), "'token' needs q"),
    (
        "chosen",
        "match",
        lambda: Draft(Tree.chain(1), torch.tensor([[1, 1]]), None, "chosen"),
        r"node 0 must hold the last token, \[0\], got \[1\]",
    ),
    (
        "chosen",
        "match",
        lambda: Draft(Tree.chain(1), torch.tensor([[0, 3]]), None, "chosen"),
        r"ids in 0\.\.2 or -1, got 3",
    ),
    (
        "chosen",
        "match",
        lambda: Draft(Tree.chain(2), torch.tensor([[0, 1]]), None, "chosen"),
        r"shape \(1, 3\), got \(1, 2\)",
    ),
    (
        "chosen",
        "match",
        lambda: Draft(Tree.chain(4), torch.tensor([[0, 1, 1, 1, 1]]), None, "chosen"),
        r"deeper than depth_limit \[2\]",
    ),
]


@pytest.mark.parametrize(("kind", "rule", "make", "message"), BROKEN)
def test_a_broken_draft_is_refused(kind: str, rule: str, make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        speculate(random_gpt(1), Fixed(kind, make), [0], max_new_tokens=3, rule=rule)


@pytest.mark.parametrize(
    "make", [lambda m: ModelDrafter(m, how="top-k"), DynamicTree, AdaptiveDrafter, HeuristicDrafter]
)
def test_a_drafters_model_must_fit_the_target(make) -> None:  # type: ignore[no-untyped-def]
    target = Counting(random_gpt(1))
    with pytest.raises(ValueError, match="draft's vocab_size is 4, the target's 3"):
        speculate(target, make(random_gpt(2, vocab=4)), [0], max_new_tokens=4)
    with pytest.raises(ValueError, match="draft's block_size is 8, the target's 16"):
        speculate(target, make(random_gpt(2, block=8)), [0], max_new_tokens=4)
    assert target.passes == []


@core
def test_a_rule_must_have_a_function_and_known_kinds() -> None:
    with pytest.raises(ValueError, match="must have either a chain function or a tree function"):
        Rule("mine", frozenset({"chain"}), "without")
    with pytest.raises(ValueError, match=r"kinds must be some of .*, got \['drawn'\]"):
        Rule("mine", frozenset({"drawn"}), "without", chain=RULES["token"].chain)


def test_defaults() -> None:
    from minispec.inputs import default_rule

    warm, greedy = Sampling(), Sampling(0)
    assert [default_rule(warm, k) for k in ("chain", "without", "iid", "coupled", "chosen")] == [
        "token", "rrs", "specinfer", "coupled", "match",
    ]  # fmt: skip
    assert {default_rule(greedy, k) for k in ("chain", "without", "iid", "coupled", "chosen")} == {"match"}


# --- what must not be lost on the way ------------------------------------------------------------------------


def long_gpt(seed: int, layers: int = 2) -> GPT:
    return random_gpt(seed, vocab=11, block=96, layers=layers, width=16, heads=4, scale=0.4)


def every_drafter(target: GPT, draft: GPT) -> dict[str, tuple[object, str]]:
    wide = Tree.branching([3, 2, 1])
    return {
        "rrs": (ModelDrafter(draft, wide), "rrs"),
        "specinfer": (ModelDrafter(draft, wide, "iid"), "specinfer"),
        "traversal": (ModelDrafter(draft, wide), "traversal"),
        "top-k": (ModelDrafter(draft, wide, "top-k"), "match"),
        "coupled": (ModelDrafter(draft, wide, "coupled"), "coupled"),
        "dynamic": (DynamicTree(draft, nodes=12, max_depth=4, width=3), "match"),
        "early": (EarlyExitDrafter(target, 1, wide), "rrs"),
        "ngram": (NGramDrafter(3, branches=3), "match"),
        "block": (ModelDrafter(draft, Tree.chain(4)), "block"),
        "adaptive": (AdaptiveDrafter(draft, 6, 0.15), "token"),
        "heuristic": (HeuristicDrafter(draft, 2, 6), "block"),
    }


@pytest.mark.parametrize("name", every_drafter(long_gpt(1), long_gpt(2)))
def test_greedy_equals_plain_and_rows_equal_solo_runs(name: str) -> None:
    target, draft = long_gpt(1), long_gpt(2, layers=1)
    drafter, rule = every_drafter(target, draft)[name]
    prompts = [[1], [2, 3, 4, 5, 6, 7, 8], [9, 10], [0] * 90, [5] * 96, [4, 4, 4]]
    options = {"max_new_tokens": 40, "sampling": Sampling(0), "stop": [7]}
    plain = generate(target, prompts, **options)
    batch = speculate(target, drafter, prompts, rule=rule, **options)
    assert [r.tokens for r in batch] == [r.tokens for r in plain]
    assert [r.finish_reason for r in batch] == [r.finish_reason for r in plain]
    for prompt, row in zip(prompts, batch, strict=True):
        solo = speculate(target, drafter, prompt, rule=rule, **options)
        assert (solo.tokens, solo.stats) == (row.tokens, row.stats)


@pytest.mark.parametrize("name", ["rrs", "specinfer", "traversal", "top-k", "coupled"])
def test_draft_equal_to_target_accepts_all_the_depth_there_is(name: str) -> None:
    target = long_gpt(1)
    drafter, rule = every_drafter(target, target)[name]
    sampling = Sampling(0) if name == "top-k" else Sampling()
    result = speculate(target, drafter, [1, 2], max_new_tokens=80, sampling=sampling, rule=rule, seed=3)
    assert all(step.accepted == 3 for step in result.steps[:-1])


@pytest.mark.parametrize("name", ["rrs", "top-k", "dynamic", "early"])
def test_one_target_pass_a_step_and_a_draft_pass_a_level(name: str) -> None:
    target, draft = long_gpt(1), Counting(long_gpt(2))
    tree = Tree.best((0.5, 0.2, 0.1, 0.05), 64, 6)
    assert tree.size == 64
    counted = Counting(target)
    drafter = {
        "rrs": ModelDrafter(draft, tree),
        "top-k": ModelDrafter(draft, tree, "top-k"),
        "dynamic": DynamicTree(draft, nodes=64, max_depth=6, width=8),
        "early": EarlyExitDrafter(target, 1, tree),
    }[name]
    steps = []
    for step in stream(counted, drafter, [1, 2, 3], max_new_tokens=7):
        steps.append(step)
        break
    assert len(steps[0].drafted) == 63
    assert counted.passes == [(1, 2), (1, 64)]  # prefill, then the whole tree at once
    if name != "early":
        assert len(draft.passes) == 6


def test_cache_equals_a_prefill_after_every_tree_step() -> None:
    target, draft = long_gpt(1), long_gpt(2)
    for name, (drafter, rule) in every_drafter(target, draft).items():
        text, moved = [1, 2, 3], 0
        with caches() as made:
            for step in stream(target, drafter, text, max_new_tokens=40, seed=0, rule=rule):
                text = [*text, *step.tokens]
                moved += step.path != tuple(range(len(step.path)))
                assert_prefilled(made[0], target, text)
        assert moved or name in ("block", "adaptive", "heuristic", "ngram"), name


def test_the_drafts_cache_equals_an_uncached_pass_before_every_tree_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from minispec.drafters import ModelSession

    checked, original = 0, ModelSession.read_last

    def watched(self: ModelSession) -> torch.Tensor:
        nonlocal checked
        logits = original(self)
        for b, text in enumerate(self.texts):
            assert (logits[b] - self.model(torch.tensor([text]))[0, -1]).abs().max() < 1e-10
            checked += 1
        return logits

    monkeypatch.setattr(ModelSession, "read_last", watched)
    target, draft = long_gpt(1), long_gpt(2)
    for drafter, rule in every_drafter(target, draft).values():
        speculate(target, drafter, [[1, 2, 3], [4]], max_new_tokens=30, seed=0, rule=rule)
    assert checked > 150


COUPLED_TREES = [Tree.branching([2, 2]), Tree.branching([3, 1, 1]), Tree.from_parents([-1, 0, 0, 1, 1, 3])]


@pytest.mark.parametrize("seeds", [12, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9)], ids=["T=1", "T=.8,p=.9"])
def test_case_24_coupled_equals_plain_sampling_token_for_token(seeds: int, sampling: Sampling) -> None:
    target, other, near = long_gpt(1), long_gpt(2), long_gpt(3, layers=1)
    prompts, keys = [[1, 2]] * seeds, list(range(seeds))
    options = {"max_new_tokens": 64, "sampling": sampling, "seed": keys}
    plain = [r.tokens for r in generate(target, prompts, **options)]
    accepted = 0
    for draft, tree in itertools.product((target, other, near), [*map(Tree.chain, range(1, 7)), *COUPLED_TREES]):
        fast = speculate(target, draft, prompts, tree=tree, rule="coupled", **options)
        assert [r.tokens for r in fast] == plain
        accepted += sum(r.stats.accepted for r in fast)
    assert accepted > 0
    alone = speculate(target, near, [1, 2], max_new_tokens=64, sampling=sampling, seed=7, rule="coupled")
    assert alone.tokens == plain[7]


def test_coupled_noise_accepts_more_than_a_fresh_draw_would() -> None:
    """Draft and target race with the same noise: they agree with probability near 1 - TV, not sum p q."""
    p, q = (0.5, 0.3, 0.2), (0.4, 0.35, 0.25)
    target, draft = TableModel(rows_of(*p), 300), TableModel(rows_of(*q), 300)
    steps = [
        step
        for r in speculate(target, draft, [[0]] * 30, max_new_tokens=250, draft_len=1, rule="coupled", seed=0)
        for step in r.steps
    ]
    rate = sum(s.accepted for s in steps) / sum(s.tested for s in steps)
    assert rate > 0.85  # sum p q = .355; 1 - TV = .9


# --- support, absent nodes -----------------------------------------------------------------------------------


def test_siblings_never_repeat_and_nodes_stay_empty_when_q_runs_out() -> None:
    draft = TableModel(rows_of(0.7, 0.3, 0.0, 0.0))
    session = ModelDrafter(draft, Tree.branching([3, 2])).begin([[0], [1]], Sampling())  # type: ignore[arg-type]
    from minispec import Randomness

    for seed in range(20):
        made = session.propose([[], []], [2, 1], Randomness(seed, 2))
        session.commit([[0], [0]])
        tokens, q = made.tokens, made.q
        assert q is not None
        assert tokens[:, 3].tolist() == [-1, -1]  # the third sibling of two possible tokens
        assert set(tokens[0, 1:3].tolist()) == {0, 1}
        assert tokens[1, 4:].tolist() == [-1] * 6  # row 1 may go one level deep only
        assert tokens[0, 8:].tolist() == [-1, -1]  # children of the absent third sibling
        assert (q.sum(-1)[tokens < 0] == 0).all()
        assert torch.allclose(q.sum(-1)[:, 1:][tokens[:, 1:] >= 0], torch.ones((), dtype=torch.float64))
        first = tokens[0, 1]
        assert q[0, 2, first] == 0


def test_rows_with_different_trees_share_a_batch() -> None:
    drafter = NGramDrafter(3, branches=2)
    session = drafter.begin([[1, 2, 5, 1, 2, 6, 1, 2], [3, 4], [7, 8, 7]], Sampling())
    made = session.propose([[], [], []], [5, 5, 1], None)  # type: ignore[arg-type]
    assert made.tokens.tolist() == [[2, 6, 5, 1, 1, 2, 2], [4, -1, -1, -1, -1, -1, -1], [7, 8, -1, -1, -1, -1, -1]]
    assert made.tree.rows[0] == (-1, 0, 0, 1, 2, 3, 4)


@pytest.mark.parametrize("nodes", [2, 5, 40])
@pytest.mark.parametrize("max_depth", [1, 5, 12])
@pytest.mark.parametrize("width", [1, 5, 9])
def test_a_dynamic_tree_wider_and_deeper_than_the_context(nodes: int, max_depth: int, width: int) -> None:
    """The draft's cache has room for `width` nodes a level, however short the context is."""
    target, draft = random_gpt(1, vocab=3, block=8), random_gpt(2, vocab=3, block=8)
    options = {"max_new_tokens": [7, 3], "sampling": Sampling(0)}
    fast = speculate(target, DynamicTree(draft, nodes, max_depth, width), [[0], [0, 1]], **options)  # type: ignore[arg-type]
    assert [r.tokens for r in fast] == [r.tokens for r in generate(target, [[0], [0, 1]], **options)]  # type: ignore[arg-type]


def test_dynamic_trees_follow_the_drafts_confidence() -> None:
    table = torch.tensor([[0.0, 0.9, 0.1], [0.6, 0.3, 0.1], [0.5, 0.25, 0.25]], dtype=torch.float64)
    drafter = DynamicTree(TableModel(table), nodes=5, max_depth=3, width=2)  # type: ignore[arg-type]
    made = drafter.begin([[0]], Sampling()).propose([[]], [9], None)  # type: ignore[arg-type]
    # from 0: 1 (.9); from there 0 (.54) and 1 (.27); from the 0: 1 (.486)
    assert made.tokens.tolist() == [[0, 1, 0, 1, 1]]
    assert made.tree.rows == ((-1, 0, 1, 1, 2),)
    assert made.kind == "chosen"
    limited = drafter.begin([[0]], Sampling()).propose([[]], [1], None)  # type: ignore[arg-type]
    assert limited.tree.max_depth == 1


def test_adaptive_lengths_stop_before_a_draw_and_drop_nothing() -> None:
    sure, unsure = TableModel(rows_of(0.9, 0.1), 64), TableModel(rows_of(0.5, 0.5), 64)
    for model, want in ((sure, 8), (unsure, 2)):  # .9^8 = .43 >= .4 > .9^9; .5^1 = .5 >= .2 .. with the cost below
        cost = 0.2 if model is sure else 0.1
        made = AdaptiveDrafter(model, 12, cost, 2.0).begin([[0]], Sampling()).propose([[]], [20], Always())  # type: ignore[arg-type]
        assert made.tree.size - 1 == want
        assert (made.tokens >= 0).all()


class Always:
    """Picks the likeliest."""

    def flip(self, prob: torch.Tensor) -> torch.Tensor:
        return prob >= 0.5

    def pick(self, weights: torch.Tensor, at: object = None) -> torch.Tensor:
        return weights.argmax(-1)


def test_the_heuristic_adds_two_and_takes_one() -> None:
    target = long_gpt(1)
    same = speculate(target, HeuristicDrafter(target, 2, 9), [1], max_new_tokens=60, sampling=Sampling(0), rule="token")
    assert [s.proposed for s in same.steps][:5] == [2, 4, 6, 8, 9]
    other = speculate(target, HeuristicDrafter(long_gpt(9), 4, 9), [1], max_new_tokens=60, seed=1, rule="token")
    steps = other.steps[:8]  # far from the end, where the draft is cut
    assert {step.accepted == step.proposed for step in steps} == {True, False}
    for step, then in itertools.pairwise(steps):
        now = step.proposed
        assert then.proposed == (min(now + 2, 9) if step.accepted == now else max(now - 1, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: EarlyExitDrafter(m, 0), r"layers must be an integer in 1\.\.1, got 0"),
        (lambda m: EarlyExitDrafter(m, 2), r"layers must be an integer in 1\.\.1, got 2"),
        (lambda m: DynamicTree(m, nodes=0), "nodes must be an integer >= 1, got 0"),
        (lambda m: DynamicTree(m, width=1.5), r"width must be an integer >= 1, got 1\.5"),
        (lambda m: AdaptiveDrafter(m, -1), "max_len must be an integer >= 0, got -1"),
        (lambda m: AdaptiveDrafter(m, 3, cost=-1.0), r"cost must be >= 0 and speed_up > 0, got -1\.0"),
        (lambda m: AdaptiveDrafter(m, 3, cost=float("nan")), r"cost must be >= 0 and speed_up > 0, got nan"),
        (lambda m: DynamicTree(m, confidence=0), "confidence must be a temperature > 0 or None, got 0"),
        (lambda m: HeuristicDrafter(m, 0), "first must be an integer >= 1, got 0"),
        (lambda m: NGramDrafter(2, branches=0), "branches must be an integer >= 1, got 0"),
    ],
)
def test_bad_drafters(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((ValueError, TypeError), match=message):
        make(random_gpt(1))


def test_early_exit_shares_weights_and_all_but_all_layers_agree() -> None:
    target = long_gpt(1, layers=3)
    drafter = EarlyExitDrafter(target, 2)
    assert drafter.model.wte is target.wte  # type: ignore[attr-defined]
    x = torch.tensor([[1, 2, 3]])
    hidden = target.wte(x) + target.wpe(torch.arange(3))
    for block in target.h[:2]:
        hidden = block(hidden, None, 0, None)
    want = target.ln_f(hidden) @ target.wte.weight.T
    assert (drafter.model(x) - want).abs().max() < 1e-12
    assert len(target.h) == 3


# --- statistics ----------------------------------------------------------------------------------------------


def test_statistics_of_trees_by_hand() -> None:
    parents = (-1, 0, 0, 1, 2)
    steps = [
        Step((5, 7), (4, 5, 6, 8), parents, (0, 2)),  # second branch won, then its only child was rejected
        Step((4, 6, 9), (4, 5, 6, 8), parents, (0, 1, 3)),  # first branch to its leaf
        Step((9,), (4, 5, 6, 8), parents, (0,)),  # none
        Step((9,), (-1, -1, -1, -1), parents, (0,)),  # nothing was there
    ]
    assert accepted_depths(steps) == [2, 1, 1]
    assert [s.tested for s in steps] == [2, 2, 1, 0]
    assert acceptance_by_depth(steps) == [2 / 3, 1 / 2]
    assert acceptance_by_rank(steps) == [2 / 5, 1 / 3]  # ranks: first child of root 1/3, of inner nodes 1/2
    assert winning_branches(steps) == {-1: 2, 0: 1, 1: 1}
    assert accepted_depths([]) == [0]
    assert acceptance_by_rank([]) == []


def test_measured_ranks_are_the_vector_that_best_wants() -> None:
    p, q = (0.4, 0.3, 0.2, 0.1), (0.4, 0.3, 0.2, 0.1)
    target, draft = TableModel(rows_of(*p), 300), TableModel(rows_of(*q), 300)
    drafter = ModelDrafter(draft, Tree.branching([3, 2]), "top-k")  # type: ignore[arg-type]
    results = speculate(target, drafter, [[0]] * 20, max_new_tokens=280, rule="match", seed=0)
    steps = [s for r in results for s in r.steps]
    assert acceptance_by_rank(steps) == pytest.approx([0.4, 0.3, 0.2], abs=0.02)


# --- chi-squared and unbiased acceptance ---------------------------------------------------------------------

SETUPS: dict[str, tuple[Tree, str]] = {
    "token": (Tree.chain(2), "without"),
    "block": (Tree.chain(3), "without"),
    "match": (Tree.branching([2, 1]), "top-k"),
    "coupled": (Tree.branching([2, 1]), "coupled"),
    "rrs": (Tree.branching([2, 2]), "without"),
    "specinfer": (Tree.branching([2, 1]), "iid"),
    "traversal": (Tree.branching([2, 1]), "without"),
}


@pytest.mark.parametrize("n", [50_000, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", SETUPS)
def test_chi_squared_and_tokens_per_step(two: tuple[GPT, GPT], rule: str, n: int) -> None:
    target, draft = (GPT(m.config) for m in two)
    target.load_state_dict(two[0].state_dict()), draft.load_state_dict(two[1].state_dict())
    tree, how = SETUPS[rule]
    drafter = ModelDrafter(draft, tree, how)
    firsts: Counter[int] = Counter()

    def run(prompts: list[list[int]], seed: int):  # type: ignore[no-untyped-def]
        results = speculate(target, drafter, prompts, seed=seed, max_new_tokens=LENGTH, rule=rule)
        firsts.update(len(r.steps[0].tokens) for r in results)
        return results

    verdict = chi_squared(sample(n, 1, run), target_law(two[0], PROMPT, LENGTH))
    assert verdict.passed, verdict
    if rule == "coupled":
        return  # its noise is fixed by the seed: there is nothing to enumerate
    exact = ModelDrafter(two[1], tree, how)
    law = exact_law(
        lambda rng: len(next(stream(two[0], exact, PROMPT, rng=rng, max_new_tokens=LENGTH, rule=rule)).tokens)
    )
    mean = sum(k * prob for k, prob in law.items())
    variance = sum(k * k * prob for k, prob in law.items()) - mean**2
    measured = sum(k * count for k, count in firsts.items()) / n
    assert abs(measured - mean) < 4 * (variance / n) ** 0.5


def test_the_same_test_rejects_resorted_siblings() -> None:
    """Siblings re-sorted by q after the draw no longer have the law they are told to have."""

    class Resorted:
        kind, max_nodes = "without", 3

        def begin(self, prompts, sampling):  # type: ignore[no-untyped-def]
            session = ModelDrafter(
                TableModel(rows_of(0.2, 0.5, 0.3)),
                Tree.branching([2]),  # type: ignore[arg-type]
            ).begin(prompts, sampling)
            propose = session.propose

            def resorted(new, limit, rng):  # type: ignore[no-untyped-def]
                made = propose(new, limit, rng)
                if made.tree.size < 3:
                    return made
                swap = made.q[:, 1].gather(1, made.tokens[:, 1:].clamp(min=0)).diff(dim=1) > 0  # (B, 1)
                tokens = torch.where(swap, made.tokens[:, [0, 2, 1]], made.tokens)
                return Draft(made.tree, tokens, made.q, "without")

            session.propose = resorted
            return session

    target = TableModel(rows_of(0.5, 0.3, 0.2))
    counts = sample(
        20_000, 3, lambda p, s: speculate(target, Resorted(), p, seed=s, max_new_tokens=LENGTH, rule="rrs"), prompt=[0]
    )
    assert not chi_squared(counts, f1_joint()).passed


def test_a_rule_of_ones_own() -> None:
    target, draft = long_gpt(1), long_gpt(2)
    mine = Rule("mine", frozenset({"chain"}), "without", chain=RULES["token"].chain)
    want = speculate(target, draft, [1, 2], max_new_tokens=20, rule="token", seed=1)
    assert speculate(target, draft, [1, 2], max_new_tokens=20, rule=mine, seed=1) == want
