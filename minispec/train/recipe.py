"""How to train, and how far a run has come."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from minispec.inputs import check_integer

Metrics = dict[str, float]
LARGEST_SEED = 1 << 32  # seeds of epochs and rounds are computed from a run's seed and must fit 64 bits


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
    beta2: float = 0.98
    clip: float = 1.0  # gradient norm
    precision: str = "float32"  # or "bfloat16": matrix products only, weights stay float32
    seed: int = 0
    validate_every: int = 500  # steps

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"give either steps or minutes, got steps={self.steps} and minutes={self.minutes}")
        for name, least in (("steps", 0), ("batch", 1), ("context", 1), ("warmup", 0), ("validate_every", 1)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least)
        for name in ("minutes", "lr", "decay", "clip"):
            if not 0 < (1 if getattr(self, name) is None else getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be a finite number > 0, got {getattr(self, name)!r}")
        if self.decay > 1:
            raise ValueError(f"decay must be a share in (0, 1], got {self.decay!r}")
        if not 0 <= check_integer("seed", self.seed, 0) < LARGEST_SEED:
            raise ValueError(f"seed must be an integer in 0..{LARGEST_SEED - 1}, got {self.seed!r}")
        for name, allowed in (("schedule", ("trapezoid", "cosine")), ("precision", ("float32", "bfloat16"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    def rate(self, step: int, progress: float) -> float:
        """Learning rate at a step, `progress` in [0, 1] being the share of the run that is over."""
        warm = min(1.0, (step + 1) / max(self.warmup, 1))
        if self.schedule == "cosine":
            return self.lr * warm * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.lr * warm * min(1.0, max(0.0, (1 - progress) / self.decay))

    def progress(self, state: State) -> float:
        """The share of the run that is over."""
        if self.steps is not None:
            return state.step / self.steps if self.steps else 1.0
        assert self.minutes is not None
        return state.seconds / (60 * self.minutes)

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context in which matrix products have this recipe's precision."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16")


@dataclass
class State:
    """What a run has come to; all but the tensors."""

    step: int = 0
    seconds: float = 0.0  # training time used, over all runs
    loss: float = float("nan")  # running mean, nats a token
    history: list[dict[str, float]] = field(default_factory=list)
