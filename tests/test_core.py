"""The kernel seen closely: what no other quick test pins down. With the other tests marked `core`, mutants die of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from doubles import Scripted, random_gpt
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minispec import RULES, KVCache, Randomness, Rule, Sampling, Tree
from minispec.lab import exact_law
from minispec.model import GPTConfig, read
from minispec.noise import AHEAD, COINS, CUT, Ahead, Noise, exponential, mix
from minispec.sampling import COLDEST, HOTTEST, Rng, Shifted, check_law
from minispec.tree import constant
from minispec.verify import ANY, NOTHING, TINY, WHY_NOT, block, check_kind, find_rule, match, residual, rrs, token

pytestmark = pytest.mark.core

# --- each rule's exact joint law, on laws that depend on everything before ---------------------------------


class Laws:
    """A law for every prefix, drawn at random, with holes as top-k and top-p make them."""

    def __init__(self, seed: int, vocab: int = 3) -> None:
        self.seed, self.vocab = seed, vocab
        self.known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        if prefix not in self.known:
            key = mix(self.seed, sum((x + 1) * 10**i for i, x in enumerate(prefix)))
            law = torch.rand(self.vocab, generator=torch.Generator().manual_seed(key), dtype=torch.float64)
            law[law < 0.25] = 0.0
            law[key % self.vocab] += 0.1
            self.known[prefix] = law / law.sum()
        return self.known[prefix]


def draw(tree: Tree, q: Laws, how: str, rng: Rng, limit: int = 9) -> tuple[Tensor, Tensor]:
    """Tokens (1, N), -1 where no sibling was left or deeper than `limit`, and the law of each (1, N, V)."""
    tokens, laws = [0], [torch.zeros(q.vocab, dtype=torch.float64)]
    prefixes: list[tuple[int, ...] | None] = [()]
    left: dict[int, Tensor] = {}
    for parent in tree.rows[0][1:]:
        prefix = prefixes[parent]
        prefix = None if prefix is None or len(prefix) >= limit else prefix
        law = torch.zeros(q.vocab, dtype=torch.float64) if prefix is None else left.get(parent, q(prefix))
        if prefix is None or law.sum() == 0:
            tokens.append(-1), laws.append(torch.zeros_like(law)), prefixes.append(None)
            continue
        x = int(rng.pick(law[None]))
        tokens.append(x), laws.append(law), prefixes.append((*prefix, x))
        if how == "without":
            rest = law.clone()
            rest[x] = 0.0
            left[parent] = rest / rest.sum() if rest.sum() > 0 else rest
    return torch.tensor([tokens]), torch.stack(laws)[None]


def targets(tree: Tree, tokens: Tensor, p: Laws) -> Tensor:
    """p at each node (1, N, V)."""
    prefixes: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.rows[0][1:], start=1):
        prefixes.append((*prefixes[parent], max(int(tokens[0, node]), 0)))
    return torch.stack([p(prefix) for prefix in prefixes])[None]


def joint(
    rule: str, tree: Tree, how: str, seed: int, limit: int = 9
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float]]:
    """The exact law of depth + 1 tokens that one step and p after it give, and the law that they should have."""
    p, q, length = Laws(seed), Laws(seed + 100), tree.max_depth + 1

    def run(rng: Rng) -> tuple[int, ...]:
        tokens, laws = draw(tree, q, how, rng, limit)
        path, last = RULES[rule].verify(targets(tree, tokens, p), laws, tokens, tree, rng)
        kept = [int(tokens[0, node]) for node in path[0, 1:].tolist() if node >= 0]
        return (*kept, int(last[0]))

    law: dict[tuple[int, ...], float] = {}
    for out, prob in exact_law(run).items():
        for rest in itertools.product(range(3), repeat=length - len(out)):
            more, text = prob, list(out)
            for x in rest:
                more *= float(p(tuple(text))[x])
                text.append(x)
            law[tuple(text)] = law.get(tuple(text), 0.0) + more
    want = {
        xs: math.prod(float(p(xs[:i])[x]) for i, x in enumerate(xs))
        for xs in itertools.product(range(3), repeat=length)
    }
    return law, want


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("rule", "shape", "how"),
    [
        ("token", [1, 1], "without"),
        ("block", [1], "without"),
        ("block", [1, 1], "without"),
        ("match", [2, 1], "without"),
        ("rrs", [1, 1], "without"),
        ("rrs", [3], "without"),
        ("rrs", [2, 1], "without"),
        ("specinfer", [2], "iid"),
        ("specinfer", [2, 1], "iid"),
    ],
)  # fmt: skip
def test_exact_joint_law(rule: str, shape: list[int], how: str, seed: int) -> None:
    law, want = joint(rule, Tree.branching(shape), how, seed)
    for xs, prob in want.items():
        assert law.get(xs, 0.0) == pytest.approx(prob, abs=1e-10), xs
    assert sum(law.values()) == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("rule", ["token", "block", "match", "rrs"])
def test_exact_joint_law_where_the_draft_is_cut_short(rule: str, limit: int) -> None:
    law, want = joint(rule, Tree.chain(2), "without", 7, limit)
    for xs, prob in want.items():
        assert law.get(xs, 0.0) == pytest.approx(prob, abs=1e-10), xs


def test_block_accepts_what_its_paper_says() -> None:
    """Two tokens, p = (1/3, 2/3), q the reverse, K = 2: 11/9 accepted in expectation, where token has 10/9 (F7)."""
    p, q = (torch.tensor(x, dtype=torch.float64) / 3 for x in ([1, 2], [2, 1]))
    for rule, want in ((block, 11 / 9), (token, 10 / 9)):

        def run(rng: Rng, rule=rule) -> int:  # type: ignore[no-untyped-def]
            drafted = torch.stack([rng.pick(q[None]), rng.pick(q[None])], 1)
            return int(rule(p.expand(1, 3, 2), q.expand(1, 2, 2), drafted, rng)[0])

        assert sum(n * prob for n, prob in exact_law(run).items()) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("K", [1, 2, 7, 40])
def test_block_by_its_recursion_the_long_way(K: int, dtype: torch.dtype) -> None:
    """Coins, length and residual of every row, with tokens that p or q give nothing and absent ones."""
    B, V, close = 6, 5, 1e-5 if dtype == torch.float32 else 1e-12
    generator = torch.Generator().manual_seed(K)
    p, q = (torch.rand(B, K + 1, V, generator=generator, dtype=torch.float64) ** 2 for _ in range(2))
    p = torch.where(torch.rand(p.shape, generator=generator) < 0.02, 0.0, p)
    p, q = p / p.sum(-1, keepdim=True), 0.4 * q / q.sum(-1, keepdim=True) + 0.6 * p / p.sum(-1, keepdim=True)
    drafted = torch.stack([row.multinomial(1, generator=generator)[:, 0] for row in q])[:, :K]  # (B, K)
    drafted[1, K // 2 :], drafted[2] = -1, -1
    q = torch.where((drafted >= 0)[..., None], q[:, :K], 0.0)

    class Asked(Randomness):
        def flip(self, prob: Tensor) -> Tensor:
            coins.append(prob)
            passed.append(super().flip(prob))
            return passed[0]

        def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
            laws.append(weights)
            return super().pick(weights, at)

    coins: list[Tensor] = []
    passed: list[Tensor] = []
    laws: list[Tensor] = []
    accepted, _ = block(p.to(dtype), q.to(dtype), drafted, Asked(3, B))
    for row in range(B):
        w, weights, h = 1.0, [1.0], []
        for i, x in enumerate(drafted[row].tolist()):
            w = min(1.0, w * float(p[row, i, x] / q[row, i, x])) if x >= 0 else 0.0
            rest = w * p[row, i + 1] - (q[row, i + 1] if i + 1 < K else 0.0)
            s = float(rest.clamp(min=0).sum())
            h.append(s / (s + 1 - w) if s + 1 - w > TINY else 1.0)
            weights.append(w)
        assert coins[0][row].tolist() == pytest.approx(h, abs=close)
        a = max((i + 1 for i, ok in enumerate(passed[0][row].tolist()) if ok), default=0)
        assert int(accepted[row]) == a
        want = residual(weights[a] * p[row, a], q[row, a] if a < K else torch.zeros(V, dtype=torch.float64))
        assert laws[0][row].tolist() == pytest.approx(want.tolist(), abs=20 * close)
    assert int(accepted[2]) == 0
    assert float(coins[0][2].max()) == 0


@pytest.mark.parametrize("rule", [token, block])
@pytest.mark.parametrize(
    ("dtype", "tiny"), [(torch.float32, 1e-10), (torch.float32, 1e-30), (torch.float32, 1e-42), (torch.float64, 1e-200)]
)
def test_ratios_beyond_the_range_of_floats(rule: Any, dtype: torch.dtype, tiny: float) -> None:
    """A draft that all but rules out what it drew: the product of p / q overflows, the coins are 1 all the same."""
    p, q = torch.tensor([[1.0, tiny]], dtype=dtype), torch.tensor([[tiny, 1.0]], dtype=dtype)
    rng = Coins(0.5)
    accepted, _ = rule(p.expand(1, 5, 2), q.expand(1, 4, 2), torch.zeros(1, 4, dtype=torch.long), rng)
    assert rng.probs[0].tolist() == [pytest.approx([1, 1, 1, 1], abs=1e-6)]
    assert int(accepted) == 4
    up_and_down = torch.tensor([[0, 1, 0, 1]])  # w = 1, tiny, 1, tiny: what was gained before is not counted twice
    rng = Coins(0.5)
    rule(p.expand(1, 5, 2), q.expand(1, 4, 2), up_and_down, rng)
    assert rng.probs[0].isfinite().all()
    law = exact_law(
        lambda rng: int(rule(p.expand(1, 2, 2), q.expand(1, 1, 2), rng.pick(q)[:, None], rng)[1])  # the bonus, or not
    )
    assert law[0] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("rule", [token, block])
def test_a_draft_equal_to_the_target_is_accepted_whole(rule) -> None:  # type: ignore[no-untyped-def]
    """Where p = q the residual is nothing and block's h is 0 / 0; both pass. No draft at all: the bonus alone."""
    p = torch.tensor([[[0.5, 0.3, 0.2]] * 4], dtype=torch.float64)
    law = exact_law(lambda rng: int(rule(p, p[:, :3], torch.tensor([[2, 0, 1]]), rng)[0]))
    assert law == {3: pytest.approx(1.0)}
    rng = Coins(0.5)
    rule(p, p[:, :3], torch.tensor([[2, 0, 1]]), rng)
    assert torch.allclose(rng.probs[0], torch.ones(1, 3, dtype=torch.float64))
    none = exact_law(lambda rng: tuple(x.item() for x in rule(p[:, :1], p[:, :0], torch.zeros(1, 0).long(), rng)))
    assert none == pytest.approx({(0, 0): 0.5, (0, 1): 0.3, (0, 2): 0.2})


