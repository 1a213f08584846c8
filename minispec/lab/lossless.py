"""`assert_lossless`: any decoder, sampled, against the law of its target. The verdict is in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from minispec.inputs import check_integer, is_integer, prompt_lists
from minispec.lab.causes import likely_causes
from minispec.lab.family import sampled_findings, two_sample_findings
from minispec.lab.law import target_law
from minispec.lab.report import CONTRACT, LENGTH, SEEDS, STOP, ContractError, Finding, Report
from minispec.model import LanguageModel
from minispec.sampling import Sampling

Tokens = tuple[int, ...]
Progress = Callable[[int, int], None]  # (done, of how many)
LARGEST_LAW = 20_000  # outputs; a law of more is not enumerated


class Decoder(Protocol):
    """What is judged: new tokens after `prompt`, at most `n`, all chance in them from `seed`."""

    def __call__(self, prompt: Sequence[int], n: int, seed: int) -> Sequence[int]: ...


def assert_lossless(
    decoder: Decoder,
    target: LanguageModel | Mapping[Tokens, float] | Decoder,
    *,
    prompt: Sequence[int] = (0,),
    length: int = 4,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    samples: int = 10_000,
    level: float = 1e-6,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Raise `AssertionError`, with the verdict, unless `decoder` draws from the law of `target`. See `judge`."""
    report = judge(
        decoder,
        target,
        prompt=prompt,
        length=length,
        sampling=sampling,
        stop=stop,
        samples=samples,
        level=level,
        seed=seed,
        progress=progress,
    )
    if not report.ok:
        raise AssertionError(str(report))
    return report


