"""The pytest plugin. Installed as the top-level module `minispec_pytest`, so that loading it does not load torch.

In a run that does not ask for `minispec.checks` it adds one fixture, whose body imports what it needs when it is used.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import pytest

SUITE = "minispec.checks"


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: Sequence[str]) -> None:
    """Options exist in runs of the suite only: their names are common ones."""
    if not any(SUITE in str(arg).replace("/", ".").replace("\\", ".") for arg in args):
        return
    group = parser.getgroup("minispec", "losslessness of speculative decoding")
    for kind in ("rule", "drafter", "decoder"):
        described = f"a {kind} to check; may be given several times"
        group.addoption(f"--{kind}", action="append", default=[], metavar="FILE.py:NAME", help=described)
    group.addoption("--samples", type=int, default=None, metavar="N", help="outputs sampled for each test")
    group.addoption("--level", type=float, default=1e-6, metavar="P", help="chance that a right part is accused")
    group.addoption("--seed", type=int, default=None, metavar="N", help="replay a run; fresh by default")


def pytest_configure(config: pytest.Config) -> None:
    """Load what is to be checked before anything is collected, so that a wrong name is a usage error."""
    if not asked(config):
        return
    import torch

    from minispec.checks.parts import SUITES, suites

    torch.set_num_threads(1)  # the models are tiny
    if config.option.seed is None:
        config.option.seed = secrets.randbelow(10**6)
    config.stash[SUITES] = suites(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"minispec: replay with --seed {config.option.seed}" if asked(config) else None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not asked(config):
        return
    from minispec.checks.parts import VERDICT

    for report in terminalreporter.stats.get("passed", []):  # what failed has said so already
        for key, text in report.user_properties:
            if key == VERDICT:
                terminalreporter.write_line(str(text))


def asked(config: pytest.Config) -> bool:
    """Whether this run is one of the suite: only then do the options exist."""
    return all(hasattr(config.option, name) for name in ("rule", "drafter", "decoder", "seed"))


@pytest.fixture
def lossless() -> Callable[..., Any]:
    """`minispec.lab.assert_lossless`: (decoder, target, **options), fails with the verdict in words."""
    from minispec.lab import assert_lossless

    return assert_lossless