class Coins:
    """An rng whose answers are computed from what it is asked: rows alone and in company get the same."""

    def __init__(self, least: float) -> None:
        self.least = least
        self.asked: list[tuple[str, tuple[int, ...], object]] = []
        self.probs: list[Tensor] = []

    def flip(self, prob: Tensor) -> Tensor:
        assert ((prob >= 0) & (prob <= 1 + 1e-12)).all()
        self.asked.append(("flip", tuple(prob.shape), None))
        self.probs.append(prob)
        return prob > self.least

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        assert (weights >= 0).all()
        assert torch.allclose(weights.sum(-1), torch.ones(len(weights), dtype=weights.dtype))
        self.asked.append(("pick", tuple(weights.shape), at))
        return weights.argmax(-1)


TREES = Tree.from_parents([[-1, 0, 0, 1, 2, 2], [-1, 0, 0, 0, 1, 1], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("least", [0.2, 0.45, 0.7])
@pytest.mark.parametrize("name", ["token", "block", "match", "rrs"])
def test_rows_in_company_are_rows_alone(name: str, least: float) -> None:
    """Every row of a batch with a tree of its own, some nodes absent, gets what it gets alone."""
    generator, rule = torch.Generator().manual_seed(5), RULES[name]
    for round_ in range(12):
        tree = TREES if rule.tree else Tree.chain(5)
        B, N, V = 4, 6, 4
        p, q = (torch.rand(2, B, N, V, generator=generator, dtype=torch.float64) ** 3).unbind(0)
        q[:, 0] = 0
        tokens = torch.randint(-1 if round_ % 2 else 0, V, (B, N), generator=generator)
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True).clamp(min=1e-30)
        q = torch.where((tokens >= 0)[..., None], q, 0.0)
        path, last = rule.verify(p, q, tokens, tree, Coins(least))
        for b in range(B):
            row = slice(b, b + 1)
            own = Tree((tree.of_row(b),))
            path_b, last_b = rule.verify(p[row], q[row], tokens[row], own, Coins(least))
            kept = [node for node in path[b].tolist() if node >= 0]
            assert kept == [node for node in path_b[0].tolist() if node >= 0]
            assert last[b] == last_b[0]
            assert all(own.rows[0][child] == parent for parent, child in itertools.pairwise(kept))
            assert path[b].tolist() == kept + [-1] * (path.shape[1] - len(kept))


def test_rules_stop_asking_when_nobody_is_left() -> None:
    """On a CPU a loop ends with its last row: a second depth, or sibling, is not looked at for nothing."""
    p = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).expand(1, 7, 3)
    q = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).expand(1, 7, 3)
    tree, tokens = Tree.branching([2, 2]), torch.tensor([[0, 0, 1, 0, 1, 0, 1]])
    rng = Coins(0.5)
    path, last = match(p, None, tokens, tree, rng)
    assert rng.asked == [("pick", (1, 3), [1])]
    assert (path.tolist(), last.tolist()) == ([[0, -1]], [2])
    rng = Coins(0.5)
    path, last = rrs(p, q, tokens, tree, rng)
    assert [what for what, _, _ in rng.asked] == ["flip", "flip", "pick"]
    assert (path.tolist(), last.tolist()) == ([[0, -1]], [2])
    sure = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(1, 7, 3)
    rng = Coins(0.5)
    path, last = rrs(sure, sure, tokens, tree, rng)  # the first child of each passes: the second is not asked for
    assert [what for what, _, _ in rng.asked] == ["flip", "flip", "pick"]
    assert (path.tolist(), last.tolist()) == ([[0, 1, 3]], [0])
    rng = Coins(0.5)
    path, last = match(sure, None, tokens, tree, rng)
    assert rng.asked == [("pick", (1, 3), [1]), ("pick", (1, 3), [2]), ("pick", (1, 3), [3])]
    assert (path.tolist(), last.tolist()) == ([[0, 1, 3]], [0])


