"""A time limit for code that may loop for ever, without signals or threads: it works in any notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class TooLong(BaseException):
    """The time is over. No `Exception`, so that an answer's own `except Exception` does not swallow it."""


@contextmanager
def patience(seconds: float, file: str | None = None) -> Iterator[None]:
    """Raise `TooLong` from a line of `file` (None: never) that runs more than so many seconds after now.

    Only lines of that file are watched, so library code runs at full speed.
    """
    if file is None:
        yield
        return
    deadline, before = time.monotonic() + seconds, sys.gettrace()

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TooLong
        return line

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename == file else None

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
