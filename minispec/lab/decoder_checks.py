"""`check_decoder`: a whole speculative decoder, on models whose law, cache and passes are open to view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minispec.inputs import check_integer
from minispec.lab.causes import likely_causes
from minispec.lab.family import sampled_findings
from minispec.lab.law import exact_law, target_law, total_variation
from minispec.lab.models import random_pair
from minispec.lab.output import Tokens, cut, cut_law
from minispec.lab.parts import Adapted, FullDecoder, adapt
from minispec.lab.report import (
    CACHE,
    EFFICIENCY,
    EXACT,
    GREEDY,
    LENGTH,
    ROWS,
    SEEDS,
    STOP,
    ZERO,
    ContractError,
    Finding,
    Report,
)
from minispec.lab.statistics import two_sample
from minispec.lab.suite import Say, Suite
from minispec.lab.watch import SAME, Pass, Watched, cache_error, draft_error, first_in_step
from minispec.model import LanguageModel
from minispec.sampling import Sampling

PROMPT = (0, 1, 2, 0, 1)
FILTERED = Sampling(top_p=0.8)
LEAVES = 3000
EXACT_TV = 1e-10


@dataclass(frozen=True)
class Bench:
    """What a decoder is checked with."""

    run: Adapted
    models: tuple[LanguageModel, LanguageModel]
    prompt: tuple[int, ...] = PROMPT
    length: int = 4
    samples: int = 4000
    level: float = 1e-6
    seed: int = 0
    leaves: int = LEAVES

    @property
    def target(self) -> LanguageModel:
        return self.models[0]

    def law(self, n: int, sampling: Sampling | None = None) -> dict[Tokens, float]:
        return target_law(self.target, self.prompt, n, sampling)


def check_decoder(
    decoder: FullDecoder,
    *,
    models: tuple[LanguageModel, LanguageModel] | None = None,
    prompt: Sequence[int] = PROMPT,
    length: int = 4,
    samples: int | None = None,
    level: float = 1e-6,
    seed: int = 0,
    progress: Say | None = None,
) -> Report:
    """Everything that can be asked of a speculative decoder, on a pair of small models that the lab provides.

    decoder: (target, draft, prompt, n, rng) -> the n new tokens. The models are `LanguageModel`s, `rng` has `flip`
        and `pick`. It may say, by the names of its parameters, that it wants `prompts`, a list of prompts, for
        `prompt` (and returns a list of token lists); an integer `seed` for `rng` (then it is sampled, and cannot be
        enumerated); and, behind these, `sampling` (a `Sampling`) and `stop` (token ids), which are then checked
        too. `parts.assemble` makes one from a rule, a drafter or a cache.
    models: target and draft, in float64, of a vocabulary that can be enumerated; default `models.random_pair`.
    length: tokens of a sampled output. samples: how many, default 3,000 of a decoder that takes `prompts`, 500 of one
        that is called once for each. level, seed: as for `judge`.
    progress: called with the name of each check before it runs.

    Raises `TypeError`/`ValueError` for arguments out of range; what the decoder raises becomes a finding.
    """
    options = {"models": models, "prompt": prompt, "length": length, "samples": samples, "level": level, "seed": seed}
    return decoder_suite(decoder, **options).report(progress)  # type: ignore[arg-type]


def decoder_suite(
    decoder: FullDecoder,
    *,
    models: tuple[LanguageModel, LanguageModel] | None = None,
    prompt: Sequence[int] = PROMPT,
    length: int = 4,
    samples: int | None = None,
    level: float = 1e-6,
    seed: int = 0,
) -> Suite:
    """The checks of `check_decoder`, to be run one by one."""
    run = adapt(decoder)
    samples = (3000 if run.batched else 500) if samples is None else samples
    for name, value, least in (("length", length, 1), ("samples", samples, 2), ("seed", seed, 0)):
        check_integer(name, value, least)
    bench = Bench(run, random_pair() if models is None else models, tuple(prompt), length, samples, level, seed)
    subject = f"decoder {getattr(decoder, '__name__', type(decoder).__name__)}"
    return Suite(subject, bench, CHECKS_OF_DECODERS, explain, seed, level)


def explain(findings: Sequence[Finding]) -> tuple[str, ...]:
    """The pieces of the museum that fail like this."""
    return likely_causes(frozenset(f.check for f in findings if not f.ok), [f.check for f in findings])


def handling(bench: Bench) -> list[Finding]:
    """Length, stop token, repeatability."""
    stops = [(), (1,)] if bench.run.stops else [()]
    for stop in stops:
        for seed in range(bench.seed, bench.seed + 4):
            for n in (0, 1, 2, 3, 4, 7):
                [tokens] = bench.run(bench.models, [bench.prompt], n, seed, None, stop)
                ended = bool(tokens) and tokens[-1] in stop
                if len(cut(tokens, frozenset(stop))) < len(tokens):
                    words = f"with stop={list(stop)} it gave {list(tokens)} (seed {seed})"
                    return [Finding(STOP, False, f"tokens after the stop token: {words}")]
                if len(tokens) > n or (len(tokens) < n and not ended):
                    return [Finding(LENGTH, False, f"asked for {n} tokens, it gave {len(tokens)} (seed {seed})")]
        if [tokens] != bench.run(bench.models, [bench.prompt], 7, seed, None, stop):
            return [Finding(SEEDS, False, f"the same seed, {seed}, gave two outputs")]
    out = [Finding(LENGTH, True, "0 to 7 tokens, as asked for"), Finding(SEEDS, True, "one seed, one output")]
    return out + ([Finding(STOP, True, "nothing after it")] if bench.run.stops else [])


def enumerated(bench: Bench) -> list[Finding]:
    """The exact law over three tokens: at T = 1, under top-p, with a stop token."""
    if not bench.run.enumerable:
        return []
    cases: list[tuple[str, Sampling, tuple[int, ...]]] = [("T = 1", Sampling(), ())]
    cases += [("top-p .8", FILTERED, ())] if bench.run.samples_with else []
    cases += [("a stop token", Sampling(), (1,))] if bench.run.stops else []
    return [finding for case in cases for finding in _exact(bench, *case)]


def _exact(bench: Bench, words: str, sampling: Sampling, stop: tuple[int, ...]) -> list[Finding]:
    want = cut_law(bench.law(3, sampling), stop)

    def run(rng: Any) -> Tokens:
        return bench.run(bench.models, [bench.prompt], 3, rng, sampling, stop)[0]

    try:
        law = exact_law(run, bench.leaves)
    except ValueError as error:
        if "leaves" not in str(error):
            raise ContractError(str(error)) from error
        return [Finding(EXACT, True, f"{words}: not enumerated, more than {bench.leaves} outcomes")]
    tv = total_variation(law, want)
    if tv < EXACT_TV:
        return [Finding(EXACT, True, f"{words}: three tokens, every choice enumerated", tv)]
    never = {x: prob for x, prob in law.items() if x not in want and prob > EXACT_TV}
    shown = [] if stop else list(never)[:1]
    zero = [Finding(ZERO, False, f"{words}: {list(x)}, which the target never gives") for x in shown]
    x = max(want.keys() | law.keys(), key=lambda x: abs(law.get(x, 0.0) - want.get(x, 0.0)))
    seen = f"it gives {list(x)} with probability {law.get(x, 0.0):.4f}, the target with {want.get(x, 0.0):.4f}"
    return [*zero, Finding(EXACT, False, f"{words}: {seen}", tv)]


def greedy(bench: Bench) -> list[Finding]:
    """At temperature 0 there is one output."""
    if not bench.run.samples_with:
        return []
    n = 9
    [want] = bench.law(n, Sampling(0))
    for seed in range(bench.seed, bench.seed + 8):
        [tokens] = bench.run(bench.models, [bench.prompt], n, seed, Sampling(0))
        if tokens != want:
            return [Finding(GREEDY, False, f"at temperature 0 it gave {list(tokens)} for {list(want)} (seed {seed})")]
    return [Finding(GREEDY, True, f"{n} tokens, the target's own")]


def draw(
    bench: Bench, sampling: Sampling, n: int, prompts: Sequence[Sequence[int]], each: int, offset: int = 1000
) -> list[Counter[Tokens]]:
    """Counts of `each` outputs for each prompt; those of a batched decoder come from mixed batches."""
    counts: list[Counter[Tokens]] = [Counter() for _ in prompts]
    size = 1000 if bench.run.batched else 1
    for start in range(0, each, size):
        rows = min(size, each - start)
        seed = bench.seed + offset + start
        if bench.run.batched:
            out = bench.run(bench.models, [p for p in prompts for _ in range(rows)], n, seed, sampling)
            for i, found in enumerate(counts):
                found.update(out[i * rows : (i + 1) * rows])
        else:
            for prompt, found in zip(prompts, counts, strict=True):
                found.update(bench.run(bench.models, [prompt], n, seed, sampling))
    return counts


def sampled(bench: Bench) -> list[Finding]:
    """The family of chi-squared tests, at T = 1 and, with half the samples, under top-p."""
    law = bench.law(bench.length)
    [counts] = draw(bench, Sampling(), bench.length, [bench.prompt], bench.samples)
    findings = sampled_findings(counts, law, bench.level)
    if len(counts) == 1 < len(law):
        findings.append(Finding(SEEDS, False, "all seeds gave one and the same output"))
    if bench.run.samples_with:
        [counts] = draw(bench, FILTERED, bench.length, [bench.prompt], bench.samples // 2)
        found = sampled_findings(counts, bench.law(bench.length, FILTERED), bench.level)
        findings += [Finding(**{**vars(f), "message": f"top-p .8: {f.message}"}) for f in found]
    return findings


def rows(bench: Bench) -> list[Finding]:
    """Prompts of different lengths in one batch are continued as each among its like."""
    if not bench.run.batched:
        return []
    each = bench.samples // 2
    prompts = [bench.prompt, bench.prompt[:2]]
    for i, (prompt, mixed) in enumerate(zip(prompts, draw(bench, Sampling(), 3, prompts, each), strict=True)):
        [alone] = draw(
            bench, Sampling(), 3, [prompt], each, 10**6 * (i + 1)
        )  # other seeds: the samples are independent
        verdict = two_sample(mixed, alone, bench.level / 2)
        if not verdict.passed:
            words = f"a prompt of {len(prompt)} tokens is continued otherwise in company with one of another length"
            return [Finding(ROWS, False, words, verdict.tv, None, None, verdict.p_value, verdict.samples)]
    words = f"prompts of {' and '.join(str(len(p)) for p in prompts)} tokens, in one batch and apart"
    return [Finding(ROWS, True, words, None, None, verdict.detectable_tv, verdict.p_value, verdict.samples)]


def cache(bench: Bench) -> list[Finding]:
    """Every pass of the target, and the draft's first in each step, against uncached passes."""
    errors: dict[str, float] = {}
    for seed in range(bench.seed, bench.seed + 6):
        log: list[Pass] = []
        target, draft = (Watched(m, who, log) for m, who in zip(bench.models, ("target", "draft"), strict=True))
        [tokens] = bench.run((target, draft), [bench.prompt], 9, seed)
        text = [*bench.prompt, *tokens]
        compared = [("target", cache_error(bench.target, read, text)) for read in log if read.who == "target"]
        compared += [("draft", draft_error(bench.models[1], read, text)) for read in first_in_step(log)]
        for who, error in compared:
            if error is not None:
                errors[who] = max(errors.get(who, 0.0), error)
    wrong = {who: error for who, error in errors.items() if not error < SAME}
    if wrong:
        words = " and ".join(f"the {who}'s logits are off by {error:.2g}" for who, error in wrong.items())
        return [Finding(CACHE, False, f"{words} from those of an uncached pass over the text")]
    return [Finding(CACHE, True, f"logits of {' and '.join(errors)} are those of an uncached pass")] if errors else []


