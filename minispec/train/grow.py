"""Grow a trained GPT into a larger one that computes the same function, and train on from there.

Width is doubled by copying every channel (Net2Net, Chen et al. 1511.05641): a LayerNorm of [x, x] is
[LN(x), LN(x)], a linear layer that reads doubled channels splits its weight between the two copies. The split is
uneven by a little noise, or both copies would stay equal for ever. Depth is added by repeating blocks with their
output projections set to zero, so that a new block starts as the identity.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minispec.model import GPT, GPTConfig


def _copies(weight: Tensor) -> Tensor:
    """Rows (outputs) twice."""
    return torch.cat([weight, weight])


def _split(weight: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Columns (inputs) twice, half the weight each, give or take `noise` of its spread: the sum is kept."""
    shift = torch.randn(weight.shape, generator=generator) * noise * weight.std()
    return torch.cat([weight / 2 + shift, weight / 2 - shift], 1)


def widen(model: GPT, noise: float = 0.1, seed: int = 0) -> GPT:
    """A GPT of twice the width and heads with the same logits (up to rounding)."""
    config = replace(model.config, n_embd=2 * model.config.n_embd, n_head=2 * model.config.n_head)
    generator, wide = torch.Generator().manual_seed(seed), GPT(config)
    state = {}
    for name, weight in model.state_dict().items():
        if name.startswith(("wte", "wpe")):
            state[name] = torch.cat([weight, weight], 1)
        elif "c_attn" in name:  # q, k and v are widened each for itself; q and k keep their head size
            parts = weight.chunk(3)
            if weight.ndim == 2:
                parts = tuple(_split(part, noise, generator) for part in parts)
            state[name] = torch.cat([_copies(part) for part in parts])
        elif weight.ndim == 2:
            state[name] = _copies(_split(weight, noise, generator))
        else:
            state[name] = _copies(weight)
    for name in ("ln_f.weight", "ln_f.bias"):  # the tied head adds up two equal halves
        state[name] = state[name] / 2
    wide.load_state_dict(state)
    return wide


def deepen(model: GPT) -> GPT:
    """A GPT of twice the depth with the same logits: each block is followed by a copy that starts as the identity."""
    deep = GPT(replace(model.config, n_layer=2 * model.config.n_layer))
    state = {name: weight for name, weight in model.state_dict().items() if not name.startswith("h.")}
    for name, weight in model.state_dict().items():
        if name.startswith("h."):
            _, layer, rest = name.split(".", 2)
            state[f"h.{2 * int(layer)}.{rest}"] = weight
            state[f"h.{2 * int(layer) + 1}.{rest}"] = torch.zeros_like(weight) if "c_proj" in rest else weight.clone()
    deep.load_state_dict(state)
    return deep


def grow(model: GPT, config: GPTConfig, seed: int = 0) -> GPT:
    """The model widened and deepened to `config`. ValueError where doubling does not lead there."""
    grown = model
    while grown.config.n_embd < config.n_embd:
        grown = widen(grown, seed=seed)
    while grown.config.n_layer < config.n_layer:
        grown = deepen(grown)
    if grown.config != config:
        raise ValueError(f"doubling width (with heads) and depth of {model.config} does not lead to {config}")
    return grown
