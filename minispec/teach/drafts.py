"""Exercises of `07_drafts_and_distillation`: divergences, and which draft is worth its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from minispec.planner import best_draft_len, speed_up
from minispec.teach.grading import Exercise, Mistake, unanswered
from minispec.teach.rejection import PAIRS

Drafts = dict[str, tuple[float, float]]  # name -> (acceptance, cost ratio)
CASES: tuple[Drafts, ...] = (  # in each another shortcut fails
    {"large": (0.77, 0.13), "middle": (0.70, 0.05), "tiny": (0.21, 0.02)},
    {"large": (0.88, 0.42), "middle": (0.76, 0.35), "tiny": (0.33, 0.22)},
    {"large": (0.86, 0.29), "middle": (0.84, 0.18), "tiny": (0.72, 0.06)},
    {"large": (0.65, 0.30), "middle": (0.50, 0.28), "tiny": (0.22, 0.02)},
)


def forward_kl(p: Tensor, q: Tensor) -> float:
    """KL(p || q) in nats."""
    return float((p * (p / q).log()).sum())


def best_draft(drafts: Drafts) -> str:
    """The name of the draft with the largest speed-up, each with the K that suits it."""
    return most(lambda a, c: best_draft_len(a, c)[1])(drafts)


def most(score: Callable[[float, float], float]) -> Callable[[Drafts], str]:
    """The draft of the highest score(acceptance, cost)."""
    return lambda drafts: max(drafts, key=lambda name: score(*drafts[name]))


def named(answer: Any, case: tuple[Any, ...]) -> Any:
    """The name given, or None. TypeError for what is no name."""
    found = answer(dict(case[0]))
    if not unanswered(found) and found not in list(case[0]):
        raise TypeError(f"the name of a draft is wanted, one of {', '.join(case[0])}; got {found!r}")
    return found


KL = Exercise(
    right=forward_kl,
    cases=PAIRS,
    praise="The mean of log p / q under the target: it punishes a draft that misses what the target may say.",
    mistakes=[
        Mistake(
            "reverse KL",
            "that is KL(q || p): the mean under the *draft*. Here the target's words count.",
            lambda p, q: forward_kl(q, p),
        ),
        Mistake(
            "cross-entropy",
            "that is the cross-entropy, - sum p log q. It is at least the entropy of p; a divergence is 0 for q = p.",
            lambda p, q: float(-(p * q.log()).sum()),
        ),
        Mistake(
            "sign turned round",
            "a divergence is never negative: which of the two stands above in the fraction?",
            lambda p, q: -forward_kl(p, q),
        ),
        Mistake(
            "not weighted",
            "the logarithms must be weighted with p: it is a mean over what the target says.",
            lambda p, q: float((p / q).log().sum()),
        ),
        Mistake(
            "total variation",
            "that is TV, what acceptance hangs on. Wanted is the Kullback-Leibler divergence.",
            lambda p, q: float((p - q).abs().sum() / 2),
        ),
    ],
    otherwise="sum over x of p(x) log(p(x) / q(x)), natural logarithm.",
)

BEST = Exercise(
    right=best_draft,
    cases=[(drafts,) for drafts in CASES],
    observe=named,
    explain=lambda found, wanted: (
        f"you choose the {found} draft for one of the test sets, and another is faster. Compute the speed-up of each "
        "at its own best K, and take the largest."
    ),
    praise="Neither the best nor the cheapest draft: the one with the largest speed-up at its own best K.",
    mistakes=[
        Mistake(
            "best acceptance",
            "the best guesser may be too slow to be worth it: it costs c at each of K steps.",
            most(lambda a, c: a),
        ),
        Mistake(
            "cheapest",
            "a draft that is cheap and wrong only makes work for the target.",
            most(lambda a, c: -c),
        ),
        Mistake(
            "acceptance per cost",
            "acceptance / cost rewards what costs nothing. What counts is tokens a step over the *whole* step's time, "
            "the target's pass included.",
            most(lambda a, c: a / c),
        ),
        Mistake(
            "acceptance minus cost",
            "a - c is a sound test of whether a draft pays at all, but says little about how much.",
            most(lambda a, c: a - c),
        ),
        Mistake(
            "one K for all",
            "you give all drafts the same K. A good and cheap draft should guess further than a poor one.",
            most(lambda a, c: speed_up(a, 4, c)),
        ),
    ],
)

EXERCISES = {"07.forward_kl": KL, "07.best_draft": BEST}
