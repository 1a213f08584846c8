"""The losslessness lab: exact laws by enumeration, and chi-squared tests of what enumeration replaces."""

from minispec.lab.law import Enumerator, exact_law, target_law, total_variation
from minispec.lab.statistics import Verdict, chi_squared, two_sample

__all__ = [
    "Enumerator",
    "Verdict",
    "chi_squared",
    "exact_law",
    "target_law",
    "total_variation",
    "two_sample",
]
