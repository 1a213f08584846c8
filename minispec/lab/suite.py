"""A family of checks on one thing: run one after the other, or one at a time, and concluded in a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minispec.lab.report import CONTRACT, ContractError, Finding, Report

Check = Callable[[Any], list[Finding]]
Say = Callable[[str], object]


@dataclass
class Suite:
    """checks: functions of `bench` by name. explain: the likely causes, from the findings."""

    subject: str
    bench: Any
    checks: Mapping[str, Check]
    explain: Callable[[list[Finding]], tuple[str, ...]]
    seed: int
    level: float
    done: dict[str, list[Finding]] = field(default_factory=dict)

    def run(self, name: str) -> list[Finding]:
        """What the check of that name finds; a breach of the contract is a finding. Runs once."""
        if name not in self.done:
            try:
                with torch.inference_mode():
                    self.done[name] = self.checks[name](self.bench)
            except ContractError as error:
                self.done[name] = [Finding(CONTRACT, False, str(error))]
        return self.done[name]

    def report(self, say: Say | None = None) -> Report:
        """Run what has not been run, up to the first breach of the contract, and conclude. `say` hears each name."""
        findings: list[Finding] = []
        for name in self.checks:
            if say is not None and name not in self.done:
                say(name)
            findings += self.run(name)
            if any(f.check == CONTRACT and not f.ok for f in findings):
                return Report(self.subject, tuple(findings), (), self.seed, self.level)
        wrong = any(not f.ok for f in findings)
        return Report(self.subject, tuple(findings), self.explain(findings) if wrong else (), self.seed, self.level)