def judge(
    decoder: Decoder,
    target: LanguageModel | Mapping[Tokens, float] | Decoder,
    *,
    prompt: Sequence[int] = (0,),
    length: int = 4,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    samples: int = 10_000,
    level: float = 1e-6,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Sample `decoder` and test what it returns; the findings, as a `Report`.

    decoder: a callable (prompt, n, seed) -> tokens; nothing else of it is known. Called `samples` times and a little.
    target: what its law should be: a model, whose law over `length` tokens is enumerated (a small vocabulary);
        or that law, {tokens: probability}; or a plain decoder of the same signature, sampled as often.
    prompt, length: what it continues, and by how many tokens. Take `length` >= draft_len + 2, so that a second step
        begins: the first token alone does not show half of the classical bugs.
    sampling, stop: as the decoder has them; with a model the law is made from them.
    level: the chance that a right decoder is accused by any of the tests. seed: the first of the seeds used.

    Raises `ValueError`/`TypeError` for arguments out of range; what the decoder raises becomes a finding.
    """
    for name, value, least in (("length", length, 1), ("samples", samples, 1), ("seed", seed, 0)):
        check_integer(name, value, least)
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level!r}")
    if not callable(decoder):
        raise TypeError(f"decoder must be a callable (prompt, n, seed) -> tokens, got {decoder!r}")
    law, reference = _right_law(target, prompt, length, sampling, stop)
    subject = getattr(decoder, "__name__", type(decoder).__name__)
    bound = Bound(decoder, list(prompt), frozenset(stop), _vocabulary(target, law))
    try:
        findings = _handling(bound, length, seed)
        total = samples * (2 if reference else 1)
        counts = bound.sample(length, samples, seed, lambda i: progress and progress(i, total))
        if law is not None:
            findings += sampled_findings(counts, law, level)
        else:
            other = Bound(cast(Decoder, reference), bound.prompt, bound.stop, None)
            plain = other.sample(length, samples, seed + samples, lambda i: progress and progress(samples + i, total))
            findings += two_sample_findings(counts, plain, level)
        if law is None or len(law) > 1:
            findings.append(_seeds_differ(counts, samples))
    except ContractError as error:
        findings = [Finding(CONTRACT, False, str(error))]
    failed = frozenset(f.check for f in findings if not f.ok)
    return Report(subject, tuple(findings), likely_causes(failed), seed, level)


class Bound:
    """A decoder with its prompt; what it returns is checked before it is believed."""

    def __init__(
        self, decoder: Decoder, prompt: list[int], stop: frozenset[int] = frozenset(), vocabulary: int | None = None
    ) -> None:
        self.decoder, self.prompt, self.stop, self.vocabulary = decoder, prompt, stop, vocabulary

    def __call__(self, n: int, seed: int) -> Tokens:
        prompt = list(self.prompt)
        try:
            returned: Any = self.decoder(prompt, n, seed)
        except Exception as error:
            raise ContractError(f"decoder(prompt, {n}, {seed}) raised {type(error).__name__}: {error}") from error
        if prompt != self.prompt:
            raise ContractError(f"the decoder changed the prompt that it was given, {self.prompt} to {prompt}")
        return check_tokens(returned, self.vocabulary)

    def sample(
        self, n: int, samples: int, seed: int, progress: Callable[[int], object] = lambda i: None
    ) -> Counter[Tokens]:
        counts: Counter[Tokens] = Counter()
        for i in range(samples):
            counts[self(n, seed + i)] += 1
            if (i + 1) % 100 == 0:
                progress(i + 1)
        return counts


def check_tokens(returned: Any, vocabulary: int | None) -> Tokens:
    """What a decoder returned, as a tuple of ints; `ContractError` says what it is instead."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if isinstance(returned, str) or not isinstance(returned, (list, tuple)):
        raise ContractError(f"the decoder must return a list of token ids, got {type(returned).__name__}")
    for token in returned:
        if not is_integer(token):
            raise ContractError(f"the decoder must return integer token ids, got {token!r} among them")
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            allowed = "0.." if vocabulary is None else f"0..{vocabulary - 1}"
            raise ContractError(f"the decoder returned the token id {token}, outside {allowed}")
    return tuple(map(int, returned))


def cut(tokens: Tokens, stop: frozenset[int]) -> Tokens:
    """`tokens` up to and including the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop), None)
    return tokens[:end]


def cut_law(law: Mapping[Tokens, float], stop: Sequence[int]) -> dict[Tokens, float]:
    """The law of outputs that end with their first stop token."""
    out: dict[Tokens, float] = {}
    for tokens, prob in law.items():
        short = cut(tokens, frozenset(stop))
        out[short] = out.get(short, 0.0) + prob
    return out


def _right_law(
    target: Any, prompt: Sequence[int], length: int, sampling: Sampling | None, stop: Sequence[int]
) -> tuple[dict[Tokens, float] | None, Decoder | None]:
    """The law to test against, or the decoder to compare with."""
    if isinstance(target, Mapping):
        wrong = {len(tokens) for tokens in target} - set(range(1, length + 1))
        if wrong:
            raise ValueError(f"target: the law speaks of outputs of {sorted(wrong)} tokens, length is {length}")
        return dict(target), None
    if not hasattr(target, "config"):
        if not callable(target):
            raise TypeError(f"target must be a model, a law or a plain decoder, got {target!r}")
        return None, cast(Decoder, target)
    config = target.config
    prompt_lists(list(prompt), config.vocab_size, config.block_size)
    if len(prompt) + length > config.block_size:
        raise ValueError(f"length: {len(prompt)} + {length} tokens exceed the target's block_size {config.block_size}")
    law = target_law(target, prompt, length, sampling, LARGEST_LAW)
    return cut_law(law, stop), None


def _vocabulary(target: Any, law: Mapping[Tokens, float] | None) -> int | None:
    return int(target.config.vocab_size) if hasattr(target, "config") else None


def _handling(bound: Bound, length: int, seed: int) -> list[Finding]:
    """Length, stop token and repeatability, over a few seeds."""
    findings = []
    for n in range(length + 1):
        for s in range(seed, seed + 20):
            tokens = bound(n, s)
            short = cut(tokens, bound.stop)
            if len(short) < len(tokens):
                findings.append(
                    Finding(STOP, False, f"{len(tokens) - len(short)} tokens after the stop token (seed {s})")
                )
            elif len(tokens) != n and not (tokens and tokens[-1] in bound.stop and len(tokens) < n):
                findings.append(Finding(LENGTH, False, f"asked for {n} tokens, it gave {len(tokens)} (seed {s})"))
            elif bound(n, s) != tokens:
                findings.append(Finding(SEEDS, False, f"the same seed, {s}, gave two outputs"))
            if findings:
                return findings
    out = [Finding(LENGTH, True, f"0 to {length} tokens, as asked for")]
    return out + ([Finding(STOP, True, "nothing after a stop token")] if bound.stop else [])


def _seeds_differ(counts: Mapping[Tokens, int], samples: int) -> Finding:
    if len(counts) == 1 and samples > 1:
        return Finding(SEEDS, False, f"{samples} seeds gave one and the same output: the seed is not used")
    return Finding(SEEDS, True, "one seed, one output; other seeds, other outputs")
