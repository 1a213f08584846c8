"""Answers as learners write them: each wrong one is told apart, and gets the hint against its own misconception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minispec.planner import best_draft_len, expected_tokens
from minispec.teach import grade
from minispec.verify import residual

ANSWERS: list[tuple[str, str, Any]] = []


def wrong(name: str, mistake: str) -> Callable[[Any], Any]:
    """The answer below shows this misconception in that exercise."""

    def add(answer: Any) -> Any:
        ANSWERS.append((name, mistake, answer))
        return answer

    return add


def values(name: str, **answers: Any) -> None:
    ANSWERS.extend((name, mistake.replace("_", " "), answer) for mistake, answer in answers.items())


def start(**changed: Any) -> dict[str, Any]:
    return {"p": "target", "q": "draft", "K": 4, "passes": 1} | changed


values(
    "00.notation",
    p_and_q_swapped=start(p="Draft", q="target "),
    the_pending_token_counted=start(K=5),
    a_pass_for_each_guess=start(passes=4),
)


@wrong("01.token_time", "weights, not bytes")
def _(parameters, bytes_per_weight, bandwidth):  # type: ignore[no-untyped-def]
    return parameters / bandwidth


@wrong("01.token_time", "tokens a second")
def _(parameters, bytes_per_weight, bandwidth):  # type: ignore[no-untyped-def]
    model = parameters * bytes_per_weight
    return bandwidth / model


@wrong("01.token_time", "arithmetic counted")
def _(parameters, bytes_per_weight, bandwidth):  # type: ignore[no-untyped-def]
    return (2 * parameters * bytes_per_weight) / bandwidth


@wrong("01.pass_time", "sum of both")
def _(n, parameters, bytes_per_weight, bandwidth, flops):  # type: ignore[no-untyped-def]
    memory = parameters * bytes_per_weight / bandwidth
    compute = 2 * parameters * n / flops
    return memory + compute


@wrong("01.pass_time", "weights read n times")
def _(n, parameters, bytes_per_weight, bandwidth, flops):  # type: ignore[no-untyped-def]
    return n * max(parameters * bytes_per_weight / bandwidth, 2 * parameters / flops)


@wrong("01.pass_time", "arithmetic of one token")
def _(n, parameters, bytes_per_weight, bandwidth, flops):  # type: ignore[no-untyped-def]
    return max(parameters * bytes_per_weight / bandwidth, 2 * parameters / flops)


@wrong("01.pass_time", "the faster decides")
def _(n, parameters, bytes_per_weight, bandwidth, flops):  # type: ignore[no-untyped-def]
    times = [parameters * bytes_per_weight / bandwidth, 2 * n * parameters / flops]
    return sorted(times)[0]


@wrong("02.attend", "stale slots seen")
def _(query, keys, values, length):  # type: ignore[no-untyped-def]
    return torch.softmax(keys @ query / query.numel() ** 0.5, 0) @ values


@wrong("02.attend", "scores not scaled")
def _(query, keys, values, length):  # type: ignore[no-untyped-def]
    return torch.softmax(keys[:length] @ query, 0) @ values[:length]


@wrong("02.attend", "hidden scores set to 0")
def _(query, keys, values, length):  # type: ignore[no-untyped-def]
    scores = keys @ query / query.numel() ** 0.5
    scores[length:] = 0
    return scores.softmax(0) @ values


@wrong("02.attend", "hidden after the softmax")
def _(query, keys, values, length):  # type: ignore[no-untyped-def]
    weights = (keys @ query / query.numel() ** 0.5).softmax(0)
    weights[length:] = 0
    return weights @ values


@wrong("02.rollback", "rejected row kept")
def _(n, K, accepted):  # type: ignore[no-untyped-def]
    return n + accepted + 1


@wrong("02.rollback", "pending token dropped")
def _(n, K, accepted):  # type: ignore[no-untyped-def]
    return (n - 1) + accepted


@wrong("02.rollback", "nothing rolled back")
def _(n, K, accepted):  # type: ignore[no-untyped-def]
    return (n - 1) + (K + 1)


@wrong("02.rollback", "rows to drop")
def _(n, K, accepted):  # type: ignore[no-untyped-def]
    return K - accepted


@wrong("03.accept", "ratio inverted")
def _(p, q, x):  # type: ignore[no-untyped-def]
    return torch.clamp(q[x] / p[x], max=1)


@wrong("03.accept", "not capped")
def _(p, q, x):  # type: ignore[no-untyped-def]
    return p[x] / q[x]


@wrong("03.accept", "no coin")
def _(p, q, x):  # type: ignore[no-untyped-def]
    return bool(p[x] >= q[x])


@wrong("03.accept", "q counted twice")
def _(p, q, x):  # type: ignore[no-untyped-def]
    return torch.minimum(p, q)[x]


@wrong("03.residual", "p itself")
def _(p, q):  # type: ignore[no-untyped-def]
    return p.clone()


@wrong("03.residual", "absolute difference")
def _(p, q):  # type: ignore[no-untyped-def]
    difference = abs(p - q)
    return difference / difference.sum()


@wrong("03.residual", "not normalised")
def _(p, q):  # type: ignore[no-untyped-def]
    return torch.relu(p - q)


@wrong("03.residual", "nothing left")
def _(p, q):  # type: ignore[no-untyped-def]
    rest = torch.relu(p - q)
    return rest / sum(rest)


@wrong("03.acceptance", "total variation")
def _(p, q):  # type: ignore[no-untyped-def]
    return torch.relu(p - q).sum()


@wrong("03.acceptance", "two independent draws agree")
def _(p, q):  # type: ignore[no-untyped-def]
    return p @ q


@wrong("03.acceptance", "unweighted mean")
def _(p, q):  # type: ignore[no-untyped-def]
    return sum(min(1, float(p[x] / q[x])) for x in range(len(p))) / len(p)


@wrong("03.step", "resampled from p")
def _(p, q, dice):  # type: ignore[no-untyped-def]
    x = dice.pick(q)
    return x if dice.flip(min(1, p[x] / q[x])) else dice.pick(p)


@wrong("03.step", "only the rejected token removed")
def _(p, q, dice):  # type: ignore[no-untyped-def]
    x = dice.pick(q)
    if dice.flip(p[x] / q[x]):
        return x
    p[x] = 0
    return dice.pick(p / p.sum())


@wrong("03.step", "ratio inverted")
def _(p, q, dice):  # type: ignore[no-untyped-def]
    x = dice.pick(q)
    if dice.flip(q[x] / p[x]):
        return x
    return dice.pick(torch.relu(p - q))


@wrong("03.step", "no coin")
def _(p, q, dice):  # type: ignore[no-untyped-def]
    x = dice.pick(q)
    return x if p[x] >= q[x] else dice.pick(torch.relu(p - q))


def speculate(target, draft, prompt, max_new_tokens, K, dice, *, flaw=""):  # type: ignore[no-untyped-def]
    """The loop as the scaffold suggests it, with one flaw."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        drafted, q = [], []
        for _ in range(K):
            q.append(draft(tokens if flaw == "blind" else tokens + drafted)[-1])
            drafted.append(dice.pick(q[-1]))
        if flaw == "one by one":
            p = torch.stack([target(tokens + drafted[:i])[-1] for i in range(K + 1)])
        else:
            p = target(tokens + drafted)[-K - 1 :]
        for i in range(K):
            x, law = drafted[i], p[i + 1] if flaw == "off by one" else p[i]
            if dice.flip(law[x] / q[i][x]):
                tokens.append(x)
                continue
            tokens.append(dice.pick(law if flaw == "resample" else residual(law, q[i])))
            if flaw != "goes on":
                break
        else:
            if flaw != "no bonus":
                tokens.append(dice.pick(q[-1] if flaw == "bonus from q" else p[K]))
    return tokens[len(prompt) :] if flaw == "too long" else tokens[len(prompt) : len(prompt) + max_new_tokens]


