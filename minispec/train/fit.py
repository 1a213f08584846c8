"""The training loop: AdamW, a schedule that can be extended, interruptions that leave no trace.

What is learnt is an *objective*, a function (model, step, progress) -> loss: cross-entropy on text
(`language_model`) or disagreement with a target (`distillation`).
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from minispec.model import GPT
from minispec.train.checkpoint import load_checkpoint, save_checkpoint
from minispec.train.recipe import Metrics, Recipe, State

Objective = Callable[[GPT, int, float], Tensor]  # (model, step, share of the run that is over) -> loss


def make_optimizer(model: GPT, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, recipe.beta2), fused=True)


def fit(
    model: GPT,
    objective: Objective,
    recipe: Recipe,
    *,
    checkpoint: Path | None = None,
    save_every: float = 120.0,
    validate: Callable[[GPT], Metrics] | None = None,
    on_step: Callable[[State, float], None] | None = None,
) -> State:
    """Train `model` in place and return the state.

    Resumes from `checkpoint` when that file is there, and saves to it every `save_every` seconds, at the end and
    on Ctrl-C, always between two steps. Just before a trapezoid's decay starts a copy is kept as `<name>.stable`,
    from which a longer run can go on. `validate(model)` gives named figures for the curve; `on_step(state, progress)`
    is told of each step.
    """
    optimizer, state = make_optimizer(model, recipe), State()
    if checkpoint is not None and checkpoint.exists():
        state = load_checkpoint(checkpoint, model, optimizer)
    model.train()
    saved, stable = time.monotonic(), False
    with between_steps() as interrupted:
        while (progress := recipe.progress(state)) < 1:
            start = time.monotonic()
            if checkpoint and not stable and recipe.schedule == "trapezoid" and progress >= 1 - recipe.decay:
                save_checkpoint(checkpoint.with_suffix(".stable" + checkpoint.suffix), model, optimizer, state, recipe)
            stable = progress >= 1 - recipe.decay
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(state.step, progress)
            loss = objective(model, state.step, progress)
            update(model, optimizer, loss, recipe.clip)
            advance(state, float(loss.detach()), time.monotonic() - start)
            if state.step % recipe.validate_every == 0:
                record(state, recipe, validate(model) if validate else {})
            if on_step is not None:
                on_step(state, recipe.progress(state))
            if checkpoint is not None and (interrupted() or time.monotonic() - saved > save_every):
                save_checkpoint(checkpoint, model, optimizer, state, recipe)
                saved = time.monotonic()
            if interrupted():
                raise KeyboardInterrupt
    record(state, recipe, validate(model) if validate else {})
    if checkpoint is not None and state.step:
        save_checkpoint(checkpoint, model, optimizer, state, recipe)
    return state


@contextmanager
def between_steps() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the step to end: a model saved halfway through an update would not be the same run.

    Gives a function that says whether it was pressed. Elsewhere than in the main thread signals are left alone.
    """
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def update(model: GPT, optimizer: torch.optim.Optimizer, loss: Tensor, clip: float) -> None:
    """Back-propagate, clip, step."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def advance(state: State, loss: float, spent: float) -> None:
    """Count a step. One during which the process was stopped counts no more than some usual ones."""
    if state.step > 20:
        spent = min(spent, 20 * state.seconds / state.step)
    state.loss = loss if math.isnan(state.loss) else 0.98 * state.loss + 0.02 * loss
    state.step, state.seconds = state.step + 1, state.seconds + spent


def record(state: State, recipe: Recipe, figures: Metrics) -> None:
    """Add a point to the curve; a run that was already complete adds none."""
    if state.history and state.history[-1]["step"] == state.step:
        return
    point: Metrics = {"step": state.step, "tokens": state.step * recipe.batch * recipe.context}
    point |= {"seconds": round(state.seconds, 1), "loss": round(state.loss, 4)}
    state.history.append(point | {name: round(value, 4) for name, value in figures.items()})
