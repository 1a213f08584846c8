"""Exercises of `08_beyond`: block weights, prompt lookup, admissible stopping, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from minispec.teach.grading import Exercise, Mistake

RATIOS = ([0.5, 2.0, 0.8], [2.0, 0.5, 1.0], [0.3, 4.0, 0.5, 3.0], [1.5])
TEXTS = (
    ([1, 2, 3, 4, 1, 2, 5, 6, 7, 1, 2], 2, 3),
    ([7, 8, 9, 7, 8], 2, 2),
    ([1, 2, 3, 4], 2, 3),
    ([5, 5, 5, 5, 5], 2, 2),
    ([1, 2, 3, 1, 2, 3, 1], 1, 2),
)


def weights(ratios: Sequence[float]) -> list[float]:
    """w_i = min(1, w_{i-1} r_i), w_0 = 1: of each prefix."""
    return list(accumulate(ratios, lambda w, r: min(1.0, w * r), initial=1.0))[1:]


def find(text: Sequence[int], n: int, K: int) -> list[int]:
    """What followed the latest earlier occurrence of the last n tokens, up to K tokens; [] where there is none."""
    return search(text, n, K, reversed(range(len(text) - n)))


def search(text: Sequence[int], n: int, K: int, starts: Iterable[int], skip: int | None = None) -> list[int]:
    """The first of `starts` at which the last n tokens stand; what comes `skip` (n) places after it."""
    for start in starts:
        if list(text[start : start + n]) == list(text[-n:]):
            after = start + (n if skip is None else skip)
            return list(text[after : after + K])
    return []


def batch_gain(expected: float, times: Callable[[int], float], B: int, K: int, draft_step: float) -> float:
    """Speed-up of a batch of B rows: the check reads B (K + 1) tokens in one pass, plain decoding B."""
    return expected * times(B) / (times(B * (K + 1)) + K * draft_step)


def roofline(n: int) -> float:
    """A t(n) that is flat up to 32 tokens and rises in proportion after that."""
    return max(1.0, n / 32)


RULES = {"A": False, "B": True, "C": True, "D": True}

BLOCK = Exercise(
    right=weights,
    cases=[(ratios,) for ratios in RATIOS],
    praise="A surplus (r > 1) repays an earlier deficit, but is never saved up beyond 1.",
    mistakes=[
        Mistake(
            "token rule",
            "that is the product of min(1, r_i): the token rule, which forgets a surplus at once. Let it repay.",
            lambda ratios: list(accumulate(ratios, lambda w, r: w * min(1.0, r), initial=1.0))[1:],
        ),
        Mistake(
            "never capped",
            "a weight is a probability: cap it at 1 at each place.",
            lambda ratios: list(accumulate(ratios, lambda w, r: w * r)),
        ),
        Mistake(
            "capped at the end",
            "the cap belongs inside the recursion: a surplus at place 1 must not be saved for place 2.",
            lambda ratios: [min(1.0, w) for w in accumulate(ratios, lambda w, r: w * r)],
        ),
        Mistake(
            "each place alone",
            "each weight must start from the one before it: w_i = min(1, w_{i-1} r_i).",
            lambda ratios: [min(1.0, r) for r in ratios],
        ),
    ],
    otherwise="w_1 = min(1, r_1), then w_i = min(1, w_{i-1} r_i).",
)

LOOKUP = Exercise(
    right=find,
    cases=TEXTS,
    praise="No model, no training, no cost: where texts repeat themselves this is hard to beat.",
    mistakes=[
        Mistake(
            "finds itself",
            "the last n tokens always stand at the end of the text: look for an *earlier* place.",
            lambda text, n, K: search(text, n, K, range(len(text) - n, -1, -1)),
        ),
        Mistake(
            "first hit",
            "take the *latest* earlier hit: what was said last is the better guide.",
            lambda text, n, K: search(text, n, K, range(len(text) - n)),
        ),
        Mistake(
            "suffix returned",
            "you return the tokens that were looked for. Wanted are those that came *after* them.",
            lambda text, n, K: search(text, n, K, range(len(text) - n - 1, -1, -1), skip=0),
        ),
        Mistake(
            "one token too far",
            "the run begins right after the n tokens that were found, not one later.",
            lambda text, n, K: search(text, n, K, range(len(text) - n - 1, -1, -1), skip=n + 1),
        ),
        Mistake(
            "overlap excluded",
            "the earlier place may overlap the end of the text: in 5 5 5 5 5 the pattern 5 5 stands one place earlier.",
            lambda text, n, K: search(text, n, K, range(len(text) - 2 * n, -1, -1)),
        ),
    ],
    otherwise="Go from the end to the front; at each start compare n tokens with the last n; return what follows.",
)

STOP = Exercise(
    right=RULES,
    praise="What decides on *submitting* x must be known before x is drawn. Once drawn, x must be tested.",
    mistakes=[
        Mistake(
            "A taken for exact",
            "look at A again: tokens with a small q(x) are never tested, so they come out by way of the bonus alone. "
            "Which law does a *submitted* token follow then?",
            RULES | {"A": True},
        ),
        Mistake(
            "B taken for wrong",
            "look at B again: max q is known before x is drawn. Can the decision depend on x?",
            RULES | {"B": False},
        ),
        Mistake(
            "C taken for wrong",
            "look at C again: coins of an *earlier* step are past. Do they tell anything about this x?",
            RULES | {"C": False},
        ),
        Mistake(
            "D taken for wrong",
            "look at D again: x itself is submitted whatever it is. Only whether a *next* one is drawn depends on it.",
            RULES | {"D": False},
        ),
        Mistake(
            "none exact",
            "stopping is not wrong as such: the draft's length may depend on anything known before the draw.",
            dict.fromkeys(RULES, False),
        ),
    ],
    otherwise="For each: is it settled before x is drawn whether x will be tested?",
)

BATCH = Exercise(
    right=batch_gain,
    cases=[(3.5, roofline, B, 4, 0.1) for B in (1, 4, 8, 32, 128)],
    praise="The more rows, the more tokens a plain pass reads anyway, and the fewer are free for guesses.",
    mistakes=[
        Mistake(
            "check of one row",
            "the check reads K + 1 tokens of *each* of the B rows, all in one pass.",
            lambda e, t, B, K, d: e * t(B) / (t(K + 1) + K * d),
        ),
        Mistake(
            "plain pass of one row",
            "plain decoding of the batch reads B tokens in a pass, not 1. Compare with that.",
            lambda e, t, B, K, d: e * t(1) / (t(B * (K + 1)) + K * d),
        ),
        Mistake(
            "rows one after the other",
            "B rows share a pass: that is what batches are for.",
            lambda e, t, B, K, d: e * t(1) / (t(K + 1) + K * d),
        ),
        Mistake(
            "drafting is free",
            "the draft makes K passes in each step.",
            lambda e, t, B, K, d: e * t(B) / t(B * (K + 1)),
        ),
        Mistake(
            "B K tokens",
            "the pending token of each row is read in the check, too.",
            lambda e, t, B, K, d: e * t(B) / (t(B * K) + K * d),
        ),
    ],
    otherwise="Tokens a step, times the plain pass of the batch, over the time of a speculative step.",
)

EXERCISES = {"08.block_weights": BLOCK, "08.lookup": LOOKUP, "08.stopping": STOP, "08.batch_gain": BATCH}
