"""A recorded run played again: its coins, through the verification rules, give its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minispec.show.trace import Trace
from minispec.tree import Tree
from minispec.verify import find_rule


class Replay:
    """An `rng` that answers what a trace says. Give it to `speculate` to decode the same run again, with the models.

    choices: those of a trace in the order in which they were made. Raises `ValueError` when it is asked something
    else than the run was, or more.
    """

    def __init__(self, choices: Sequence[dict[str, Any]]) -> None:
        self.choices = list(choices)

    @staticmethod
    def of(trace: Trace) -> Replay:
        """The choices of a whole run."""
        return Replay([choice for step in trace.data["steps"] for choice in (*step["draws"], *step["coins"])])

    def _next(self, op: str, count: int) -> list[int]:
        if not self.choices:
            raise ValueError(f"the trace is at its end, and a {op} is asked for")
        choice = self.choices.pop(0)
        if choice["op"] != op or len(choice["outcome"]) != count:
            raise ValueError(f"the trace has a {choice['op']} of {len(choice['outcome'])}, not a {op} of {count}")
        return list(choice["outcome"])

    def flip(self, prob: Tensor) -> Tensor:
        coins = self._next("flip", prob.numel())
        return torch.tensor(coins, dtype=torch.bool, device=prob.device).view(prob.shape)

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        return torch.tensor(self._next("pick", weights.shape[0]), device=weights.device)


def replay(trace: Trace) -> list[int]:
    """The tokens that the trace's coins give when they go through its rule: from the file alone, without models.

    Raises `ValueError` for a rule that is not one of `verify.RULES`.
    """
    rule = find_rule(trace.data["rule"])
    stop, V = set(trace.data["stop"]), trace.data["vocab_size"]
    tokens: list[int] = []
    for step in trace.data["steps"]:
        nodes = step["nodes"]
        tree = Tree.from_parents([node["parent"] for node in nodes])
        p = torch.zeros(1, len(nodes), V, dtype=torch.float64)
        q = torch.zeros_like(p)
        for i, node in enumerate(nodes):
            if node["next"] is not None:
                p[0, i, node["next"]["token"]] = torch.tensor(node["next"]["p"], dtype=p.dtype)
            test = node.get("test")
            if test is not None and test["laws"]["q"] is not None:
                q[0, i, test["laws"]["token"]] = torch.tensor(test["laws"]["q"], dtype=p.dtype)
        drafted = torch.tensor([[node["token"] for node in nodes]])
        path, token = rule.verify(p, q, drafted, tree, Replay(step["coins"]))
        run = [nodes[node]["token"] for node in path[0].tolist() if node > 0] + [int(token)]
        end = next((i + 1 for i, t in enumerate(run) if t in stop), len(run))
        tokens += run[:end]
    return tokens