for flaw, mistake in {
    "resample": "resampled from p",
    "no bonus": "no bonus token",
    "bonus from q": "bonus from the draft",
    "goes on": "goes on after a rejection",
    "off by one": "p one place off",
    "blind": "guesses blind to each other",
    "one by one": "a target pass for each guess",
    "too long": "too many tokens",
}.items():
    wrong("04.loop", mistake)(lambda *a, flaw=flaw: speculate(*a, flaw=flaw))


@wrong("04.expected_tokens", "division by 0")
def _(a, K):  # type: ignore[no-untyped-def]
    return (1 - a ** (K + 1)) / (1 - a)


@wrong("04.expected_tokens", "bonus forgotten")
def _(a, K):  # type: ignore[no-untyped-def]
    return sum(a**i for i in range(1, K + 1))


@wrong("04.expected_tokens", "one place short")
def _(a, K):  # type: ignore[no-untyped-def]
    return sum(a**i for i in range(K))


@wrong("04.expected_tokens", "places independent")
def _(a, K):  # type: ignore[no-untyped-def]
    return K * a + 1


@wrong("04.speed_up", "drafting is free")
def _(a, K, c, check=1.0):  # type: ignore[no-untyped-def]
    return expected_tokens(a, K) / check


@wrong("04.speed_up", "one draft pass")
def _(a, K, c, check=1.0):  # type: ignore[no-untyped-def]
    return expected_tokens(a, K) / (c + check)


