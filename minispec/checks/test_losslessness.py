"""One test for each check of each part, and one for the verdict on the part as a whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minispec.checks.parts import VERDICT
from minispec.lab.suite import Suite


def test_check(suite: Suite, check: str) -> None:
    failed = [str(finding) for finding in suite.run(check) if not finding.ok]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)


def test_verdict(suite: Suite, record_property: Callable[[str, object], None]) -> None:
    report = suite.report()
    record_property(VERDICT, str(report).splitlines()[0])
    if not report.ok:
        pytest.fail(str(report), pytrace=False)
