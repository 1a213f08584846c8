"""The rules as pure functions, on laws written by hand: fixtures F1, F2, F6 and cases 1-3, 8."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minispec import RULES, Sampling, Tree
from minispec.lab import exact_law
from minispec.sampling import Rng
from minispec.verify import count_accepted, find_rule, match, residual, token

pytestmark = pytest.mark.core

F1_P, F1_Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]


def law(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def first_token(p: Tensor, q: Tensor, rule: Callable[..., tuple[Tensor, Tensor]]) -> list[float]:
    """The exact law of the first token that a chain rule emits with one draft token, the bonus law being p."""

    def run(rng: Rng) -> int:
        drafted = rng.pick(q[None])[:, None]  # (1, 1)
        accepted, nxt = rule(torch.stack([p, p])[None], q[None, None], drafted, rng)
        return int(drafted[0, 0] if accepted[0] else nxt[0])

    found = exact_law(run)
    return [found.get(x, 0.0) for x in range(len(p))]


def test_f1_token_rule_emits_p() -> None:
    assert first_token(law(*F1_P), law(*F1_Q), token) == pytest.approx(F1_P, abs=1e-12)


def test_f1_acceptance_and_residual() -> None:
    p, q = law(*F1_P), law(*F1_Q)
    assert float(torch.minimum(p, q).sum()) == pytest.approx(0.70, abs=1e-12)
    assert residual(p, q).tolist() == [1, 0, 0]


@pytest.mark.parametrize("seed", range(30))
def test_token_rule_emits_p_whatever_q(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, 4, generator=generator, dtype=torch.float64)
    for zeroed in (p, q):  # laws with holes, as top-k and top-p make them
        zeroed[torch.rand(4, generator=generator) < 0.3] = 0
        zeroed[seed % 4] += 0.1
        zeroed /= zeroed.sum()
    assert first_token(p, q, token) == pytest.approx(p.tolist(), abs=1e-12)


def test_f2_the_second_law_comes_from_the_right_context() -> None:
    first, after = law(0.6, 0.4), torch.stack([law(0.9, 0.1), law(0.2, 0.8)])
    q = law(0.3, 0.7)

    def run(rng: Rng) -> tuple[int, int]:
        drafted = rng.pick(q[None])[:, None]
        p = torch.stack([first, after[drafted[0, 0]]])[None]
        accepted, nxt = token(p, q[None, None], drafted, rng)
        if accepted[0]:
            return int(drafted[0, 0]), int(nxt[0])
        return int(nxt[0]), int(rng.pick(after[nxt]))

    joint = exact_law(run)
    want = {(0, 0): 0.54, (0, 1): 0.06, (1, 0): 0.08, (1, 1): 0.32}
    assert joint == pytest.approx(want, abs=1e-12)


def test_f6_a_point_mass_is_no_softmax() -> None:
    p = law(0.51, 0.49)
    tree = Tree.chain(1)

    def run(rng: Rng) -> int:
        tokens = torch.tensor([[0, 0]])  # the draft proposes its top-1, token 0
        path, nxt = match(torch.stack([p, p])[None], None, tokens, tree, rng)
        return 0 if path[0, 1] == 1 else int(nxt[0])

    found = exact_law(run)
    assert [found[0], found[1]] == pytest.approx([0.51, 0.49], abs=1e-12)

    def wrong(rng: Rng) -> int:
        accepted, nxt = token(torch.stack([p, p])[None], p[None, None], torch.tensor([[0]]), rng)
        return 0 if accepted[0] else int(nxt[0])

    assert exact_law(wrong) == pytest.approx({0: 1.0})


def test_case_1_greedy_is_the_targets_argmax_without_a_choice() -> None:
    greedy = Sampling(0)
    q = greedy.probs(law(0.20, 0.16, 0.16, 0.16, 0.16, 0.16).log())
    p = greedy.probs(law(0.30, 0.50, 0.05, 0.05, 0.05, 0.05).log())
    for rule in RULES.values():

        def run(rng: Rng, rule=rule) -> tuple[int, int]:  # type: ignore[no-untyped-def]
            tokens = torch.tensor([[5, int(rng.pick(q[None]))]])
            laws = torch.stack([torch.zeros_like(q), q])[None]
            path, nxt = rule.verify(torch.stack([p, p])[None], laws, tokens, Tree.chain(1), rng)
            return int((path[0, 1:] >= 0).sum()), int(nxt[0])

        assert exact_law(run, max_leaves=1) == {(0, 1): 1.0}


def test_case_2_p_of_zero_never_passes_and_q_of_zero_still_appears() -> None:
    p, q = law(0.0, 0.6, 0.4), law(0.5, 0.5, 0.0)
    assert first_token(p, q, token) == pytest.approx([0.0, 0.6, 0.4], abs=1e-12)


@pytest.mark.parametrize(
    ("p", "q"),
    [([1.0, 0.0], [1.0, 0.0]), ([0.3, 0.7], [0.3, 0.7]), ([0.5 + 4e-10, 0.5 - 4e-10], [0.5, 0.5])],
)
def test_case_3_an_empty_residual_falls_back_to_p(p: list[float], q: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        got = residual(torch.tensor(p, dtype=dtype), torch.tensor(q, dtype=dtype))
        assert torch.isfinite(got).all()
        assert float(got.sum()) == pytest.approx(1)
        assert got.tolist() == pytest.approx(p, abs=1e-7)


def test_case_8_accepted_run_ends_at_the_first_rejection() -> None:
    assert count_accepted(torch.tensor([[1, 0, 1, 1]], dtype=torch.bool)).tolist() == [1]
    assert count_accepted(torch.tensor([[1, 0, 1], [1, 1, 1]], dtype=torch.bool)).tolist() == [1, 3]
    assert count_accepted(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]


# --- wrong rules: that the tests can tell ----------------------------------------------------------------


def one_step(p: Tensor, q: Tensor, accept: Callable[[float, float], float], rest: Callable[..., Tensor]) -> Callable:
    """A chain rule of one token with its acceptance and its residual exchanged."""

    def rule(p_: Tensor, q_: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
        x = int(drafted[0, 0])
        ok = rng.flip(torch.tensor([accept(float(p[x]), float(q[x]))]))
        law_ = p if ok[0] else rest(p, q, x)
        return ok.long(), rng.pick(law_[None])

    return rule


def zeroed(p: Tensor, q: Tensor, x: int) -> Tensor:
    out = p.clone()
    out[x] = 0
    return out


WRONG = {
    "rejection resamples from p": (lambda a, b: min(1, a / b), lambda p, q, x: p, [0.350, 0.390, 0.260]),
    "rejection only zeroes the token": (lambda a, b: min(1, a / b), zeroed, [0.405, 0.338, 0.257]),
    "accept iff p >= q": (lambda a, b: float(a >= b), lambda p, q, x: residual(p, q), [1, 0, 0]),
    "ratio inverted": (lambda a, b: min(1, b / a), lambda p, q, x: residual(p, q), [0.2, 0.5, 0.3]),
}


@pytest.mark.parametrize("name", WRONG)
def test_f1_wrong_rules_emit_their_own_laws(name: str) -> None:
    p, q = law(*F1_P), law(*F1_Q)
    accept, rest, want = WRONG[name]
    got = first_token(p, q, one_step(p, q, accept, rest))
    assert got == pytest.approx(want, abs=1e-3)
    assert got != pytest.approx(F1_P, abs=1e-2)


def test_f1_match_with_a_second_draw_emits_its_own_law() -> None:
    p, q = law(*F1_P), law(*F1_Q)

    def run(rng: Rng) -> int:
        x, y = int(rng.pick(q[None])), int(rng.pick(p[None]))
        return x if x == y else int(rng.pick(p[None]))

    found = exact_law(run)
    assert [found[x] for x in range(3)] == pytest.approx([0.445, 0.357, 0.198], abs=1e-3)


# --- shapes, rows, refusals --------------------------------------------------------------------------------


def test_match_follows_the_branch_that_the_target_drew() -> None:
    tree = Tree.from_parents([-1, 0, 0, 1, 2])
    tokens = torch.tensor([[9, 3, 5, 0, 1], [9, 3, 5, 0, 1], [9, 3, 5, 0, 1]])

    class Says:
        answers = [[5, 3, 4], [1, 0, 2], [7, 6, 2]]  # noqa: RUF012 - one list a depth, a token a row

        def flip(self, prob: Tensor) -> Tensor:
            raise AssertionError("match flips no coin")

        def pick(self, weights: Tensor, at: object = None) -> Tensor:
            return torch.tensor(self.answers.pop(0))

    path, nxt = match(torch.ones(3, 5, 10), None, tokens, tree, Says())
    assert path.tolist() == [[0, 2, 4], [0, 1, 3], [0, -1, -1]]
    assert nxt.tolist() == [7, 6, 4]


def test_absent_nodes_are_never_accepted_and_leave_the_bonus() -> None:
    p, q = law(*F1_P), torch.zeros(3, dtype=torch.float64)
    laws, absent = torch.stack([p, p])[None], torch.tensor([[-1]])
    for run in (
        lambda rng: tuple(x.item() for x in token(laws, q[None, None], absent, rng)),
        lambda rng: tuple(
            x[0].item() if x.ndim == 1 else x[0, 1].item() + 1
            for x in match(laws, None, torch.tensor([[0, -1]]), Tree.chain(1), rng)
        ),
    ):
        assert exact_law(run) == pytest.approx({(0, x): F1_P[x] for x in range(3)})


def test_rows_of_a_batch_are_verified_each_for_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(6, 4, 5, generator=generator, dtype=torch.float64).softmax(-1)
    q = torch.rand(6, 3, 5, generator=generator, dtype=torch.float64).softmax(-1)
    drafted = torch.randint(5, (6, 3), generator=generator)
    coins = torch.rand(6, 3, generator=generator, dtype=torch.float64)

    class Fixed:
        def __init__(self, rows: slice) -> None:
            self.rows = rows

        def flip(self, prob: Tensor) -> Tensor:
            return coins[self.rows] < prob

        def pick(self, weights: Tensor, at: object = None) -> Tensor:
            return weights.argmax(-1)

    together = token(p, q, drafted, Fixed(slice(0, 6)))
    for b in range(6):
        rows = slice(b, b + 1)
        alone = token(p[rows], q[rows], drafted[rows], Fixed(rows))
        assert (alone[0][0], alone[1][0]) == (together[0][b], together[1][b])


def test_unknown_rules_are_refused_by_name() -> None:
    for bad in ("tokens", 3, None):
        with pytest.raises(
            ValueError, match=r"rule must be one of block, coupled, match, rrs, specinfer, token, traversal, got"
        ):
            find_rule(bad)  # type: ignore[arg-type]


def test_joint_law_of_a_chain_of_two_by_enumeration_of_coins_and_picks() -> None:
    """The chain rule against p x p on independent positions, every leaf counted: no leaf lost, none twice."""
    p, q = law(*F1_P), law(*F1_Q)

    def run(rng: Rng) -> tuple[int, ...]:
        drafted = torch.stack([rng.pick(q[None]), rng.pick(q[None])], 1)
        accepted, nxt = token(p.expand(1, 3, 3), q.expand(1, 2, 3), drafted, rng)
        out = drafted[0, : int(accepted[0])].tolist() + [int(nxt[0])]
        return tuple(out + [int(rng.pick(p[None])) for _ in range(3 - len(out))])

    want = {xs: float(p[xs[0]] * p[xs[1]] * p[xs[2]]) for xs in itertools.product(range(3), repeat=3)}
    assert exact_law(run) == pytest.approx(want, abs=1e-12)
