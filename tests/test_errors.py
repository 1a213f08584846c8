"""Every bad input of `bad_inputs.py` meets the message of `MESSAGES.md`: one line, before any pass, and no traceback."""

from __future__ import annotations

from pathlib import Path

import bad_inputs
import pytest
from bad_inputs import CALLS, COMMANDS, FILES, folder, read_golden, refused, refused_command, refused_file, stable

GOLDEN = read_golden()


def title(args: list[str]) -> str:
    return " ".join(["minispec", *map(bad_inputs.repr_of, args)])


def test_the_table_has_every_case_and_no_other() -> None:
    """Where this fails, or a message has changed on purpose: python tests/bad_inputs.py."""
    assert list(GOLDEN) == [*CALLS, *(name for name, _, _ in FILES), *map(title, COMMANDS)]
    assert not [message for message in GOLDEN.values() if message.startswith("(") or not message]


@pytest.mark.parametrize("expression", CALLS)
def test_case_18_bad_calls_are_refused_before_any_pass(expression: str) -> None:
    message, passes = refused(expression)
    assert stable(message, Path("nowhere at all")) == GOLDEN[expression]
    assert passes == []
    assert "\n" not in message


@pytest.mark.parametrize(("name", "damage", "read"), FILES, ids=[name for name, _, _ in FILES])
def test_case_25_bad_files_are_refused_by_name(name: str, damage: bad_inputs.Damage, read: bad_inputs.Damage) -> None:
    with folder(0) as root:
        message = refused_file(damage, read, root)
        assert stable(message, root) == GOLDEN[name]
        assert not Path("executed").exists()  # what the pickle would do


@pytest.mark.parametrize("args", COMMANDS, ids=title)
def test_case_18_bad_commands_are_one_line_and_status_2(args: list[str]) -> None:
    with folder(0) as root:
        status, error = refused_command(args, root)
        assert status == 2
        assert error.count("\n") == 1
        assert error.startswith("minispec")
        assert stable(error, root) == GOLDEN[title(args)]