@wrong("04.speed_up", "check taken as 1")
def _(a, K, c, check=1.0):  # type: ignore[no-untyped-def]
    return expected_tokens(a, K) / (1 + c * K)


@wrong("04.speed_up", "K + 1 target passes")
def _(a, K, c, check=1.0):  # type: ignore[no-untyped-def]
    return expected_tokens(a, K) / ((K + 1) * check + K * c)


@wrong("05.samples", "linear")
def _(tv, noncentrality):  # type: ignore[no-untyped-def]
    return noncentrality / tv / 4


@wrong("05.samples", "4 forgotten")
def _(tv, noncentrality):  # type: ignore[no-untyped-def]
    return noncentrality / tv / tv


@wrong("05.samples", "upside down")
def _(tv, noncentrality):  # type: ignore[no-untyped-def]
    return 4 * noncentrality * tv**2


ANSWERS += [
    ("05.bug", "A believed by its first token", {"A": 5, "B": 5, "C": 1}),
    ("05.bug", "noise taken for a bug", {"A": 2, "B": 1, "C": 1}),
    ("05.bug", "A and C confused", {"A": 1, "B": 5, "C": 2}),
]


def verify(p, q, drafted, rng, *, flaw=""):  # type: ignore[no-untyped-def]
    """The token rule for one row, by a loop, with one flaw."""
    ok = []
    for i in range(drafted.shape[1]):
        x = drafted[0, i]
        if x < 0:
            break
        chance = (q[0, i, x] / p[0, i, x]) if flaw == "inverted" else p[0, i, x] / q[0, i, x]
        if flaw == "no coin":
            ok.append(bool(p[0, i, x] >= q[0, i, x]))
        else:
            ok.append(bool(rng.flip(chance.reshape(1).clamp(max=1))))
        if not ok[-1] and flaw != "all heads":
            break
    accepted = sum(ok)
    if accepted == drafted.shape[1]:
        law = q[0, -1] if drafted.shape[1] and flaw == "bonus" else p[0, -1]
    else:
        law = p[0, accepted] if flaw == "resample" else residual(p[0, accepted], q[0, accepted])
    return torch.tensor([accepted]), rng.pick(law[None])


for flaw, mistake in {
    "resample": "resampled from p",
    "inverted": "ratio inverted",
    "no coin": "no coin",
    "bonus": "bonus from the draft",
    "all heads": "all heads counted",
}.items():
    wrong("05.rule", mistake)(lambda *a, flaw=flaw: verify(*a, flaw=flaw))


@wrong("06.mask", "causal")
def _(parents):  # type: ignore[no-untyped-def]
    return torch.ones(len(parents), len(parents)).tril().bool()


@wrong("06.mask", "parent only")
def _(parents):  # type: ignore[no-untyped-def]
    mask = torch.eye(len(parents)).bool()
    for i, parent in enumerate(parents[1:], start=1):
        mask[i, parent] = True
    return mask


