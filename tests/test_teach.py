"""The checks of the exercises: right answers pass, misconceptions are named, nothing crashes them."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import subprocess
import sys

import pytest
import torch

from minispec import GPT, Pair, Randomness, Sampling
from minispec.lab import Enumerator
from minispec.teach import Dice, check, compare, grade, grading, laws, prompts, source
from minispec.teach.grading import LESSONS, Exercise, find
from minispec.teach.patience import TooLong, patience

EXERCISES: dict[str, Exercise] = {}
for lesson in LESSONS.values():
    EXERCISES |= importlib.import_module(f"minispec.teach.{lesson}").EXERCISES


@pytest.mark.parametrize("name", EXERCISES)
def test_the_right_answer_passes_and_at_least_three_misconceptions_are_named(name: str) -> None:
    exercise = EXERCISES[name]
    assert grade(name, exercise.right).status == "right"
    assert grade(name, exercise.right).message == exercise.praise != ""
    assert len(exercise.mistakes) >= 3
    assert len({mistake.name for mistake in exercise.mistakes}) == len(exercise.mistakes)
    for mistake in exercise.mistakes:
        outcome = grade(name, mistake.answer)
        assert (outcome.status, outcome.mistake) == ("wrong", mistake.name)
        assert outcome.message == mistake.hint


@pytest.mark.parametrize("name", EXERCISES)
def test_a_placeholder_is_not_yet_an_answer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    placeholders = [None, ...]
    right = EXERCISES[name].right
    if callable(right):
        placeholders += [lambda *a: None, lambda *a: ...]
    elif isinstance(right, dict):
        placeholders += [dict.fromkeys(right, ...), right | {next(iter(right)): ...}]
    for placeholder in placeholders:
        assert grade(name, placeholder).status == "not yet"
    check(name, ...)
    assert capsys.readouterr().out.startswith(f"… not yet · {name}")


def raises(*a):  # type: ignore[no-untyped-def]
    raise KeyError("oh")


def leaves(*a):  # type: ignore[no-untyped-def]
    raise SystemExit(3)


def recurses(*a):  # type: ignore[no-untyped-def]
    return recurses(*a)


def spoils(*a):  # type: ignore[no-untyped-def]
    for x in a:
        if isinstance(x, torch.Tensor):
            x.zero_()
    return 7.0


class Strange:
    """Neither a number nor a text, and no equal to anything."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = object.__hash__


NONSENSE = [
    raises,
    leaves,
    recurses,
    spoils,
    lambda: 1,
    lambda *a: torch.zeros(2, 3, 4),
    lambda *a: float("nan"),
    lambda *a: float("inf"),
    lambda *a: torch.full((3,), float("-inf")),
    lambda *a: "token",
    lambda *a: [],
    lambda *a: [[1], [2, 3]],
    lambda *a: {"a": None},
    lambda *a: {1: "x"},
    lambda *a: [99] * 4,
    lambda *a: -1,
    lambda *a: True,
    lambda *a: Strange(),
    lambda *a: lambda: 1,
    17,
    "an answer",
    Strange(),
    Exception,
    {"A": "yes"},
]


@pytest.mark.parametrize("name", EXERCISES)
def test_no_nonsense_crashes_a_check_or_passes_it(name: str) -> None:
    for answer in NONSENSE:
        outcome = grade(name, answer)
        assert outcome.status in ("wrong", "not yet"), (answer, outcome)
        assert "\n" not in str(outcome)
        assert len(outcome.message) > 10


def test_an_answer_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "SECONDS", 0.05)

    def endless(p, q, x):  # type: ignore[no-untyped-def]
        while True:
            with contextlib.suppress(Exception):
                x += 1

    outcome = grade("03.accept", endless)
    assert outcome.status == "wrong"
    assert "never end" in outcome.message
    with pytest.raises(TooLong), patience(0.0, __file__):
        endless(0, 0, 0)


def test_an_exception_is_shown_with_the_line_it_came_from() -> None:
    def mine(p, q, x):  # type: ignore[no-untyped-def]
        return p[x] / q[len(q)]

    message = grade("03.accept", mine).message
    assert "IndexError" in message
    assert "return p[x] / q[len(q)]" in message
    assert "p = [0.5, 0.3, 0.2], q = [0.2, 0.5, 0.3], x = 0" in message


def test_hints_for_shapes_and_infinities_and_for_anything_else() -> None:
    assert "shape (3,) is wanted" in grade("03.residual", lambda p, q: (p - q)[None]).message
    assert "division by 0" in grade("03.residual", lambda p, q: p / 0).message
    assert "numbers are wanted" in grade("03.residual", lambda p, q: "p").message
    assert "it gives 0.25" in grade("03.accept", lambda p, q, x: 0.25).message
    assert "a function is wanted" in grade("03.accept", 0.25).message
    partly = grade("03.accept", lambda p, q, x: None if len(p) == 4 else 1.0).message
    assert "0.5, 0.3, 0.2" in partly or "returns nothing" in partly


