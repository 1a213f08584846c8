"""Train a GPT on text: AdamW, a schedule that can be extended, checkpoints that resume exactly.

Checkpoints are safetensors (weights, AdamW's moments) with JSON metadata (step, time used, curve), written
atomically. The batch of step i depends on (seed, i) only, so that an interrupted run continues as if nothing
had happened.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minispec.files import write_tensors
from minispec.model import GPT, GPTConfig
from minispec.train.data import batch_at

CHECKPOINT_VERSION = "minispec-checkpoint-1"


@dataclass(frozen=True)
class Recipe:
    """How to train. Give `steps` (repeatable to the bit) or `minutes` (a time budget over all runs)."""

    steps: int | None = None
    minutes: float | None = None
    batch: int = 8  # windows a step
    context: int = 256  # tokens a window
    lr: float = 1e-3  # peak learning rate
    warmup: int = 100  # steps
    decay: float = 0.3  # share of the run in which the rate falls to zero
    schedule: str = "trapezoid"  # or "cosine"
    weight_decay: float = 0.1
    beta2: float = 0.99
    clip: float = 1.0  # gradient norm
    precision: str = "float32"  # or "bfloat16": matrix products only, weights stay float32
    seed: int = 0
    validate_every: int = 500  # steps

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"give either steps or minutes, got steps={self.steps} and minutes={self.minutes}")
        for name in ("batch", "context", "lr", "validate_every"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)!r}")
        for name, allowed in (("schedule", ("trapezoid", "cosine")), ("precision", ("float32", "bfloat16"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    def rate(self, step: int, progress: float) -> float:
        """Learning rate at a step, `progress` in [0, 1] being the share of the run that is over."""
        warm = min(1.0, (step + 1) / max(self.warmup, 1))
        if self.schedule == "cosine":
            return self.lr * warm * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.lr * warm * min(1.0, max(0.0, (1 - progress) / self.decay))


@dataclass
class State:
    """What a run has come to; all but the tensors."""

    step: int = 0
    seconds: float = 0.0  # training time used, over all runs
    loss: float = float("nan")  # running mean, nats a token
    history: list[dict[str, float]] = field(default_factory=list)


def make_optimizer(model: GPT, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, recipe.beta2), fused=True)


def train_step(model: GPT, optimizer: torch.optim.Optimizer, loss: Tensor, clip: float) -> None:
    """Back-propagate, clip, step."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def train(
    model: GPT,
    tokens: Tensor,
    recipe: Recipe,
    *,
    checkpoint: Path | None = None,
    save_every: float = 120.0,
    validate: Callable[[GPT], float] | None = None,
    on_step: Callable[[State, float], None] | None = None,
) -> State:
    """Train `model` in place on `tokens` (n,) and return the state.

    Resumes from `checkpoint` when that file is there, and saves to it every `save_every` seconds, at the end and
    on Ctrl-C. Just before a trapezoid's decay starts a copy is kept as `<name>.stable`, from which a longer run
    can go on. `validate(model)` gives bits per byte; `on_step(state, progress)` is told of each step.
    """
    optimizer, state = make_optimizer(model, recipe), State()
    if checkpoint is not None and checkpoint.exists():
        state = load_checkpoint(checkpoint, model, optimizer)
    model.train()
    device_type, saved, stable = model.device.type, time.monotonic(), False
    try:
        while (progress := _progress(state, recipe)) < 1:
            start = time.monotonic()
            if checkpoint and not stable and recipe.schedule == "trapezoid" and progress >= 1 - recipe.decay:
                save_checkpoint(checkpoint.with_suffix(".stable" + checkpoint.suffix), model, optimizer, state, recipe)
            stable = progress >= 1 - recipe.decay
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(state.step, progress)
            x, y = batch_at(tokens, state.step, recipe.batch, recipe.context, recipe.seed)
            with torch.autocast(device_type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                logits = model(x.to(model.device))  # (batch, context, V)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), y.to(model.device).flatten())
            train_step(model, optimizer, loss, recipe.clip)
            value = loss.item()
            state.loss = value if math.isnan(state.loss) else 0.98 * state.loss + 0.02 * value
            state.step += 1
            spent = time.monotonic() - start  # of a process that was stopped meanwhile, no more than some steps' worth
            state.seconds += min(spent, 20 * state.seconds / state.step) if state.step > 20 else spent
            if state.step % recipe.validate_every == 0:
                record(state, recipe, validate(model) if validate else None)
            if on_step is not None:
                on_step(state, _progress(state, recipe))
            if checkpoint is not None and time.monotonic() - saved > save_every:
                save_checkpoint(checkpoint, model, optimizer, state, recipe)
                saved = time.monotonic()
    finally:
        if checkpoint is not None and state.step:
            save_checkpoint(checkpoint, model, optimizer, state, recipe)
    record(state, recipe, validate(model) if validate else None)
    return state


def record(state: State, recipe: Recipe, bits_per_byte: float | None) -> None:
    """Add a point to the curve."""
    point: dict[str, float] = {"step": state.step, "tokens": state.step * recipe.batch * recipe.context}
    point |= {"seconds": round(state.seconds, 1), "loss": round(state.loss, 4)}
    if bits_per_byte is not None:
        point["bits_per_byte"] = round(bits_per_byte, 4)
    state.history.append(point)


def _progress(state: State, recipe: Recipe) -> float:
    if recipe.steps is not None:
        return state.step / recipe.steps if recipe.steps else 1.0
    assert recipe.minutes is not None
    return state.seconds / (60 * recipe.minutes)


def save_checkpoint(path: Path, model: GPT, optimizer: torch.optim.Optimizer, state: State, recipe: Recipe) -> None:
    """Write weights, moments and state, atomically."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for parameter, moments in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            tensors[f"{key}.{names[parameter]}"] = moments[key]
    about: dict[str, Any] = {"state": asdict(state), "config": asdict(model.config), "recipe": asdict(recipe)}
    write_tensors(path, tensors, {"format": CHECKPOINT_VERSION, "about": json.dumps(about)})


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a checkpoint. ValueError names the file when it is none, or of another version."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != CHECKPOINT_VERSION:
                raise ValueError(
                    f"{path}: written as {about.get('format')!r}, this version reads {CHECKPOINT_VERSION!r}; "
                    "start a new run under another name"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a checkpoint ({error}); delete it to start again") from None
    return tensors, json.loads(about["about"])


def model_from_checkpoint(path: Path) -> GPT:
    """The model alone, float32."""
    tensors, about = read_checkpoint(path)
    model = GPT(GPTConfig(**about["config"]))
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    return model


def load_checkpoint(path: Path, model: GPT, optimizer: torch.optim.Optimizer) -> State:
    """Put weights and moments back in place. ValueError when the file holds a model of another shape."""
    tensors, about = read_checkpoint(path)
    if about["config"] != asdict(model.config):
        raise ValueError(f"{path}: holds {about['config']}, this run trains {asdict(model.config)}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            if f"exp_avg.{name}" in tensors:
                moments = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": tensors[f"step.{name}"], **moments}
    return State(**about["state"])
