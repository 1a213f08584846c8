"""The losslessness lab: proves a speculative decoder right, or names its bug.

`assert_lossless` samples any decoder; `check_rule`, `check_drafter` and `check_decoder` also enumerate the exact law,
compare the cache with a prefill and test the efficiency. `museum` holds the bugs that they know.
"""

from minispec.lab.law import Enumerator, exact_law, target_law, total_variation
from minispec.lab.lossless import assert_lossless, judge
from minispec.lab.report import Finding, Report
from minispec.lab.statistics import Verdict, chi_squared, detectable_tv, holm, required_samples, two_sample

__all__ = [
    "Enumerator",
    "Finding",
    "Report",
    "Verdict",
    "assert_lossless",
    "chi_squared",
    "detectable_tv",
    "exact_law",
    "holm",
    "judge",
    "required_samples",
    "target_law",
    "total_variation",
    "two_sample",
]
