"""Dynamic trees: grow where the draft is sure (EAGLE-2, 2406.16858, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minispec.drafters import Draft, ModelDrafter, ModelSession
from minispec.inputs import check_integer
from minispec.model import LanguageModel
from minispec.sampling import Rng, Sampling
from minispec.tree import Tree

GREEDY_CONFIDENCE = 0.3


@dataclass(frozen=True)
class DynamicTree:
    """A drafter whose tree follows the draft's own confidence, each row for itself.

    Level by level the `width` candidates of largest cumulative probability are read (one draft pass a level) and
    each offers its `width` likeliest children; of all candidates the best `nodes` - 1 are submitted. They are chosen
    after being seen, so only `match` verifies them.

    confidence: the temperature at which the draft's probabilities are read as chances of being followed; None is the
    sampling temperature, or `GREEDY_CONFIDENCE` at 0, where the likeliest token is right far more often than it says.
    """

    model: LanguageModel
    nodes: int = 16  # submitted, the root included
    max_depth: int = 6
    width: int = 4
    confidence: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("max_depth", 0), ("width", 1)):
            check_integer(name, getattr(self, name), least)
        if self.confidence is not None and Sampling(self.confidence).greedy:
            raise ValueError(f"confidence must be a temperature > 0 or None, got {self.confidence!r}")

    @property
    def kind(self) -> str:
        return "chosen"

    @property
    def max_nodes(self) -> int:
        return max(self.nodes, self.max_depth * self.width + 1)

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> DynamicSession:
        confidence = sampling.temperature or GREEDY_CONFIDENCE
        return DynamicSession(self, prompts, Sampling(confidence if self.confidence is None else self.confidence))


@dataclass
class Candidates:
    """Nodes of one row, in the order they were offered: token, parent (an index into these lists), depth, log prob."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]


class DynamicSession:
    """Grows the trees of one call. Tree nodes are read again after the step, with the tokens that were accepted."""

    def __init__(self, drafter: DynamicTree, prompts: Sequence[Sequence[int]], confidence: Sampling) -> None:
        self.drafter, self.confidence = drafter, confidence
        read = range(1, drafter.max_depth * drafter.width + 1)  # nodes at most: `width` a level
        shape = Tree.from_parents([-1, *(max(node - drafter.width, 0) for node in read)])  # room in the cache
        self.inner = ModelSession(ModelDrafter(drafter.model, shape, "top-k"), prompts, Sampling())

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        for text, new in zip(self.inner.texts, new_tokens, strict=True):
            text += new
        depth = min(self.drafter.max_depth, max(depth_limit))
        rows = [Candidates([text[-1]], [-1], [0], [0.0]) for text in self.inner.texts]
        if depth and self.drafter.nodes > 1:
            self._grow(rows, depth)
        kept = [self._best(row, limit) for row, limit in zip(rows, depth_limit, strict=True)]
        N = max(len(tokens) for tokens, _ in kept)
        for tokens, parents in kept:
            while len(tokens) < N:
                tokens.append(-1)
                parents.append(max(parents[-1], 0))
        tree = Tree(tuple(tuple(parents) for _, parents in kept))
        return Draft(tree, torch.tensor([t for t, _ in kept], device=self.drafter.model.device), None, "chosen")

    def _grow(self, rows: list[Candidates], depth: int) -> None:
        """Offer candidates level by level; read the best of each level."""
        logits = self.inner.read_last()[:, None]  # (B, 1, V)
        frontier = [[0] for _ in rows]  # candidates whose logits are at hand
        seen: list[list[int]] = [[0] for _ in rows]  # candidates in the cache behind the text, by slot
        for level in range(1, depth + 1):
            log_q = self.confidence.probs(logits, "draft").log()  # (B, F, V)
            k = min(self.drafter.width, log_q.shape[-1])
            best = log_q.topk(k, -1)
            for b, row in enumerate(rows):
                for place, parent in enumerate(frontier[b]):
                    for x, score in zip(best.indices[b, place].tolist(), best.values[b, place].tolist(), strict=True):
                        row.tokens.append(x)
                        row.parents.append(parent)
                        row.depths.append(level)
                        row.scores.append(row.scores[parent] + score)
            if level < depth:
                frontier = [self._frontier(row, level) for row in rows]
                logits = self._read(rows, frontier, seen)

    def _frontier(self, row: Candidates, level: int) -> list[int]:
        there = [i for i, d in enumerate(row.depths) if d == level]
        return sorted(there, key=lambda i: -row.scores[i])[: self.drafter.width]

    def _read(self, rows: list[Candidates], frontier: list[list[int]], seen: list[list[int]]) -> Tensor:
        """One draft pass over each row's frontier, each node seeing its ancestors: (B, F, V)."""
        masks, positions = [], []
        last = self.drafter.model.config.block_size - 1
        for b, row in enumerate(rows):
            base = len(self.inner.texts[b]) - 1  # position of the root
            positions.append([min(base + row.depths[i], last) for i in frontier[b]])
            seen[b] = seen[b] + frontier[b]
            masks.append([[slot in ancestors(row, i) for slot in seen[b]] for i in frontier[b]])
        device = self.drafter.model.device
        ids = torch.tensor([[row.tokens[i] for i in f] for row, f in zip(rows, frontier, strict=True)], device=device)
        mask = torch.tensor(masks, device=device)  # (B, F, M): the last M slots, the root's included
        return self.drafter.model(ids, self.inner.cache, torch.tensor(positions, device=device), mask)

    def _best(self, row: Candidates, limit: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the best candidates, breadth-first. A parent never scores below its child."""
        allowed = [i for i, d in enumerate(row.depths) if d <= limit]
        chosen = sorted(allowed, key=lambda i: (-row.scores[i], i))[: self.drafter.nodes]
        chosen.sort(key=lambda i: (row.depths[i], i))
        place = {i: new for new, i in enumerate(chosen)}
        return [row.tokens[i] for i in chosen], [place.get(row.parents[i], -1) for i in chosen]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        lengths = zip(self.inner.cache.lengths, self.inner.texts, strict=True)
        self.inner.cache.rollback([min(m, len(text)) for m, text in lengths])

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)


def ancestors(row: Candidates, node: int) -> set[int]:
    """The node and what it hangs on, up to the root."""
    found = {node}
    while row.parents[node] >= 0:
        node = row.parents[node]
        found.add(node)
    return found
