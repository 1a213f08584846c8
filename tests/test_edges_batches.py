"""Batches for real: rows with prompts, budgets, stops and seeds of their own, that know nothing of each other."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from doubles import Counting, mix, random_gpt, stored

from minispec import (
    GPT,
    Draft,
    KVCache,
    NGramDrafter,
    Randomness,
    Sampling,
    Tree,
    decode,
    generate,
    speculate,
    stream,
)
from minispec.advanced import AdaptiveDrafter, DynamicTree, HeuristicDrafter
from minispec.lab import chi_squared, exact_law, target_law, total_variation
from minispec.lab.law import Enumerator
from minispec.noise import AHEAD, COINS

GREEDY = Sampling(0)


@lru_cache(maxsize=8)
def models(seed: int) -> tuple[GPT, GPT]:
    target = random_gpt(2 * seed, vocab=7, block=40, width=16, heads=4, scale=0.4)
    return target, mix(target, random_gpt(2 * seed + 1, vocab=7, block=40, width=16, heads=4, scale=0.4), 0.3)


# --- row independence --------------------------------------------------------------------------------------


def ways(target: GPT, draft: GPT) -> dict[str, list[tuple[Any, dict[str, Any]]]]:
    """Drafts and rules by what makes a row's tokens its own: T = 0, or noise that hangs on seed and position."""
    wide = Tree.branching([2, 2, 1])
    chosen: list[tuple[Any, dict[str, Any]]] = [
        (draft, {"draft_len": 4, "rule": "match"}),
        (draft, {"tree": wide, "rule": "match"}),
        (NGramDrafter(4, branches=2), {}),
        (DynamicTree(draft, nodes=10, max_depth=4, width=3), {}),
    ]
    coupled: list[tuple[Any, dict[str, Any]]] = [
        (draft, {"draft_len": 5, "rule": "coupled"}),
        (draft, {"tree": wide, "rule": "coupled"}),
    ]
    ratio: list[tuple[Any, dict[str, Any]]] = [
        (draft, {"draft_len": 4, "rule": "token"}),
        (draft, {"draft_len": 3, "rule": "block"}),
        (draft, {"tree": wide, "rule": "rrs"}),
        (draft, {"tree": wide, "rule": "specinfer"}),
        (draft, {"tree": wide, "rule": "traversal"}),
        (AdaptiveDrafter(draft, 6, 0.15), {"rule": "token"}),
        (HeuristicDrafter(draft, 2, 6), {"rule": "block"}),
    ]
    return {"greedy": ratio + chosen + coupled, "match": chosen, "coupled": coupled}


@dataclass(frozen=True)
class Batch:
    """Rows as drawn: each of these is one a row."""

    prompts: list[list[int]]
    budgets: list[int]
    stops: list[list[int] | None]
    seeds: list[int]

    def of(self, rows: list[int]) -> dict[str, Any]:
        pick = lambda values: [values[row] for row in rows]  # noqa: E731
        return {
            "prompt": pick(self.prompts), "max_new_tokens": pick(self.budgets),
            "stop": pick(self.stops), "seed": pick(self.seeds),
        }  # fmt: skip


def draw_batch(draw: random.Random, rows: int) -> Batch:
    """Prompts of 1..40 tokens (some fill the context), budgets 0..45, no, one or several stop tokens."""
    lengths = [draw.choice([1, 2, draw.randint(1, 40), draw.randint(1, 12), 40]) for _ in range(rows)]
    return Batch(
        [[draw.randrange(7) for _ in range(n)] for n in lengths],
        [draw.choice([0, 1, draw.randint(2, 12), draw.randint(2, 45)]) for _ in range(rows)],
        [draw.choice([None, [], [draw.randrange(7)], [2, 5]]) for _ in range(rows)],
        [draw.randrange(2**40) for _ in range(rows)],
    )


