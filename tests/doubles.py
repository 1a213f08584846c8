"""Test doubles and helpers: random GPTs that show bugs, a model with a law written by hand, counting wrappers."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from minispec import GPT, GPTConfig, KVCache


def random_gpt(
    seed: int, vocab: int = 3, block: int = 16, layers: int = 2, width: int = 8, heads: int = 2, scale: float = 0.7
) -> GPT:
    """A float64 GPT with weights large enough that laws differ and depend on tokens further back."""
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


class Counting:
    """A model that counts its passes and the tokens in each."""

    def __init__(self, model: GPT) -> None:
        self.model, self.config = model, model.config
        self.device, self.dtype = model.device, model.dtype
        self.passes: list[tuple[int, int]] = []

    def __call__(self, tokens, cache=None, positions=None, mask=None):  # type: ignore[no-untyped-def]
        self.passes.append(tuple(tokens.shape))
        return self.model(tokens, cache, positions, mask)


class Scripted:
    """An `rng` that takes its answers from lists and says what it was asked."""

    def __init__(self, flips: list[bool] = (), picks: list[int] = ()) -> None:  # type: ignore[assignment]
        self.flips, self.picks, self.asked = list(flips), list(picks), []

    def flip(self, prob: Tensor) -> Tensor:
        self.asked.append(("flip", prob.clone()))
        return torch.tensor([self.flips.pop(0) for _ in range(prob.numel())]).view(prob.shape)

    def pick(self, weights: Tensor, at=None) -> Tensor:  # type: ignore[no-untyped-def]
        self.asked.append(("pick", weights.clone()))
        return torch.tensor([self.picks.pop(0) for _ in range(len(weights))])


def stored(tensors: list[Tensor]) -> int:
    """Bytes of memory behind these tensors, which may be views of one another."""
    real = [t for t in tensors if t.device.type != "meta"]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in real)}.values())
