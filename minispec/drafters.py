"""Where draft tokens come from: a small model, or an earlier place in the text.

A `Drafter` is immutable; `begin` opens a session that owns its cache, so threads and abandoned streams are
harmless. A draft says how its candidates came about (`kind`), and a rule says which kinds it accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from minispec.cache import KVCache
from minispec.model import LanguageModel, read
from minispec.sampling import Rng, Sampling
from minispec.tree import Tree


@dataclass(frozen=True)
class Draft:
    """Candidates for the next tokens of each row.

    tree: their shape, N nodes. tokens (B, N): node 0 the pending token, -1 for an absent node.
    q (B, N, V): the law node i was drawn from, zero for node 0 and absent nodes; None for chosen candidates.
    kind: how they came about: "chain", "chosen", "without", "iid" or "coupled" (see `verify.Rule`).
    """

    tree: Tree
    tokens: Tensor
    q: Tensor | None
    kind: str


class Session(Protocol):
    """One call's drafting. Rows are those given to `begin`, less those dropped by `select`."""

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        """A draft after each row's `new_tokens` (emitted since the last call), no deeper than its limit."""
        ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """The target accepted these nodes of the last draft (each path starts with node 0)."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        ...


class Drafter(Protocol):
    """Anything that opens sessions. `max_nodes` bounds the nodes N of its drafts, the root included."""

    @property
    def kind(self) -> str: ...

    @property
    def max_nodes(self) -> int: ...

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Session: ...


@dataclass(frozen=True)
class ModelDrafter:
    """Drafts with a model: `how="sampled"` draws each token from q, `how="top-k"` takes the likeliest.

    `tree` is the shape wanted; only chains are drafted so far. Raises `ValueError` for other shapes or ways.
    """

    model: LanguageModel
    tree: Tree = field(default_factory=lambda: Tree.chain(4))
    how: str = "sampled"

    def __post_init__(self) -> None:
        if self.how not in ("sampled", "top-k"):
            raise ValueError(f"how must be 'sampled' or 'top-k', got {self.how!r}")
        if not self.tree.is_chain:
            raise ValueError(f"tree: a model drafts chains only, got parents {self.tree.rows}")

    @property
    def kind(self) -> str:
        return "chain" if self.how == "sampled" else "chosen"

    @property
    def max_nodes(self) -> int:
        return self.tree.size

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> ModelSession:
        return ModelSession(self, prompts, sampling)


class ModelSession:
    """A model drafter's cache and the text it has seen.

    Before each draft the cache is rolled back to max(n-2, 0) entries and the last tokens are read in one pass:
    after a full acceptance one of them was missing, else it is re-read, which is harmless and keeps rows alike.
    So a chain of K costs K passes, the re-read included.
    """

    def __init__(self, drafter: ModelDrafter, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        self.model, self.tree, self.sampled = drafter.model, drafter.tree, drafter.how == "sampled"
        self.kind, self.sampling = drafter.kind, sampling
        self.texts = [list(prompt) for prompt in prompts]
        config, device, dtype = self.model.config, self.model.device, self.model.dtype
        capacity = config.block_size + self.tree.size
        self.cache = KVCache(config, len(prompts), capacity, device=device, dtype=dtype)

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        for text, new in zip(self.texts, new_tokens, strict=True):
            text += new
        tree = self.tree.cut(max(depth_limit))
        B, device = len(self.texts), self.model.device
        tokens = torch.full((B, tree.size), -1, dtype=torch.long, device=device)  # (B, N)
        tokens[:, 0] = torch.tensor([text[-1] for text in self.texts], device=device)
        q = torch.zeros(B, tree.size, self.model.config.vocab_size, device=device)  # (B, N, V)
        if tree.size > 1:
            tokens, q = self._chain(
                tokens, q.to(self.model.dtype) if self.model.dtype == torch.float64 else q, depth_limit, rng
            )
        return Draft(tree, tokens, q if self.sampled else None, self.kind)

    def _chain(self, tokens: Tensor, q: Tensor, depth_limit: Sequence[int], rng: Rng) -> tuple[Tensor, Tensor]:
        logits = self._read_last()  # (B, V)
        limit = torch.tensor(depth_limit, device=tokens.device)  # (B,)
        K, B = tokens.shape[1] - 1, len(self.texts)
        last = self.model.config.block_size - 1
        for depth in range(1, K + 1):
            law = self.sampling.probs(logits, "draft")  # (B, V)
            x = rng.pick(law) if self.sampled else law.argmax(-1)  # (B,)
            absent = depth > limit  # (B,)
            tokens[:, depth] = x.masked_fill(absent, -1)
            q[:, depth] = law.masked_fill(absent[:, None], 0.0)
            if depth < K:
                position = torch.tensor([[min(n, last)] for n in self.cache.lengths], device=x.device)  # (B, 1)
                logits = self.model(x.view(B, 1), self.cache, position)[:, -1]  # (B, V)
        return tokens, q

    def _read_last(self) -> Tensor:
        """Logits (B, V) after each row's last token, by one pass over what the cache lacks."""
        have = [min(m, max(len(text) - 2, 0)) for m, text in zip(self.cache.lengths, self.texts, strict=True)]
        self.cache.rollback(have)
        return read(self.model, self.cache, [text[m:] for m, text in zip(have, self.texts, strict=True)])

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Of the nodes that were read, keep the accepted ones."""
        nodes = [m - len(text) + 1 for m, text in zip(self.cache.lengths, self.texts, strict=True)]
        if min(nodes) > 0:  # else nothing was drafted in this step
            self.cache.keep([[i for i in path if i < nodes[0]] for path in paths], nodes[0])

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.texts = [self.texts[row] for row in rows]


@dataclass(frozen=True)
class NGramDrafter:
    """Prompt lookup: find the last n tokens earlier in the text, propose what followed there.

    The longest n <= `max_n` with a hit wins, then the latest hit; up to `draft_len` tokens are proposed, fewer
    where the text ends. No model, no cost; pays where texts repeat. Candidates are chosen, so `match` verifies.
    """

    draft_len: int = 4
    max_n: int = 3

    def __post_init__(self) -> None:
        Tree.chain(self.draft_len)  # refuses what is no length
        if isinstance(self.max_n, bool) or not isinstance(self.max_n, int) or self.max_n < 1:
            raise ValueError(f"max_n must be an integer >= 1, got {self.max_n!r}")

    @property
    def kind(self) -> str:
        return "chosen"

    @property
    def max_nodes(self) -> int:
        return self.draft_len + 1

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> NGramSession:
        return NGramSession(self, prompts)


class NGramSession:
    def __init__(self, drafter: NGramDrafter, prompts: Sequence[Sequence[int]]) -> None:
        self.drafter, self.texts = drafter, [list(prompt) for prompt in prompts]

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        for text, new in zip(self.texts, new_tokens, strict=True):
            text += new
        found = [
            lookup(text, self.drafter.max_n, min(self.drafter.draft_len, limit))
            for text, limit in zip(self.texts, depth_limit, strict=True)
        ]
        K = max(map(len, found))
        rows = [[text[-1], *run, *[-1] * (K - len(run))] for text, run in zip(self.texts, found, strict=True)]
        return Draft(Tree.chain(K), torch.tensor(rows), None, "chosen")

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        pass  # nothing is cached

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]


def lookup(text: Sequence[int], max_n: int, length: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix of at most `max_n` tokens."""
    for n in range(min(max_n, len(text) - 1), 0, -1):
        suffix = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == suffix:
                return list(text[start + n : start + n + length])
    return []


@dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing: speculation with it is plain decoding."""

    kind: str = "chosen"
    max_nodes: int = 1

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> NoSession:
        return NoSession([prompt[-1] for prompt in prompts])


class NoSession:
    def __init__(self, pending: list[int]) -> None:
        self.pending = pending

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        self.pending = [new[-1] if new else old for new, old in zip(new_tokens, self.pending, strict=True)]
        return Draft(Tree.chain(0), torch.tensor(self.pending)[:, None], None, "chosen")

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        self.pending = [self.pending[row] for row in rows]
