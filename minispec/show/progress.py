"""Progress bars with the time left, on stderr, and only where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from minispec.bars import bar
from minispec.lab.law import Enumerator
from minispec.sampling import Rng

T = TypeVar("T")


@contextmanager
def progress(title: str, total: float) -> Iterator[Callable[[float], None]]:
    """A bar for `total` units of work; call what it yields with the units that are newly done."""
    done = MofNCompleteColumn() if total != 1 else TaskProgressColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn(elapsed_when_finished=True))
    with bar(*columns, transient=True) as shown:
        task = shown.add_task(title, total=total)
        yield lambda units: shown.advance(task, units)


@contextmanager
def enumeration(fn: Callable[[Rng], T], title: str = "enumerating") -> Iterator[Callable[[Rng], T]]:
    """`fn` for `lab.exact_law`, with a bar of the probability that has been enumerated: 1 in the end.

    with enumeration(fn) as watched:
        law = exact_law(watched)
    """
    with progress(title, 1.0) as tick:

        def watched(rng: Rng) -> T:
            output = fn(rng)
            tick(rng.prob if isinstance(rng, Enumerator) else 0.0)
            return output

        yield watched
