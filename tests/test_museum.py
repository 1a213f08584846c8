"""The museum: each piece is caught by the checks that it claims, and by no other; right decoders by none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minispec import ModelDrafter, Pair, Randomness, Sampling, Tree
from minispec.lab.museum import PIECES, Piece
from minispec.lab.museum.drafters import Spoilt
from minispec.lab.museum.table import COLUMNS, Row, examine, needed_samples, render
from minispec.lab.report import CHECKS, EACH, EFFICIENCY, FIRST, HARMLESS, JOINT
from minispec.lab.rule_checks import rule_suite
from minispec.sampling import Shifted
from minispec.verify import RULES

BY_NAME = {piece.name: piece for piece in PIECES}


@pytest.mark.parametrize("name", BY_NAME)
def test_each_piece_is_caught_by_what_it_claims_and_by_nothing_else(name: str) -> None:
    assert examine(BY_NAME[name]) == BY_NAME[name].caught_by


def test_pieces_are_many_and_tell_their_story() -> None:
    assert len(BY_NAME) == len(PIECES) >= 21
    assert {piece.kind for piece in PIECES} == {"rule", "drafter", "cache", "sampler", "decoder"}
    for piece in PIECES:
        what, how = piece.story.split("\n\n")  # what it does; how it comes about, and how it feels
        assert what.endswith("."), piece.name
        assert len(how) > 60, piece.name
        assert piece.caught_by, piece.name
        assert piece.caught_by <= set(CHECKS), piece.name
        assert (piece.caught_by <= HARMLESS and EFFICIENCY in piece.caught_by) == piece.lossless_but_slow, piece.name


def test_marginal_tests_miss_several() -> None:
    wrong = [piece for piece in PIECES if not piece.lossless_but_slow]
    assert sum(FIRST not in piece.caught_by for piece in wrong) >= 9
    assert sum(not piece.caught_by & {FIRST, EACH} for piece in wrong) >= 6
    assert sum(JOINT in piece.caught_by and not piece.caught_by & {FIRST} for piece in wrong) >= 5


@pytest.mark.parametrize("piece", [p for p in PIECES if p.kind == "rule"], ids=lambda p: p.name)
def test_the_verdict_on_a_broken_rule_names_it(piece: Piece) -> None:
    causes = rule_suite(piece.part).explain([])
    named = [cause for cause in causes if "of the museum" in cause]
    assert len(named) == 1, causes
    assert f"museum does: {piece.name} (" in named[0]


@pytest.mark.parametrize("name", RULES)
def test_no_right_rule_is_taken_for_a_broken_one(name: str) -> None:
    assert not any("of the museum" in cause for cause in rule_suite(name).explain([]))


@pytest.mark.parametrize("name", ["bonus token by argmax", "position = node index in a tree"])
def test_samples_that_are_needed(name: str) -> None:
    """The first token is right in both; the joint law of three tokens shows them."""
    needed = needed_samples(BY_NAME[name])
    assert needed[FIRST] is None
    assert needed[EACH] is not None
    assert needed[JOINT] is not None
    assert 100 < needed[JOINT] < needed[EACH] < 1000


def test_the_page_has_a_row_and_a_story_for_each_piece() -> None:
    made = [Row(piece, piece.caught_by, {FIRST: None, EACH: None, JOINT: 12_345}) for piece in PIECES]
    page = render(made)
    for piece in PIECES:
        line = next(line for line in page.splitlines() if line.startswith(f"| {piece.name} |"))
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        assert len(cells) == len(COLUMNS)
        assert {c for c, cell in zip(COLUMNS, cells, strict=True) if "✗" in cell} == piece.caught_by
        assert "never" in cells[COLUMNS.index(FIRST)]
        assert "12,345" in cells[COLUMNS.index(JOINT)]
        assert f"## {piece.name}\n" in page


def test_what_is_spoilt_in_a_session_is_used_with_float32_models_too(shipped: Pair) -> None:
    """A chain in one call would pass it by."""
    read: list[list[list[int]]] = []

    def spoil(session: Any, sampling: Sampling) -> None:
        read_last = session.read_last
        session.read_last = lambda: (read.append(session.unread()), read_last())[1]

    session = Spoilt(ModelDrafter(shipped.draft, Tree.chain(3)), spoil).begin([[1, 2]], Sampling())
    with torch.inference_mode():
        session.propose([[]], [5], Shifted(Randomness(0), [1]))
    assert read == [[[1, 2]]]
