"""Models to test with: random GPTs that show bugs, a model whose law is written by hand, one that is counted."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from minispec.around import Around
from minispec.cache import KVCache
from minispec.model import GPT, GPTConfig, LanguageModel


def random_gpt(
    seed: int, vocab: int = 3, block: int = 16, layers: int = 2, width: int = 8, heads: int = 2, scale: float = 0.7
) -> GPT:
    """A float64 GPT with weights large enough that laws differ and depend on tokens further back.

    At its default initialisation a GPT hides bugs: a token two places back moves p by a TV of .002.
    """
    generator = torch.Generator().manual_seed(seed)
    model = GPT(GPTConfig(vocab, block, layers, heads, width)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
    return model.requires_grad_(False)


def mix(model: GPT, other: GPT, share: float) -> GPT:
    """`model` with `share` of `other`'s weights: a draft that is near its target, but not it."""
    mixed = GPT(model.config).double()
    theirs = other.state_dict()
    mixed.load_state_dict({n: (1 - share) * w + share * theirs[n] for n, w in model.state_dict().items()})
    return mixed.requires_grad_(False)


def random_pair(vocab: int = 3, block: int = 32) -> tuple[GPT, GPT]:
    """A target and a draft with a memory, at a mean TV(p, q) between .2 and .6: what the lab checks with."""
    target, other = (random_gpt(seed, vocab, block, layers=1) for seed in (1, 101))
    return target, mix(target, other, 0.3)


def mean_tv(target: GPT, draft: GPT, length: int = 3) -> float:
    """Mean TV(p, q) over all contexts of `length` tokens."""
    contexts = torch.tensor(list(itertools.product(range(target.config.vocab_size), repeat=length)))
    p, q = (m(contexts)[:, -1].softmax(-1) for m in (target, draft))
    return float(0.5 * (p - q).abs().sum(-1).mean())


def memory_two_back(model: GPT) -> float:
    """Mean TV by which p moves when the token two places back changes."""
    V = model.config.vocab_size
    contexts = torch.tensor(list(itertools.product(range(V), repeat=3)))
    p = model(contexts)[:, -1].softmax(-1).view(V, V, V, V)  # (two back .. last, next)
    return float(0.5 * (p - p.roll(1, dims=0)).abs().sum(-1).mean())


class TableModel:
    """A model whose next-token law is looked up: by the last token, and by the position if given so.

    table: probabilities (V, V) or (positions, V, V): table[..., last token, next token]. It has the GPT's
    interface, keeps a cache's lengths, and checks what the GPT does not: that positions fit the slots.
    """

    def __init__(self, table: Tensor, block_size: int = 16, dtype: torch.dtype = torch.float64) -> None:
        table = table.to(dtype)
        V = table.shape[-1]
        self.table = table.expand(block_size, V, V) if table.ndim == 2 else table
        self.config = GPTConfig(V, block_size, 1, 1, 1)
        self.dtype, self.device = dtype, torch.device("cpu")
        self.calls: list[tuple[int, int]] = []

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        B, T = tokens.shape
        self.calls.append((B, T))
        if positions is None:
            start = torch.tensor([0] * B if cache is None else cache.lengths)
            positions = start[:, None] + torch.arange(T)
        if cache is not None:
            cache.begin_write(T, mask)
            cache.end_write(T)
        return self.table[positions, tokens].log()  # (B, T, V)


def rows_of(*law: float) -> Tensor:
    """The same law whatever the last token was: a table (V, V)."""
    return torch.tensor(law, dtype=torch.float64).expand(len(law), len(law))


class Counting(Around):
    """A model that counts its passes and the tokens in each."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.passes: list[tuple[int, int]] = []

    def __call__(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.passes.append((tokens.shape[0], tokens.shape[1]))
        return super().__call__(tokens, *args, **kwargs)
