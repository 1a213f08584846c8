"""One step of a rule, taken apart: the exact law of what was drafted, kept and emitted, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from minispec.decode import stream
from minispec.drafters import ModelDrafter
from minispec.lab.law import exact_law
from minispec.lab.models import TableModel
from minispec.model import LanguageModel
from minispec.sampling import Rng
from minispec.tree import Tree
from minispec.verify import ANY, Rule, residual

Models = tuple[LanguageModel, LanguageModel]
StepLaw = dict[tuple[tuple[int, ...], ...], float]
CLEAR = 1e-6  # probabilities further apart are different ones


def tables(p: Sequence[Sequence[float]], q: Sequence[Sequence[float]]) -> Models:
    """Target and draft whose laws after each token are the rows of p and q."""
    target, draft = (TableModel(torch.tensor(law, dtype=torch.float64), 32) for law in (p, q))
    return target, draft


P = [[0.38, 0.49, 0.13], [0.1, 0.6, 0.3], [0.5, 0.3, 0.2]]
Q = [[0.24, 0.21, 0.55], [0.5, 0.2, 0.3], [0.2, 0.5, 0.3]]
MARKOV = tables(P, Q)


def step_law(rule: Rule, tree: Tree, models: Models = MARKOV) -> StepLaw:
    """{(drafted, path, emitted): probability} of the first step after token 0, the draft model filling `tree`."""
    target, draft = models
    drafter = ModelDrafter(draft, tree, "without")
    open_to_all = replace(rule, kinds=ANY)  # so that rules of any drafts can be compared on this one

    def step(rng: Rng) -> tuple[tuple[int, ...], ...]:
        options = {"max_new_tokens": tree.max_depth + 1, "rule": open_to_all, "rng": rng}
        taken = next(stream(target, drafter, [0], **options))  # type: ignore[arg-type]
        return taken.drafted, taken.path, taken.tokens

    return exact_law(step)


def faults(rule: Rule) -> list[str]:
    """What a step with one draft token does, where that is not the token rule: in words and numbers."""
    law = step_law(rule, Tree.chain(1))
    drafted = [_mass(law, lambda d, path, out, x=x: d == (x,)) for x in range(3)]  # type: ignore[misc]
    kept = [_mass(law, lambda d, path, out, x=x: d == (x,) and len(path) == 2) for x in range(3)]  # type: ignore[misc]
    words = []
    for x, (p, q) in enumerate(zip(P[0], Q[0], strict=True)):
        chance, right = kept[x] / drafted[x] if drafted[x] else 0.0, min(1.0, p / q)
        if drafted[x] and abs(chance - right) > CLEAR:
            words.append(
                f"with p = {p} and q = {q} a draft token is accepted with probability {chance:.3f}, not {right:.3f}"
            )
            break
    rejected = sum(drafted) - sum(kept)
    if rejected > CLEAR:
        after = [_mass(law, lambda d, path, out, y=y: len(path) == 1 and out == (y,)) / rejected for y in range(3)]  # type: ignore[misc]
        right_rest = residual(*(torch.tensor(table[0], dtype=torch.float64) for table in (P, Q))).tolist()
        words += _differs("after a rejection", after, right_rest, "norm((p - q)+)")
    for x in range(3):
        if kept[x] > CLEAR:
            bonus = [_mass(law, lambda d, path, out, y=y, x=x: out == (x, y)) / kept[x] for y in range(3)]  # type: ignore[misc]
            wrong = _differs("after a full acceptance", bonus, P[x], "p")
            if wrong:
                return words + wrong
    return words


def _mass(law: StepLaw, where: Callable[[tuple[int, ...], tuple[int, ...], tuple[int, ...]], bool]) -> float:
    return sum(prob for (drafted, path, emitted), prob in law.items() if where(drafted, path, emitted))


def _differs(when: str, law: Sequence[float], right: Sequence[float], name: str) -> list[str]:
    if max(abs(a - b) for a, b in zip(law, right, strict=True)) < CLEAR:
        return []
    shown, wanted = ("[" + ", ".join(f"{x:.3f}" for x in values) + "]" for values in (law, right))
    return [f"{when} the next token has the law {shown}; {name} is {wanted}"]
