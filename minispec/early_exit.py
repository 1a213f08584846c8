"""Self-speculation: the target's own first layers draft."""

from __future__ import annotations

from dataclasses import replace

import torch

from minispec.drafters import ModelDrafter
from minispec.model import GPT
from minispec.tree import Tree


def EarlyExitDrafter(target: GPT, layers: int, tree: Tree | None = None, how: str = "without") -> ModelDrafter:
    """Self-speculation: the target's first `layers` blocks and its own head draft (Draft & Verify, 2309.08168).

    Shares the target's weights, has a cache of its own. Raises `ValueError` unless 1 <= layers < n_layer.
    """
    config = target.config
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < config.n_layer:
        raise ValueError(f"layers must be an integer in 1..{config.n_layer - 1}, got {layers!r}")
    with torch.device("meta"):  # no memory for weights that are shared
        draft = GPT(replace(config, n_layer=layers))
    draft.wte, draft.wpe, draft.ln_f = target.wte, target.wpe, target.ln_f
    draft.h = torch.nn.ModuleList(list(target.h)[:layers])
    return ModelDrafter(draft, Tree.chain(4) if tree is None else tree, how)
