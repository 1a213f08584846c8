"""What a check found, and the verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The checks, by the name under which findings, museum pieces and reports speak of them.
CONTRACT = "contract"  # shapes, dtypes, ranges, untouched arguments, no exception
LENGTH = "length"  # exactly as many tokens as asked for
STOP = "stop token"  # nothing after it
SEEDS = "seeds"  # one seed, one output; other seeds, other outputs
ZERO = "zero-probability token"  # nothing that the target excludes
FIRST = "first-token law"  # chi-squared on the first token alone
EACH = "law of each token"  # chi-squared on each later token alone
JOINT = "joint law"  # chi-squared on whole outputs
STEPS = "correlation between steps"  # chi-squared on what two tokens have to do with each other
EXACT = "exact law"  # every random choice enumerated
GREEDY = "greedy law"  # the same at temperature 0
TOLD = "told law"  # the draft's tokens follow the q that comes with them
ROWS = "rows of a batch"  # a row in company is a row alone
CACHE = "cache against prefill"  # cached logits are those of an uncached pass
EFFICIENCY = "efficiency"  # draft = target accepts everything; nothing is read twice

CHECKS = (
    *(CONTRACT, LENGTH, STOP, SEEDS, ZERO, FIRST, EACH, JOINT, STEPS),
    *(EXACT, GREEDY, TOLD, ROWS, CACHE, EFFICIENCY),
)
HARMLESS = frozenset({EFFICIENCY, CACHE})  # what these alone find leaves the law as it is, and costs time


class ContractError(Exception):
    """What is checked raised an error, or returned what its signature does not allow."""


@dataclass(frozen=True)
class Finding:
    """Outcome of one check.

    message: what was seen, in words. tv: total variation to the right law, measured (with its interval at 95 %) or,
    for an enumerated law, exact. detectable_tv: the smallest one that the sample would have shown with probability
    .99. p_value, samples: of the test, where there was one.
    """

    check: str
    ok: bool
    message: str
    tv: float | None = None
    tv_interval: tuple[float, float] | None = None
    detectable_tv: float | None = None
    p_value: float | None = None
    samples: int | None = None

    def __str__(self) -> str:
        parts = [self.message]
        if self.tv is not None:
            low_high = "" if self.tv_interval is None else " ({:.3f} to {:.3f} at 95 %)".format(*self.tv_interval)
            parts.append(f"TV {self.tv:.2g}{low_high}")
        if self.p_value is not None:
            parts.append(f"p-value {self.p_value:.2g}")
        if self.detectable_tv is not None:
            parts.append(f"a TV of {self.detectable_tv:.3f} would have shown")
        if self.samples is not None:
            parts.append(f"{self.samples:,} samples")
        return f"{'ok  ' if self.ok else 'FAIL'} {self.check}: {'; '.join(part for part in parts if part)}"


@dataclass(frozen=True)
class Report:
    """Everything that was found about `subject`, with the likely causes, the likeliest first.

    `ok`: every check passed. `lossless`: all did whose failure changes the output law; a slow decoder may be that.
    """

    subject: str
    findings: tuple[Finding, ...]
    causes: tuple[str, ...] = ()
    seed: int | None = None
    level: float | None = None

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    @property
    def lossless(self) -> bool:
        return self.failed <= HARMLESS

    @property
    def failed(self) -> frozenset[str]:
        """Names of the checks that failed."""
        return frozenset(finding.check for finding in self.findings if not finding.ok)

    def finding(self, check: str) -> Finding | None:
        """The worst finding of that check: the first that failed, else the first."""
        found = sorted((f for f in self.findings if f.check == check), key=lambda f: f.ok)
        return found[0] if found else None

    def __str__(self) -> str:
        lines = [f"{self.subject}: {self._verdict()}"]
        lines += [f"  {finding}" for finding in self.findings]
        if self.causes:
            lines += ["  Likely causes:", *(f"  - {cause}" for cause in self.causes)]
        if self.seed is not None:
            level = "" if self.level is None else f", level={self.level:g}"
            lines.append(f"  Replay with seed={self.seed}{level}.")
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.ok:
            shown = [f.detectable_tv for f in self.findings if f.detectable_tv is not None]
            limit = f"; a deviation of TV {max(shown):.3f} would have shown" if shown else ""
            return f"LOSSLESS as far as {len(self.findings)} checks can tell{limit}"
        names = [name for name in CHECKS if name in self.failed]
        if self.failed == {CONTRACT}:
            return "NOT CHECKED to the end: it does not keep to its signature"
        return f"{'LOSSLESS BUT SLOW' if self.lossless else 'NOT LOSSLESS'}: {', '.join(names)}"


def worst(findings: Sequence[Finding]) -> Finding:
    """The first that failed, else the first."""
    return min(findings, key=lambda finding: finding.ok)
