"""Prompt lookup: the text itself as a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minispec.drafters import Draft
from minispec.sampling import Rng, Sampling
from minispec.tree import Tree


@dataclass(frozen=True)
class NGramDrafter:
    """Prompt lookup: find the last n tokens earlier in the text, propose what followed there.

    The longest n <= `max_n` with a hit wins, then the latest hit; up to `draft_len` tokens are proposed, fewer
    where the text ends. With `branches` > 1 the best so many different continuations are proposed as a tree. No
    model, no cost; pays where texts repeat. Candidates are chosen, so `match` verifies.
    """

    draft_len: int = 4
    max_n: int = 3
    branches: int = 1

    def __post_init__(self) -> None:
        Tree.chain(self.draft_len)  # refuses what is no length
        for name in ("max_n", "branches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")

    @property
    def kind(self) -> str:
        return "chosen"

    @property
    def max_nodes(self) -> int:
        return self.draft_len * self.branches + 1

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> NGramSession:
        return NGramSession(self, prompts)


class NGramSession:
    """The texts so far; nothing is cached."""

    def __init__(self, drafter: NGramDrafter, prompts: Sequence[Sequence[int]]) -> None:
        self.drafter, self.texts = drafter, [list(prompt) for prompt in prompts]

    def propose(self, new_tokens: Sequence[Sequence[int]], depth_limit: Sequence[int], rng: Rng) -> Draft:
        for text, new in zip(self.texts, new_tokens, strict=True):
            text += new
        d = self.drafter
        runs = [
            lookup(text, d.max_n, min(d.draft_len, limit), d.branches)
            for text, limit in zip(self.texts, depth_limit, strict=True)
        ]
        return merge_runs([text[-1] for text in self.texts], runs)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]


def lookup(text: Sequence[int], max_n: int, length: int, branches: int = 1) -> list[list[int]]:
    """What followed earlier occurrences of the text's end: up to `branches` different runs, the best first.

    Longer suffixes (at most `max_n` tokens) come before shorter ones, later hits before earlier ones.
    """
    found: list[list[int]] = []
    for n in range(min(max_n, len(text) - 1), 0, -1):
        suffix = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == suffix:
                run = list(text[start + n : start + n + length])
                if run and run not in found:
                    found.append(run)
                if len(found) == branches or length == 0:
                    return found
    return found


def merge_runs(pending: Sequence[int], runs: Sequence[Sequence[Sequence[int]]]) -> Draft:
    """One draft of several runs a row: common beginnings are shared, rows are padded with absent nodes."""
    rows = []
    for token, several in zip(pending, runs, strict=True):
        nodes: dict[tuple[int, ...], int] = {(): 0}  # from the run that leads there to the node
        parents, tokens = [-1], [token]
        for depth in range(1, max(map(len, several), default=0) + 1):  # breadth-first
            for run in several:
                key = tuple(run[:depth])
                if len(key) == depth and key not in nodes:
                    nodes[key] = len(parents)
                    parents.append(nodes[key[:-1]])
                    tokens.append(key[-1])
        rows.append((parents, tokens))
    N = max(len(parents) for parents, _ in rows)
    for parents, tokens in rows:
        while len(parents) < N:  # beside the last node, or below a lone root
            parents.append(max(parents[-1], 0))
            tokens.append(-1)
    trees = [tuple(parents) for parents, _ in rows]
    tree = Tree(tuple(trees[:1] if len(set(trees)) == 1 else trees))
    return Draft(tree, torch.tensor([tokens for _, tokens in rows], device="cpu"), None, "chosen")
