"""Train a GPT on text.

The batch of step i depends on (seed, i) only, so that an interrupted run continues as if nothing had happened.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from minispec.model import GPT
from minispec.train.data import batch_at
from minispec.train.fit import fit
from minispec.train.recipe import Recipe, State


def train(model: GPT, tokens: Tensor, recipe: Recipe, **options: Any) -> State:
    """Train `model` in place by cross-entropy on `tokens` (n,). Options and result as for `fit.fit`."""

    def objective(model: GPT, step: int, progress: float) -> Tensor:
        x, y = batch_at(tokens, step, recipe.batch, recipe.context, recipe.seed)
        with recipe.autocast(model.device):
            logits = model(x.to(model.device))  # (batch, context, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.to(model.device).flatten())

    return fit(model, objective, recipe, **options)
