"""Exercises of `09_your_hardware_and_its_cost`: when the first guess pays, and what a million tokens cost."""

from __future__ import annotations

from minispec.cost import ownership
from minispec.teach.grading import Exercise, Mistake


def pays(a: float, c: float, check: float) -> bool:
    """Whether one guess a step is faster than plain decoding. check: t(2) / t(1)."""
    return (1 + a) / (check + c) > 1


def money(tokens_per_second: float, watts: float, price_per_kwh: float, price_per_hour: float) -> float:
    """What a million tokens cost."""
    return ownership(tokens_per_second, watts, price_per_hour, price_per_kwh).money


EXERCISES = {
    "09.pays": Exercise(
        right=pays,
        cases=[
            (0.8, 0.1, 1.05),
            (0.3, 0.1, 1.3),
            (0.2, 0.3, 1.0),
            (0.45, 0.3, 1.1),
            (0.6, 0.5, 1.3),
            (0.6, 0.4, 1.0),
            (0.1, 0.02, 1.0),
        ],
        praise="One guess pays when a > c + (t(2) / t(1) - 1): the gain in tokens beats the loss in time.",
        mistakes=[
            Mistake(
                "checking is free",
                "a > c is right only where t(2) = t(1). Here the pass over two tokens costs `check`.",
                lambda a, c, check: a > c,
            ),
            Mistake(
                "coin toss",
                "one half is nothing special: with a draft that costs nearly nothing, far less acceptance is enough.",
                lambda a, c, check: a > 0.5,
            ),
            Mistake(
                "bonus forgotten",
                "a step yields 1 + a tokens: the target's own token comes in any case.",
                lambda a, c, check: a / (check + c) > 1,
            ),
            Mistake(
                "drafting is free",
                "the draft's step costs c, too.",
                lambda a, c, check: (1 + a) / check > 1,
            ),
        ],
        otherwise="Tokens of a step (1 + a) over its time (check + c): is that more than 1?",
    ),
    "09.money": Exercise(
        right=money,
        cases=[(150.0, 60.0, 0.30, 0.05), (20.0, 300.0, 0.25, 0.40), (4000.0, 700.0, 0.10, 2.50)],
        praise="Twice the speed, half the cost: the machine runs half as long, and draws about the same power.",
        mistakes=[
            Mistake(
                "watts taken for kilowatts",
                "a kilowatt-hour is 1000 watts for an hour.",
                lambda s, w, kwh, hour: 1e6 / s / 3600 * (w * kwh + hour),
            ),
            Mistake(
                "seconds taken for hours",
                "1e6 / tokens_per_second is in seconds; both prices are for an hour.",
                lambda s, w, kwh, hour: 1e6 / s * (w / 1000 * kwh + hour),
            ),
            Mistake(
                "machine forgotten",
                "that is the electricity. The machine itself costs price_per_hour, running or bought.",
                lambda s, w, kwh, hour: 1e6 / s / 3600 * w / 1000 * kwh,
            ),
            Mistake(
                "electricity forgotten",
                "that is the machine. It also draws power.",
                lambda s, w, kwh, hour: 1e6 / s / 3600 * hour,
            ),
            Mistake(
                "one token",
                "that is the price of one token. Wanted is that of a million.",
                lambda s, w, kwh, hour: (w / 1000 * kwh + hour) / s / 3600,
            ),
        ],
        otherwise="Hours for a million tokens; times (kilowatts x price of a kWh + price of an hour).",
    ),
}
