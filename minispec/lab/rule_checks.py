"""`check_rule`: a verification rule, enumerated and sampled on laws written by hand, and its bug by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from minispec.inputs import check_integer
from minispec.lab.causes import rules_like
from minispec.lab.decoder_checks import Bench, enumerated, explain, greedy, handling, rows, sampled
from minispec.lab.parts import adapt, as_rule, assemble, guarded
from minispec.lab.report import ABSENT, CONTRACT, EFFICIENCY, ContractError, Finding, Report
from minispec.lab.step_law import MARKOV, faults, step_law, tables
from minispec.lab.suite import Say, Suite
from minispec.sampling import Randomness
from minispec.tree import Tree
from minispec.verify import RULES, Rule

ZEROS = tables([[0.6, 0.4, 0.0], [0.0, 0.5, 0.5], [0.3, 0.0, 0.7]], [[0.3, 0.3, 0.4], [0.5, 0.5, 0.0], [0.0, 0.4, 0.6]])
CASES = {"laws that hang on the last token": MARKOV, "laws with zeros": ZEROS}


@dataclass(frozen=True)
class RuleBench:
    """A rule, the trees that it is tried on, and for each of these and of the laws a bench."""

    rule: Rule
    trees: tuple[Tree, ...]
    benches: dict[str, Bench]

    def each(self, check: Callable[[Bench], list[Finding]], only: str = "") -> list[Finding]:
        """The findings of `check` on the benches whose name has `only` in it, merged; two that failed are enough."""
        found: list[Finding] = []
        for name, bench in self.benches.items():
            if only in name and sum(not f.ok for f in found) < 2:
                found += [replace(f, message=f"{name}: {f.message}") for f in check(bench)]
        return merged(found)


def check_rule(
    rule: str | Rule | Callable[..., Any],
    *,
    kinds: Sequence[str] | None = None,
    how: str | None = None,
    samples: int = 3000,
    level: float = 1e-6,
    seed: int = 0,
    progress: Say | None = None,
) -> Report:
    """Everything that can be asked of a verification rule.

    rule: a chain function (p (B, K+1, V), q (B, K, V), drafted (B, K), rng) -> accepted (B,), token (B,); a tree
        function (p (B, N, V), q (B, N, V), tokens (B, N), tree, rng) -> path (B, D+1), token (B,); a `Rule`; or the
        name of one.
    kinds, how: as in `Rule`, for a function that takes other drafts than a ratio test does.
    samples, level, seed: of the sampled part, as for `judge`. progress: called with the name of each check.

    Enumerates outputs of three tokens on chains of one and two draft tokens and, for rules of trees, on siblings;
    samples the generator itself, in batches; asks that p = q be accepted throughout. A rule that raises, returns other
    shapes, dtypes or ranges, changes its arguments or draws from a global generator is told so.
    """
    return rule_suite(rule, kinds=kinds, how=how, samples=samples, level=level, seed=seed).report(progress)


def rule_suite(
    rule: str | Rule | Callable[..., Any],
    *,
    kinds: Sequence[str] | None = None,
    how: str | None = None,
    samples: int = 3000,
    level: float = 1e-6,
    seed: int = 0,
) -> Suite:
    """The checks of `check_rule`, to be run one by one."""
    for name, value, least in (("samples", samples, 2), ("seed", seed, 0)):
        check_integer(name, value, least)
    found = as_rule(rule, kinds, how)
    bench = _bench(guarded(found), samples, level, seed)

    def explain_rule(findings: list[Finding]) -> tuple[str, ...]:
        return (*rules_like(bench.rule, bench.trees), *_faults(bench.rule)) or explain(findings)

    return Suite(f"rule {found.name}", bench, CHECKS_OF_RULES, explain_rule, seed, level)


def _bench(rule: Rule, samples: int, level: float, seed: int) -> RuleBench:
    trees = [Tree.chain(1), Tree.chain(2)]
    if rule.tree is not None and rule.kinds - {"chain"}:
        trees += [Tree.branching([2]), Tree.from_parents([-1, 0, 0, 1])]
    benches = {}
    for words, models in CASES.items():
        for tree in trees:
            name = f"{'chain' if tree.is_chain else 'siblings'} of {tree.size - 1}, {words}"
            run = adapt(assemble(rule=rule, tree=tree))
            benches[name] = Bench(run, models, samples=samples, level=level / 4, seed=seed)
    return RuleBench(rule, tuple(trees), benches)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Of each check the first two findings that failed, or one that speaks for all."""
    by_check: dict[str, list[Finding]] = {}
    for finding in findings:
        by_check.setdefault(finding.check, []).append(finding)
    out = []
    for found in by_check.values():
        failed = [finding for finding in found if not finding.ok]
        whole = (
            replace(found[0], message=f"{len(found)} cases, such as {found[0].message}") if len(found) > 1 else found[0]
        )
        out += failed[:2] or [whole]
    return out


