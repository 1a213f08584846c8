"""Where draft tokens come from: a small model.

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
from minispec.sampling import Rng, Sampling, check_law
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


WAYS = {  # how a model fills a tree, and the kind of draft this makes
    "without": "without",  # siblings drawn from q without replacement
    "iid": "iid",  # siblings drawn from q independently; they may repeat
    "top-k": "chosen",  # the likeliest tokens, in order
    "coupled": "coupled",  # drawn from q by the noise that the target will use at that position
}


@dataclass(frozen=True)
class ModelDrafter:
    """Drafts with a model, by one pass a tree level. `how` is one of `WAYS`; sampled chains are of kind "chain".

    Raises `ValueError` for another `how` and for a tree that differs from row to row.
    """

    model: LanguageModel
    tree: Tree = field(default_factory=lambda: Tree.chain(4))
    how: str = "without"

    def __post_init__(self) -> None:
        if self.how not in WAYS:
            raise ValueError(f"how must be one of {', '.join(WAYS)}, got {self.how!r}")
        if len(self.tree.rows) > 1:
            raise ValueError(f"tree: a model fills one tree for all rows, got {len(self.tree.rows)} trees")

    @property
    def kind(self) -> str:
        sampled = self.how in ("without", "iid")
        return "chain" if sampled and self.tree.is_chain else WAYS[self.how]

    @property
    def max_nodes(self) -> int:
        return self.tree.cut(self.model.config.block_size).size

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> ModelSession:
        return ModelSession(self, prompts, sampling)


class ModelSession:
    """A model drafter's cache and the text it has seen.

    Before each draft the tokens that the cache lacks are read in one pass: the last one, and after a full acceptance
    the one before it too. Rows that lack fewer are padded, so all are read together.
    So a tree of depth D, a chain of D tokens included, costs D passes, this one included.
    """

    def __init__(self, drafter: ModelDrafter, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        self.model, self.tree, self.how, self.kind = drafter.model, drafter.tree, drafter.how, drafter.kind
        # the likeliest tokens of a one-hot law are one token and nothing else, so top-k looks at the softmax
        self.sampling = Sampling() if self.how == "top-k" else sampling
        self.texts = [list(prompt) for prompt in prompts]
        config, dtype, self.device = self.model.config, self.model.dtype, self.model.device
        capacity = config.block_size + drafter.max_nodes
        self.cache = KVCache(config, len(prompts), capacity, device=self.device, dtype=dtype)
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        # the law of the root and of absent nodes: zero, (B, V)
        self.no_law = torch.zeros(len(prompts), config.vocab_size, device=self.device, dtype=dtype)

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        for text, new in zip(self.texts, new_tokens, strict=True):
            text += new
        tree, device = self.tree.cut(max(depth_limit)), self.device
        if tree.is_chain and 0 < tree.max_depth <= min(depth_limit) and (draft := self.at_once(tree, rng)) is not None:
            return draft
        tokens = [torch.tensor([text[-1] for text in self.texts], device=device)]  # N times (B,), in the end
        q = [self.no_law]  # N times (B, V)
        who = "draft" if self.kind == "chosen" else None  # q is looked at as a whole, by `inputs.check_draft`
        whole = True
        for depth in range(1, tree.max_depth + 1):
            parents = tree.levels[depth - 1]
            logits = self.read_level(tree, parents, tokens, whole) if depth > 1 else self.read_last()[:, None]
            laws = self.sampling.probs(logits, who)  # (B, P, V)
            whole = tree.is_chain and depth <= min(depth_limit)  # then every row has its node here
            for parent, law in zip(parents, laws.unbind(1), strict=True):  # law (B, V)
                if not whole:
                    absent = (depth > torch.tensor(depth_limit, device=device)) | (tokens[parent] < 0)  # (B,)
                    law = law.masked_fill(absent[:, None], 0.0)
                for rank in range(len(tree.children(parent))):
                    law = self.without(law, tokens[-1]) if rank and self.how != "iid" else law
                    tokens.append(self.draw(law, depth, rng, whole))
                    q.append(law)
        return Draft(tree, torch.stack(tokens, 1), None if self.kind == "chosen" else torch.stack(q, 1), self.kind)

    def at_once(self, tree: Tree, rng: Rng) -> Draft | None:
        """The draft of a chain that every row has room for, by one call where the model has such (`GPT.chain`)."""
        chain, chosen = getattr(type(self.model), "chain", None), self.kind == "chosen"
        noise, sampling = None if chosen else getattr(rng, "noise", None), self.sampling
        plain = type(sampling) is Sampling and not sampling.greedy and sampling == Sampling(sampling.temperature)
        changed = type(self) is not ModelSession or {"draw", "read_last", "read_level"} & vars(self).keys()
        if changed or not (plain and chain and (chosen or noise)) or self.kind == "coupled":
            return None
        found = chain(
            self.model,
            self.unread(),
            self.cache,
            tree.max_depth,
            sampling.divisor,
            noise and (lambda: noise(self.no_law.shape, torch.float32)),
        )
        if found is None:
            return None
        if chosen:
            check_law(found[1], "draft")
        return Draft(tree, found[0], None if chosen else torch.cat([self.no_law[:, None], found[1]], 1), self.kind)

    def draw(self, law: Tensor, depth: int, rng: Rng, whole: bool = False) -> Tensor:
        """A token of each row from its law (B, V) -> (B,); -1, an absent node, where the law is zero.

        `whole` promises that no row's law is.
        """
        weights, empty = law, None
        if not whole:
            empty = law.sum(-1) <= 0  # (B,)
            weights = law.clone()
            weights[:, 0] = torch.where(empty, 1.0, law[:, 0])  # something to pick, to be thrown away
        if self.how == "top-k":
            x = weights.argmax(-1)
        else:
            x = rng.pick(weights, at=[depth] * len(law) if self.how == "coupled" else None)
        return x if empty is None else x.masked_fill(empty, -1)

    def without(self, law: Tensor, x: Tensor) -> Tensor:
        """The law of the next sibling: x (B,) zeroed, the rest renormalised; zero where nothing is left."""
        rest = law.scatter(1, x.clamp(min=0)[:, None], 0.0)  # (B, V)
        left = rest.sum(-1, keepdim=True)  # (B, 1)
        return torch.where(left > 0, rest / left, 0.0)

    def read_level(self, tree: Tree, nodes: list[int], tokens: list[Tensor], whole: bool = False) -> Tensor:
        """One pass over a level, each node seeing its ancestors: logits (B, P, V). `whole`: none of it is absent."""
        end, device, last = nodes[-1] + 1, self.device, self.model.config.block_size - 1
        if tree.is_chain and max(self.cache.lengths) <= last:
            ids = tokens[nodes[0]].unsqueeze(1)  # (B, 1)
            return self.model(ids if whole else ids.clamp(min=0), self.cache)
        ids = torch.stack([tokens[node] for node in nodes], 1).clamp(min=0)  # (B, P)
        depths = tree.depths[0, nodes].tolist()
        starts = [n - nodes[0] for n in self.cache.lengths]  # of each row the slot, and position, of node 0
        position = [[min(start + depth, last) for depth in depths] for start in starts]
        mask = None if tree.is_chain else tree.mask[0, nodes, :end].to(device)  # (P, end): the last `end` slots
        return self.model(ids, self.cache, torch.tensor(position, device=device), mask)

    def read_last(self) -> Tensor:
        """Logits (B, V) after each row's last token, by one pass over what the cache lacks."""
        return read(self.model, self.cache, self.unread())

    def unread(self) -> list[list[int]]:
        """What the cache lacks of each row, its last token in any case: the cache is rolled back to where it starts."""
        have = [min(m, len(text) - 1) for m, text in zip(self.cache.lengths, self.texts, strict=True)]
        self.cache.rollback(have)
        return [text[m:] for m, text in zip(have, self.texts, strict=True)]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Of the nodes that were read, keep the accepted ones."""
        nodes = [m - len(text) + 1 for m, text in zip(self.cache.lengths, self.texts, strict=True)]
        if min(nodes) > 0:  # else nothing was drafted in this step
            self.cache.keep([[i for i in path if i < nodes[0]] for path in paths], nodes[0])

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.texts = [self.texts[row] for row in rows]
        self.no_law = self.no_law[: len(rows)]


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
        return Draft(Tree.chain(0), torch.tensor(self.pending, device="cpu")[:, None], None, "chosen")

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        self.pending = [self.pending[row] for row in rows]