def efficiency(bench: Bench) -> list[Finding]:
    """With draft = target, and laws of one outcome, everything is accepted; and nothing is read again and again."""
    log: list[Pass] = []
    model = bench.target
    n = min(24, model.config.block_size - 2)
    target, draft = (Watched(model, who, log, 1e4) for who in ("target", "draft"))
    [tokens] = bench.run((target, draft), [[0]], n, bench.seed)
    by = {who: [read for read in log if read.who == who] for who in ("target", "draft")}
    for who, passes in by.items():
        third = max(1, len(passes) // 3)
        late, early = (max((r.count for r in part), default=0) for part in (passes[-third:], passes[1 : third + 1]))
        total = sum(read.count for read in passes)
        if total > 2 * (n + late) and late > early + 3:
            words = f"the {who} read {total} tokens for a text of {n}, more in each step: the prefix is read again"
            return [Finding(EFFICIENCY, False, words)]
    if not by["draft"]:
        return [Finding(EFFICIENCY, True, f"{len(by['target'])} target passes for {n} tokens; the draft is not used")]
    possible = sum(read.depth for read in by["target"])
    count = len(by["target"])
    if possible - len(tokens) > by["target"][-1].depth - 1:
        words = f"with draft = target {count} passes gave {len(tokens)} tokens, and could have given {possible}"
        return [Finding(EFFICIENCY, False, f"{words}: not everything was accepted")]
    return [Finding(EFFICIENCY, True, f"draft = target: everything accepted, {n} tokens in {count} target passes")]


CHECKS_OF_DECODERS: dict[str, Callable[[Any], list[Finding]]] = {
    "length, stop, seeds": handling,
    "exact law": enumerated,
    "greedy law": greedy,
    "samples": sampled,
    "rows of a batch": rows,
    "cache": cache,
    "efficiency": efficiency,
}
