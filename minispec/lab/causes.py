"""From what failed to what may be the matter: the pieces of the museum that fail alike."""

from __future__ import annotations

from collections.abc import Sequence

from minispec.lab.law import total_variation
from minispec.lab.museum import PIECES, Piece
from minispec.lab.report import CHECKS, CONTRACT
from minispec.lab.step_law import step_law
from minispec.tree import Tree
from minispec.verify import Rule

SHOWN = 4
SAME = 1e-9


def likely_causes(failed: frozenset[str], run: Sequence[str] = CHECKS, kind: str | None = None) -> tuple[str, ...]:
    """Pieces of the museum, or those of a kind, that the same checks catch: the most alike first (Jaccard).

    run: the checks that were made; others say nothing.
    """
    if not failed or CONTRACT in failed:
        return ()
    scored = []
    for piece in PIECES:
        claims = piece.caught_by & frozenset(run)
        if claims & failed and kind in (None, piece.kind):
            scored.append((len(claims & failed) / len(claims | failed), piece))
    scored.sort(key=lambda pair: -pair[0])
    return tuple(describe(piece) for score, piece in scored[:SHOWN] if score >= max(0.5, scored[0][0] - 0.15))


def describe(piece: Piece) -> str:
    """The piece by its name, with the first sentence of its story."""
    first = " ".join(piece.story.split("\n\n")[0].split())
    return f"{piece.name} ({piece.kind}): {first}"


def rules_like(rule: Rule, trees: Sequence[Tree]) -> list[str]:
    """The broken rules of the museum that do in a step exactly what this one does."""
    mine = {tree: step_law(rule, tree) for tree in trees if tree.is_chain}
    rules = [piece for piece in PIECES if piece.kind == "rule"]
    same = [p for p in rules if all(total_variation(law, step_law(p.part, t)) < SAME for t, law in mine.items())]
    return [f"it does exactly what this one of the museum does: {describe(piece)}" for piece in same]
