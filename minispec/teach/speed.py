"""Exercises of `01_why_decoding_is_slow`: bytes against arithmetic."""

from __future__ import annotations

from minispec.teach.grading import Exercise, Mistake


def token_time(parameters: float, bytes_per_weight: float, bandwidth: float) -> float:
    """Seconds to read all weights once."""
    return parameters * bytes_per_weight / bandwidth


def pass_time(n: int, parameters: float, bytes_per_weight: float, bandwidth: float, flops: float) -> float:
    """Seconds of a pass over n tokens: reading and computing overlap, the slower decides (the roofline model)."""
    return max(token_time(parameters, bytes_per_weight, bandwidth), 2 * n * parameters / flops)


EXERCISES = {
    "01.token_time": Exercise(
        right=token_time,
        cases=[(26e6, 4, 20e9), (7e9, 2, 100e9), (7e9, 0.5, 1e12)],
        praise="Every weight is read for every token: no cleverer code can beat this time, only fewer passes can.",
        mistakes=[
            Mistake(
                "weights, not bytes",
                "bandwidth is in bytes a second. How many bytes does one weight have?",
                lambda n, b, w: n / w,
            ),
            Mistake(
                "bits",
                "bytes_per_weight is in bytes already: no factor of 8.",
                lambda n, b, w: 8 * n * b / w,
            ),
            Mistake(
                "tokens a second",
                "that is the number of tokens a second. The time for one token is wanted.",
                lambda n, b, w: w / (n * b),
            ),
            Mistake(
                "arithmetic counted",
                "the factor 2 belongs to arithmetic (a product and a sum for each weight). Each weight is *read* once.",
                lambda n, b, w: 2 * n * b / w,
            ),
        ],
        otherwise="Which quantity is in bytes, which in bytes a second?",
    ),
    "01.pass_time": Exercise(
        right=pass_time,
        cases=[(1, 7e9, 2, 100e9, 2e12), (6, 7e9, 2, 100e9, 2e12), (64, 7e9, 2, 100e9, 2e12), (4, 26e6, 4, 2e10, 1e11)],
        praise="Flat while memory is the slower one, then rising with n. Where the two meet, free checking ends.",
        mistakes=[
            Mistake(
                "sum of both",
                "reading the next weights and computing with these go on at the same time. Which of the two is felt?",
                lambda n, m, b, w, f: m * b / w + 2 * n * m / f,
            ),
            Mistake(
                "the faster decides",
                "the pass is over when *both* are done, so not the faster one decides.",
                lambda n, m, b, w, f: min(m * b / w, 2 * n * m / f),
            ),
            Mistake(
                "weights read n times",
                "that is the time of n separate passes. In one pass every weight is read once and used for n tokens.",
                lambda n, m, b, w, f: max(n * m * b / w, 2 * n * m / f),
            ),
            Mistake(
                "arithmetic of one token",
                "the arithmetic does depend on n: each weight is used for each of the n tokens.",
                lambda n, m, b, w, f: max(m * b / w, 2 * m / f),
            ),
            Mistake(
                "one operation a weight",
                "each weight costs two operations for each token, a product and a sum.",
                lambda n, m, b, w, f: max(m * b / w, n * m / f),
            ),
        ],
        otherwise="Write down the time for memory and the time for arithmetic, each on a line, then combine them.",
    ),
}
