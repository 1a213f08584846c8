"""A model with something around its passes: to count them, time them, note them, or spoil them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minispec.model import LanguageModel


class Around:
    """Has all that its model has. Subclasses do what they are for in `__call__`."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.config = model, model.config
        self.end_of_text: int | None = getattr(model, "end_of_text", None)

    def __getattr__(self, name: str) -> Any:  # its layers, for drafters that share them
        if name == "model":  # not made yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def __call__(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.model(tokens, *args, **kwargs)
