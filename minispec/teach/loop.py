"""Exercises of `04_speculative_decoding`: the whole loop, what a step yields, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minispec.lab import exact_law
from minispec.planner import expected_tokens, speed_up
from minispec.sampling import Rng
from minispec.teach.grading import Exercise, Mistake, same, unanswered
from minispec.teach.helpers import Dice
from minispec.verify import residual

Laws = Callable[[Sequence[int]], Tensor]  # tokens (T) -> the law of the next token after each of them (T, V)
Verify = Callable[[Tensor, Tensor, list[int], Dice], list[int]]  # p (K+1, V), q (K, V), drafted, dice -> new tokens

TARGET = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.5, 0.1, 0.4]], dtype=torch.float64, device="cpu")
DRAFT = torch.tensor([[0.3, 0.7, 0.0], [0.5, 0.0, 0.5], [0.0, 0.3, 0.7]], dtype=torch.float64, device="cpu")
LAWS = (("law", 1, 3), ("law", 2, 2))  # K and new tokens: several steps of one guess, and two guesses in a step


class Table:
    """A model whose next-token law hangs on the last token alone. Counts its calls."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.calls = table, 0

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self.calls += 1
        return self.table[torch.as_tensor(tokens, device="cpu").flatten()]


def loop(verify: Verify, propose: Callable[..., tuple[list[int], Tensor]] | None = None) -> Callable[..., list[int]]:
    """The decoding loop around a verification rule for one row."""

    def decode(target: Laws, draft: Laws, prompt: list[int], new: int, K: int, dice: Dice) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + new:
            drafted, q = (propose or chain)(draft, tokens, K, dice)
            p = target(tokens + drafted)[len(tokens) - 1 :]  # (K+1, V)
            tokens += verify(p, q, drafted, dice)
        return tokens[len(prompt) : len(prompt) + new]

    return decode


def chain(draft: Laws, tokens: list[int], K: int, dice: Dice) -> tuple[list[int], Tensor]:
    """K tokens, each drawn after those before it, and the law of each: (K, V)."""
    drafted: list[int] = []
    q = []
    for _ in range(K):
        q.append(draft(tokens + drafted)[-1])
        drafted.append(dice.pick(q[-1]))
    return drafted, torch.stack(q)


def blind(draft: Laws, tokens: list[int], K: int, dice: Dice) -> tuple[list[int], Tensor]:
    """K tokens that do not know of one another."""
    q = draft(tokens)[-1]
    return [dice.pick(q) for _ in range(K)], q.expand(K, -1)


def verify(
    p: Tensor,
    q: Tensor,
    drafted: list[int],
    dice: Dice,
    rest: Callable[[Tensor, Tensor], Tensor] = residual,
    bonus: Callable[[Tensor, Tensor], Tensor | None] = lambda p, q: p[-1],
    shift: int = 0,
) -> list[int]:
    """The token rule; `rest` after a rejection, `bonus` when all stand, p read `shift` places further."""
    new: list[int] = []
    for i, x in enumerate(drafted):
        law = p[min(i + shift, len(p) - 1)]
        if not dice.flip(float(law[x] / q[i][x])):
            return [*new, dice.pick(rest(law, q[i]))]
        new.append(x)
    last = bonus(p, q)
    return new if last is None else [*new, dice.pick(last)]


def on_after_rejection(p: Tensor, q: Tensor, drafted: list[int], dice: Dice) -> list[int]:
    """Replaces a rejected token and keeps testing those drawn after it."""
    new: list[int] = []
    for i, x in enumerate(drafted):
        new.append(x if dice.flip(float(p[i][x] / q[i][x])) else dice.pick(residual(p[i], q[i])))
    return [*new, dice.pick(p[-1])]


