"""A progress bar for training: loss, figures, tokens/s, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from minispec.bars import bar
from minispec.train.recipe import State

COUNTS = ("step", "tokens", "seconds", "loss")


@contextmanager
def progress(title: str, tokens_per_step: int) -> Iterator[Callable[[State, float], None]]:
    """A bar on stderr with loss, figures, tokens/s and time left; now and then a line where it is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}% {task.fields[info]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    start, first, said = time.monotonic(), -1, time.monotonic()
    with bar(*columns) as shown:
        task = shown.add_task(title, total=1.0, info="")

        def on_step(state: State, share: float) -> None:
            nonlocal first, said
            first = state.step - 1 if first < 0 else first
            now = time.monotonic()
            speed = (state.step - first) * tokens_per_step / max(now - start, 1e-9)
            latest = state.history[-1] if state.history else {}
            figures = "".join(f"{name} {value:.3f} " for name, value in latest.items() if name not in COUNTS)
            info = f"step {state.step} loss {state.loss:.3f} {figures}{speed:,.0f} tokens/s"
            shown.update(task, completed=share, info=info)
            if not shown.console.is_terminal and now - said > 20:
                said = now
                print(f"{title}: {share:4.0%} {info}", file=shown.console.file, flush=True)

        yield on_step
