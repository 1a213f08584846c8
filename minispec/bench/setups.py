"""The ways to decode that the benchmark sets side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from minispec.advanced import DynamicTree
from minispec.advanced.statistics import acceptance_by_rank
from minispec.auto import PROBE, drafter_of, find_plan
from minispec.decode import generate, search_run, speculate
from minispec.drafters import ModelDrafter
from minispec.ngram import NGramDrafter
from minispec.pair import Pair
from minispec.planner import Plan
from minispec.result import Result
from minispec.sampling import Sampling
from minispec.tree import Tree


@dataclass(frozen=True)
class Setup:
    """A way to decode: rule and drafter; None is plain decoding.

    nodes are those scored in a pass, depth the draft passes of a step (None: its cost has no model). plan: what
    `tree="auto"` found. peer: another library's decoder, (prompt, n, seed) -> tokens, in place of all that.
    """

    name: str
    rule: str | None
    drafter: Any
    nodes: int
    depth: int | None = None
    plan: Plan | None = None
    peer: Callable[[list[int], int, int], list[int]] | None = None


def decode(pair: Pair, setup: Setup, prompts: Any, sampling: Sampling, length: int, seed: int) -> list[Result]:
    """Run a setup on one prompt or a batch; always a list."""
    options: dict[str, Any] = {"max_new_tokens": length, "sampling": sampling, "stop": (), "seed": seed}
    if setup.rule is None:
        results = generate(pair.target, prompts, **options)
    else:
        results = speculate(pair.target, setup.drafter, prompts, rule=setup.rule, **options)
    return results if isinstance(results, list) else [results]


def measured_ranks(pair: Pair, prompts: list[list[int]], sampling: Sampling, how: str, length: int = 64) -> list[float]:
    """Acceptance by child rank of a small bushy tree: the vector that `Tree.best` wants."""
    probe = Setup("probe", "match" if how == "top-k" else "rrs", ModelDrafter(pair.draft, PROBE, how), PROBE.size)
    results = decode(pair, probe, list(prompts), sampling, length, seed=10_000)
    return acceptance_by_rank([step for result in results for step in result.steps])


def setups(
    pair: Pair, prompts: list[list[int]], sampling: Sampling, nodes: int, lengths: Sequence[int], probe: int = 64
) -> list[Setup]:
    """Plain decoding, chains, and trees of `nodes` nodes (root included) under the rules that fit."""
    lengths = sorted({*lengths, nodes - 1})
    found = [Setup("plain", None, None, 1, 0)]
    ranked = Tree.best(measured_ranks(pair, prompts, sampling, "top-k", probe), nodes)
    if sampling.greedy:
        found += [model_setup(pair, "match", Tree.chain(k), "top-k", f"chain {k}") for k in lengths]
    else:
        for rule in ("token", "block"):
            found += [model_setup(pair, rule, Tree.chain(k), "without", f"chain {k}") for k in lengths]
        found.append(model_setup(pair, "coupled", Tree.chain(nodes - 1), "coupled", f"chain {nodes - 1}"))
        best = Tree.best(measured_ranks(pair, prompts, sampling, "without", probe), nodes)
        for rule, how in (("rrs", "without"), ("traversal", "without"), ("specinfer", "iid"), ("coupled", "coupled")):
            found.append(model_setup(pair, rule, best, how, "best tree"))
    found.append(model_setup(pair, "match", ranked, "top-k", "top-k best tree"))
    dynamic = DynamicTree(pair.draft, nodes, max_depth=min(nodes - 1, 16), width=2)
    found.append(Setup("match, dynamic tree", "match", dynamic, nodes))
    found.append(Setup("match, n-gram", "match", NGramDrafter(min(nodes - 1, 8)), nodes))
    return found


def automatic(pair: Pair, sampling: Sampling, again: bool) -> Setup:
    """What `tree="auto"` does on this machine."""
    plan = find_plan(pair.target, pair.draft, sampling, None, 1, search_run(pair.target), again=again)
    rule = None if plan.plain else plan.rule
    return Setup(f"auto ({plan.shape})", rule, drafter_of(plan, pair.draft), plan.tree.size, plan.tree.max_depth, plan)


def peers(pair: Pair, sampling: Sampling, draft_len: int) -> list[Setup]:
    """Hugging Face generation with the same weights: plain, and assisted by the same draft (extra: peers)."""
    library = import_module("minispec.lab.peers")

    plain, assisted = (
        library.plain(pair.target, sampling),
        library.assisted(pair.target, pair.draft, draft_len, sampling),
    )
    return [
        Setup("Hugging Face plain", None, None, 1, peer=plain),
        Setup(f"Hugging Face assisted, {draft_len}", None, None, draft_len + 1, peer=assisted),
    ]


def model_setup(pair: Pair, rule: str, tree: Tree, how: str, shape: str) -> Setup:
    return Setup(f"{rule}, {shape}", rule, ModelDrafter(pair.draft, tree, how), tree.size, tree.max_depth)
