"""A test for each check of each part."""

from __future__ import annotations

import pytest

from minispec.checks.parts import SUITES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = metafunc.config.stash[SUITES]
    if "check" in metafunc.fixturenames:
        cases = [(suite, name) for suite in found for name in suite.checks]
        metafunc.parametrize(("suite", "check"), cases, ids=[f"{suite.subject}-{name}" for suite, name in cases])
    elif "suite" in metafunc.fixturenames:
        metafunc.parametrize("suite", found, ids=[suite.subject for suite in found])
