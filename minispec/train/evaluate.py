"""How well a model predicts text: bits per byte, which no choice of vocabulary can flatter."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.model import GPT
from minispec.tokenizer import Tokenizer


def token_lengths(tokenizer: Tokenizer) -> Tensor:
    """Bytes of each token (V,); special tokens count 0."""
    special = set(tokenizer.special_tokens.values())
    lengths = [0 if i in special else len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    return torch.tensor(lengths)


@torch.no_grad()
def bits_per_byte(model: GPT, tokens: Tensor, lengths: Tensor, windows: int | None = None, batch: int = 8) -> float:
    """Mean code length of `tokens` (n,) in bits per byte of their text.

    Slides a window of block_size by half its length, so that each token but the first few has at least half a
    context before it (a rest of less than half a window is left out); `windows` evenly spread ones where all would
    take too long. Raises `ValueError` for fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"tokens: need at least 2 to predict one, got {len(tokens)}")
    block = min(model.config.block_size, len(tokens) - 1)
    half = max(block // 2, 1)
    starts = list(range(0, len(tokens) - block, half))
    if windows is not None and len(starts) > windows:
        starts = [starts[i * len(starts) // windows] for i in range(windows)]
    nats, size = 0.0, 0
    for i in range(0, len(starts), batch):
        some = torch.stack([tokens[s : s + block + 1] for s in starts[i : i + batch]])  # (b, block + 1)
        logits = model(some[:, :-1].to(model.device)).float()  # (b, block, V)
        loss = F.cross_entropy(logits.transpose(1, 2), some[:, 1:].to(model.device), reduction="none").cpu()
        new = torch.ones_like(loss, dtype=torch.bool)
        new[:, : block - half] = False  # read before, as an earlier window's second half
        if i == 0 and starts[0] == 0:
            new[0] = True
        nats += float(loss[new].sum())
        size += int(lengths[some[:, 1:]][new].sum())
    return nats / math.log(2) / max(size, 1)
