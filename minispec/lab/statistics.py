"""Chi-squared tests of sampled sequences against an exact law or against another sample.

Pearson's statistic, not G, whose size is off for small cells. Joint laws of draft_len + 2 tokens or more: a test
of the first token alone misses half of the classical bugs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from scipy import optimize, stats

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
    p_value = float(stats.chi2.sf(statistic, df)) if df else 1.0
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
    p_value = float(stats.chi2.sf(statistic, df)) if df else 1.0
    tv = 0.5 * float(np.abs(first / n - second / m).sum())
    effective = int(n * m / (n + m))
    return Verdict(p_value >= level, p_value, statistic, df, n + m, tv, detectable_tv(effective, df, level))


def merge(expected: list[float], observed: list[int], least: float) -> tuple[np.ndarray, np.ndarray]:
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
    critical = float(stats.chi2.isf(level, df))
    return float(optimize.brentq(lambda lam: stats.ncx2.sf(critical, df, lam) - power, 1e-6, 1e5))


def detectable_tv(samples: int, df: int, level: float = 1e-6, power: float = 0.99) -> float:
    """Total variation that `samples` draws are sure to show: lambda >= 4 N TV^2, so TV <= sqrt(lambda / 4N)."""
    return 1.0 if df < 1 else min(1.0, float(np.sqrt(noncentrality(df, level, power) / (4 * samples))))
