"""Chi-squared tests of sampled sequences against an exact law or against another sample.

Pearson's statistic, not G, whose size is off for small cells. Joint laws of draft_len + 2 tokens or more: a test
of the first token alone misses half of the classical bugs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import scipy  # loads scipy.special when it is first used: every command would wait for it

Output = TypeVar("Output", bound=Hashable)
MIN_EXPECTED = 5.0


@dataclass(frozen=True)
class Verdict:
    """Outcome of a test. It `passed` when the p-value is at least `level` and no impossible output was seen.

    detectable_tv: the smallest total variation the sample would have shown with probability .99 at this level.
    tv: total variation between sample and law (biased upwards by noise). impossible: outputs the law excludes.
    """

    passed: bool
    p_value: float
    statistic: float
    df: int
    samples: int
    tv: float
    detectable_tv: float
    impossible: tuple[Hashable, ...] = ()


def chi_squared(
    counts: Mapping[Output, int], law: Mapping[Output, float], level: float = 1e-6, min_expected: float = MIN_EXPECTED
) -> Verdict:
    """One-sample test of `counts` against `law` {output: probability}, which must sum to 1.

    Outputs are merged in ascending order of probability until each bin expects at least `min_expected`; among equal
    ones the order must not depend on the counts, or rare outputs that were seen would meet in one bin. An output
    of probability 0 fails outright. Raises `ValueError` for an empty sample or a law that does not sum to 1.
    """
    n = sum(counts.values())
    if n == 0:
        raise ValueError("counts: the sample is empty")
    if abs(sum(law.values()) - 1) > 1e-6:
        raise ValueError(f"law: probabilities must sum to 1, got {sum(law.values())}")
    impossible = tuple(x for x, count in counts.items() if count and law.get(x, 0.0) <= 0)
    cells = sorted((x for x, p in law.items() if p > 0), key=lambda x: (law[x], repr(x)))  # blind to the counts
    expected, observed = merge([n * law[x] for x in cells], [counts.get(x, 0) for x in cells], min_expected)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    df = len(expected) - 1
    p_value = float(scipy.special.chdtrc(df, statistic)) if df else 1.0
    tv = 0.5 * (sum(abs(counts.get(x, 0) / n - p) for x, p in law.items()) + sum(counts[x] for x in impossible) / n)
    passed = p_value >= level and not impossible
    return Verdict(passed, p_value, statistic, df, n, tv, detectable_tv(n, df, level), impossible)


def two_sample(
    a: Mapping[Output, int], b: Mapping[Output, int], level: float = 1e-6, min_expected: float = MIN_EXPECTED
) -> Verdict:
    """Homogeneity test of two samples, for targets whose law cannot be enumerated."""
    n, m = sum(a.values()), sum(b.values())
    if n == 0 or m == 0:
        raise ValueError(f"both samples must hold something, got sizes {n} and {m}")
    share = min(n, m) / (n + m)
    total = {x: a.get(x, 0) + b.get(x, 0) for x in a.keys() | b.keys()}
    cells = sorted(total, key=lambda x: (total[x], repr(x)))  # blind to which sample a count is from
    pooled, first = merge([total[x] * share for x in cells], [a.get(x, 0) for x in cells], min_expected)
    pooled = pooled / share
    second = pooled - first
    e1, e2 = pooled * n / (n + m), pooled * m / (n + m)
    statistic = float(((first - e1) ** 2 / e1 + (second - e2) ** 2 / e2).sum())
    df = len(pooled) - 1
    p_value = float(scipy.special.chdtrc(df, statistic)) if df else 1.0
    tv = 0.5 * float(np.abs(first / n - second / m).sum())
    effective = int(n * m / (n + m))
    return Verdict(p_value >= level, p_value, statistic, df, n + m, tv, detectable_tv(effective, df, level))


def merge(expected: Sequence[float], observed: Sequence[float], least: float) -> tuple[np.ndarray, np.ndarray]:
    """Merge neighbouring cells, given in ascending order, until each bin expects at least `least`."""
    bins: list[list[float]] = [[0.0, 0.0]]
    for e, o in zip(expected, observed, strict=True):
        if bins[-1][0] >= least:
            bins.append([0.0, 0.0])
        bins[-1][0] += e
        bins[-1][1] += o
    if len(bins) > 1 and bins[-1][0] < least:
        e_last, o_last = bins.pop()
        bins[-1][0] += e_last
        bins[-1][1] += o_last
    table = np.array(bins)
    return table[:, 0], table[:, 1]


@lru_cache(maxsize=256)
def noncentrality(df: int, level: float, power: float) -> float:
    """The lambda at which a chi-squared test of this level has this power."""
    return float(scipy.special.chndtrinc(scipy.special.chdtri(df, level), df, 1 - power))


def detectable_tv(samples: int, df: int, level: float = 1e-6, power: float = 0.99) -> float:
    """Total variation that `samples` draws are sure to show: lambda >= 4 N TV^2, so TV <= sqrt(lambda / 4N)."""
    return 1.0 if df < 1 else min(1.0, float(np.sqrt(noncentrality(df, level, power) / (4 * samples))))


def required_samples(
    law: Mapping[Output, float],
    tv: float | Mapping[Output, float],
    power: float = 0.99,
    level: float = 1e-6,
    min_expected: float = MIN_EXPECTED,
) -> int:
    """Draws after which `chi_squared` at this level rejects, with this power, what is wrong by `tv`.

    tv: a total variation to `law` in (0, 1], or the wrong law itself, {output: probability}. By Cauchy-Schwarz the
    noncentrality of any law at that distance is at least 4 N TV^2, so N = lambda / 4 TV^2 is enough for all of them
    (so long as what is wrong is not spread over outputs so rare that they are merged); a wrong law needs
    N = lambda / sum((wrong - law)^2 / law), or as many as show an output that `law` excludes, whichever is less.
    Raises `ValueError` for a `tv` outside (0, 1], or a wrong law that is `law`.
    """
    wrong = tv if isinstance(tv, Mapping) else None
    if wrong is None and not 0 < tv <= 1:  # type: ignore[operator]
        raise ValueError(f"tv must be in (0, 1], got {tv!r}")
    excluded = 0.0 if wrong is None else sum(p for x, p in wrong.items() if law.get(x, 0.0) <= 0)
    shown = np.log(1 - power) / np.log1p(-excluded) if 0 < excluded < 1 else 1.0 if excluded else np.inf
    cells = sorted((x for x, p in law.items() if p > 0), key=lambda x: (law[x], repr(x)))
    probs = [law[x] for x in cells]
    other = probs if wrong is None else [wrong.get(x, 0.0) for x in cells]
    n = 1.0
    for _ in range(100):  # the number of cells that are not merged grows with N, and N with it
        expected, alternative = merge([n * p for p in probs], [n * p for p in other], min_expected)
        distance = (
            4 * tv**2  # type: ignore[operator]
            if wrong is None
            else float(((alternative - expected) ** 2 / expected).sum()) / n
        )
        df = len(expected) - 1
        enough = noncentrality(df, level, power) / distance if df and distance > 1e-20 else np.inf
        if enough <= n * 1.000001:
            break
        n = min(enough, 1.5 * n + 10) if np.isfinite(enough) else 2 * n
        if n > 1e12:
            break
    if min(n, shown) > 1e12:
        raise ValueError("tv: this law is not wrong enough to be told from `law` by any sample")
    return int(np.ceil(min(n, shown)))


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses a family of tests rejects, the chance of any false rejection being at most `level`.

    Holm 1979: in ascending order, each p-value is compared with level / (number of those not yet rejected).
    """
    rejected, going = [False] * len(p_values), True
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        going = going and p_values[i] <= level / (len(p_values) - rank)
        rejected[i] = going
    return rejected


