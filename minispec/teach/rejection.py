"""Exercises of `03_rejection_sampling`: the coin, the residual, the acceptance, and all of it as a law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minispec.lab import exact_law
from minispec.teach.grading import Exercise, Mistake
from minispec.teach.helpers import Dice
from minispec.verify import residual

Draw = Callable[[Tensor, Tensor, Dice], int]


def law(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


PAIRS = [  # p, q
    (law(0.5, 0.3, 0.2), law(0.2, 0.5, 0.3)),
    (law(0.1, 0.2, 0.3, 0.4), law(0.4, 0.3, 0.2, 0.1)),
    (law(0.7, 0.2, 0.1), law(0.05, 0.15, 0.8)),
]


def accept(p: Tensor, q: Tensor, x: int) -> float:
    """Probability with which x, drawn from q, is accepted."""
    return min(1.0, float(p[x] / q[x]))


def acceptance(p: Tensor, q: Tensor) -> float:
    """Probability that a token drawn from q is accepted."""
    return float(torch.minimum(p, q).sum())


def step(chance: Callable[[Tensor, Tensor, int], float], rest: Callable[[Tensor, Tensor, int], Tensor]) -> Draw:
    """Draw x from q, flip a coin, draw again from the rest where it fails."""

    def draw(p: Tensor, q: Tensor, dice: Dice) -> int:
        x = dice.pick(q)
        return x if dice.flip(chance(p, q, x)) else dice.pick(rest(p, q, x))

    return draw


def emitted(answer: Draw, case: tuple[Any, ...]) -> list[float] | None:
    """The exact law of what one draft-and-verify step emits: (V,), or None without an answer."""
    p, q = case
    found = exact_law(lambda rng: answer(p.clone(), q.clone(), Dice(rng)), max_leaves=1000)
    if set(found) <= {None, ...}:
        return None
    wrong = [x for x in found if isinstance(x, (bool, float, str)) or x not in range(len(p))]
    if wrong:
        raise TypeError(f"a token must be an integer in 0..{len(p) - 1}, got {wrong[0]!r}")
    return [found.get(x, 0.0) for x in range(len(p))]


def compare_laws(found: Any, wanted: Any) -> str:
    return (
        f"for the first pair of laws it emits {[round(x, 3) for x in found]} and p is {[round(x, 3) for x in wanted]}. "
        "Too much or too little of which tokens? Follow one of them through your code by hand."
    )


ACCEPT = Exercise(
    right=accept,
    cases=[(p, q, x) for p, q in PAIRS for x in range(len(p))],
    praise="Never more than 1, and exactly 1 wherever the target likes the token at least as much as the draft does.",
    mistakes=[
        Mistake(
            "ratio inverted",
            "the wrong way round: a token that the draft says *too often* (q > p) is the one to reject sometimes.",
            lambda p, q, x: min(1.0, float(q[x] / p[x])),
        ),
        Mistake(
            "not capped",
            "almost: where p > q your chance is above 1. It is a probability.",
            lambda p, q, x: float(p[x] / q[x]),
        ),
        Mistake(
            "q counted twice",
            "that is how often x is drawn *and* accepted. It was drawn from q already: what chance is left to give?",
            lambda p, q, x: min(float(p[x]), float(q[x])),
        ),
        Mistake(
            "p alone",
            "accepting with probability p(x) is right for a token that the draft proposes *for certain*. This one was "
            "drawn from q, so it comes with frequency q(x) only.",
            lambda p, q, x: float(p[x]),
        ),
        Mistake(
            "no coin",
            "a yes or no is too coarse: where p < q the token must pass sometimes, just not always.",
            lambda p, q, x: float(p[x] >= q[x]),
        ),
    ],
    otherwise="How often is x drawn? How often should it come out? What must the coin do?",
)

RESIDUAL = Exercise(
    right=residual,
    cases=[*PAIRS, (law(0.5, 0.5), law(0.5, 0.5))],
    praise="It sums to 1 and holds exactly what p has and q lacks.",
    mistakes=[
        Mistake(
            "p itself",
            "drawing from p again looks innocent, but accepted drafts have given some tokens their share already.",
            lambda p, q: p,
        ),
        Mistake(
            "absolute difference",
            "|p - q| also holds the tokens of which there was too much already. Something is missing only where p > q.",
            lambda p, q: norm((p - q).abs()),
        ),
        Mistake(
            "not normalised",
            "the right shape, but a law must sum to 1.",
            lambda p, q: (p - q).clamp(min=0),
        ),
        Mistake(
            "the draft's surplus",
            "that is what q has too much of. Wanted is what p has and q lacks.",
            lambda p, q: norm((q - p).clamp(min=0)),
        ),
        Mistake(
            "softmax",
            "softmax is for logits: it gives every token a share, also those that nothing is missing of.",
            lambda p, q: (p - q).softmax(-1),
        ),
        Mistake(
            "nothing left",
            "right wherever something is left. With p = q nothing is, and you divide 0 by 0: fall back to p there.",
            lambda p, q: norm((p - q).clamp(min=0)),
        ),
    ],
    otherwise="p minus q, what is negative to zero, divided by its sum; and where nothing is left, p.",
)

ACCEPTANCE = Exercise(
    right=acceptance,
    cases=PAIRS,
    praise="The overlap of the two laws: 1 - TV(p, q). No rule that draws x from q can accept more often.",
    mistakes=[
        Mistake(
            "total variation",
            "that is the chance of a *rejection*: how much the laws differ. Wanted is how much they share.",
            lambda p, q: float((p - q).abs().sum() / 2),
        ),
        Mistake(
            "two independent draws agree",
            "sum p q is how often two *independent* draws agree. The coin does better than that.",
            lambda p, q: float((p * q).sum()),
        ),
        Mistake(
            "unweighted mean",
            "the tokens are not equally likely to be proposed: weigh each one's chance by how often it is drawn.",
            lambda p, q: float((p / q).clamp(max=1).mean()),
        ),
        Mistake(
            "weighted by p",
            "the tokens come from the draft: weigh by q, not by p.",
            lambda p, q: float((p * (p / q).clamp(max=1)).sum()),
        ),
    ],
    otherwise="x is drawn with probability q(x) and then passes with min(1, p(x) / q(x)). Sum over all x.",
)

STEP = Exercise(
    right=step(accept, lambda p, q, x: residual(p, q)),
    cases=PAIRS,
    observe=emitted,
    explain=compare_laws,
    praise="Every outcome of every draw and coin was enumerated: your step emits exactly p.",
    mistakes=[
        Mistake(
            "resampled from p",
            "after a rejection you draw from p. Tokens that drafts bring already then come too often. Something has to "
            "be taken away first.",
            step(accept, lambda p, q, x: p),
        ),
        Mistake(
            "only the rejected token removed",
            "after a rejection you only rule out the rejected token. The others that q has too much of are still in.",
            step(accept, lambda p, q, x: p.scatter(0, torch.tensor(x), 0.0)),
        ),
        Mistake(
            "ratio inverted",
            "your coin has the ratio upside down: it must reject what the draft says *too often*.",
            step(lambda p, q, x: min(1.0, float(q[x] / p[x])), lambda p, q, x: residual(p, q)),
        ),
        Mistake(
            "no coin",
            "p >= q decides alone in your step. Where p < q the token must pass sometimes: a coin is needed.",
            step(lambda p, q, x: float(p[x] >= q[x]), lambda p, q, x: residual(p, q)),
        ),
        Mistake(
            "always accepted",
            "your step emits q: nothing is ever rejected.",
            step(lambda p, q, x: 1.0, lambda p, q, x: p),
        ),
        Mistake(
            "greedy draft",
            "the draft takes its likeliest token, yet the coin believes it was drawn from q.",
            lambda p, q, dice: (
                int(q.argmax()) if dice.flip(accept(p, q, int(q.argmax()))) else dice.pick(residual(p, q))
            ),
        ),
    ],
)


def norm(weights: Tensor) -> Tensor:
    """Weights divided by their sum."""
    return weights / weights.sum()


EXERCISES = {"03.accept": ACCEPT, "03.residual": RESIDUAL, "03.step": STEP, "03.acceptance": ACCEPTANCE}
