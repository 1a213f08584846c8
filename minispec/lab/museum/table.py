"""Which check catches which piece, and with how many samples: computed, never typed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minispec.lab.decoder_checks import PROMPT, check_decoder
from minispec.lab.drafter_checks import drafter_suite
from minispec.lab.law import exact_law, target_law
from minispec.lab.models import TableModel, random_pair, rows_of
from minispec.lab.museum.piece import Piece
from minispec.lab.output import Tokens
from minispec.lab.parts import adapt
from minispec.lab.report import (
    CACHE,
    EACH,
    EFFICIENCY,
    EXACT,
    FIRST,
    GREEDY,
    JOINT,
    ROWS,
    STEPS,
    STOP,
    TOLD,
    ZERO,
)
from minispec.lab.statistics import required_samples
from minispec.lab.step_law import MARKOV
from minispec.model import LanguageModel

COLUMNS = (FIRST, EACH, JOINT, STEPS, ZERO, EXACT, GREEDY, STOP, ROWS, TOLD, CACHE, EFFICIENCY)
SAMPLED = (FIRST, EACH, JOINT)
RIGHT = 1e-9  # laws nearer than this are the same
LENGTH = 3

INTRODUCTION = """\
# The museum of bugs

What implementations of speculative decoding got wrong, each in a few lines of `minispec/lab/museum/`, and which check
of `minispec.lab` catches it. The page is written by `python -m minispec.lab.museum tutorials/MUSEUM.md`, and a test
computes the table anew and compares it with what each piece claims.

**A test of the first token alone misses {first} of the {wrong} that are wrong; a test of every token, each for itself,
misses {hidden}.** What is left shows in what tokens have to do with each other, in outputs that the target never gives,
at temperature 0, at a stop token, in batches, or only in the cache.

"""
EXPLANATION = """
A cross: the check fails, with the samples that `check_decoder` takes by default, of four tokens each. A number: the
samples that chi-squared needs at level 1e-6 for power .99 on outputs of three tokens, from the enumerated law
(`required_samples`); `never` where the law that it looks at is right; a number without a cross is more than was
sampled. Rules are shown on laws over three tokens that hang on the last token, what misuses noise or seeds on laws that
hang on nothing, all else on a random pair of transformers.

"""


@dataclass(frozen=True)
class Row:
    """What the checks made of a piece.

    caught_by: the checks that failed. needed: samples for power .99 at level 1e-6 on outputs of three tokens, by
    check; None where the law that the check looks at is right, so that no number is enough; no entry where the piece
    cannot be enumerated.
    """

    piece: Piece
    caught_by: frozenset[str]
    needed: Mapping[str, int | None]


def models_of(piece: Piece) -> tuple[LanguageModel, LanguageModel]:
    """The target and the draft that the piece is shown on."""
    if piece.bench == "gpt":
        return random_pair()
    if piece.bench == "markov":
        return MARKOV
    return TableModel(rows_of(0.5, 0.3, 0.2), 32), TableModel(rows_of(0.2, 0.5, 0.3), 32)


def examine(piece: Piece, seed: int = 1) -> frozenset[str]:
    """Run every check on a piece: the names of those that fail."""
    caught = check_decoder(piece.decoder, models=models_of(piece), seed=seed).failed
    if piece.kind != "drafter":
        return caught
    return caught | {finding.check for finding in drafter_suite(piece.part).run("told law") if not finding.ok}


def needed_samples(piece: Piece) -> dict[str, int | None]:
    """Samples that chi-squared needs on the first token, on the best of the single tokens, and on whole outputs."""
    run, models = adapt(piece.decoder), models_of(piece)
    if not run.enumerable:
        return {}
    wrong = exact_law(lambda rng: run(models, [PROMPT], LENGTH, rng)[0], 20_000)
    law = target_law(models[0], PROMPT, LENGTH)
    single = [_needed(_token(law, i), _token(wrong, i)) for i in range(LENGTH)]
    some = [n for n in single if n is not None]
    return {FIRST: single[0], EACH: min(some) if some else None, JOINT: _needed(law, wrong)}


def _needed(law: Mapping[Any, float], wrong: Mapping[Any, float]) -> int | None:
    if all(abs(law.get(x, 0.0) - wrong.get(x, 0.0)) < RIGHT for x in law.keys() | wrong.keys()):
        return None
    return required_samples(law, wrong)


def _token(law: Mapping[Tokens, float], place: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for tokens, prob in law.items():
        out[tokens[place]] = out.get(tokens[place], 0.0) + prob
    return out


def table(pieces: Iterable[Piece], say: Callable[[str], object] = lambda name: None) -> list[Row]:
    """A row for each piece; `say` hears its name before."""
    rows = []
    for piece in pieces:
        say(piece.name)
        rows.append(Row(piece, examine(piece), needed_samples(piece)))
    return rows


def render(rows: Iterable[Row]) -> str:
    """The page of the museum, in Markdown."""
    rows = list(rows)
    hidden = [row for row in rows if not row.caught_by & {FIRST, EACH} and not row.piece.lossless_but_slow]
    first = [row for row in rows if FIRST not in row.caught_by and not row.piece.lossless_but_slow]
    wrong = sum(not row.piece.lossless_but_slow for row in rows)
    head = INTRODUCTION.format(first=len(first), wrong=wrong, hidden=len(hidden))
    lines = [
        *(head.splitlines()),
        "| piece | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
        *(f"| {row.piece.name} | " + " | ".join(_cell(row, check) for check in COLUMNS) + " |" for row in rows),
        *EXPLANATION.splitlines(),
    ]
    for row in rows:
        lines += [f"## {row.piece.name}", "", f"*{row.piece.kind}*. {row.piece.story}", ""]
    return "\n".join(lines)


def _cell(row: Row, check: str) -> str:
    cross = "✗" if check in row.caught_by else ""
    if check not in SAMPLED or check not in row.needed:
        return cross
    n = row.needed[check]
    return f"{cross} {'never' if n is None else f'{n:,}'}".strip()
