"""Checkpoints: weights, AdamW's moments, and where the run is; safetensors with JSON metadata, written atomically."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minispec.files import write_tensors
from minispec.model import GPT, GPTConfig
from minispec.train.recipe import Recipe, State

CHECKPOINT_VERSION = "minispec-checkpoint-1"


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
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
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
