"""Text in, text out: stop strings and the stream of characters, above a loop that knows tokens only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minispec.decode import stream
from minispec.drafters import Drafter
from minispec.inputs import TextOptions, budgets
from minispec.model import LanguageModel
from minispec.result import Result, Step, summarise
from minispec.tokenizer import Tokenizer


@dataclass(frozen=True)
class Completion:
    """What `Pair.complete` returns: the new text, and the `Result` behind it.

    text: what was generated, without the stop string that ended it and without the end-of-text token.
    result: its tokens go up to the one in which the stop string became complete (that token may hold more than the
        end of the stop string), the steps and counts are those of these tokens; its finish_reason is then "stop".
    """

    text: str
    result: Result


@dataclass(frozen=True)
class Piece:
    """Text that a step released, and the step, cut where a stop string became complete."""

    text: str
    step: Step


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Stop strings, checked. TypeError/ValueError unless it is a list or tuple of non-empty strings."""
    if not isinstance(stop, (list, tuple)):
        raise TypeError(f"stop must be a list of strings, got {stop!r}")
    for text in stop:
        if not isinstance(text, str):
            raise TypeError(f"stop must hold strings, got {text!r}")
        if not text:
            raise ValueError("stop must hold strings of at least one character, got ''")
    return tuple(stop)


class StopSearch:
    """Finds the stop string that is complete first while text comes in; the longest of those that end together.

    What it finds does not depend on how the text is cut into pieces. `feed` returns the text that can no longer belong
    to a stop string: it holds back the longest end of the text that a stop string begins with, and nothing more.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # a stop string with another one inside, ending earlier, is never the first to be complete
        self._stop = [s for s in stop if not any(other in s[:-1] for other in stop)]
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Take `text`; return what is released. Nothing is once a stop string was found."""
        if self.found:
            return ""
        self._held += text
        matches = [(self._held.index(s) + len(s), -len(s)) for s in self._stop if s in self._held]
        if matches:
            end, length = min(matches)
            released, self._held, self.found = self._held[: end + length], "", True
            return released
        longest = min(max(map(len, self._stop), default=1) - 1, len(self._held))
        kept = next((k for k in range(longest, 0, -1) if any(s.startswith(self._held[-k:]) for s in self._stop)), 0)
        cut = len(self._held) - kept
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def finish(self) -> str:
        """What was held back: no stop string will become complete any more."""
        released, self._held = self._held, ""
        return released


class TextStream:
    """Text of tokens that come one after the other: whole characters, up to the first stop string.

    `stopped` says that a stop string is complete; no more tokens are wanted then.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._end_of_text, self._decoder, self._search = tokenizer.end_of_text, tokenizer.stream(), StopSearch(stop)

    @property
    def stopped(self) -> bool:
        return self._search.found

    def feed(self, token: int) -> str:
        """The text that `token` releases. An end-of-text token is the end of a text, no part of it."""
        return "" if token == self._end_of_text else self._search.feed(self._decoder.feed(token))

    def finish(self) -> str:
        """Whatever is left when no token follows."""
        return self._search.feed(self._decoder.finish()) + self._search.finish()


def pieces(tokenizer: Tokenizer, steps: Iterable[Step], stop: Sequence[str] = ()) -> Iterator[Piece]:
    """The text that each step releases, up to the step in which a stop string became complete.

    A held-back end of the text comes with the last step, whose finish_reason is not None.
    The texts joined are the text of a `Completion`.
    """
    text = TextStream(tokenizer, stop)
    for step in steps:
        released = ""
        for i, token in enumerate(step.tokens):
            released += text.feed(token)
            if text.stopped:
                step = cut(step, i + 1)
                break
        if step.finish_reason is not None:
            released += text.finish()
            step = cut(step, len(step.tokens)) if text.stopped else step
        yield Piece(released, step)
        if text.stopped:
            return


def cut(step: Step, tokens: int) -> Step:
    """The step as if the row had ended with its first `tokens` tokens."""
    return replace(step, tokens=step.tokens[:tokens], path=step.path[: tokens + 1], finish_reason="stop")


def complete(
    target: LanguageModel,
    draft: LanguageModel | Drafter,
    tokenizer: Tokenizer,
    text: str,
    stop: Sequence[str],
    options: TextOptions,
) -> Completion:
    """See `Pair.complete`."""
    stop, start = stop_strings(stop), time.perf_counter()
    prompt = tokenizer.encode(text)
    steps = stream(target, draft, prompt, **options)
    parts = list(pieces(tokenizer, steps, stop))
    taken = [part.step for part in parts]
    stats = summarise(taken, time.perf_counter() - start)
    tokens = [token for step in taken for token in step.tokens]
    none = "context" if any(budgets(options["max_new_tokens"], 1)) else "length"  # the reason where no step was taken
    reason = taken[-1].finish_reason if taken else none
    assert reason is not None
    return Completion("".join(part.text for part in parts), Result(prompt, tokens, reason, taken, stats))
