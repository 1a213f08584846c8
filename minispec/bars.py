"""Progress bars on stderr, and only where that is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import Progress, ProgressColumn


@contextmanager
def bar(*columns: ProgressColumn, transient: bool = False) -> Iterator[Progress]:
    """A bar where stderr is a terminal; elsewhere one that never begins: a disabled one may end with a blank line."""
    console = Console(stderr=True)
    found = Progress(*columns, console=console, disable=not console.is_terminal, transient=transient)
    with found if console.is_terminal else nullcontext():
        yield found
