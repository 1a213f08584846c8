"""Every rule on every tree it admits, filled in every way: the exact law of the real decoder is the target's."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch
from doubles import TableModel, mix, random_gpt, rows_of

from minispec import GPT, RULES, EarlyExitDrafter, ModelDrafter, NGramDrafter, Sampling, Tree, speculate, stream
from minispec.advanced import AdaptiveDrafter, DynamicTree, HeuristicDrafter
from minispec.lab import exact_law, target_law, total_variation
from minispec.sampling import Rng

PROMPT = [0, 1, 2, 0, 1]
SAMPLERS = {"T=1": Sampling(), "T=.7,k=2": Sampling(0.7, top_k=2), "T=0": Sampling(0)}
CHAINS = {f"chain{k}": Tree.chain(k) for k in (1, 2, 3)}
BRANCHING = {str(w): Tree.branching(w) for w in ([2], [2, 1], [2, 2])}


def random_trees() -> dict[str, Tree]:
    out: dict[str, Tree] = {}
    for seed in range(4):
        chance, parents = random.Random(seed), [-1, 0]
        while len(parents) < 4 + seed % 3:
            parents.append(chance.randint(max(parents[-1], 0), len(parents) - 1))
        out[f"random{seed}{parents[1:]}"] = Tree.from_parents(parents)
    return out


TREES = {**CHAINS, **BRANCHING, **random_trees()}


def drafters(target: GPT, draft: GPT, rule: str, name: str, tree: Tree) -> Iterator[tuple[str, object]]:
    """The drafters that this rule admits on this tree, by name."""
    kinds = RULES[rule].kinds
    for how in ("without", "iid", "top-k", "coupled"):
        for who, model in (("model", draft), ("early", None)):
            drafter = ModelDrafter(model, tree, how) if model else EarlyExitDrafter(target, 1, tree, how)
            if drafter.kind in kinds:
                yield f"{who} {how}", drafter
    if tree.is_chain:
        for adaptive in (AdaptiveDrafter(draft, tree.max_depth, 0.2), HeuristicDrafter(draft, 1, tree.max_depth)):
            if "chain" in kinds:
                yield type(adaptive).__name__, adaptive
        if "chosen" in kinds:
            yield "ngram", NGramDrafter(tree.max_depth)
    if name == "[2, 2]" and "chosen" in kinds:
        yield "dynamic", DynamicTree(draft, nodes=5, max_depth=2, width=2)
        yield "ngram tree", NGramDrafter(2, branches=2)


def all_combinations() -> list[tuple[str, str, str]]:
    target, draft = random_gpt(1), random_gpt(2)
    return [
        (rule, name, who)
        for rule in sorted(RULES)
        for name, tree in TREES.items()
        for who, _ in drafters(target, draft, rule, name, tree)
    ]


COMBINATIONS = all_combinations()
COVERING = [  # each rule, tree, drafter and sampler at least once; at most 1,500 leaves each
    ("token", "chain2", "AdaptiveDrafter", "T=1"),
    ("token", "chain2", "HeuristicDrafter", "T=1"),
    ("token", "chain3", "model without", "T=.7,k=2"),
    ("token", "chain1", "early without", "T=1"),
    ("token", "chain2", "model iid", "T=0"),
    ("block", "chain1", "model without", "T=1"),
    ("block", "chain2", "model without", "T=1"),
    ("block", "chain3", "model without", "T=.7,k=2"),
    ("block", "chain2", "AdaptiveDrafter", "T=1"),
    ("block", "chain3", "model without", "T=0"),
    ("match", "chain3", "ngram", "T=1"),
    ("match", "[2, 2]", "ngram tree", "T=1"),
    ("match", "[2, 2]", "dynamic", "T=1"),
    ("match", "[2, 2]", "model top-k", "T=1"),
    ("match", "[2, 1]", "model without", "T=.7,k=2"),
    ("match", "[2]", "model iid", "T=1"),
    ("match", "random1[0, 0, 0, 2]", "early top-k", "T=0"),
    ("coupled", "[2, 1]", "model coupled", "T=.7,k=2"),
    ("coupled", "chain2", "early coupled", "T=1"),
    ("rrs", "[2]", "model without", "T=1"),
    ("rrs", "[2, 1]", "model without", "T=1"),
    ("rrs", "[2, 2]", "model without", "T=.7,k=2"),
    ("rrs", "[2, 2]", "model without", "T=0"),
    ("rrs", "random0[0, 1, 1]", "early without", "T=.7,k=2"),
    ("rrs", "chain2", "model iid", "T=1"),
    ("specinfer", "[2]", "model iid", "T=1"),
    ("specinfer", "[2]", "early iid", "T=1"),
    ("specinfer", "[2, 1]", "model iid", "T=.7,k=2"),
    ("specinfer", "[2, 2]", "model iid", "T=0"),
    ("traversal", "chain2", "model without", "T=1"),
    ("traversal", "[2]", "model without", "T=1"),
    ("traversal", "[2, 1]", "model without", "T=1"),
    ("traversal", "[2, 2]", "model without", "T=.7,k=2"),
]


def find(target: GPT, draft: GPT, rule: str, name: str, who: str) -> tuple[Tree, object]:
    tree = next(tree for key, tree in TREES.items() if key.startswith(name.split("[0")[0]))
    return tree, dict(drafters(target, draft, rule, name, tree))[who]


def deviation(
    target: GPT, drafter: object, rule: str, tree: Tree, sampling: Sampling, leaves: int, whole: int = 99
) -> tuple[float, int]:
    """TV of the exact law over depth + 1 tokens to the target's, and the number of leaves.

    Trees of more than `whole` nodes, and those that would pass `leaves`, are followed for one step, which the
    target's own law then continues (laws of steps compose).
    """
    length, count = tree.max_depth + 1, 0
    options = {"max_new_tokens": length, "rule": rule, "sampling": sampling}

    def run(rng: Rng) -> tuple[int, ...]:
        nonlocal count
        count += 1
        return tuple(speculate(target, drafter, PROMPT, rng=rng, **options).tokens)

    want = target_law(target, PROMPT, length, sampling)
    if tree.size <= whole:
        try:
            return total_variation(exact_law(run, max_leaves=leaves), want), count
        except ValueError:
            count = 0

    def step(rng: Rng) -> tuple[int, ...]:
        nonlocal count
        count += 1
        return next(stream(target, drafter, PROMPT, rng=rng, **options)).tokens

    law: dict[tuple[int, ...], float] = {}
    for run_, prob in exact_law(step, max_leaves=leaves).items():
        for rest, more in target_law(target, [*PROMPT, *run_], length - len(run_), sampling).items():
            law[(*run_, *rest)] = law.get((*run_, *rest), 0.0) + prob * more
    return total_variation(law, want), count


@pytest.mark.parametrize("case", COVERING, ids=" ".join)
def test_covering_set(two: tuple[GPT, GPT], case: tuple[str, str, str, str]) -> None:
    rule, name, who, sampler = case
    tree, drafter = find(*two, rule, name, who)
    tv, count = deviation(two[0], drafter, rule, tree, SAMPLERS[sampler], 1500)
    assert tv < 1e-10
    assert count <= 1500


def test_the_covering_set_covers() -> None:
    for place, all_ in ((0, {r for r, _, _ in COMBINATIONS}), (2, {w for _, _, w in COMBINATIONS}), (3, set(SAMPLERS))):
        assert {case[place] for case in COVERING} >= all_
    assert {case[1] for case in COVERING} >= {*CHAINS, *BRANCHING}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rule", "shape"), sorted({(rule, name) for rule, name, _ in COMBINATIONS}))
def test_every_admissible_combination(two: tuple[GPT, GPT], rule: str, shape: str) -> None:
    """With -rP: combinations, leaves, worst TV and seconds of each rule and tree."""
    worst, runs, leaves, start = 0.0, 0, 0, time.monotonic()
    for rule_, name, who in COMBINATIONS:
        if (rule_, name) != (rule, shape):
            continue
        tree, drafter = find(*two, rule, name, who)
        for sampler, sampling in SAMPLERS.items():
            whole = 99 if sampling != Sampling() else 4
            tv, count = deviation(two[0], drafter, rule, tree, sampling, 15_000, whole)
            worst, runs, leaves = max(worst, tv), runs + 1, leaves + count
            assert tv < 1e-10, (rule, name, who, sampler)
    print(
        f"{rule} {shape}: {runs} combinations, {leaves} leaves, worst TV {worst:.1e}, {time.monotonic() - start:.0f} s"
    )


# --- the rules on laws written by hand ---------------------------------------------------------------------

F3_P, F3_Q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]


def emitted(rule: str, how: str, spoil=None, rest=None) -> list[float]:  # type: ignore[no-untyped-def]
    """The law of the first token with two children of the root (fixture F3); `spoil` may change the laws told."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in (F3_P, F3_Q))
    target, draft = TableModel(rows_of(*F3_P)), TableModel(rows_of(*F3_Q))
    drafter = ModelDrafter(draft, Tree.branching([2]), how)  # type: ignore[arg-type]

    def run(rng: Rng) -> int:
        session = drafter.begin([[0]], Sampling())
        draft_ = session.propose([[]], [1], rng)
        told = draft_.q if spoil is None else spoil(draft_.q, draft_.tokens)
        laws = p.expand(1, 3, 4)
        path, token = RULES[rule].verify(laws, told, draft_.tokens, draft_.tree, rng)
        return int(draft_.tokens[0, path[0, 1]]) if path[0, 1] > 0 else int(token[0])

    assert target is not None
    assert q is not None
    law = exact_law(run)
    return [law.get(x, 0.0) for x in range(4)]