def test_the_loop_check_says_how_far_the_law_is_right() -> None:
    def first_only(target, draft, prompt, new, K, dice):  # type: ignore[no-untyped-def]
        return [dice.pick(target(prompt)[-1])] + [0] * (new - 1)

    assert "needs 1.00 target calls" not in grade("04.loop", first_only).message

    def plain_then_draft(target, draft, prompt, new, K, dice):  # type: ignore[no-untyped-def]
        tokens = list(prompt)
        while len(tokens) < len(prompt) + new:
            model = target if len(tokens) == len(prompt) else draft
            tokens.append(dice.pick(model(tokens)[-1]))
        return tokens[len(prompt) :]

    message = grade("04.loop", plain_then_draft).message
    assert "the first 2 tokens together" in message
    assert "that of the first 1 is right" in message


def test_unknown_exercises_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"one of 03\.accept, 03\.residual"):
        check("03.nothing", 1)
    with pytest.raises(ValueError, match=r"named like '03\.accept'"):
        grade("accept", 1)
    assert find("03.accept") is EXERCISES["03.accept"]


def test_answers_may_be_numbers_tensors_or_lists() -> None:
    accept = EXERCISES["03.accept"].right
    assert grade("03.accept", lambda p, q, x: torch.tensor([accept(p, q, x)])).status == "right"
    assert grade("03.accept", lambda p, q, x: torch.tensor(accept(p, q, x), dtype=torch.float32)).status == "right"
    mask = EXERCISES["06.mask"].right
    assert grade("06.mask", lambda parents: torch.tensor(mask(parents))).status == "right"
    assert grade("06.mask", lambda parents: torch.tensor(mask(parents)).int()).status == "right"
    rules = EXERCISES["08.stopping"].right
    assert grade("08.stopping", {k: int(v) for k, v in rules.items()}).status == "right"


def test_dice_draw_as_the_package_does_and_refuse_what_is_no_law() -> None:
    weights = torch.tensor([0.0, 2.0, 6.0])
    dice, rng = Dice(5), Randomness(5)
    assert [dice.pick(weights) for _ in range(20)] == [int(rng.pick(weights[None])) for _ in range(20)]
    assert all(dice.flip(1.5) for _ in range(20))
    assert not any(dice.flip(0) for _ in range(20))
    assert Dice(Enumerator()).pick([0.0, 1.0]) == 1
    for wrong in ([[1.0]], [0.0, 0.0], [-1.0, 2.0], [float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="weights must be"):
            dice.pick(wrong)
    with pytest.raises(ValueError, match="not a number"):
        dice.flip(float("nan"))


def test_source_shows_code_with_and_without_its_docstring() -> None:
    whole, bare = source(grade), source(grade, docstring=False)
    assert '"""' in repr(whole)
    assert '"""' not in repr(bare)
    assert "def grade(" in bare.text
    assert whole._repr_markdown_().startswith("```python\ndef grade(")


def test_a_guess_is_printed_beside_the_measurement_whatever_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for guess in (..., None, 3, 0.25, "twice", (1, 2)):
        compare("gain", guess, 2.34567, "x")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[1] == "gain: no guess, measured 2.35x"
    assert lines[2:5] == [f"gain: your guess {text}, measured 2.35x" for text in ("3x", "0.25x", "twice")]
    assert "(1, 2)" in lines[5]


def test_laws_are_the_models_own_after_each_token(two: tuple[GPT, GPT]) -> None:
    target, _ = two
    found = laws(target, [0, 2, 1])
    assert found.shape == (3, 3)
    torch.testing.assert_close(found[1], target(torch.tensor([[0, 2]]))[0, -1].softmax(-1))
    assert laws(target, [0], Sampling(0.0)).max() == 1


def test_prompts_are_those_of_the_package(shipped: Pair) -> None:
    assert len(prompts(shipped)) == 24
    assert shipped.tokenizer.decode(prompts(shipped, 2)[0]).startswith("Once upon a time")
    assert len(prompts(shipped, 2)) == 2


def test_teach_loads_no_plotting_until_it_is_asked_for() -> None:
    code = "import sys, minispec.teach; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_hint_holds_a_solution() -> None:
    code = ("min(1, p", "min(1.0", "clamp", ".sum()", "[n -", "n + a", "cumprod", "a ** (K", "minimum(")
    for exercise, text in itertools.product(EXERCISES.values(), code):
        for mistake in exercise.mistakes:
            assert text not in mistake.hint