@wrong("06.mask", "itself left out")
def _(parents):  # type: ignore[no-untyped-def]
    mask = torch.zeros(len(parents), len(parents))
    for i, parent in enumerate(parents):
        while parent >= 0:
            mask[i, parent], parent = 1, parents[parent]
    return mask


@wrong("06.mask", "transposed")
def _(parents):  # type: ignore[no-untyped-def]
    mask = torch.eye(len(parents))
    for i, parent in enumerate(parents):
        while parent >= 0:
            mask[parent, i], parent = 1, parents[parent]
    return mask


@wrong("06.positions", "slot taken for position")
def _(parents, n):  # type: ignore[no-untyped-def]
    return list(range(n - 1, n - 1 + len(parents)))


@wrong("06.positions", "depth alone")
def _(parents, n):  # type: ignore[no-untyped-def]
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    return depth


@wrong("06.positions", "one too far")
def _(parents, n):  # type: ignore[no-untyped-def]
    found = [n]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


@wrong("06.next_law", "not renormalised")
def _(q, x):  # type: ignore[no-untyped-def]
    q[x] = 0
    return q


@wrong("06.next_law", "q unchanged")
def _(q, x):  # type: ignore[no-untyped-def]
    return q / q.sum()


@wrong("06.next_law", "softmax of the rest")
def _(q, x):  # type: ignore[no-untyped-def]
    q[x] = 0
    return torch.softmax(q, 0)


@wrong("06.expected_tokens", "bonus forgotten")
def _(parents, rates):  # type: ignore[no-untyped-def]
    reached = [1.0]
    for node, parent in enumerate(parents[1:], start=1):
        reached.append(reached[parent] * rates[parents[1:node].count(parent)])
    return sum(reached[1:])


@wrong("06.expected_tokens", "rates not multiplied")
def _(parents, rates):  # type: ignore[no-untyped-def]
    return 1 + sum(rates[parents[1:node].count(parent)] for node, parent in enumerate(parents[1:], start=1))


@wrong("06.expected_tokens", "every child the first")
def _(parents, rates):  # type: ignore[no-untyped-def]
    reached = [1.0]
    for parent in parents[1:]:
        reached.append(reached[parent] * rates[0])
    return sum(reached)


@wrong("07.forward_kl", "reverse KL")
def _(p, q):  # type: ignore[no-untyped-def]
    return torch.sum(q * (q.log() - p.log()))


@wrong("07.forward_kl", "cross-entropy")
def _(p, q):  # type: ignore[no-untyped-def]
    return -torch.sum(p * q.log())


@wrong("07.forward_kl", "sign turned round")
def _(p, q):  # type: ignore[no-untyped-def]
    return torch.sum(p * (q / p).log())


@wrong("07.best_draft", "best acceptance")
def _(drafts):  # type: ignore[no-untyped-def]
    return max(drafts, key=lambda name: drafts[name][0])


@wrong("07.best_draft", "cheapest")
def _(drafts):  # type: ignore[no-untyped-def]
    return sorted(drafts, key=lambda name: drafts[name][1])[0]


@wrong("07.best_draft", "acceptance per cost")
def _(drafts):  # type: ignore[no-untyped-def]
    ratios = {a / c: name for name, (a, c) in drafts.items()}
    return ratios[max(ratios)]


@wrong("07.best_draft", "one K for all")
def _(drafts):  # type: ignore[no-untyped-def]
    return max(drafts, key=lambda name: expected_tokens(drafts[name][0], 4) / (1 + 4 * drafts[name][1]))


@wrong("08.block_weights", "token rule")
def _(ratios):  # type: ignore[no-untyped-def]
    w, found = 1.0, []
    for r in ratios:
        w *= min(1, r)
        found.append(w)
    return found


@wrong("08.block_weights", "never capped")
def _(ratios):  # type: ignore[no-untyped-def]
    return torch.tensor(ratios, dtype=torch.float64).cumprod(0)


