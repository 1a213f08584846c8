"""Exercises of `05_is_it_lossless`: how many samples, which bug, and a rule of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minispec.lab import exact_law
from minispec.sampling import Rng
from minispec.teach.grading import Exercise, Mistake, unanswered
from minispec.teach.loop import DRAFT, TARGET
from minispec.verify import Rule, count_accepted, residual, token

ChainRule = Callable[[Tensor, Tensor, Tensor, Rng], tuple[Tensor, Tensor]]
MENU = {
    1: "after a rejection it draws from p",
    2: "the bonus comes from the draft",
    3: "no coin: accepts where p >= q",
    4: "the ratio is upside down",
    5: "nothing is wrong",
}
CULPRITS = {"A": 2, "B": 5, "C": 1}


def rule_with(
    p: Tensor,
    q: Tensor,
    drafted: Tensor,
    rng: Rng,
    accept: Callable[[Tensor, Tensor], Tensor] = lambda p_x, q_x: p_x / q_x,
    rest: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda p, q, x: residual(p, q),
    bonus: Callable[[Tensor, Tensor], Tensor] = lambda p, q: p,
    count: Callable[[Tensor], Tensor] = count_accepted,
) -> tuple[Tensor, Tensor]:
    """The token rule with its parts open. As it stands it is right. Shapes as in `verify.token`."""
    B, K = drafted.shape
    row, x = torch.arange(B), torch.cat([drafted.clamp(min=0), drafted.new_zeros(B, 1)], 1)  # (B,), (B, K+1)
    p_x, q_x = p[:, :K].gather(2, x[:, :K, None])[..., 0], q.gather(2, x[:, :K, None])[..., 0]  # (B, K)
    accepted = count(rng.flip(torch.where(q_x > 0, accept(p_x, q_x), 0.0).clamp(0, 1)))  # (B,)
    laws = torch.cat([q, q.new_zeros(B, 1, q.shape[2])], 1)  # (B, K+1, V): an absent guess has an all-zero law
    after = rest(p[row, accepted], laws[row, accepted], x[row, accepted])  # (B, V)
    present = laws[row, accepted].sum(-1) > 0
    last = bonus(p[:, K], q[:, K - 1]) if K else p[:, K]
    law = torch.where(present[:, None], after, p[row, accepted])
    return accepted, rng.pick(torch.where((accepted == K)[:, None], last, law))


def careless(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
    """The right rule for full chains, which takes an absent guess for token 0 of a law in which it is sure."""
    absent = (drafted < 0)[..., None]  # (B, K, 1)
    accepted, emitted = token(p, torch.where(absent, p[:, :-1], q), drafted, rng)
    return accepted, emitted


def suspects() -> dict[str, Rule]:
    """Three verification rules whose source one should not read before having guessed."""
    made: dict[int, ChainRule] = {
        1: partial(rule_with, rest=lambda p, q, x: p),
        2: partial(rule_with, bonus=lambda p, q: q),
        3: partial(rule_with, accept=lambda p_x, q_x: (p_x >= q_x).to(p_x.dtype)),
        4: partial(rule_with, accept=lambda p_x, q_x: q_x / p_x),
        5: rule_with,
    }
    kinds = frozenset({"chain"})
    return {name: Rule(name, kinds, "without", chain=made[number]) for name, number in CULPRITS.items()}


def rule_law(rule: ChainRule, length: int, draft_len: int, real: int) -> dict[tuple[int, ...], float] | None:
    """The exact law of the first tokens of text when one step under `rule` begins it and the target ends it.

    Of the `draft_len` guesses the first `real` are there, the others are absent: token -1, an all-zero q.
    """

    def step(rng: Rng) -> tuple[int, ...] | None:
        drafted: list[int] = []
        for _ in range(real):
            drafted.append(int(rng.pick(DRAFT[([0] + drafted)[-1]][None])[0]))
        context = [0, *drafted]
        q = torch.zeros(1, draft_len, len(TARGET), dtype=TARGET.dtype)
        q[0, :real] = DRAFT[context[:-1]]
        padded = torch.full((1, draft_len), -1)
        padded[0, :real] = torch.tensor(drafted, dtype=torch.long)
        returned = rule(TARGET[(context + [0] * draft_len)[: draft_len + 1]][None], q, padded, rng)
        if unanswered(returned):
            return None
        accepted, emitted = (int(value) for value in returned)
        if not (0 <= accepted <= real and 0 <= emitted < len(TARGET)):
            raise ValueError(
                f"with {real} guesses accepted must be in 0..{real} and token in 0..2, got {accepted} and {emitted}"
            )
        return (*drafted[:accepted], emitted)

    begun = exact_law(step, max_leaves=2000)
    return None if None in begun else ended({x: prob for x, prob in begun.items() if x is not None}, length)


def ended(law: dict[tuple[int, ...], float], length: int) -> dict[tuple[int, ...], float]:
    """Texts cut to `length` tokens, shorter ones continued by the target."""
    found: dict[tuple[int, ...], float] = {}
    stack = list(law.items())
    while stack:
        text, prob = stack.pop()
        if len(text) >= length:
            found[text[:length]] = found.get(text[:length], 0.0) + prob
        else:
            stack += [((*text, x), prob * float(TARGET[text[-1], x])) for x in range(len(TARGET))]
    return found


def observe(answer: Any, case: tuple[Any, ...]) -> dict[tuple[int, ...], float] | None:
    return rule_law(answer, *case)


def explain_law(found: Any, wanted: Any) -> str:
    first = [sum(prob for text, prob in law.items() if text[0] == x) for law in (found, wanted) for x in range(3)]
    if any(abs(a - b) > 1e-6 for a, b in zip(first[:3], first[3:], strict=True)):
        return (
            "already the law of the first token is not the target's. Is the coin right? And what follows a rejection?"
        )
    return "the law of the first token is right, the joint law is not. Look at what depends on how many were accepted."


def explain_culprits(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    return (
        f"not so: {', '.join(wrong)}. Compare first-token laws, then joint laws, and think through what each bug "
        "on the menu would do to them."
    )


SAMPLES = Exercise(
    right=lambda tv, noncentrality: noncentrality / (4 * tv**2),
    cases=[(0.1, 122.0), (0.02, 55.0), (0.5, 80.0)],
    praise="Ten times smaller errors take a hundred times the samples: enumerate where you can.",
    mistakes=[
        Mistake(
            "linear",
            "noise shrinks with the *root* of N only, so half the error takes more than twice the samples.",
            lambda tv, n: n / (4 * tv),
        ),
        Mistake(
            "4 forgotten",
            "TV is *half* the sum of |p' - p|, which makes a factor 4 in the bound.",
            lambda tv, n: n / tv**2,
        ),
        Mistake(
            "upside down",
            "the smaller the error, the *more* samples it takes.",
            lambda tv, n: n * 4 * tv**2,
        ),
        Mistake(
            "2 in place of 4",
            "the half in TV is squared, too.",
            lambda tv, n: n / (2 * tv**2),
        ),
    ],
    otherwise="Solve lambda = 4 N TV^2 for N.",
)

BUG = Exercise(
    right=CULPRITS,
    praise="Two of the three print fluent text, and one of these passes every test of the first token.",
    explain=explain_culprits,
    mistakes=[
        Mistake(
            "A believed by its first token",
            "A's first token is right. Look at its joint law: what is wrong *after* both guesses stood?",
            CULPRITS | {"A": 5},
        ),
        Mistake(
            "noise taken for a bug",
            "look at B's exact law, not at its sampled one: samples always scatter.",
            CULPRITS | {"B": 1},
        ),
        Mistake(
            "A and C confused",
            "one of A and C has its first-token law right, the other has not. A bug after a rejection shows at once.",
            CULPRITS | {"A": 1, "C": 2},
        ),
        Mistake(
            "C's ratio suspected",
            "with the ratio upside down the draft's *favourites* would be pushed up further. C is gently off.",
            CULPRITS | {"C": 4},
        ),
    ],
)

RULE = Exercise(
    right=token,
    cases=[(3, 2, 2), (2, 1, 1), (2, 2, 1), (1, 0, 0)],  # at last an absent guess, and none
    observe=observe,
    explain=explain_law,
    praise="The joint law is the target's. Now let the whole suite of notebook 05 look at it.",
    mistakes=[
        Mistake(
            "resampled from p",
            "after a rejection you draw from p itself, where the residual is due.",
            partial(rule_with, rest=lambda p, q, x: p),
        ),
        Mistake(
            "only the rejected token removed",
            "ruling out the rejected token is not enough: every token with q > p has had too much.",
            partial(rule_with, rest=lambda p, q, x: p.scatter(1, x[:, None], 0.0)),
        ),
        Mistake(
            "ratio inverted",
            "the coin has its ratio upside down.",
            partial(rule_with, accept=lambda p_x, q_x: q_x / p_x),
        ),
        Mistake(
            "no coin",
            "a guess with p < q must pass *sometimes*: a coin is needed, not a comparison.",
            partial(rule_with, accept=lambda p_x, q_x: (p_x >= q_x).to(p_x.dtype)),
        ),
        Mistake(
            "bonus from the draft",
            "the token after K accepted guesses is drawn from q. Nothing tests it, so it must come from p.",
            partial(rule_with, bonus=lambda p, q: q),
        ),
        Mistake(
            "absent guess accepted",
            "right for full chains. An absent guess (token -1) has an all-zero q, and p / 0 is infinite: where "
            "q(x) = 0 nothing may be accepted.",
            careless,
        ),
        Mistake(
            "all heads counted",
            "you count every guess that passed, also after a rejection: of [True, False, True] one is accepted.",
            partial(rule_with, count=lambda ok: ok.long().sum(1)),
        ),
    ],
)

EXERCISES = {"05.samples": SAMPLES, "05.bug": BUG, "05.rule": RULE}
