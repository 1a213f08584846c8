"""Exercises that grade themselves: they look at what an answer *does*, and know how people go wrong.

An exercise has a right answer, some cases to try it on, and *mistakes*: misconceptions, each with the answer that
someone who holds it would give. What the learner's answer does in every case is compared with the right one, then
with each mistake; the one that it agrees with everywhere names the misconception, and the hint follows from that.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from minispec.teach.patience import TooLong, patience

LESSONS = {
    "00": "start",
    "01": "speed",
    "02": "rollback",
    "03": "rejection",
    "04": "loop",
    "05": "lossless",
    "06": "trees",
    "07": "drafts",
    "08": "beyond",
    "09": "hardware",
}
SECONDS = 20.0  # for all that an answer does in one case
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Outcome:
    """What a check found: status "right", "not yet" or "wrong"; `mistake` names the misconception if it is known."""

    exercise: str
    status: str
    message: str
    mistake: str | None = None

    def __str__(self) -> str:
        mark = {"right": "✓ right", "not yet": "… not yet", "wrong": "✗ not right"}[self.status]
        return f"{mark} · {self.exercise} · {self.message}"


@dataclass(frozen=True)
class Mistake:
    """A misconception: its name, the hint against it, and the answer that follows from it."""

    name: str
    hint: str
    answer: Any


@dataclass(frozen=True)
class Raised:
    """An answer raised an exception. Two are equal when the kinds are."""

    kind: type[BaseException]
    text: str = field(compare=False, default="")


def call(answer: Any, case: tuple[Any, ...]) -> Any:
    """What a function returns for the arguments of a case, given as copies."""
    return answer(*[a.clone() if isinstance(a, Tensor) else a for a in case])


@dataclass(frozen=True)
class Exercise:
    """right: the answer, a function or a value. cases: arguments, ignored for a value.

    observe(answer, case): what is compared: a number, a tensor, a list, or a dict of numbers in which a missing key
    counts 0; by default the value returned. None means that there is no answer yet.
    explain(found, wanted): a last hint from both observations where no mistake fits.
    """

    right: Any
    cases: Sequence[tuple[Any, ...]] = ((),)
    mistakes: Sequence[Mistake] = ()
    praise: str = ""
    otherwise: str = "Read the formula above once more, and try it by hand on a small example."
    observe: Callable[[Any, tuple[Any, ...]], Any] = call
    explain: Callable[[Any, Any], str] | None = None


def find(name: str) -> Exercise:
    """The exercise of that name. ValueError lists those of its notebook."""
    lesson = LESSONS.get(str(name)[:2])
    if lesson is None:
        raise ValueError(f"exercise must be named like '03.accept', beginning with one of {', '.join(LESSONS)}")
    exercises: dict[str, Exercise] = importlib.import_module(f"minispec.teach.{lesson}").EXERCISES
    if name not in exercises:
        raise ValueError(f"exercise must be one of {', '.join(exercises)}, got {name!r}")
    return exercises[name]


def check(name: str, answer: Any) -> None:
    """Grade an answer and print what was found. Raises `ValueError` for an unknown exercise, else nothing."""
    print(grade(name, answer))


def grade(name: str, answer: Any) -> Outcome:
    """The verdict on an answer, whatever it does: raise, loop for ever, return nonsense."""
    exercise = find(name)
    if unanswered(answer):
        return Outcome(name, "not yet", "write your answer in the cell above and run it again.")
    if not callable(exercise.right):
        answer = _constant(answer)
    elif not callable(answer):
        return Outcome(name, "wrong", f"a function is wanted, this is {_short(answer)}.")
    found = [observed(exercise, answer, case) for case in exercise.cases]
    if all(value is None for value in found):
        hint = "your function returns nothing so far. (If it is written: is a `return` missing?)"
        return Outcome(name, "not yet", hint)
    wanted = known(name, None)
    if all(same(f, w) for f, w in zip(found, wanted, strict=True)):
        return Outcome(name, "right", exercise.praise)
    for place, mistake in enumerate(exercise.mistakes):
        if all(same(f, t) for f, t in zip(found, known(name, place), strict=True)):
            return Outcome(name, "wrong", mistake.hint, mistake.name)
    return Outcome(name, "wrong", _explain(exercise, found, wanted))


@lru_cache(maxsize=256)
def known(name: str, mistake: int | None) -> list[Any]:
    """What the right answer does in each case, or the answer of a mistake."""
    exercise = find(name)
    answer = exercise.right if mistake is None else exercise.mistakes[mistake].answer
    return [observed(exercise, _constant(answer), case) for case in exercise.cases]


def observed(exercise: Exercise, answer: Any, case: tuple[Any, ...]) -> Any:
    """What an answer does in a case; `Raised` where it does not get through."""
    try:
        with patience(SECONDS, getattr(getattr(answer, "__code__", None), "co_filename", None)):
            value = exercise.observe(answer, case)
        return None if unanswered(value) else value
    except TooLong:
        return Raised(TooLong, f"it did not finish within {SECONDS:.0f} s: does a loop never end?")
    except (Exception, SystemExit) as error:
        return Raised(type(error), _where(error, answer))


def unanswered(value: Any) -> bool:
    """Whether a placeholder still stands there."""
    if isinstance(value, dict):
        return any(unanswered(item) for item in value.values())
    return value is None or value is ... or (isinstance(value, (tuple, list)) and any(v is ... for v in value))


def same(a: Any, b: Any) -> bool:
    """Whether two observations agree, numbers to `TOLERANCE`; NaN equals NaN, 1.0 equals tensor([1.0])."""
    if isinstance(a, Raised) or isinstance(b, Raised) or a is None or b is None:
        return type(a) is type(b) and bool(a == b)
    if isinstance(a, dict) and isinstance(b, dict):
        numbers = all(isinstance(v, (int, float)) for v in [*a.values(), *b.values()])
        return all(same(a.get(k, 0.0 if numbers else None), b.get(k, 0.0 if numbers else None)) for k in a.keys() | b)
    if isinstance(a, str) or isinstance(b, str):
        return str(a).strip().casefold() == str(b).strip().casefold()
    x, y = numeric(a), numeric(b)
    if x is None or y is None or (x.shape != y.shape and not x.numel() == y.numel() == 1):
        return False
    return bool(torch.allclose(x.flatten(), y.flatten(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))


def numeric(value: Any) -> Tensor | None:
    """A number or a nest of them as a float64 tensor, None for anything else."""
    try:
        if isinstance(value, (list, tuple)) and value and all(isinstance(v, Tensor) for v in value):
            value = torch.stack([v.detach().cpu() for v in value])
        return torch.as_tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None


def _constant(value: Any) -> Any:
    """A value as a function of anything, a function as it is."""
    return value if callable(value) else lambda *case: value


def _explain(exercise: Exercise, found: Sequence[Any], wanted: Sequence[Any]) -> str:
    """The most telling thing about the first case that went wrong, without giving the answer away."""
    place = next(i for i, (f, w) in enumerate(zip(found, wanted, strict=True)) if not same(f, w))
    f, w = found[place], wanted[place]
    where = describe(exercise, exercise.cases[place])
    if isinstance(f, Raised):
        return f"it raises {f.kind.__name__}{where}: {f.text}" if f.kind is not TooLong else f.text
    if f is None:
        return f"it returns nothing{where}."
    if exercise.explain is not None and isinstance(f, type(w)):
        return exercise.explain(f, w)
    x, y = numeric(f), numeric(w)
    if y is not None and x is None:
        return f"numbers are wanted{where}, this gives {_short(f)}."
    if x is not None and y is not None:
        if x.shape != y.shape and not x.numel() == y.numel() == 1:
            return f"something of shape {tuple(y.shape)} is wanted{where}, this has shape {tuple(x.shape)}."
        if not bool(torch.isfinite(x).all()):
            return f"it gives {_short(f)}{where}: something is infinite or not a number. Is there a division by 0?"
    return f"it gives {_short(f)}{where}. {exercise.otherwise}"


def describe(exercise: Exercise, case: tuple[Any, ...]) -> str:
    """ " with p = [0.5, 0.3], x = 1", as far as the arguments are numbers."""
    if not case or exercise.observe is not call:
        return ""
    names = list(inspect.signature(exercise.right).parameters)
    shown = [f"{n} = {_short(a)}" for n, a in zip(names, case, strict=False) if numeric(a) is not None]
    return f" with {', '.join(shown)}" if shown else ""


def _short(value: Any) -> str:
    x = numeric(value) if not isinstance(value, (bool, str)) else None
    text = repr(value) if x is None else str([round(v, 4) for v in x.tolist()] if x.ndim == 1 else _plain(x))
    return text if len(text) <= 90 else f"{text[:87]}..."


def _plain(x: Tensor) -> Any:
    values = x.tolist()
    return round(values, 4) if isinstance(values, float) else values


def _where(error: BaseException, answer: Any) -> str:
    """The message, and the line of the learner's own code that it came from."""
    file = getattr(getattr(answer, "__code__", None), "co_filename", None)
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file and frame.line]
    text = " ".join(str(error).split()) or "no message"
    return f"{text[:200]}{f' (in the line `{lines[-1].strip()}`)' if lines else ''}"