@wrong("08.block_weights", "capped at the end")
def _(ratios):  # type: ignore[no-untyped-def]
    return torch.tensor(ratios, dtype=torch.float64).cumprod(0).clamp(max=1)


@wrong("08.lookup", "finds itself")
def _(text, n, K):  # type: ignore[no-untyped-def]
    for start in reversed(range(len(text) - n + 1)):
        if text[start : start + n] == text[-n:]:
            return text[start + n :][:K]
    return []


@wrong("08.lookup", "first hit")
def _(text, n, K):  # type: ignore[no-untyped-def]
    for start in range(len(text) - n):
        if text[start : start + n] == text[-n:]:
            return text[start + n :][:K]
    return []


@wrong("08.lookup", "suffix returned")
def _(text, n, K):  # type: ignore[no-untyped-def]
    for start in reversed(range(len(text) - n)):
        if text[start : start + n] == text[-n:]:
            return text[start:][:K]
    return []


ANSWERS += [
    ("08.stopping", "A taken for exact", {"A": True, "B": True, "C": True, "D": True}),
    ("08.stopping", "B taken for wrong", {"A": False, "B": False, "C": True, "D": True}),
    ("08.stopping", "C taken for wrong", {"A": False, "B": True, "C": False, "D": True}),
    ("08.stopping", "none exact", {"A": False, "B": False, "C": False, "D": False}),
]


@wrong("08.batch_gain", "check of one row")
def _(expected, times, B, K, draft_step):  # type: ignore[no-untyped-def]
    return expected * times(B) / (times(K + 1) + K * draft_step)


@wrong("08.batch_gain", "plain pass of one row")
def _(expected, times, B, K, draft_step):  # type: ignore[no-untyped-def]
    return expected * times(1) / (times((K + 1) * B) + K * draft_step)


@wrong("08.batch_gain", "drafting is free")
def _(expected, times, B, K, draft_step):  # type: ignore[no-untyped-def]
    return expected / times((K + 1) * B) * times(B)


@wrong("09.pays", "checking is free")
def _(a, c, check):  # type: ignore[no-untyped-def]
    return a > c


@wrong("09.pays", "bonus forgotten")
def _(a, c, check):  # type: ignore[no-untyped-def]
    return a > check + c


@wrong("09.pays", "drafting is free")
def _(a, c, check):  # type: ignore[no-untyped-def]
    return 1 + a > check


@wrong("09.money", "watts taken for kilowatts")
def _(tokens_per_second, watts, price_per_kwh, price_per_hour):  # type: ignore[no-untyped-def]
    hours = 1e6 / tokens_per_second / 3600
    return hours * watts * price_per_kwh + hours * price_per_hour


@wrong("09.money", "machine forgotten")
def _(tokens_per_second, watts, price_per_kwh, price_per_hour):  # type: ignore[no-untyped-def]
    return 1e6 / tokens_per_second / 3600 * watts / 1000 * price_per_kwh


@wrong("09.money", "one token")
def _(tokens_per_second, watts, price_per_kwh, price_per_hour):  # type: ignore[no-untyped-def]
    return 1 / tokens_per_second / 3600 * (watts / 1000 * price_per_kwh + price_per_hour)


@pytest.mark.parametrize(
    ("name", "mistake", "answer"), ANSWERS, ids=[f"{name}: {mistake}" for name, mistake, _ in ANSWERS]
)
def test_a_plausible_wrong_answer_gets_its_own_hint(name: str, mistake: str, answer: Any) -> None:
    outcome = grade(name, answer)
    assert (outcome.status, outcome.mistake) == ("wrong", mistake), outcome


def test_every_exercise_has_three_of_them() -> None:
    from test_teach import EXERCISES

    shown = {name: {mistake for other, mistake, _ in ANSWERS if other == name} for name in EXERCISES}
    assert all(len(mistakes) >= 3 for mistakes in shown.values()), shown


def test_the_same_answers_without_their_flaw_are_right() -> None:
    assert grade("04.loop", speculate).status == "right"
    assert grade("05.rule", verify).status == "right"
    assert grade("07.best_draft", lambda d: max(d, key=lambda n: best_draft_len(*d[n])[1])).status == "right"