def test_residual_keeps_small_but_real_remainders() -> None:
    p, q = torch.tensor([0.5 + 1e-7, 0.5 - 1e-7], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert residual(p, q).tolist() == pytest.approx([1, 0])
    both = residual(torch.stack([p, q]), torch.stack([q, q]))  # each row for itself
    assert both.tolist() == [pytest.approx([1, 0]), [0.5, 0.5]]
    noise = torch.tensor([[1e-9, 1 - 1e-9], [0.0, 1.0]], dtype=torch.float64)
    assert torch.equal(residual(noise[0], noise[1]), noise[0])  # no entry above `NOTHING`
    assert (NOTHING, TINY) == (1e-9, 1e-15)


class Elsewhere(Coins):
    """An rng on whatever device it is asked on."""

    def flip(self, prob: Tensor) -> Tensor:
        self.asked.append(("flip", tuple(prob.shape), None))
        return prob > self.least

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        self.asked.append(("pick", tuple(weights.shape), at))
        return weights.argmax(-1)


@pytest.mark.parametrize("name", ["token", "block", "match", "rrs"])
def test_rules_stay_on_their_device_and_never_wait_for_it(name: str) -> None:
    """On the meta device, which has no values: whoever looks at one, or mixes in a tensor of the CPU, fails."""
    rule, rng = RULES[name], Elsewhere(0.5)
    tree = Tree.from_parents([-1, 0, 0, 1, 2]) if rule.tree else Tree.chain(4)
    p = torch.empty(3, 5, 4, device="meta", dtype=torch.float64)
    path, last = rule.verify(p, p, torch.empty(3, 5, device="meta", dtype=torch.long), tree, rng)
    assert path.device.type == last.device.type == "meta"
    assert (path.shape, last.shape) == ((3, tree.max_depth + 1), (3,))
    asked = {
        "token": [("flip", (3, 4), None), ("pick", (3, 4), None)],
        "block": [("flip", (3, 4), None), ("pick", (3, 4), None)],
        "match": [("pick", (3, 4), [depth] * 3) for depth in (1, 2, 3)],
        "rrs": [("flip", (3,), None)] * 4 + [("pick", (3, 4), None)],
    }
    assert rng.asked == asked[name]


# --- rules as objects --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [["token"], {"token"}, 1, "Token", ""])
def test_no_such_rule(bad: object) -> None:
    with pytest.raises(ValueError, match=r"^rule must be one of block, coupled, match, rrs, specinfer, token, .*, got"):
        find_rule(bad)  # type: ignore[arg-type]


def test_the_rules_and_their_kinds() -> None:
    kinds = {name: sorted(RULES[name].kinds) for name in ("token", "block", "match", "coupled", "rrs", "specinfer")}
    assert kinds == {
        "token": ["chain"],
        "block": ["chain"],
        "match": ["chain", "chosen", "coupled", "iid", "without"],
        "coupled": ["coupled"],
        "rrs": ["chain", "without"],
        "specinfer": ["chain", "iid"],
    }
    assert {name: RULES[name].how for name in kinds} == {
        "token": "without",
        "block": "without",
        "match": "top-k",
        "coupled": "coupled",
        "rrs": "without",
        "specinfer": "iid",
    }
    for name in kinds:
        assert RULES[name].name == name
        assert find_rule(name) is RULES[name]
        assert RULES[name].needs_q == (name not in ("match", "coupled"))
    assert find_rule(RULES["rrs"]) is RULES["rrs"]
    for kind in sorted(ANY):
        assert Rule("mine", frozenset({kind}), "without", chain=token).needs_q == (kind not in ("chosen", "coupled"))
    assert sorted(ANY) == sorted(WHY_NOT) == kinds["match"]


def test_a_rule_has_one_function_and_known_kinds() -> None:
    for both in ({}, {"chain": token, "tree": match}):
        with pytest.raises(ValueError, match=r"^rule 'mine' must have either a chain function or a tree function$"):
            Rule("mine", frozenset({"chain"}), "without", **both)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be some of chain, chosen, coupled, iid, without, got \['a', 'b'\]$"):
        Rule("mine", frozenset({"b", "chain", "a"}), "without", chain=token)
    with pytest.raises(ValueError, match=r"^rule 'mine': kinds must be some of .*, got \[\]$"):
        Rule("mine", frozenset(), "without", chain=token)
    with pytest.raises(AttributeError):
        RULES["token"].name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("kind", sorted(ANY))
def test_check_kind(kind: str) -> None:
    for name in ("token", "match", "coupled", "rrs", "specinfer"):
        rule = RULES[name]
        if kind in rule.kinds:
            check_kind(rule, kind)
        else:
            with pytest.raises(ValueError, match="does not accept") as error:
                check_kind(rule, kind)
            accepted = ", ".join(sorted(rule.kinds))
            want = f"rule {name!r} does not accept a draft of kind {kind!r} (only {accepted}): {WHY_NOT[kind]}"
            assert str(error.value) == want
    with pytest.raises(ValueError, match=r"^kind of a draft must be one of chain, chosen, .*, without, got 'all'$"):
        check_kind(RULES["match"], "all")


REASONS = {
    "chosen": r"^a ratio test needs the law .* have none: testing them with p/q would change the output distribution$",
    "without": "^the rule does not know that a sibling's law depends on the siblings drawn before it$",
    "iid": "^the rule takes siblings to be drawn without replacement, or to have none$",
    "coupled": "^tokens drawn by the noise that verification will use again are not independent of its coins$",
    "chain": "^the rule wants its draft drawn by the target's own noise$",
}


def test_every_refusal_has_its_reason() -> None:
    import re

    assert set(REASONS) == set(WHY_NOT)
    for kind, pattern in REASONS.items():
        assert re.search(pattern, WHY_NOT[kind]), kind
    assert "re-ranked or re-sorted candidates have none" in WHY_NOT["chosen"]


# --- randomness --------------------------------------------------------------------------------------------


def test_mix_is_splitmix64() -> None:
    """The published test vector: state 1234567, the increment added once for each output."""
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    gamma, back = 0x9E3779B97F4A7C15, pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    for i, value in enumerate(want):
        key = (1234567 + i * gamma) * back % (1 << 64)
        assert mix(key, 0) == value
    assert mix(5, 3) == mix((5 + 3 * 0xD1B54A32D192ED03 * back) % (1 << 64), 0)
    assert 0 <= mix(-1, -7) < 1 << 64


def sfc64(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seed))