def tv_interval(
    counts: Mapping[Output, int], law: Mapping[Output, float], confidence: float = 0.95
) -> tuple[float, float]:
    """A confidence interval for the total variation between the law that was sampled and `law`.

    The distance of a sample exceeds that of its law on average, by no more than b = sum sqrt(p (1 - p) / N) / 2, and
    strays from its mean by more than e = sqrt(ln(2 / (1 - confidence)) / 2N) with half the remaining probability on
    either side (McDiarmid 1989): so the interval is [tv - b - e, tv + e], cut to 0..1.
    """
    n = sum(counts.values())
    keys = counts.keys() | law.keys()
    tv = 0.5 * sum(abs(counts.get(x, 0) / n - law.get(x, 0.0)) for x in keys)
    bias = 0.5 * sum(np.sqrt(c / n * (1 - c / n) / n) for c in counts.values())
    stray = np.sqrt(np.log(2 / (1 - confidence)) / (2 * n))
    return max(0.0, float(tv - bias - stray)), min(1.0, float(tv + stray))


def association(
    counts: Mapping[tuple[int, int], int], law: Mapping[tuple[int, int], float]
) -> tuple[float, float, int]:
    """(p-value, statistic, df) of the test that two tokens hang together as in `law`, whatever their own laws are.

    The law is first fitted to the margins of `counts` (iterative proportional fitting, Deming & Stephan 1940), which
    leaves its odds ratios as they are. df 0, and a p-value of 1, where an expectation is below `MIN_EXPECTED`.
    """
    n = sum(counts.values())
    rows, columns = (sorted({pair[i] for pair, p in law.items() if p > 0}) for i in (0, 1))
    fitted = np.array([[law.get((r, c), 0.0) for c in columns] for r in rows]) * n
    seen = np.array([[counts.get((r, c), 0) for c in columns] for r in rows], dtype=float)
    keep_r, keep_c = seen.sum(1) > 0, seen.sum(0) > 0
    fitted, seen = fitted[keep_r][:, keep_c], seen[keep_r][:, keep_c]
    if min(seen.shape) < 2:
        return 1.0, 0.0, 0
    for _ in range(200):
        fitted = fitted * (seen.sum(1) / np.maximum(fitted.sum(1), 1e-300))[:, None]
        fitted = fitted * (seen.sum(0) / np.maximum(fitted.sum(0), 1e-300))
    cells = fitted > 0
    df = int(cells.sum()) - sum(seen.shape) + 1
    if df < 1 or fitted[cells].min() < MIN_EXPECTED:
        return 1.0, 0.0, 0
    statistic = float(((seen - fitted)[cells] ** 2 / fitted[cells]).sum())
    return float(scipy.special.chdtrc(df, statistic)), statistic, df
