"""The family of chi-squared tests that one sample of token sequences is put to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TypeVar

from minispec.lab.report import EACH, FIRST, JOINT, STEPS, ZERO, Finding
from minispec.lab.statistics import Verdict, association, chi_squared, holm, tv_interval, two_sample

Tokens = tuple[int, ...]
Weight = TypeVar("Weight", int, float)  # a count or a probability


def sampled_findings(counts: Mapping[Tokens, int], law: Mapping[Tokens, float], level: float = 1e-6) -> list[Finding]:
    """Tests of a sample against its law: the first token, each later one, whole outputs, pairs, impossible outputs.

    The tests are one family: the chance that any of them accuses a right decoder is at most `level` (Holm).
    """
    n = sum(counts.values())
    first = _marginal(counts, law, 0, level)
    later = [_marginal(counts, law, i, level) for i in range(1, max(map(len, law)))]
    joint = chi_squared(counts, law, level)
    pairs = [association(pair_counts, pair_law)[0] for pair_counts, pair_law in _pairs(counts, law)]
    tests = {FIRST: first.p_value, JOINT: joint.p_value}
    if later:
        tests[EACH] = _least(v.p_value for v in later)
    if pairs:
        tests[STEPS] = _least(iter(pairs))
    rejected = dict(zip(tests, holm(list(tests.values()), level), strict=True))
    findings = [_zero(joint, law, n), _finding(FIRST, first, not rejected[FIRST], "first token", counts, law)]
    if later:
        worst = min(range(len(later)), key=lambda i: later[i].p_value)
        words = f"token {worst + 2}, the worst"
        findings.append(_finding(EACH, later[worst], not rejected[EACH], words, counts, law, tests[EACH]))
    if pairs:
        words = "tokens hang together as they should" if not rejected[STEPS] else _correlated(rejected)
        findings.append(Finding(STEPS, not rejected[STEPS], words, p_value=tests[STEPS], samples=n))
    words = "whole outputs" if not rejected[JOINT] else _joint_words(rejected)
    findings.append(_finding(JOINT, joint, not rejected[JOINT], words, counts, law))
    return findings


def two_sample_findings(
    counts: Mapping[Tokens, int], reference: Mapping[Tokens, int], level: float = 1e-6
) -> list[Finding]:
    """The same against a sample of plain decoding, where the law cannot be enumerated."""
    n = sum(counts.values()) + sum(reference.values())
    longest = max(max(map(len, counts)), max(map(len, reference)))
    verdicts = {FIRST: two_sample(_token(counts, 0), _token(reference, 0), level)}
    later = [two_sample(_token(counts, i), _token(reference, i), level) for i in range(1, longest)]
    if later:
        verdicts[EACH] = min(later, key=lambda v: v.p_value)
    verdicts[JOINT] = two_sample(counts, reference, level)
    p_values = {name: v.p_value for name, v in verdicts.items()}
    if later:
        p_values[EACH] = _least(v.p_value for v in later)
    rejected = dict(zip(p_values, holm(list(p_values.values()), level), strict=True))
    return [
        Finding(
            name,
            not rejected[name],
            "against plain decoding",
            verdict.tv,
            detectable_tv=verdict.detectable_tv,
            p_value=p_values[name],
            samples=n,
        )
        for name, verdict in verdicts.items()
    ]


def _token(table: Mapping[Tokens, Weight], place: int) -> dict[int, Weight]:
    """The law, or the counts, of the token at `place`; -1 where an output has ended before."""
    found: dict[int, Weight] = {}
    for tokens, weight in table.items():
        token = tokens[place] if place < len(tokens) else -1
        found[token] = found[token] + weight if token in found else weight
    return found


def _marginal(counts: Mapping[Tokens, int], law: Mapping[Tokens, float], place: int, level: float) -> Verdict:
    return chi_squared(_token(counts, place), _token(law, place), level)


def _pairs(
    counts: Mapping[Tokens, int], law: Mapping[Tokens, float]
) -> Iterator[tuple[dict[tuple[int, int], int], dict[tuple[int, int], float]]]:
    for i, j in combinations(range(max(map(len, law))), 2):
        pair_law: Counter[tuple[int, int]] = Counter()
        pair_counts: Counter[tuple[int, int]] = Counter()
        for tokens, prob in law.items():
            if j < len(tokens):
                pair_law[tokens[i], tokens[j]] += prob  # type: ignore[assignment]
        for tokens, count in counts.items():
            if j < len(tokens) and pair_law.get((tokens[i], tokens[j]), 0.0) > 0:
                pair_counts[tokens[i], tokens[j]] += count
        mass = sum(pair_law.values())
        if mass > 0 and pair_counts:
            yield dict(pair_counts), {pair: prob / mass for pair, prob in pair_law.items()}


def _least(p_values: Iterator[float]) -> float:
    """The p-value of several tests at once: Bonferroni's, the first step of Holm's."""
    found = list(p_values)
    return min(1.0, len(found) * min(found))


def _zero(joint: Verdict, law: Mapping[Tokens, float], n: int) -> Finding:
    if not joint.impossible:
        return Finding(ZERO, True, "none seen", samples=n)
    shown = ", ".join(repr(x) for x in joint.impossible[:3])
    return Finding(
        ZERO, False, f"{len(joint.impossible)} outputs that the target never gives, such as {shown}", samples=n
    )


def _finding(
    check: str,
    verdict: Verdict,
    ok: bool,
    words: str,
    counts: Mapping[Tokens, int],
    law: Mapping[Tokens, float],
    p_value: float | None = None,
) -> Finding:
    interval = tv_interval(counts, law) if check == JOINT else None
    p = verdict.p_value if p_value is None else p_value
    return Finding(check, ok, words, verdict.tv, interval, verdict.detectable_tv, p, verdict.samples)


def _correlated(rejected: Mapping[str, bool]) -> str:
    alone = "" if rejected[FIRST] or rejected.get(EACH) else ", though each token for itself has its law"
    return f"what a token says about another is not as in the target{alone}"


def _joint_words(rejected: Mapping[str, bool]) -> str:
    if not rejected[FIRST] and not rejected.get(EACH):
        return "whole outputs are wrong, though each token for itself has its law"
    if not rejected[FIRST]:
        return "whole outputs are wrong, though the first token has its law"
    return "whole outputs are wrong"
