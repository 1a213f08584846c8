"""The losslessness lab: proves a speculative decoder right, or names its bug.

`assert_lossless` samples any decoder; `check_rule`, `check_drafter` and `check_decoder` also enumerate the exact law,
compare the cache with a prefill and test the efficiency. `museum` holds the bugs that they know.
"""

from minispec.lab.decoder_checks import check_decoder
from minispec.lab.drafter_checks import check_drafter
from minispec.lab.law import Enumerator, exact_law, target_law, total_variation
from minispec.lab.lossless import assert_lossless, judge
from minispec.lab.models import TableModel, random_gpt, random_pair, rows_of
from minispec.lab.parts import assemble
from minispec.lab.report import Finding, Report
from minispec.lab.rule_checks import check_rule
from minispec.lab.statistics import Verdict, chi_squared, detectable_tv, holm, required_samples, two_sample

__all__ = [
    "Enumerator",
    "Finding",
    "Report",
    "TableModel",
    "Verdict",
    "assemble",
    "assert_lossless",
    "check_decoder",
    "check_drafter",
    "check_rule",
    "chi_squared",
    "detectable_tv",
    "exact_law",
    "holm",
    "judge",
    "random_gpt",
    "random_pair",
    "required_samples",
    "rows_of",
    "target_law",
    "total_variation",
    "two_sample",
]