@pytest.mark.parametrize(
    ("rule", "how"),
    [("specinfer", "iid"), ("rrs", "without"), ("traversal", "without"), ("match", "top-k"), ("match", "iid")],
)
def test_f3_right_siblings_emit_p(rule: str, how: str) -> None:
    assert emitted(rule, how) == pytest.approx(F3_P, abs=1e-9)


def test_f3_siblings_without_replacement_told_the_original_q() -> None:
    def original(q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        q = q.clone()
        q[:, 2] = q[:, 1]
        return q

    assert emitted("rrs", "without", original) == pytest.approx([0.357, 0.343, 0.200, 0.100], abs=5e-4)


@pytest.mark.parametrize(
    ("last", "want"), [("p", [0.204, 0.328, 0.312, 0.156]), ("residual", [0.26, 0.32, 0.28, 0.14])]
)
def test_f3_iid_siblings_whose_ratio_is_never_updated(last: str, want: list[float]) -> None:
    p, q = (torch.tensor(x, dtype=torch.float64) for x in (F3_P, F3_Q))

    def run(rng: Rng) -> int:
        for _ in range(2):
            x = int(rng.pick(q[None]))
            if rng.flip((p[x] / q[x]).clamp(max=1)[None])[0]:
                return x
        return int(rng.pick((p if last == "p" else (p - q).clamp(min=0))[None]))

    law = exact_law(run)
    assert [law[x] for x in range(4)] == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize(
    ("rule", "want"), [("token", 10 / 9), ("block", 11 / 9), ("traversal", 11 / 9), ("rrs", 10 / 9)]
)
def test_f7_expected_accepted_drafts(rule: str, want: float) -> None:
    target, draft = TableModel(rows_of(1 / 3, 2 / 3)), TableModel(rows_of(2 / 3, 1 / 3))
    law = exact_law(
        lambda rng: next(stream(target, draft, [0], max_new_tokens=3, draft_len=2, rule=rule, rng=rng)).accepted  # type: ignore[arg-type]
    )
    assert sum(a * prob for a, prob in law.items()) == pytest.approx(want, abs=1e-9)


def accepted(target: object, draft: object, rule: str, K: int) -> float:
    law = exact_law(
        lambda rng: next(stream(target, draft, [0], max_new_tokens=K + 1, draft_len=K, rule=rule, rng=rng)).accepted  # type: ignore[arg-type, type-var]
    )
    return sum(a * prob for a, prob in law.items())


@pytest.mark.parametrize("seed", range(6))
def test_block_accepts_no_less_than_token_and_traversal_is_block_on_a_chain(seed: int) -> None:
    target = random_gpt(seed, vocab=2)
    draft = mix(target, random_gpt(seed + 50, vocab=2), 0.3)
    by_rule = {rule: accepted(target, draft, rule, 3) for rule in ("token", "block", "traversal", "rrs")}
    assert by_rule["block"] >= by_rule["token"] - 1e-12
    assert by_rule["traversal"] == pytest.approx(by_rule["block"], abs=1e-9)
    assert by_rule["rrs"] == pytest.approx(by_rule["token"], abs=1e-9)
    assert accepted(target, draft, "block", 1) == pytest.approx(accepted(target, draft, "token", 1), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_acceptance_of_k_siblings_is_that_of_the_table(k: int) -> None:
    """Six tokens, case A of the table: rrs without replacement .80 .91 .96 .97, top-k with match .40 .65 .71 .86."""
    p, q = (0.40, 0.25, 0.15, 0.10, 0.06, 0.04), (0.30, 0.30, 0.10, 0.05, 0.15, 0.10)
    target, draft = TableModel(rows_of(*p)), TableModel(rows_of(*q))
    for rule, how, want in (
        ("rrs", "without", (0.80, 0.91, 0.96, 0.97)),
        ("specinfer", "iid", (0.80, 0.89, 0.94, 0.96)),
        ("match", "top-k", (0.40, 0.65, 0.71, 0.86)),
    ):
        if k == 4 and how == "iid":
            continue  # 6^4 draws: many leaves for one more digit
        drafter = ModelDrafter(draft, Tree.branching([k]), how)  # type: ignore[arg-type]
        law = exact_law(
            lambda rng, d=drafter, r=rule: next(stream(target, d, [0], max_new_tokens=2, rule=r, rng=rng)).accepted  # type: ignore[arg-type, misc]
        )
        assert law[1] == pytest.approx(want[k - 1], abs=0.0051)