def race(u: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exp(1) noise of uniforms, the long way."""
    return -torch.log1p(-torch.as_tensor(u).to(dtype))


def test_a_seed_means_these_very_draws() -> None:
    """Coins are uniforms of one generator, picks races against -log(1 - u) of another's; nothing else."""
    rng, weights = Randomness([11, 22], rows=2), torch.tensor([[0.1, 0.4, 0.5], [0.3, 0.3, 0.4]])
    fresh, coins, keyed = sfc64(mix(11, 2)), sfc64(mix(mix(11, 2), 1)), torch.Generator()
    for dtype in (torch.float32, torch.bfloat16):
        prob = torch.linspace(0, 1, 8).to(dtype)
        if dtype == torch.float32:
            u = torch.from_numpy(coins.random(COINS, np.float32)).view(-1, 8)
        assert torch.equal(rng.flip(prob), u[int(dtype == torch.bfloat16)] < prob)
    u = torch.from_numpy(coins.random(COINS, np.float64)).view(-1, 8)
    assert torch.equal(rng.flip(torch.linspace(0, 1, 8).double()), u[0] < torch.linspace(0, 1, 8).double())
    noise = race(fresh.random(AHEAD // 6 * 6)).view(-1, 2, 3)
    for draw in range(20):
        assert torch.equal(rng.pick(weights), (weights / noise[draw]).argmax(-1))
    for position in range(20):
        noise = torch.stack(
            [
                race(torch.rand(3, generator=keyed.manual_seed(mix(key, at)), dtype=torch.float64))
                for key, at in ((11, position), (22, position + 5))
            ]
        )
        assert torch.equal(rng.pick(weights, at=[position, position + 5]), (weights / noise).argmax(-1))


def test_a_coin_of_probability_0_never_passes_even_where_the_uniform_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ahead, "next", lambda self, shape, dtype: torch.zeros(shape, dtype=dtype))
    assert Randomness(0).flip(torch.tensor([0.0, 1e-30, 1.0])).tolist() == [False, True, True]


def test_coins_are_one_sequence_of_uniforms_whatever_the_layout_of_the_probabilities() -> None:
    whole = torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
    for prob in (whole, whole.t().contiguous().t(), whole.double(), whole[:, 2:], whole.t()[1:3], whole[0, 0]):
        single = prob.dtype == torch.float32
        u = sfc64(mix(mix(5, 1), 1)).random(COINS // prob.numel() * prob.numel(), np.float32 if single else np.float64)
        want = torch.from_numpy(u[: prob.numel()]).view(prob.shape)
        assert torch.equal(Randomness(5).flip(prob), prob > want)
    assert Randomness(5).flip(torch.empty(3, 0)).shape == (3, 0)
    for dtype in (torch.float16, torch.bfloat16):  # the coin is finer than its probability
        rate = Randomness(5).flip(torch.full((500_000,), 0.001, dtype=dtype)).float().mean()
        assert 0.0007 < rate < 0.0013
    assert Randomness(5).flip(torch.tensor([1, 0])).tolist() == [True, False]


def test_draws_are_made_on_the_cpu_and_handed_to_the_device() -> None:
    rng = Randomness(0, rows=2)
    assert rng.flip(torch.empty(3, device="meta")).device.type == "meta"
    for at in (None, [3, 4]):
        assert rng.pick(torch.empty(2, 5, device="meta"), at=at).device.type == "meta"


@pytest.mark.parametrize(
    ("dtype", "want"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_noise_is_as_fine_as_the_weights(
    dtype: torch.dtype, want: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fresh(self: Ahead, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        seen.append(dtype)
        return torch.ones(shape)

    def keyed(self: Noise, keys: list[int], positions: list[int], V: int, dtype: torch.dtype) -> Tensor:
        seen.append((dtype, positions))
        return torch.ones(len(keys), V)

    monkeypatch.setattr(Ahead, "next", fresh)
    monkeypatch.setattr(Noise, "at", keyed)
    Randomness(0, rows=2).pick(torch.ones(2, 3, dtype=dtype))
    Randomness(0, rows=2).pick(torch.ones(2, 3, dtype=dtype), at=[0, 1])
    assert seen == [want, (want, [0, 1])]


@pytest.mark.parametrize("kind", ["fresh", "coins"])
def test_numbers_made_ahead_are_one_sequence(kind: str) -> None:
    """Made in blocks of about `AHEAD` or `COINS` numbers, which draws of one dtype use up, whatever their shapes."""
    size, seed = (AHEAD, 5) if kind == "fresh" else (COINS, mix(5, 1))
    ahead: Ahead = getattr(Noise(5), kind)
    again, f32, f64 = sfc64(seed), torch.float32, torch.float64

    def block(n: int, dtype: torch.dtype) -> Tensor:
        if kind == "fresh":
            return race(again.random(n), dtype)
        return torch.from_numpy(again.random(n, np.float32 if dtype == f32 else np.float64))

    V = size // 4  # four rows a block
    first = block(size, f32).view(4, V)
    assert torch.equal(getattr(Noise(5), kind).next((1,), f32), first[0, :1])
    assert torch.equal(ahead.next((1, V), f32), first[:1])
    assert torch.equal(ahead.next((2, V), f32), first[1:3])
    second = block(size, f32).view(4, V)  # one row is left, two are wanted
    assert torch.equal(ahead.next((2, V), f32), second[:2])
    assert torch.equal(ahead.next((2, V), f32), second[2:])
    exact = block(size, f32).view(4, V)
    assert torch.equal(ahead.next((V,), f32), exact[0])
    assert torch.equal(ahead.next((3, V), f32), exact[1:])  # as many are left as are wanted
    third = block(size, f32).view(4, V)
    assert torch.equal(ahead.next((1, V), f32), third[:1])  # three rows are left, and given up for another dtype
    fourth = block(size, f64).view(-1)
    assert torch.equal(ahead.next((2, V), f64), fourth[: 2 * V].view(2, V))
    used = 2 * V
    for shape in ((1, 7), (), (0, 3), *[(1, 5)] * 20, (2, 5), (2, 5), (3,), *[(3, 2, 1)] * 40, (1, 7)):
        n = math.prod(shape)  # handed out some draws at a time, the rest cut anew for other shapes
        assert torch.equal(ahead.next(shape, f64), fourth[used : used + n].view(shape))
        used += n
    assert ahead.next((0, 3), f64).dtype == f64
    assert CUT < 20
    assert (AHEAD, COINS) == (1 << 16, 1 << 12)  # what is given up depends on it, and so does what a seed means
    wide = block(7 * 2 * size, f32)  # more than a block
    assert torch.equal(ahead.next((7, 2 * size), f32), wide.view(7, 2 * size))
    assert torch.equal(ahead.next((size,), f64), block(size, f64))  # and nothing over it
    whole = block(size // 100 * 100, f32)  # as many draws of this shape as a block holds
    for draw in range(size // 100):
        assert torch.equal(ahead.next((100,), f32), whole[100 * draw : 100 * draw + 100])


@pytest.mark.parametrize("rows", [1, 3])
def test_where_one_token_can_win_no_noise_is_made(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the one-hot laws of greedy decoding; one more token with a chance, in any row, and there is a race."""
    rng, raced = Randomness(3, rows), []
    at = Noise.at
    monkeypatch.setattr(Noise, "at", lambda *args: raced.append(args) or at(*args))
    sure = torch.zeros(rows, 50)
    for row in range(rows):
        sure[row, 7 * row + 1] = 0.3
    assert rng.pick(sure, at=[4] * rows).tolist() == [7 * row + 1 for row in range(rows)]
    assert not raced
    unsure = sure.clone()
    unsure[-1, 3] = 1e-30
    rng.pick(unsure, at=[4] * rows)
    assert len(raced) == 1
    other = Randomness(3, rows)
    assert torch.equal(other.pick(sure), sure.argmax(-1))  # a draw that is not keyed takes its noise all the same,
    assert not torch.equal(
        other._noise.fresh.next((rows, 50), torch.float32),
        Randomness(3, rows)._noise.fresh.next((rows, 50), torch.float32),
    )


def test_noise_made_in_inference_mode_serves_outside_too() -> None:
    rng, weights = Randomness(4), torch.rand(1, 9, requires_grad=True)
    with torch.inference_mode():
        drawn = [rng.pick(torch.rand(1, 9)), rng.pick(torch.rand(1, 9), at=[3]), rng.flip(torch.rand(1, 9))]
    assert all(x.is_inference() for x in drawn)
    for draw in (rng.pick(weights), rng.pick(weights, at=[3]), rng.flip(weights)):
        assert not draw.is_inference()


def keyed_uniforms(key: int, position: int, V: int) -> Tensor:
    return torch.rand(V, generator=torch.Generator().manual_seed(mix(key, position)), dtype=torch.float64)


def test_match_draws_until_every_row_has_ended_and_no_longer() -> None:
    p = torch.full((2, 4, 3), 1 / 3)
    tokens = torch.tensor([[0, 1, 1, 1], [0, 2, 2, 2]])
    rng = Scripted(picks=[1, 0, 1, 2, 0, 0])  # the first row goes on for two tokens, then nobody does
    path, emitted = match(p, None, tokens, Tree.chain(3), rng)
    assert path.tolist() == [[0, 1, 2, -1], [0, -1, -1, -1]]
    assert emitted.tolist() == [0, 0]
    assert len(rng.asked) == 3


def test_keyed_noise_is_a_function_of_key_position_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, seeded = Noise(5), []
    manual_seed = torch.Generator.manual_seed

    class Watched:
        """The keyed generator, which tells how often it is seeded."""

        def __init__(self) -> None:
            self.inner = torch.Generator()

        def manual_seed(self, seed: int) -> Watched:
            seeded.append(seed)
            manual_seed(self.inner, seed)
            return self

    watched = Watched()
    noise._keyed = watched  # type: ignore[assignment]
    uniform_ = torch.Tensor.uniform_
    monkeypatch.setattr(
        torch.Tensor,
        "uniform_",
        lambda self, generator: uniform_(self, generator=getattr(generator, "inner", generator)),
    )
    for positions in ((0, 0), (1, 0), (15, 16), (16, 15), (17, 40), (40, 40), (3, 17)):
        for dtype in (torch.float32, torch.float64):
            want = [race(keyed_uniforms(key, at, 50), dtype) for key, at in zip((7, 8), positions, strict=True)]
            got = noise.at([7, 8], positions, 50, dtype)
            assert got.dtype == dtype
            assert torch.equal(got, torch.stack(want))
            assert torch.equal(noise.at([7, 7], positions[:1] * 2, 50, dtype), torch.stack([want[0]] * 2))
    seeded.clear()
    for position in range(32, 48):
        assert noise.at([7], [position], 50, torch.float32).shape == (1, 50)
    assert seeded == [mix(7, position) for position in range(32, 48)]  # sixteen positions at once, once
    noise.at([7], [48], 50, torch.float32)
    noise.at([7], [47], 50, torch.float32)  # a draft's end and the next beginning: two blocks are kept a row
    assert len(seeded) == 32
    noise.at([7], [64], 50, torch.float32)
    assert len(noise._blocks) == 2
    noise.at([7], [48], 50, torch.float32)
    assert len(seeded) == 48
    noise.at([7], [47], 50, torch.float32)  # the oldest has made room
    assert len(seeded) == 64
    pair = Noise(5)
    for position in (0, 16):
        pair.at([7, 8], [position, position], 50, torch.float32)
    assert len(pair._blocks) == 4
    got = pair.at([7, 8], [32, 0], 50, torch.float32)  # what is handed out has been looked up before room is made
    assert torch.equal(got[1], race(keyed_uniforms(8, 0, 50), torch.float32))
    assert len(pair._blocks) == 4
    seeded.clear()
    V = AHEAD // 4
    want = [race(keyed_uniforms(key, 5, V), torch.float64) for key in (9, 10)]
    assert torch.equal(noise.at([9, 10], [5, 5], V, torch.float64), torch.stack(want))
    assert seeded == [mix(9, 4), mix(9, 5), mix(10, 4), mix(10, 5)]  # two positions of two rows fill a block
    seeded.clear()
    noise.at([9], [5], 2 * AHEAD, torch.float64)
    assert seeded == [mix(9, 5)]  # never less than one


def test_noise_lies_strictly_between_nothing_and_infinity() -> None:
    for dtype in (torch.float32, torch.float64):
        info = torch.finfo(dtype)
        u = [0.0, 1e-20, 0.5, 1 - 2**-53, 1.0]
        got = exponential(torch.tensor(u, dtype=torch.float64), dtype)
        most = -math.log(info.eps / 2)  # 16.6 or 36.7
        assert got.dtype == dtype
        assert got.tolist() == pytest.approx([info.tiny, 1e-20, math.log(2), most, most], rel=1e-6, abs=0)


def test_noise_is_as_fine_next_to_nothing_as_anywhere() -> None:
    """The least wins: where -log of a float32 u is 0 or 6e-8 or more, tokens rarer than that would never be drawn."""
    u = torch.from_numpy(sfc64(2).random(1 << 10)) * 1e-12
    for dtype in (torch.float32, torch.float64):
        assert torch.allclose(exponential(u.clone(), dtype).double(), u, rtol=1e-6, atol=0)


def test_keys_of_rows() -> None:
    assert Randomness(7, rows=3).keys == [7, mix(7, 1), mix(7, 2)]
    assert Randomness(7).keys == [7]
    assert Randomness((4, 5), rows=2).keys == [4, 5]
    assert Randomness([4, 5, 6], rows=3).select([0, 2]).keys == [4, 6]
    assert type(Randomness(np.int64(3)).keys[0]) is int
    fresh = [Randomness().keys[0] for _ in range(40)]
    assert len(set(fresh)) == 40
    assert 2**62 <= max(fresh) < 2**63  # 63 bits of the operating system's randomness: else once in 2^40 runs


@pytest.mark.parametrize(
    ("seed", "rows", "error"),
    [([1], 2, ValueError), ([1, 2, 3], 2, ValueError), ([1, True], 2, TypeError), ([1, 2.0], 2, TypeError),
     (True, 1, TypeError), ("1", 1, TypeError), (1.0, 1, TypeError), ([], 1, ValueError)],
)  # fmt: skip
def test_bad_seeds_by_type(seed: object, rows: int, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Randomness(seed, rows)  # type: ignore[arg-type]
    assert str(caught.value) == f"seed must be an integer, or {rows} integers (one a row), got {seed!r}"


def test_shifted_counts_from_the_rows_offsets() -> None:
    asked = []

    class Recorder:
        def flip(self, prob: Tensor) -> Tensor:
            return prob > 2

        def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
            asked.append(at)
            return weights.argmax(-1)

    inner = Recorder()
    rng = Shifted(inner, [10, 20])
    assert rng.pick(torch.eye(2), at=[1, 3]).tolist() == [0, 1]
    assert rng.pick(torch.eye(2)).tolist() == [0, 1]
    assert asked == [[11, 23], None]
    assert rng.flip == inner.flip


# --- sampling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, "temperature must be a finite number >= 0, got -0.1"),
        ({"temperature": math.nan}, ValueError, "temperature must be a finite number >= 0, got nan"),
        ({"temperature": True}, TypeError, "temperature must be a finite number >= 0, got True"),
        ({"temperature": "1"}, TypeError, "temperature must be a finite number >= 0, got '1'"),
        ({"temperature": 10**400}, ValueError, f"temperature must be a finite number >= 0, got {10**400}"),
        ({"top_k": 0}, ValueError, "top_k must be an integer >= 1 or None, got 0"),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer >= 1 or None, got 2.0"),
        ({"top_k": True}, TypeError, "top_k must be an integer >= 1 or None, got True"),
        ({"top_p": 0.0}, ValueError, "top_p must be a number in (0, 1] or None, got 0.0"),
        ({"top_p": 1.01}, ValueError, "top_p must be a number in (0, 1] or None, got 1.01"),
        ({"top_p": "x"}, TypeError, "top_p must be a number in (0, 1] or None, got 'x'"),
    ],
)
def test_errors_in_full(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Sampling(**options)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_the_edges_of_the_allowed() -> None:
    assert Sampling(0).greedy
    assert Sampling(temperature=0, top_k=1, top_p=1.0).greedy
    assert not Sampling(1e-9).greedy
    assert Sampling() == Sampling(1.0, None, None)
    assert Sampling(top_p=1).probs(torch.tensor([0.0, 1.0])).tolist() == torch.tensor([0.0, 1.0]).softmax(-1).tolist()
    assert (COLDEST, HOTTEST) == (1e-30, 1e30)


def test_large_logits_are_no_bad_ones_though_their_sum_is_infinite() -> None:
    assert Sampling().probs(torch.full((2, 2), 3e38)).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_temperature_divides_the_logits_and_large_ones_do_no_harm() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0], [-3.0, 0.0, 3.0]], dtype=torch.float64)
    for T in (0.5, 2.0):
        assert torch.allclose(Sampling(T).probs(logits), (logits / T).softmax(-1), atol=1e-14)
        assert torch.allclose(Sampling(T).probs(logits + 1e4), (logits / T).softmax(-1), atol=1e-11)
    cold = torch.tensor([3e38, 2.9e38, -3e38])  # float32: dividing these by T first would give infinities
    assert Sampling(0.1).probs(cold).tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5), Sampling(0), Sampling(top_k=2), Sampling(top_p=0.6)])
def test_laws_are_float32_at_least_and_add_up(dtype: torch.dtype, sampling: Sampling) -> None:
    logits = torch.tensor([[0.5, 0.25, -1.0, 0.0], [-1.0, 2.0, 1.0, 2.0]], dtype=dtype)
    before = logits.clone()
    law = sampling.probs(logits)
    assert law.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(law.sum(-1), torch.ones(2, dtype=law.dtype))
    assert torch.equal(logits, before)  # the caller's logits stay as they are
    want = sampling.probs(before.double())
    assert torch.allclose(law.double(), want, atol=1e-6)


def test_filters_work_a_row_at_a_time_and_together() -> None:
    law = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.97, 0.01, 0.01, 0.01]], dtype=torch.float64)
    got = Sampling(top_k=3, top_p=0.6).probs(law.log()[None])[0]
    want = [[4 / 7, 3 / 7, 0, 0], [0, 0, 3 / 7, 4 / 7], [1, 0, 0, 0]]
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64))
    kept = Sampling(top_k=4, top_p=0.35).probs(law.log())
    assert kept.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
    assert torch.equal(Sampling(top_k=4).probs(law.log()), law.log().softmax(-1))  # nothing to cut, nothing sorted


def test_what_cuts_nothing_sorts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[0.5, 0.25, -1.0, 0.0]])
    assert (Sampling(top_k=3).probs(logits) == 0).tolist() == [[False, False, True, False]]  # fewer rows than k

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("sorted")

    monkeypatch.setattr(torch, "sort", refuse)
    for sampling in (Sampling(), Sampling(top_k=4), Sampling(top_k=9), Sampling(top_p=1), Sampling(top_k=4, top_p=1.0)):
        assert torch.equal(sampling.probs(logits), logits.softmax(-1))
    for sampling in (Sampling(top_k=3), Sampling(top_p=0.99), Sampling(top_k=9, top_p=0.99)):  # what cuts, does
        with pytest.raises(AssertionError, match="sorted"):
            sampling.probs(logits)


def test_top_p_of_one_drops_no_tail_that_rounding_hides() -> None:
    logits = torch.tensor([0.0, -60.0, -70.0])  # in float32 the mass before the second is 1
    assert Sampling(top_k=2).probs(logits)[1] > 0
    assert torch.equal(Sampling(top_k=2, top_p=1.0).probs(logits), Sampling(top_k=2).probs(logits))


def test_ties_of_many_go_to_the_lowest_indices() -> None:
    """Of more than a handful: torch sorts few numbers stably even where it is not asked to."""
    logits = torch.arange(1000).remainder(4).float()
    for sampling in (Sampling(top_k=300), Sampling(top_k=300, top_p=0.5)):
        kept = sampling.probs(logits).nonzero()[:, 0]
        best = torch.arange(3, 1000, 4)
        assert torch.equal(kept[kept % 4 == 3], best[: (kept % 4 == 3).sum()])
        second = torch.arange(2, 1000, 4)
        assert torch.equal(kept[kept % 4 == 2], second[: (kept % 4 == 2).sum()])


def test_the_place_of_a_bad_logit() -> None:
    logits = torch.zeros(2, 3, 4)
    logits[1, 2, 0] = math.nan
    with pytest.raises(ValueError, match=r"^draft logits: a NaN, a \+inf or nothing .* at \(row, node\) \(1, 2\)$"):
        Sampling().probs(logits, "draft")
    with pytest.raises(ValueError, match=r"^model logits: "):
        Sampling(0).probs(logits)
    for sampling in (Sampling(), Sampling(0), Sampling(0.5, top_k=2), Sampling(top_p=0.5)):  # None: others will look
        assert sampling.probs(logits, None).isnan().any(-1).tolist() == [[False] * 3, [False, False, True]]
    for bad in (math.nan, math.inf):
        law = torch.full((2, 3, 4), 0.25)
        law[1, 2, 0] = bad
        with pytest.raises(ValueError, match=r"^draft logits: a NaN, a \+inf or nothing .* at \(row, node\) \(1, 2\)$"):
            check_law(law, "draft")
    check_law(torch.full((2, 3, 4), 3e38), "draft")  # weights, not a law; too large to add, but numbers
    logits[0, 1, 3] = math.inf
    with pytest.raises(ValueError, match=r"\(0, 1\)$"):  # the first of them
        Sampling().probs(logits)


# --- trees -------------------------------------------------------------------------------------------------


def test_a_tree_by_hand() -> None:
    tree = Tree.from_parents([[-1, 0, 0, 1, 3], [-1, 0, 1, 1, 1]])
    assert tree.rows == ((-1, 0, 0, 1, 3), (-1, 0, 1, 1, 1))
    assert (tree.size, tree.max_depth, tree.is_chain) == (5, 3, False)
    assert tree.of_row(0) == (-1, 0, 0, 1, 3)
    assert tree.of_row(1) == (-1, 0, 1, 1, 1)
    assert Tree.chain(2).of_row(7) == (-1, 0, 1)
    assert tree.depths.tolist() == [[0, 1, 1, 2, 3], [0, 1, 2, 2, 2]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 3], [-1, 0, 1, 1, 1]]
    assert tree.child_table.tolist() == [
        [[1, 2, -1], [3, -1, -1], [-1] * 3, [4, -1, -1], [-1] * 3],
        [[1, -1, -1], [2, 3, 4], [-1] * 3, [-1] * 3, [-1] * 3],
    ]
    assert tree.children(1) == [3]
    assert tree.children(1, row=1) == [2, 3, 4]
    assert tree.mask.dtype == torch.bool
    assert tree.mask.int().tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 0, 1]],
    ]
    for table in (tree.depths, tree.parents, tree.child_table):
        assert table.dtype == torch.long
    assert Tree.chain(0).levels == [[0]]
    assert Tree.from_parents([-1, 0, 0, 1]).levels == [[0], [1, 2], [3]]
    assert Tree.from_parents([[-1, 0, 1], [-1, 0, 0]]).is_chain is False
    assert Tree.from_parents([[-1, 0, 1], [-1, 0, 1]]).is_chain is True


def test_cutting_keeps_rows_equally_long() -> None:
    tree = Tree.from_parents([[-1, 0, 0, 1, 3], [-1, 0, 1, 1, 1]])
    assert tree.cut(3) is tree
    assert tree.cut(2).rows == ((-1, 0, 0, 1, 3), (-1, 0, 1, 1, 1))  # row 1 has five nodes that deep, so row 0 too
    assert tree.cut(1).rows == ((-1, 0, 0), (-1, 0, 1))
    assert tree.cut(0).rows == ((-1,), (-1,))
    assert Tree.chain(4).cut(2) == Tree.chain(2)


def test_trees_are_remembered() -> None:
    assert Tree.chain(3) is Tree.chain(3)
    assert Tree.branching([2, 2]).cut(1) == Tree.branching([2])


@pytest.mark.parametrize(
    ("k", "error"), [(-1, ValueError), (True, TypeError), (1.0, TypeError), ("2", TypeError), (None, TypeError)]
)
def test_bad_chain(k: object, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Tree.chain(k)  # type: ignore[arg-type]
    assert str(caught.value) == f"draft_len must be an integer >= 0, got {k!r}"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "tree: every row needs the same number of nodes, and there must be a row"),
        (((-1, 0), (-1, 0, 0)), "tree: every row needs the same number of nodes, and there must be a row"),
        (((),), "tree: node 0 must have the parent -1, got parents []"),
        (((0, 0),), "tree: node 0 must have the parent -1, got parents [0, 0]"),
        (((-1, 1),), "tree: the parent of node 1 must be in 0..0, got 1"),
        (((-1, 0, -1),), "tree: the parent of node 2 must be in 0..1, got -1"),
        (((-1, False),), "tree: the parent of node 1 must be in 0..0, got False"),
        (((-1, 0.0),), "tree: the parent of node 1 must be in 0..0, got 0.0"),
        (((-1, 0, 1, 0),), "tree: nodes must come breadth-first, got depths [0, 1, 2, 1]"),
        (((-1, 0), (-1, 1)), "tree: the parent of node 1 must be in 0..0, got 1"),
    ],
)
def test_bad_trees_in_full(rows: tuple, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match="tree: ") as caught:
        Tree(rows)
    assert str(caught.value) == message


@pytest.mark.parametrize("widths", [[0], [True], [1.5], [2, -1], ["2"]])
def test_bad_widths_in_full(widths: list) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match="widths") as caught:
        Tree.branching(widths)
    assert str(caught.value) == f"widths must be integers >= 1, got {widths!r}"


@pytest.mark.parametrize("parents", [3, None, "", "ab", {0: 1}, iter([-1, 0])])
def test_parents_come_in_a_list(parents: object) -> None:
    with pytest.raises(TypeError) as caught:
        Tree.from_parents(parents)  # type: ignore[arg-type]
    assert str(caught.value) == f"parents must be a list of integers, or one such list a row, got {parents!r}"


def test_expected_tokens_by_hand() -> None:
    tree = Tree.from_parents([-1, 0, 0, 0, 1, 1, 4])
    rates = (0.5, 0.25)  # the third child of the root counts nothing
    assert tree.expected_tokens(rates) == pytest.approx(1 + 0.5 + 0.25 + 0 + 0.25 + 0.125 + 0.125)
    assert Tree.chain(0).expected_tokens(rates) == 1


def test_best_trees_by_hand() -> None:
    assert Tree.best((0.9, 0.05), 4).rows == Tree.chain(3).rows
    assert Tree.best((0.5, 0.45), 5, 1).rows == ((-1, 0, 0),)  # two rates: two children, and no deeper
    assert Tree.best((0.6, 0.3), 4).rows == ((-1, 0, 0, 1),)
    assert Tree.best((0.5,), 1).rows == ((-1,),)
    assert Tree.best((0.5,), 3, 0).rows == ((-1,),)
    assert Tree.best((), 3).rows == ((-1,),)
    assert Tree.best((0.0, 0.0), 3).rows == ((-1,),)  # what is never accepted is not worth a node
    assert Tree.best((1e-15,), 3).rows == ((-1,),)  # nor is what hardly ever is
    assert Tree.best((2e-15,), 2).rows == ((-1, 0),)
    assert Tree.best((1.0, 0.0), 4).rows == Tree.chain(3).rows
    assert Tree.best([0.9], 3).rows == Tree.chain(2).rows
    assert Tree.best((0.8, 0.6, 0.4), 8, 2).expected_tokens((0.8, 0.6, 0.4)) == pytest.approx(
        1 + 0.8 + 0.6 + 0.4 + 0.64 + 0.48 + 0.48 + 0.36
    )


@pytest.mark.parametrize(
    ("rates", "nodes", "depth", "message"),
    [
        ((-0.1,), 3, 2, "acceptance_by_rank must be rates in 0..1, got [-0.1]"),
        ((0.5, 1.1), 3, 2, "acceptance_by_rank must be rates in 0..1, got [0.5, 1.1]"),
        ((0.5,), 0, 2, "nodes must be >= 1 and max_depth >= 0, got 0 and 2"),
        ((0.5,), 0, None, "nodes must be >= 1 and max_depth >= 0, got 0 and -1"),
        ((0.5,), 3, -1, "nodes must be >= 1 and max_depth >= 0, got 3 and -1"),
    ],
)
def test_bad_best(rates: tuple[float, ...], nodes: int, depth: int | None, message: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Tree.best(rates, nodes, depth)
    assert str(caught.value) == message


# --- the cache ---------------------------------------------------------------------------------------------


def test_a_cache_by_hand() -> None:
    cache = KVCache(GPTConfig(7, 40, 3, 2, 8), 2, 5, dtype=torch.float64)
    assert cache.kv.shape == (3, 2, 2, 2, 5, 4)
    assert (cache.kv == 0).all()
    assert (cache.batch, cache.capacity, cache.lengths, cache.kv.dtype) == (2, 5, [0, 0], torch.float64)
    cache.kv[:, 1].fill_(1)
    assert (cache.kv[:, 1] == 1).all()
    assert (cache.kv[:, 0] == 0).all()
    default = KVCache(GPTConfig(7, 40, 1, 1, 2))
    assert (default.batch, default.capacity, default.kv.dtype) == (1, 1024, torch.float32)
    for batch, capacity in ((0, 4), (1, 0), (-1, 4)):
        with pytest.raises(ValueError, match=rf"^batch and capacity must be >= 1, got {batch} and {capacity}$"):
            KVCache(GPTConfig(7, 40, 1, 1, 2), batch, capacity)
    assert KVCache(GPTConfig(7, 40, 1, 1, 2), 1, 1).capacity == 1


def test_masks_by_hand() -> None:
    cache = KVCache(GPTConfig(7, 40, 1, 1, 2), 2, 9)
    assert cache.begin_write(4) is None  # nothing cached: the model's own causal attention
    cache.lengths = [3, 3]
    assert cache.begin_write(1) is None  # one token sees everything
    even = cache.begin_write(2)
    assert even is not None
    assert even.int().tolist() == [[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]]  # one for all rows
    cache.lengths = [3, 1]
    ragged = cache.begin_write(2)
    assert ragged is not None
    assert ragged.int().tolist() == [[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]], [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]]]
    one = cache.begin_write(1)  # of rows that are not in step each needs its mask
    assert one is not None
    assert one.int().tolist() == [[[[1, 1, 1, 1]]], [[[1, 1, 0, 0]]]]
    tree = torch.tensor([[[1, 0, 0], [1, 0, 1]], [[0, 1, 0], [0, 1, 1]]], dtype=torch.bool)  # (B, T = 2, M = 3)
    given = cache.begin_write(2, tree)
    assert given is not None
    assert given.int().tolist() == [[[[1, 1, 1, 0, 0], [1, 1, 1, 0, 1]]], [[[0, 1, 0, 0, 0], [0, 1, 1, 0, 0]]]]
    cache.lengths = [0, 0]
    given = cache.begin_write(
        2, torch.tensor([[1, 0], [0, 1]], dtype=torch.bool)
    )  # a mask counts though nothing is cached
    assert given is not None
    assert given.int().tolist() == [[[[1, 0], [0, 1]]]] * 2


def test_writes_land_in_each_rows_next_slots() -> None:
    for lengths in ([2, 2], [3, 1]):
        cache = KVCache(GPTConfig(7, 40, 2, 1, 1), 2, 6)
        cache.kv.fill_(-1)
        cache.lengths = list(lengths)
        new = torch.arange(8.0).view(2, 2, 1, 2, 1)  # (2, B, H, T, D)
        cache.begin_write(2)
        seen = cache.write(1, new)
        assert seen.shape == (2, 2, 1, max(lengths) + 2, 1)
        assert cache.lengths == lengths  # they count from end_write on
        cache.end_write(2)
        assert cache.lengths == [n + 2 for n in lengths]
        for part, b in itertools.product(range(2), range(2)):
            want = [-1.0] * 6
            want[lengths[b] : lengths[b] + 2] = new[part, b, 0, :, 0].tolist()
            assert cache.kv[1, part, b, 0, :, 0].tolist() == want
            assert seen[part, b, 0, :, 0].tolist() == want[: max(lengths) + 2]
        assert (cache.kv[0] == -1).all()
    cache.lengths = [3, 4]
    with pytest.raises(ValueError, match=r"^cache: 4 \+ 3 slots exceed its capacity of 6$"):
        cache.begin_write(3)
    cache.begin_write(2)  # to the very end
    cache.lengths = [4, 4]
    assert cache.begin_write(1) is None
    cache.write(0, torch.full((2, 2, 1, 1, 1), 5.0))  # in step again: the places of the ragged write are forgotten
    assert cache.kv[0, :, :, 0, 4, 0].tolist() == [[5, 5], [5, 5]]
    assert (cache.kv[0, :, :, :, 5] == -1).all()


def test_keep_by_hand() -> None:
    cache = KVCache(GPTConfig(7, 40, 1, 1, 1), 3, 8)
    cache.kv.copy_(torch.arange(8.0).view(8, 1).expand_as(cache.kv))
    cache.lengths = [7, 6, 5]
    cache.keep([[0, 2, 4], [0, 1], []], 5)
    assert cache.lengths == [5, 3, 0]
    assert cache.kv[0, 1, 0, 0, :5, 0].tolist() == [0, 1, 2, 4, 6]
    assert cache.kv[0, 0, 1, 0, :3, 0].tolist() == [0, 1, 2]
    assert cache.kv[0, 0, 2, 0, :, 0].tolist() == list(range(8))
    with pytest.raises(ValueError, match=r"^keep: 3 paths of 1 nodes do not fit lengths \[5, 3, 0\]$"):
        cache.keep([[0], [0], [0]], 1)
    with pytest.raises(ValueError, match=r"^keep: 2 paths of 0 nodes do not fit lengths \[5, 3, 0\]$"):
        cache.keep([[], []], 0)
    with pytest.raises(ValueError, match=r"^keep: 3 paths of -1 nodes"):
        cache.keep([[], [], []], -1)
    cache.keep([[], [], []], 0)
    assert cache.lengths == [5, 3, 0]
    cache.rollback([5, 3, 0])
    cache.select([0, 1])
    with pytest.raises(ValueError, match=r"^keep: a path must increase strictly within 0\.\.2, got \[0, 3\]$"):
        cache.keep([[0], [0, 3]], 3)
    with pytest.raises(ValueError, match=r"got \[1, 1\]$"):
        cache.keep([[0], [1, 1]], 3)
    assert cache.lengths == [5, 3]
    cache.keep([[1, 2], [0, 1, 2]], 3)  # all of a row's slots may be nodes
    assert cache.lengths == [4, 3]
    assert cache.kv[0, 1, 0, 0, :4, 0].tolist() == [0, 1, 4, 6]


def test_rollback_and_select_by_hand() -> None:
    cache = KVCache(GPTConfig(7, 40, 1, 1, 1), 3, 8)
    cache.kv.copy_(torch.arange(3.0).view(3, 1, 1, 1).expand_as(cache.kv))
    cache.lengths = [5, 6, 7]
    cache.rollback(5)
    assert cache.lengths == [5, 5, 5]
    cache.rollback((5, 0, 3))
    assert cache.lengths == [5, 0, 3]
    for bad in ([5, 0], [6, 0, 3], [5, -1, 3], 4, [5, 0, 3, 0]):
        with pytest.raises(ValueError, match=r"^rollback: lengths must lie in 0\.\.\[5, 0, 3\], got \["):
            cache.rollback(bad)
    cache.select([1, 2])
    assert cache.lengths == [0, 3]
    assert cache.batch == 2
    assert cache.kv[0, 0, :, 0, 0, 0].tolist() == [1, 2, 2]
    for bad in ([0, 0], [2], [-1], [1, 0]):
        with pytest.raises(ValueError, match=r"^select: rows must increase strictly within 0\.\.1, got \["):
            cache.select(bad)
    cache.select([])
    assert cache.lengths == []


# --- whatever the default device ---------------------------------------------------------------------------


def test_nothing_depends_on_the_default_device() -> None:
    """With another default device every tensor must be made where it belongs: a forgotten `device=` fails here."""
    model, texts = random_gpt(3, vocab=7, block=40), [[1, 2, 3, 4, 5, 6], [3, 1]]
    want = torch.cat([model(torch.tensor([text]))[:, -1] for text in texts])
    laws = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    tokens, chain = torch.tensor([[0, 1, 2, 3, 1], [1, 1, 0, 0, 2]]), Tree.chain(4)
    tree = Tree.from_parents([-1, 0, 0, 1, 2])

    def verify(name: str) -> tuple[Tensor, Tensor]:
        rule = RULES[name]
        return rule.verify(laws, laws.roll(1, 1), tokens, tree if rule.tree else chain, Randomness(1, 2))

    verdicts = {name: verify(name) for name in ("token", "block", "match", "rrs")}
    with torch.device("meta"):
        cache = KVCache(model.config, 2, 50, device="cpu", dtype=torch.float64)
        assert KVCache(model.config, 1, 5).kv.device.type == "cpu"
        read(model, cache, [texts[0][:4], texts[1][:1]])
        assert torch.allclose(read(model, cache, [texts[0][4:], texts[1][1:]]), want)
        starts, nodes = torch.tensor([[6], [2]], device="cpu"), torch.zeros(2, 5, dtype=torch.long, device="cpu")
        assert model(nodes, cache, starts + tree.depths, tree.mask).device.type == "cpu"
        before = cache.kv.clone()
        cache.keep([[0, 2], [0, 1, 3]], 5)
        assert torch.equal(cache.kv[:, :, 0, :, :8], before[:, :, 0, :, [0, 1, 2, 3, 4, 5, 6, 8]])
        assert torch.equal(cache.kv[:, :, 1, :, :5], before[:, :, 1, :, [0, 1, 2, 3, 5]])
        assert constant([1]).device.type == "cpu"
        assert tree.child_table.device.type == "cpu"
        for name, (path, last) in verdicts.items():
            got = verify(name)
            assert torch.equal(got[0], path)
            assert torch.equal(got[1], last)
        for sampling in (Sampling(0.5), Sampling(0), Sampling(top_k=2, top_p=0.9)):
            assert sampling.probs(laws).device.type == "cpu"
        assert Randomness(1, 2).pick(laws[:, 0], at=[1, 2]).device.type == "cpu"


class Told(TorchFunctionMode):
    """Fails where a tensor is made without a word about its device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        makers = (torch.arange, torch.tensor, torch.zeros, torch.ones, torch.empty, torch.full, torch.rand)
        assert func not in makers or "device" in (kwargs or {}), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["token", "block", "match", "rrs"])
def test_rules_say_where_a_tensor_is_made(name: str) -> None:
    rule, tree = RULES[name], Tree.from_parents([-1, 0, 0, 1, 2])
    laws, tokens = torch.full((2, 5, 4), 0.25, device="cpu"), torch.zeros(2, 5, dtype=torch.long, device="cpu")
    with Told():
        rule.verify(laws, laws, tokens, tree if rule.tree else Tree.chain(4), Randomness(1, 2))


def test_a_write_leaves_the_rows_alone_that_were_dropped() -> None:
    cache = KVCache(GPTConfig(7, 40, 1, 1, 2), 3, 8)
    cache.lengths = [2, 2, 2]
    cache.select([0, 1])
    for lengths in ([2, 2], [2, 1]):  # in step and not
        cache.rollback(lengths)
        cache.begin_write(3)
        seen = cache.write(0, torch.ones(2, 2, 1, 3, 2))
        assert seen.shape == (2, 2, 1, 5, 2)
        assert seen[:, 0, :, 2:].eq(1).all()
        assert seen[:, 0, :, :2].eq(0).all()
        assert cache.kv[0, :, 2].eq(0).all()


def test_a_cache_stays_on_its_device_and_never_waits_for_it() -> None:
    cache = KVCache(GPTConfig(7, 40, 2, 2, 4), 2, 20, device="meta")
    mask = torch.empty(1, 3, 3, device="meta", dtype=torch.bool)
    for lengths in ([4, 4], [4, 2]):
        cache.lengths = lengths
        for given in (None, mask):
            shown = cache.begin_write(3, given)
            assert shown is not None
            assert shown.device.type == "meta"
            assert shown.shape[-2:] == (3, 7)
            for layer in range(2):
                assert cache.write(layer, torch.empty(2, 2, 2, 3, 2, device="meta")).shape == (2, 2, 2, 7, 2)
        cache.end_write(3)
        cache.keep([[0, 2], [1]], 3)
        assert cache.lengths == [lengths[0] + 2, lengths[1] + 1]
    cache.select([1])
    assert cache.kv.device.type == "meta"


def test_constants_outlive_inference_mode() -> None:
    with torch.inference_mode():
        table = constant([[1, 2]])
    assert not table.is_inference()
    assert constant([[True, False]]).dtype == torch.long
    assert table.tolist() == [[1, 2]]