def one_by_one(target: Laws, draft: Laws, prompt: list[int], new: int, K: int, dice: Dice) -> list[int]:
    """The right law by one target pass for each token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new:
        drafted, q = chain(draft, tokens, K, dice)
        rows = [target(tokens + drafted[:i])[-1] for i in range(K + 1)]
        tokens += verify(torch.stack(rows), q, drafted, dice)
    return tokens[len(prompt) : len(prompt) + new]


def too_long(target: Laws, draft: Laws, prompt: list[int], new: int, K: int, dice: Dice) -> list[int]:
    """Never cuts the last step."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new:
        drafted, q = chain(draft, tokens, K, dice)
        tokens += verify(target(tokens + drafted)[len(tokens) - 1 :], q, drafted, dice)
    return tokens[len(prompt) :]


def run(answer: Callable[..., Any], case: tuple[Any, ...]) -> dict[Any, float] | None:
    """The exact law of the tokens returned, or the target calls needed where the draft is the target."""
    kind, K, new = case
    if kind == "passes":
        return passes(answer, K, new)
    law: dict[Any, float] = exact_law(
        lambda rng: as_tokens(answer(Table(TARGET), Table(DRAFT), [0], new, K, Dice(rng))), max_leaves=3000
    )
    return None if set(law) == {None} else law


def passes(answer: Callable[..., Any], K: int, new: int) -> dict[Any, float] | None:
    """Expected target calls, and tokens, where the draft is the target."""

    def count(rng: Rng) -> tuple[int, int] | None:
        target = Table(TARGET)
        tokens = as_tokens(answer(target, Table(TARGET), [0], new, K, Dice(rng)))
        return None if tokens is None else (target.calls, len(tokens))

    law = exact_law(count, max_leaves=3000)
    if set(law) == {None}:
        return None
    found = [(calls, n, prob) for (calls, n), prob in ((x or (0, 0), prob) for x, prob in law.items())]
    return {"target passes": sum(c * w for c, _, w in found), "tokens": sum(n * w for _, n, w in found)}


def as_tokens(value: Any) -> tuple[int, ...] | None:
    """A list of token ids as a tuple. TypeError for anything else."""
    if unanswered(value):
        return None
    if not isinstance(value, (list, tuple)) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
        raise TypeError(f"a list of token ids is wanted, got {value!r}")
    return tuple(value)


def explain(found: dict[Any, float], wanted: dict[Any, float]) -> str:
    """How far the law is right, or what is wrong with the count."""
    if "tokens" in wanted:
        if not same(found["tokens"], wanted["tokens"]):
            return f"{wanted['tokens']:g} tokens were asked for, {found['tokens']:g} came."
        return (
            f"with a draft equal to the target your loop needs {found['target passes']:.2f} target calls for "
            f"{found['tokens']:g} tokens (K = 2). Everything is accepted then: each call should yield K + 1 tokens."
        )
    new = len(next(iter(wanted)))
    lengths = {len(tokens) for tokens in found}
    if lengths != {new}:
        return f"{new} new tokens were asked for, it returned {', '.join(map(str, sorted(lengths)))}."
    for n in range(1, new + 1):
        if not same(marginal(found, n), marginal(wanted, n)):
            first = "token is" if n == 1 else f"{n} tokens together is"
            fine = "" if n == 1 else f" (that of the first {n - 1} is right)"
            return f"the law of the first {first} not the target's{fine}. What does your loop do at that place?"
    return "the law is not the target's."


def marginal(law: dict[Any, float], n: int) -> dict[Any, float]:
    """The law of the first n tokens."""
    found: dict[Any, float] = {}
    for tokens, prob in law.items():
        found[tokens[:n]] = found.get(tokens[:n], 0.0) + prob
    return found


