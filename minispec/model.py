"""One GPT-2-architecture definition for target and draft.

Learned positions, pre-LayerNorm blocks, GELU (tanh), biases, and a head tied to the token embedding
(Radford et al. 2019). Parameter names are GPT-2's own. There is no dropout: train and eval mode agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.fused import Fused
from minispec.linear import Copying, Linear, Packed


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT. Raises `ValueError`/`TypeError` for sizes that cannot be built."""

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer >= 1, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}")


class LanguageModel(Protocol):
    """What the decoding loop needs of a model: `GPT` has it, and so may a test double."""

    config: GPTConfig

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor: ...


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: KVCache | None, layer: int, mask: Tensor | None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        q, kv = qkv[0], qkv[1:]
        if cache is not None:
            kv = cache.write(layer, kv)  # (2, B, H, S, D): all slots up to the last new one
        k, v = kv.unbind(0)
        causal = mask is None and T > 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)  # (B, H, T, D)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)
        return out


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.c_fc.gelu(x))  # (B, T, C)
        return out


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None, layer: int, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, layer, mask)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: `GPT.reset_parameters` does it, and only where there is memory for it."""


class GPT(Copying):
    """A decoder-only transformer. `end_of_text` is the id of the token that ends a text, or None."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.end_of_text: int | None = None
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head = Packed()  # of the tied embedding
        self.fused = Fused()
        if not self.wte.weight.is_meta:  # torch would load its compiler to draw numbers that are nowhere
            self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """GPT-2's initialisation: N(0, .02), residual projections divided by sqrt(2 n_layer)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "ln_" in name:
                nn.init.ones_(parameter)
            else:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if "c_proj" in name else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def forget(self) -> None:
        self.head, self.fused = Packed(), Fused()

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.wte.weight.dtype

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token at each of `tokens` (B, T): (B, T, V).

        With a `cache` the T tokens are appended to it (each row's length grows by T) and see what it holds.
        `positions` (B, T) default to the slots, row length + 0..T-1. `mask` (T, M) or (B, T, M), bool, says
        which of the *last M slots*, the T new ones included, each new token sees; all slots before those are
        seen. The default is causal. Raises `ValueError` past `block_size`.
        """
        T, start = tokens.shape[1], 0 if cache is None else max(cache.lengths)
        if positions is None and start + T > self.config.block_size:
            raise ValueError(f"tokens: {start} cached + {T} new positions exceed block_size {self.config.block_size}")
        if cache is not None:
            mask = cache.begin_write(T, mask)  # (B or 1, 1, T, S) or None
            positions = cache.slots if positions is None else positions  # (B, T), or None: all from `start` on
        elif mask is not None:
            mask = mask.view(-1, 1, T, T)
        logits = None if cache is None else self.fused(self, tokens, positions, cache, mask)  # the same in one call
        if logits is None:
            x = self.wte(tokens) + (self.wpe.weight[start : start + T] if positions is None else self.wpe(positions))
            for layer, block in enumerate(self.h):
                x = block(x, cache, layer, mask)
            logits = self.head.linear(self.ln_f(x), self.wte.weight)  # (B, T, V)
        if cache is not None:
            cache.end_write(T)
        return logits

    def chain(
        self,
        rows: Sequence[Sequence[int]],
        cache: KVCache,
        count: int,
        divisor: float,
        noise: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor] | None:
        """`count` tokens after each row's (B, T), one pass each, in one call: last and new tokens (B, K+1), and laws.

        The laws (B, K, V) are softmax(logits / divisor); a token is drawn by a race with `noise()` (B, V), or is the
        likeliest. None, and nothing is done, where passes are not fused (`fused`) or one would go past `block_size`.
        """
        T, end = len(rows[0]), max(cache.lengths) + len(rows[0]) + count - 1
        if any(len(row) != T for row in rows) or end > min(self.config.block_size, cache.capacity):
            return None
        return self.fused.chain(self, torch.tensor(rows, device="cpu"), cache, count, divisor, noise)


MODULES: list[type[nn.Module]] = [GPT, Block, Attention, MLP, Linear, nn.LayerNorm, Embedding, nn.ModuleList]
Fused.kinds = {kind: kind.forward for kind in MODULES}  # what a fused pass stands for


def read(model: LanguageModel, cache: KVCache, rows: Sequence[Sequence[int]]) -> Tensor:
    """Append each row's tokens, as many as it has, to the cache; logits (B, V) after the last of each row.

    A *ragged read*: rows are right-padded to one (B, T) pass; padding is hidden by the mask and given back by
    rolling back to each row's own count. A read that passes the cache's end is taken in pieces.
    """
    counts, before = [len(row) for row in rows], list(cache.lengths)
    T, room = max(counts), cache.capacity - max(before)
    if T > room > 0:
        first = read(model, cache, [row[:room] for row in rows])
        rest = read(model, cache, [row[room:] for row in rows])
        longer = torch.tensor([count > room for count in counts], device=model.device)
        return torch.where(longer[:, None], rest, first)
    if min(counts) == T and max(before) + T <= model.config.block_size:  # nothing to pad
        return model(torch.tensor(rows, device=model.device), cache)[:, -1]  # (B, V)
    padded = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=model.device)  # (B, T)
    last = model.config.block_size - 1
    positions = [[min(start + t, last) for t in range(T)] for start in before]
    logits = model(padded, cache, torch.tensor(positions, device=model.device))  # (B, T, V)
    cache.rollback([start + count for start, count in zip(before, counts, strict=True)])
    ends = torch.tensor([max(count - 1, 0) for count in counts], device=model.device)
    return logits[torch.arange(len(rows), device=model.device), ends]  # (B, V)