def differences(seed: int) -> int:
    """Rows of one random batch that are not what they are alone, or in other company."""
    draw = random.Random(seed)
    target, draft = models(draw.randrange(4))
    what = draw.choice(["greedy", "match", "coupled"])
    drafter, options = draw.choice(ways(target, draft)[what])
    sampling = GREEDY if what == "greedy" else Sampling(draw.choice([0.7, 1.0, 1.5]), draw.choice([None, 4]))
    batch = draw_batch(draw, draw.choice([2, 3, 4, 6, 9, 16, 33, 64]))

    def run(rows: list[int]) -> list[Any]:
        results = speculate(target, drafter, sampling=sampling, **options, **batch.of(rows))
        return [(r.tokens, r.finish_reason, r.stats) for r in results]

    everyone = list(range(len(batch.prompts)))
    together = run(everyone)
    alone = draw.sample(everyone, min(4, len(everyone)))
    wrong = sum(run([row]) != [together[row]] for row in alone)
    others = draw.sample(everyone, (len(everyone) + 1) // 2)  # in another order, too
    return wrong + sum(a != together[row] for row, a in zip(others, run(others), strict=True))


@pytest.mark.parametrize("part", range(4))
def test_a_rows_tokens_do_not_depend_on_its_neighbours(part: int) -> None:
    assert sum(differences(seed) for seed in range(part * 7, part * 7 + 7)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_a_rows_tokens_do_not_depend_on_its_neighbours_in_500_batches(part: int) -> None:
    assert sum(differences(seed) for seed in range(1000 + part * 25, 1025 + part * 25)) == 0


class Company:
    """An rng for several rows of which one is enumerated and the others draw from a generator of their own."""

    def __init__(self, enumerator: Any, row: int | None, generator: torch.Generator) -> None:
        self.enumerator, self.row, self.generator = enumerator, row, generator

    def flip(self, prob: torch.Tensor) -> torch.Tensor:
        coins = torch.rand(prob.shape, generator=self.generator, dtype=prob.dtype) < prob
        if self.row is not None:
            coins[self.row] = self.enumerator.flip(prob[self.row])
        return coins

    def pick(self, weights: torch.Tensor, at: Any = None) -> torch.Tensor:
        picks = torch.multinomial(weights, 1, generator=self.generator)[:, 0]
        if self.row is not None:
            picks[self.row] = self.enumerator.pick(weights[self.row : self.row + 1])[0]
        return picks

    def select(self, rows: list[int]) -> Company:
        return Company(self.enumerator, rows.index(self.row) if self.row in rows else None, self.generator)


@pytest.mark.parametrize("rule", ["token", "block", "rrs", "specinfer", "match"])
def test_a_rows_exact_law_in_company_is_the_targets(two: tuple[GPT, GPT], rule: str) -> None:
    """Its neighbours finish before it and after it, have longer prompts, and accept other numbers of tokens."""
    target, draft = two
    tree = {} if rule in ("token", "block") else {"tree": Tree.branching([2])}
    prompts, budgets = [[0, 1, 2, 2, 1, 0], [0, 1], [2, 1, 0]], [1, 3, 6]

    def run(rng: Enumerator) -> tuple[int, ...]:
        company = Company(rng, 1, torch.Generator().manual_seed(5))
        rows = speculate(target, draft, prompts, max_new_tokens=budgets, rule=rule, rng=company, **tree)
        assert [len(r.tokens) for r in rows] == budgets
        return tuple(rows[1].tokens)

    assert total_variation(exact_law(run), target_law(target, [0, 1], 3)) < 1e-10


@pytest.mark.parametrize("rule", ["token", "rrs", "traversal"])
def test_laws_of_unlike_rows_by_chi_squared(two: tuple[GPT, GPT], rule: str) -> None:
    """Three kinds of row in one batch, each with its own law: prompt, length and stop token."""
    target, draft = two
    n = 1000 if rule == "traversal" else 4000
    prompts, budgets, stops = [[0, 1], [2, 1, 0, 0], [1]], [4, 2, 3], [[], [1], [2]]
    tree = {"draft_len": 2} if rule == "token" else {"tree": Tree.branching([2, 1])}
    rows = speculate(target, draft, prompts * n, max_new_tokens=budgets * n, stop=stops * n, rule=rule, seed=11, **tree)
    for kind in range(3):
        law: Counter[tuple[int, ...]] = Counter()
        for text, p in target_law(target, prompts[kind], budgets[kind]).items():
            end = next((i + 1 for i, token in enumerate(text) if token in stops[kind]), len(text))
            law[text[:end]] += p  # type: ignore[assignment]
        verdict = chi_squared(Counter(tuple(r.tokens) for r in rows[kind::3]), law)
        assert verdict.passed, (kind, verdict)


# --- rows that accept 0, 2 and K ----------------------------------------------------------------------------


class Oracle:
    """Knows each row's greedy text and proposes trees in which just so many tokens of it are right."""

    kind = "chosen"

    def __init__(self, texts: list[list[int]], right: list[int], K: int, branch: bool) -> None:
        self.texts, self.right, self.K, self.branch = texts, right, K, branch
        self.max_nodes = 2 * K + 1 if branch else K + 1

    def begin(self, prompts: Any, sampling: Sampling) -> OracleSession:
        return OracleSession(self, prompts)


class OracleSession:
    def __init__(self, oracle: Oracle, prompts: Any) -> None:
        self.oracle, self.rows, self.lengths = oracle, list(range(len(prompts))), [len(p) for p in prompts]

    def propose(self, new_tokens: Any, depth_limit: Any, rng: Any) -> Draft:
        trees, tokens = [], []
        for i, (new, limit) in enumerate(zip(new_tokens, depth_limit, strict=True)):
            self.lengths[i] += len(new)
            text, n, right = self.oracle.texts[self.rows[i]], self.lengths[i], self.oracle.right[self.rows[i]]
            K = self.oracle.K
            true = [*text, *[0] * K][n : n + K]
            good = [t if d < right else (t + 1) % 7 for d, t in enumerate(true)]
            bad = [(t + 2) % 7 for t in true]
            good, bad = ([t if d < limit else -1 for d, t in enumerate(run)] for run in (good, bad))
            if not self.oracle.branch:
                trees.append(tuple(range(-1, K)))
                tokens.append([text[n - 1], *good])
            else:  # two chains side by side, breadth-first: the right one is now the first child, now the second
                first = self.rows[i] % 2
                trees.append((-1, 0, 0, *range(1, 2 * K - 1)))
                pairs = [(g, b) if first else (b, g) for g, b in zip(good, bad, strict=True)]
                tokens.append([text[n - 1], *[token for pair in pairs for token in pair]])
        return Draft(Tree(tuple(trees)), torch.tensor(tokens), None, "chosen")

    def commit(self, paths: Any) -> None:
        pass

    def select(self, rows: Any) -> None:
        self.rows, self.lengths = [self.rows[r] for r in rows], [self.lengths[r] for r in rows]


@pytest.mark.parametrize("branch", [False, True], ids=["chain", "tree"])
def test_rows_that_accept_0_2_and_k(branch: bool) -> None:
    target, _ = models(0)
    prompts, K = [[1], [2, 3, 4], [5, 6], [0] * 10, [3], [4, 4]], 4
    right = [0, 2, 4, 2, 4, 0]
    plain = generate(target, prompts, max_new_tokens=30, sampling=GREEDY)
    texts = [r.prompt + r.tokens for r in plain]
    counted = Counting(target)
    fast = speculate(counted, Oracle(texts, right, K, branch), prompts, max_new_tokens=30, sampling=GREEDY)
    assert [r.tokens for r in fast] == [r.tokens for r in plain]
    for result, accepts in zip(fast, right, strict=True):
        assert {step.accepted for step in result.steps[:-1]} == {accepts}
    passes = [B for B, _ in counted.passes[1:]]  # the first is the prefill
    steps = [len(r.steps) for r in fast]
    assert passes == [sum(n > i for n in steps) for i in range(max(steps))]  # a finished row is in no later pass
    assert len(set(steps)) == 3


def test_finished_rows_cost_the_draft_nothing_either() -> None:
    target, draft = map(Counting, models(1))
    rows = speculate(target, draft, [[1]] * 5, max_new_tokens=[0, 1, 5, 20, 2], draft_len=3, seed=1, stop=())
    assert [len(r.tokens) for r in rows] == [0, 1, 5, 20, 2]
    steps = [len(r.steps) for r in rows]
    assert [B for B, _ in target.passes] == [sum(n > i for n in steps) for i in range(max(steps))]
    assert [B for B, _ in draft.passes] == sorted((B for B, _ in draft.passes), reverse=True)
    assert (draft.passes[0][0], draft.passes[-1][0]) == (4, 1)


# --- what may be one a row ----------------------------------------------------------------------------------


def test_budgets_and_stops_a_row_equal_calls_of_their_own() -> None:
    target, draft = models(2)
    prompts = [[1, 2], [3], [4, 5, 6], [0] * 39, [0] * 40]
    plain = generate(target, prompts, max_new_tokens=20, sampling=GREEDY)
    budgets, stops = [20, 7, 0, 5, 3], [[plain[0].tokens[4]], [], None, [], [1]]
    want = [
        speculate(target, draft, p, max_new_tokens=m, stop=s, sampling=GREEDY)
        for p, m, s in zip(prompts, budgets, stops, strict=True)
    ]
    options = {"sampling": GREEDY}
    for b, s in (
        (budgets, stops),
        (tuple(budgets), tuple(stops)),
        (np.array(budgets), stops),
        (torch.tensor(budgets), [x if x is None else np.array(x, dtype=int) for x in stops]),
        (budgets, [x if x is None else set(x) for x in stops]),
    ):
        got = speculate(target, draft, prompts, max_new_tokens=b, stop=s, **options)
        assert [(r.tokens, r.finish_reason) for r in got] == [(r.tokens, r.finish_reason) for r in want]
    one = speculate(target, draft, prompts[0], max_new_tokens=[20], stop=[stops[0]], **options)
    assert one == want[0]
    assert [s.tokens for s in stream(target, draft, prompts[0], max_new_tokens=[20], stop=[stops[0]], **options)] == [
        s.tokens for s in one.steps
    ]
    square = speculate(target, draft, prompts[:2], max_new_tokens=9, stop=np.array([[1, 2], [3, 4]]), **options)
    assert [r.tokens for r in square] == [
        generate(target, p, max_new_tokens=9, stop=s, **options).tokens
        for p, s in zip(prompts, ([1, 2], [3, 4]), strict=False)
    ]
    target.end_of_text = want[1].tokens[2]
    try:
        mixed = speculate(target, draft, [prompts[1]] * 2, max_new_tokens=7, stop=[None, []], **options)
    finally:
        target.end_of_text = None
    assert mixed[0].finish_reason == "stop"
    assert mixed[1].tokens == want[1].tokens


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 64])
def test_memory_is_bounded_as_stated(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches are as large as `speculate` says, stay where they are, and nothing else of note lives between steps."""
    target, draft = models(3)
    caches: list[KVCache] = []
    alive: list[int] = []
    original, emit = KVCache.__init__, decode._emit

    def watched(self: KVCache, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        caches.append(self)
        places.append(self.kv.data_ptr())

    def alive_now() -> int:
        return stored([t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)])

    def emitting(*args: Any) -> Any:
        if len(alive) < 6:
            alive.append(alive_now())
        return emit(*args)

    places: list[int] = []
    gc.collect()
    before = alive_now()
    monkeypatch.setattr(KVCache, "__init__", watched)
    monkeypatch.setattr(decode, "_emit", emitting)
    tree, n, new = Tree.branching([3, 2]), 4, 20
    speculate(target, draft, [[1, 2, 3, 4]] * rows, max_new_tokens=new, tree=tree, seed=1)
    config = target.config
    slot = 2 * config.n_layer * config.n_embd
    sizes = sorted(c.kv.numel() for c in caches)
    assert sizes == sorted([slot * rows * (n + new + tree.size), slot * rows * (config.block_size + tree.size)])
    assert [c.kv.data_ptr() for c in caches] == places
    laws = 2 * rows * tree.size * config.vocab_size  # p and q
    assert max(alive) - before <= 8 * (sum(sizes) + 2 * laws + AHEAD + COINS + 20 * rows * tree.size) + 4096
    assert max(alive) - before >= 8 * sum(sizes)


def test_the_randomness_of_a_batch_is_that_of_its_rows() -> None:
    """One seed for all: row 0 draws as alone; the keys of the others differ."""
    target, draft = models(0)
    batch = speculate(target, draft, [[1]] * 64, max_new_tokens=12, seed=3, rule="match")
    assert batch[0].tokens == speculate(target, draft, [1], max_new_tokens=12, seed=3, rule="match").tokens
    assert len({tuple(r.tokens) for r in batch}) > 50
    assert len(set(Randomness(3, 64).keys)) == 64