LOOP = Exercise(
    right=loop(verify),
    cases=[("passes", 2, 3), *LAWS],
    observe=run,
    explain=explain,
    praise="Every path through your loop was enumerated: the law is the target's, at one target pass a step.",
    mistakes=[
        Mistake(
            "resampled from p",
            "after a rejection you draw from p itself. Notebook 03: from what instead?",
            loop(partial(verify, rest=lambda p, q: p)),
        ),
        Mistake(
            "no bonus token",
            "the law is right, but when all K guesses stand you emit K tokens. The same pass gave p after the last "
            "guess too: that token is free.",
            loop(partial(verify, bonus=lambda p, q: None)),
        ),
        Mistake(
            "bonus from the draft",
            "the token after K accepted guesses is drawn from a law of the draft. Nothing tests it any more, so it "
            "must come from the target.",
            loop(partial(verify, bonus=lambda p, q: q[-1])),
        ),
        Mistake(
            "goes on after a rejection",
            "you go on testing guesses after a rejection. They were drawn after a token that is no longer there.",
            loop(on_after_rejection),
        ),
        Mistake(
            "p one place off",
            "you test a guess with the law *after* it. p[i] must be the law of the place where guess i stands.",
            loop(partial(verify, shift=1)),
        ),
        Mistake(
            "guesses blind to each other",
            "the law is right, as the coin knows what was drawn from; but guesses drawn from one and the same law fit "
            "badly. Draw each after those before it: the draft reads tokens + drafted.",
            loop(verify, blind),
        ),
        Mistake(
            "a target pass for each guess",
            "the law is right, but the target is called once for each guess: that is plain decoding's price. One call "
            "on tokens + drafted gives all K + 1 laws.",
            one_by_one,
        ),
        Mistake(
            "too many tokens",
            "the last step may bring more tokens than were asked for: cut them off.",
            too_long,
        ),
    ],
)


EXPECTED = Exercise(
    right=expected_tokens,
    cases=[(0.7, 1), (0.7, 4), (0.9, 8), (0.0, 3), (1.0, 5)],
    praise="Between 1 (all guesses wrong) and K + 1 (all right): the geometric sum 1 + a + ... + a^K.",
    mistakes=[
        Mistake(
            "division by 0",
            "right for a < 1. With a = 1 your formula divides 0 by 0; how many tokens come when every guess is right?",
            lambda a, K: (1 - a ** (K + 1)) / (1 - a),
        ),
        Mistake(
            "bonus forgotten",
            "those are the accepted guesses. Every step yields one token more, drawn by the target.",
            lambda a, K: expected_tokens(a, K) - 1,
        ),
        Mistake(
            "one place short",
            "the sum runs to a^K: all K accepted, and the bonus after them.",
            lambda a, K: expected_tokens(a, K - 1),
        ),
        Mistake(
            "places independent",
            "guess i counts only when *all* guesses before it were accepted: its chance is a^i, not a.",
            lambda a, K: 1 + a * K,
        ),
        Mistake(
            "a (K + 1)",
            "guess i counts only when all guesses before it were accepted, and the last token needs no luck.",
            lambda a, K: a * (K + 1),
        ),
    ],
    otherwise="Add the chances that the step yields at least 1, at least 2, ..., K + 1 tokens.",
)
SPEED_UP = Exercise(
    right=speed_up,
    cases=[(0.7, 4, 0.1, 1.0), (0.8, 6, 0.05, 1.3), (0.5, 1, 0.3, 1.1), (0.9, 8, 0.02, 1.0)],
    praise="Tokens a step over what a step costs, with one plain target pass as the unit.",
    mistakes=[
        Mistake(
            "drafting is free",
            "the draft runs K times in each step, and each run costs c.",
            lambda a, K, c, check: expected_tokens(a, K) / check,
        ),
        Mistake(
            "one draft pass",
            "the draft writes its K tokens one after the other: K passes, not one.",
            lambda a, K, c, check: expected_tokens(a, K) / (check + c),
        ),
        Mistake(
            "check taken as 1",
            "a pass over K + 1 tokens costs `check` plain passes, not exactly one.",
            lambda a, K, c, check: expected_tokens(a, K) / (1 + K * c),
        ),
        Mistake(
            "K + 1 target passes",
            "the target reads all K + 1 tokens in one pass.",
            lambda a, K, c, check: expected_tokens(a, K) / ((K + 1) * check + K * c),
        ),
        Mistake(
            "bonus forgotten",
            "tokens a step: do not forget the one that the target draws itself.",
            lambda a, K, c, check: (expected_tokens(a, K) - 1) / (check + K * c),
        ),
    ],
    otherwise="Tokens that a step yields, divided by the time of a step (K draft steps, one check).",
)

EXERCISES = {"04.loop": LOOP, "04.expected_tokens": EXPECTED, "04.speed_up": SPEED_UP}