def _unfiltered(bench: Bench) -> Bench:
    """At temperature 1 and without a stop token: filters are not a rule's business, and zeros are in the laws."""
    return replace(bench, run=replace(bench.run, samples_with=False, stops=False))


def contract(bench: RuleBench) -> list[Finding]:
    """Shapes, dtypes and ranges, over lengths that reach the empty draft, in both float types and in batches."""
    bench.each(lambda one: handling(_unfiltered(one)))
    for dtype in (torch.float32, torch.float64):
        for B in (1, 3):
            p, q, tokens = _random_step(B, dtype)
            bench.rule.verify(p, q, tokens, Tree.chain(2), Randomness(0, B))
    return [Finding(CONTRACT, True, "shapes, dtypes and ranges; no argument is changed, no global generator is used")]


def absent(bench: RuleBench) -> list[Finding]:
    """A row whose draft is shorter: token -1, q all zeros."""
    for place in (2, 1):
        p, q, tokens = _random_step(1, torch.float64)
        tokens[:, place:], q[:, place:] = -1, 0.0
        q[:, :place], p[:, :place] = 1 / 4, 1 / 4  # what is there is accepted
        try:
            path, _ = bench.rule.verify(p, q, tokens, Tree.chain(2), _Fixed(1))
        except ContractError as error:
            return [Finding(ABSENT, False, str(error))]
        if place in path[0].tolist():
            return [Finding(ABSENT, False, "it accepts one (p / 0 where q is all zeros?)")]
    return [Finding(ABSENT, True, "never accepted")]


def _random_step(B: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Laws p and q (B, 3, 4) and tokens (B, 3) of a chain of two."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, B, 3, 4, generator=generator, dtype=torch.float64).softmax(-1).to(dtype)
    q[:, 0] = 0.0
    return p, q, torch.randint(4, (B, 3), generator=generator)


class _Fixed:
    """An `rng` of which every coin of a positive probability passes and every pick is the likeliest."""

    def __init__(self, rows: int) -> None:
        self.keys = list(range(rows))

    def flip(self, prob: torch.Tensor) -> torch.Tensor:
        if bool(prob.isnan().any()):
            raise ContractError("it flips a coin of probability NaN (0 / 0 where q(x) is 0?)")
        return prob > 0

    def pick(self, weights: torch.Tensor, at: Sequence[int] | None = None) -> torch.Tensor:
        if bool(weights.isnan().any()) or bool((weights < 0).any()) or bool((weights.sum(-1) <= 0).any()):
            raise ContractError(f"it draws from weights that are no law: {weights[0].tolist()}")
        return weights.argmax(-1)


def _exact(bench: RuleBench) -> list[Finding]:
    return bench.each(lambda one: enumerated(_unfiltered(one)))


def _greedy(bench: RuleBench) -> list[Finding]:
    return bench.each(greedy)


def _sampled(bench: RuleBench) -> list[Finding]:
    last = list(bench.benches)[len(bench.trees) - 1]
    return bench.each(lambda one: sampled(_unfiltered(one)), last.split(",")[0])


def _rows(bench: RuleBench) -> list[Finding]:
    return bench.each(rows, "chain of 2, laws that")


def _efficiency(bench: RuleBench) -> list[Finding]:
    """p = q is accepted throughout, by a rule that looks at q; and how many tokens a step yields."""
    tree = bench.trees[1]
    law = step_law(bench.rule, tree)
    tokens = sum(len(emitted) * prob for (_, _, emitted), prob in law.items())
    right = sum(len(out) * prob for (_, _, out), prob in step_law(RULES["token"], tree).items())
    words = f"{tokens:.3f} tokens a step with two draft tokens, the token rule {right:.3f}"
    if not bench.rule.needs_q:
        return [Finding(EFFICIENCY, True, words)]
    same = step_law(bench.rule, tree, (MARKOV[0], MARKOV[0]))
    whole = sum(prob for (_, path, _), prob in same.items() if len(path) == 3)
    if whole < 1 - 1e-9:
        return [Finding(EFFICIENCY, False, f"with p = q only {whole:.3f} of the drafts are accepted whole; {words}")]
    return [Finding(EFFICIENCY, True, f"p = q is accepted throughout; {words}")]


def _faults(rule: Rule) -> list[str]:
    """In words, for a rule that looks at q (for others a ratio is no measure)."""
    if not rule.needs_q:
        return []
    found = faults(rule)
    return found or ["one draft token alone is verified rightly; the fault is in how several go together"]


CHECKS_OF_RULES: dict[str, Callable[[Any], list[Finding]]] = {
    "contract": contract,
    "absent draft tokens": absent,
    "exact law": _exact,
    "greedy law": _greedy,
    "samples": _sampled,
    "rows of a batch": _rows,
    "efficiency": _efficiency,
}
