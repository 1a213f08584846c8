"""`check_drafter`: whether a drafter tells the law that it draws from, keeps its cache, and drafts what it can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minispec.decode import speculate
from minispec.drafters import Drafter
from minispec.inputs import check_integer, default_rule
from minispec.lab.causes import describe
from minispec.lab.decoder_checks import (
    PROMPT,
    Bench,
    cache,
    efficiency,
    enumerated,
    explain,
    greedy,
    handling,
    rows,
    sampled,
)
from minispec.lab.law import exact_law, total_variation
from minispec.lab.mirror import Mirrored, Strict
from minispec.lab.models import random_gpt, random_pair
from minispec.lab.museum import PIECES
from minispec.lab.parts import MakeDrafter, adapt, assemble, make
from minispec.lab.report import CACHE, CONTRACT, TOLD, ContractError, Finding, Report
from minispec.lab.suite import Say, Suite
from minispec.model import LanguageModel
from minispec.sampling import Randomness, Rng, Sampling
from minispec.verify import find_rule

Models = tuple[LanguageModel, LanguageModel]
LARGEST = 8  # tokens of a vocabulary that is enumerated
TOLD_TV = 1e-6  # a drafter may tell its law in float32


@dataclass(frozen=True)
class DrafterBench:
    """A drafter and the decoder that it makes with the rule of its kind."""

    make: Callable[[LanguageModel, LanguageModel], Strict]
    bench: Bench
    rule: str


def check_drafter(
    drafter: MakeDrafter | Drafter,
    *,
    models: Models | None = None,
    rule: str | None = None,
    samples: int = 3000,
    level: float = 1e-6,
    seed: int = 0,
    progress: Say | None = None,
) -> Report:
    """Everything that can be asked of a drafter.

    drafter: a factory (target, draft) -> `Drafter`, called with small models of the lab; or a `Drafter`, whose own
        model, if it has one, has a vocabulary of at most 8 tokens.
    models: target and draft, as for `check_decoder`. rule: the name of the rule that verifies it, default the one of
        its kind. samples, level, seed: of the sampled part, as for `judge`. progress: called with each check's name.

    Compares, over every outcome, the law of the drafted tokens with the q told of them; the decoder's output law with
    the target's; and each draft with that of a session which begins afresh. Raises `TypeError`/`ValueError` for
    arguments out of range; what the drafter raises becomes a finding.
    """
    return drafter_suite(drafter, models=models, rule=rule, samples=samples, level=level, seed=seed).report(progress)


def drafter_suite(
    drafter: MakeDrafter | Drafter,
    *,
    models: Models | None = None,
    rule: str | None = None,
    samples: int = 3000,
    level: float = 1e-6,
    seed: int = 0,
) -> Suite:
    """The checks of `check_drafter`, to be run one by one."""
    for name, value, least in (("samples", samples, 2), ("seed", seed, 0)):
        check_integer(name, value, least)
    if not callable(drafter) and not hasattr(drafter, "begin"):
        raise TypeError(f"drafter must be a factory (target, draft) -> Drafter, or a Drafter, got {drafter!r}")
    models = _models(drafter) if models is None else models
    if rule is not None:
        find_rule(rule)

    def strict(target: LanguageModel, draft: LanguageModel) -> Strict:
        return Strict(make(drafter, target, draft), target.config.vocab_size)

    subject = f"drafter {getattr(drafter, '__name__', type(drafter).__name__)}"
    try:
        used = rule or default_rule(Sampling(), strict(*models).kind)
    except Exception as error:
        words = str(error) if isinstance(error, ContractError) else f"it raised {type(error).__name__}: {error}"
        broken = [Finding(CONTRACT, False, words)]
        return Suite(subject, None, {"contract": lambda bench: broken}, lambda findings: (), seed, level)
    run = adapt(assemble(rule=used, drafter=strict))
    bench = DrafterBench(strict, Bench(run, models, samples=samples, level=level, seed=seed), used)
    return Suite(subject, bench, CHECKS_OF_DRAFTERS, lambda findings: _causes(bench, findings), seed, level)


def _models(drafter: Any) -> Models:
    """The lab's pair; with a model of the drafter's own, a target of its vocabulary."""
    if hasattr(drafter, "begin") and hasattr(drafter, "model"):
        config = drafter.model.config
        if config.vocab_size > LARGEST:
            raise ValueError(
                f"drafter: its model has a vocabulary of {config.vocab_size} tokens, at most {LARGEST} can be "
                "enumerated; give a factory (target, draft) -> Drafter instead"
            )
        return random_gpt(1, config.vocab_size, config.block_size, layers=1), drafter.model
    return random_pair()


def told(bench: DrafterBench) -> list[Finding]:
    """Over every outcome: the probability of a draft is the product of what its q say of its tokens."""
    drafter = bench.make(*bench.bench.models)
    for prompt in (list(PROMPT), [2, 1], [1]):
        products: dict[tuple[int, ...], float] = {}
        laws: dict[tuple[int, ...], list[list[float]]] = {}

        def run(rng: Rng, prompt: list[int] = prompt, products: Any = products, laws: Any = laws) -> tuple[int, ...]:
            draft = drafter.begin([prompt], Sampling()).propose([()], [3], rng)
            key = tuple(draft.tokens[0, 1:].tolist())
            if draft.q is not None:
                told_of = [float(draft.q[0, i, x]) for i, x in enumerate(key, start=1) if x >= 0]
                products[key], laws[key] = _product(told_of), draft.q[0].tolist()
            return key

        try:
            law = exact_law(run, bench.bench.leaves)
        except ValueError as error:
            if "leaves" in str(error):
                return [Finding(TOLD, True, f"not enumerated, more than {bench.bench.leaves} drafts")]
            raise ContractError(str(error)) from error
        if not products:
            return [Finding(TOLD, True, f"candidates of kind {drafter.kind!r} have no law, and need none")]
        tv = 0.5 * sum(abs(prob - products[key]) for key, prob in law.items())
        if tv > TOLD_TV:
            return [Finding(TOLD, False, _say_told(law, products, laws), tv)]
    return [Finding(TOLD, True, "tokens are drawn from the q told of them, every draft enumerated", tv)]


def _product(numbers: list[float]) -> float:
    out = 1.0
    for number in numbers:
        out *= number
    return out


def _say_told(law: Any, products: Any, laws: Any) -> str:
    """What the first token is drawn from, beside what is told of it; and what that looks like."""
    V = len(next(iter(laws.values()))[1])
    drawn = [sum(prob for key, prob in law.items() if key and key[0] == x) for x in range(V)]
    first = next(q[1] for key, q in laws.items() if key and key[0] >= 0)
    shown, said = ("[" + ", ".join(f"{x:.3f}" for x in row) + "]" for row in (drawn, first))
    if sum(drawn) < 1 - 1e-9:
        return f"node 1 is absent with probability {1 - sum(drawn):.3f}, by the token drawn: drawn {shown}, told {said}"
    if max(abs(a - b) for a, b in zip(drawn, first, strict=True)) > TOLD_TV:
        return f"node 1 is drawn from {shown}, told is {said}{_looks_like(drawn, first)}"
    key = max(law, key=lambda key: abs(law[key] - products[key]))
    odds = f"draft {list(key)} has probability {law[key]:.4f}, told {products[key]:.4f}"
    return f"node 1 is drawn as told, later ones are not: {odds}"


def _looks_like(drawn: list[float], told_law: list[float]) -> str:
    """A point mass, or the law at another temperature."""
    if max(drawn) > 1 - 1e-9:
        return ": the token is chosen, not drawn (an argmax?), so its law is a point mass"
    for tenth in range(1, 41):
        T = tenth / 10
        hot = [q ** (1 / T) for q in told_law]
        if max(abs(h / sum(hot) - d) for h, d in zip(hot, drawn, strict=True)) < 1e-6:
            return f": drawn at {T} times the temperature that is told"
    return ""


def _mirror(bench: DrafterBench) -> list[Finding]:
    """Each draft beside that of a fresh session."""
    worst = 0.0
    for T in (1.0, 0.0):
        for seed in range(bench.bench.seed, bench.bench.seed + 5):
            mirrored = Mirrored(bench.make(*bench.bench.models))
            options: dict[str, Any] = {"max_new_tokens": 16, "rng": Randomness(seed), "rule": bench.rule, "stop": []}
            speculate(bench.bench.target, mirrored, list(bench.bench.prompt), sampling=Sampling(T), **options)
            worst = max(worst, *mirrored.errors)
    if worst > TOLD_TV:
        how = "other tokens" if worst == float("inf") else f"laws that differ by {worst:.2g}"
        return [Finding(CACHE, False, f"a session that begins afresh on the same text proposes {how}")]
    return [Finding(CACHE, True, "a session that begins afresh at every step proposes the same")]


def _on_decoder(check: Callable[[Bench], list[Finding]]) -> Callable[[DrafterBench], list[Finding]]:
    return lambda bench: check(bench.bench)


def _causes(bench: DrafterBench, findings: list[Finding]) -> tuple[str, ...]:
    """Broken drafters of the museum that draw and tell the same; else what the q told looks like; else the pattern."""
    lies = next((f for f in findings if f.check == TOLD and not f.ok), None)
    if lies is None:
        return explain(findings)
    mine = _drawn_and_told(bench.make(*bench.bench.models), 1)
    same = []
    for piece in PIECES:
        if piece.kind == "drafter":
            theirs = _drawn_and_told(piece.part(*bench.bench.models), 1)
            if all(total_variation(a, b) < TOLD_TV for a, b in zip(mine, theirs, strict=True)):
                same.append(f"it does exactly what this one of the museum does: {describe(piece)}")
    return (*same, f"q is not the law that was drawn from: {lies.message}")


def _drawn_and_told(drafter: Drafter, depth: int) -> tuple[dict[Any, float], dict[Any, float]]:
    """The law of a draft of this depth, and the product of what its q say of its tokens."""
    products: dict[Any, float] = {}

    def run(rng: Rng) -> tuple[int, ...]:
        draft = drafter.begin([list(PROMPT)], Sampling()).propose([()], [depth], rng)
        key = tuple(draft.tokens[0, 1:].tolist())
        assert draft.q is not None
        products[key] = _product([float(draft.q[0, i, x]) for i, x in enumerate(key, start=1) if x >= 0])
        return key

    return exact_law(run), products


CHECKS_OF_DRAFTERS: dict[str, Callable[[Any], list[Finding]]] = {
    "contract": _on_decoder(handling),
    "told law": told,
    "exact law": _on_decoder(enumerated),
    "greedy law": _on_decoder(greedy),
    "samples": _on_decoder(sampled),
    "rows of a batch": _on_decoder(rows),
    "cache": lambda bench: _worst_cache(bench),
    "efficiency": _on_decoder(efficiency),
}


def _worst_cache(bench: DrafterBench) -> list[Finding]:
    found = _mirror(bench) + cache(bench.bench)
    failed = [f for f in found if not f.ok]
    return failed[:1] or [replace(found[0], message="; ".join(f.message for f in found))]
