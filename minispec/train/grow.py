"""Grow a trained GPT into a larger one that computes the same function, and train on from there.

Width is doubled by copying every channel (Net2Net, Chen et al. 1511.05641): a LayerNorm of [x, x] is
[LN(x), LN(x)], a linear layer that reads doubled channels splits its weight between the two copies. The split is
uneven by a little noise, or both copies would stay equal for ever. Less than twice the width is filled up with channels
that hold the mean of the others, which no LayerNorm lets through. Depth is added by repeating blocks with their output
projections set to zero, so that a new block starts as the identity.
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


def fill_up(model: GPT, width: int, seed: int = 0) -> GPT:
    """A GPT of that larger width, heads of the same size, with the same logits (but for LayerNorm's epsilon).

    New channels of the residual stream hold the mean of the old ones: the mean stays, the variance shrinks by
    old / new width, which the norms' weights make up for. New heads and MLP units read, and are not read yet.
    """
    old, size = model.config.n_embd, model.config.n_embd // model.config.n_head
    config = replace(model.config, n_embd=width, n_head=width // size)
    wide = GPT(config)
    wide.reset_parameters(torch.Generator().manual_seed(seed))
    state = wide.state_dict()
    for name, weight in model.state_dict().items():
        new = state[name]
        if "ln_" in name:
            new[:old], new[old:] = weight, 0.0 if name.endswith("bias") else weight.mean()
            if name.endswith("weight"):
                new *= (old / width) ** 0.5
        elif name.startswith(("wte", "wpe")):
            new[:, :old], new[:, old:] = weight, weight.mean(1, keepdim=True)
        elif "c_proj" in name:  # it writes into the stream
            if weight.ndim == 2:
                new[:, weight.shape[1] :] = 0.0
                new = new[:, : weight.shape[1]]
            new[:old], new[old:] = weight, weight.mean(0)
        else:
            parts = 3 if "c_attn" in name else 1  # q, k and v
            for part, given in zip(new.chunk(parts), weight.chunk(parts), strict=True):
                part[tuple(slice(n) for n in given.shape)] = given
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
    """The model grown to `config`. ValueError for heads of another size, or a depth that doubling does not give."""
    grown = model
    same = config.n_embd * model.config.n_head == model.config.n_embd * config.n_head  # the size of heads
    while same and 2 * grown.config.n_embd <= config.n_embd:
        grown = widen(grown, seed=seed)
    if same and grown.config.n_embd < config.n_embd:
        grown = fill_up(grown, config.n_embd, seed)
    while grown.config.n_layer < config.n_layer:
        grown = deepen(grown)
    if grown.config != config:
        raise ValueError(f"wider with heads of the same size, and doubled in depth, {model.config} is never {config}")
    return grown
