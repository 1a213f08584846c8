"""What a decoding run returns: the steps it took, the tokens, and the counts that matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minispec.planner import Plan


@dataclass(frozen=True)
class Step:
    """One target pass of one row.

    tokens: emitted in this step: accepted draft tokens, then one of the target's own; cut after a stop token.
    drafted: token of each draft node (nodes 1..N-1), -1 for an absent one.
    parents: parent of each node (N), the root's being -1.
    path: accepted nodes from the root (0) on, cut like `tokens`.
    finish_reason: "length", "stop" or "context" in a row's last step, else None.
    """

    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    finish_reason: str | None = None

    @property
    def proposed(self) -> int:
        """Draft tokens submitted to the target."""
        return sum(token >= 0 for token in self.drafted)

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted and emitted."""
        return len(self.path) - 1

    @property
    def tested(self) -> int:
        """Depths at which a draft token was tested: all accepted ones, and the one where the path ended."""
        if self.accepted == len(self.tokens):  # cut by a stop token in the accepted run: nothing was rejected
            return self.accepted
        last = self.path[-1]
        rejected = any(p == last and t >= 0 for p, t in zip(self.parents[1:], self.drafted, strict=True))
        return self.accepted + rejected


@dataclass(frozen=True)
class Stats:
    """Counts over the steps of one row.

    `seconds` is the wall-clock time of the whole call (of all rows together) and is not compared.
    """

    new_tokens: int
    target_passes: int
    proposed: int
    tested: int
    accepted: int
    seconds: float = field(default=0.0, compare=False)

    @property
    def tokens_per_pass(self) -> float | None:
        """New tokens for each target pass; plain decoding has 1. None without a pass."""
        return self.new_tokens / self.target_passes if self.target_passes else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / tested: estimates alpha = sum min(p, q) on a chain under `token`. None when nothing was tested.

        `block` keeps the last success, so its rate is higher than alpha.
        """
        return self.accepted / self.tested if self.tested else None

    @property
    def accepted_per_proposed(self) -> float | None:
        """Accepted / proposed: lower, as what follows a rejection is never tested. None when nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None


@dataclass(frozen=True)
class Result:
    """The outcome for one prompt: new tokens only, why it ended, and how it came about.

    finish_reason: "length" (max_new_tokens reached), "stop" (a stop token, which is the last token), or
    "context" (block_size reached). plan: what `tree="auto"` decided before the first draw, else None.
    """

    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    steps: list[Step]
    stats: Stats
    plan: Plan | None = None


def summarise(steps: Sequence[Step], seconds: float = 0.0) -> Stats:
    """Add up the steps."""
    return Stats(
        new_tokens=sum(len(step.tokens) for step in steps),
        target_passes=len(steps),
        proposed=sum(step.proposed for step in steps),
        tested=sum(step.tested for step in steps),
        accepted=sum(step.accepted for step in steps),
        seconds=seconds,
    )
