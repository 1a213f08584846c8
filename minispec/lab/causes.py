"""From what failed to what may be the matter."""

from __future__ import annotations

from minispec.lab.report import CONTRACT


def likely_causes(failed: frozenset[str]) -> tuple[str, ...]:
    if not failed or CONTRACT in failed:
        return ()
    return ()
