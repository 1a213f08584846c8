"""A run in the terminal: guesses, rejections and replacements as they come, a gauge below, trees drawn as trees.

Every origin has a colour *and* a mark, so that nothing is lost on a printer, on a dumb terminal, with `NO_COLOR`
or to the colour-blind. Marks are ASCII: a cp1252 console shows them too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from rich.tree import Tree as Branches

from minispec.result import Step, summarise
from minispec.tokenizer import Tokenizer

# origin: style, what stands before and behind
LOOK = {
    "prompt": ("", "", ""),
    "accepted": ("cyan", "", ""),
    "rejected": ("red strike", "~", "~"),
    "replaced": ("bold yellow", "[", "]"),
    "bonus": ("bold magenta", "{", "}"),
    "untested": ("dim", "", ""),
}
LEGEND = (("accepted", "guessed, accepted"), ("rejected", "guessed, rejected"), ("replaced", "in its place"))
WIDE = 20  # columns of the gauge's bar


@dataclass(frozen=True)
class Piece:
    """Text of one token, and where it comes from (a key of `LOOK`)."""

    text: str
    origin: str

    def marked(self) -> Text:
        """With its style and marks; the marks stand inside leading blanks and line breaks, so that words stay whole."""
        style, before, behind = LOOK[self.origin]
        text = self.text
        if self.origin == "rejected":  # a rejected line break must not break the line, a blank must be seen
            text = text.replace("\n", "\\n") if text.strip(" ") else text.replace(" ", "_")
        core = text.strip("\n ")
        if not core or not before:
            return Text(text, style)
        left = text[: text.index(core)]
        right = text[len(left) + len(core) :]
        return Text.assemble(left, (f"{before}{core}{behind}", style), right)


def final_origin(step: Step) -> str:
    """What the step's last token is, if it is the target's: "bonus" after a run without rejection, else "replaced"."""
    return "replaced" if step.tested > step.accepted else "bonus"


def pieces(step: Step, tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[Piece]:
    """The step's tokens with their origins; rejected guesses stand before what came in their place."""
    for i, text in enumerate(texts):
        if i < step.accepted:
            yield Piece(text, "accepted")
            continue
        for child, parent in enumerate(step.parents):
            if child and parent == step.path[-1] and step.drafted[child - 1] >= 0:
                yield Piece(tokenizer.decode([step.drafted[child - 1]]), "rejected")
        yield Piece(text, final_origin(step) if step.proposed else "prompt")


@dataclass
class Screen:
    """Lines that are complete are printed; the one that grows, and the gauge, are kept live where that is possible."""

    console: Console
    tokenizer: Tokenizer
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    line: Text = field(default_factory=Text)

    @property
    def live(self) -> bool:
        """Whether the gauge can move: a terminal that understands cursor movements."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def gauge(self) -> Text:
        """Tokens, tokens a pass and the acceptance rate so far, in one line that fits the console."""
        stats = summarise(self.steps, self.seconds)
        rate, passes = stats.acceptance_rate, stats.tokens_per_pass
        full = round(WIDE * (rate or 0))
        speed = stats.new_tokens / self.seconds if self.seconds else 0.0
        parts = [
            f"accepted {'n/a' if rate is None else format(rate, '.2f')}",
            f"{0 if passes is None else passes:.2f} tokens a pass",
            f"{stats.new_tokens} tokens",
            f"{speed:.0f} tokens/s",
        ]
        bar = Text.assemble("[", ("#" * full, "cyan"), ("." * (WIDE - full), "dim"), "] ")
        for part in parts:
            joined = part if bar.plain.endswith("] ") else f", {part}"
            if cell_len(bar.plain + joined) < self.console.width:
                bar.append(joined)
        return bar

    def write(self, text: Text, live: Live | None) -> None:
        """Add to the growing line; print what is complete."""
        width = max(self.console.width - 1, 8)
        for part in text.split("\n", allow_blank=True, include_separator=True):
            self.line.append_text(part)
            done = self.line.plain.endswith("\n")
            if done:
                self.line.right_crop(1)
            lines = list(self.line.wrap(self.console, width, tab_size=8)) or [Text()]
            last = Text() if done else lines.pop()
            for line in lines:
                self.console.print(line, soft_wrap=True, highlight=False)
            self.line = last
        if live is not None:
            live.update(Group(self.line, self.gauge()), refresh=True)

    def draft_tree(self, step: Step) -> Branches:
        """The step's draft, with what became of each node."""
        end = step.path[-1]
        texts = [self.tokenizer.decode([t]) if t >= 0 else "" for t in step.drafted]
        branches = [Branches(Text(f"step {len(self.steps)}", "bold"), guide_style="dim")]
        for node, parent in enumerate(step.parents[1:], start=1):
            origin = "accepted" if node in step.path else "rejected" if parent == end else "untested"
            if step.accepted == len(step.tokens) and origin == "rejected":
                origin = "untested"
            label = Piece(texts[node - 1].replace("\n", "\\n").strip(" ") or "' '", origin).marked()
            label.append({"accepted": " <-", "rejected": "", "untested": ""}[origin], "bold cyan")
            branches.append(branches[parent].add(label) if step.drafted[node - 1] >= 0 else branches[parent])
        return branches[0]

    def legend(self, plain: bool) -> Text:
        """What the marks mean."""
        if plain:
            return Text("plain decoding: every token is the target's own")
        known = [*LEGEND, ("bonus", "bonus")]
        return Text("   ").join(Piece(text, origin).marked() for origin, text in known)


def show(
    console: Console, tokenizer: Tokenizer, prompt: str, steps: Iterable[Step], trees: bool = False
) -> tuple[list[Step], float]:
    """Print the prompt and the steps as they come; return them and the seconds they took.

    trees: draw each draft that is not a chain, too. After Ctrl-C what there is stays readable, with legend and gauge,
    before `KeyboardInterrupt` goes on its way.
    """
    screen, decoder = Screen(console, tokenizer), tokenizer.stream()
    live = Live(console=console, auto_refresh=False, transient=True) if screen.live else None
    if live is not None:
        live.start()
    interrupted = False
    try:
        screen.write(Text(prompt), live)
        start = time.perf_counter()
        for step in steps:
            screen.seconds += time.perf_counter() - start  # drawing is not decoding
            screen.steps.append(step)
            texts = [decoder.feed(token) for token in step.tokens]
            chain = all(parent == node - 1 for node, parent in enumerate(step.parents))
            if trees and not chain:
                screen.write(Text("\n"), live)
                console.print(screen.draft_tree(step))
            for piece in pieces(step, tokenizer, texts):
                screen.write(piece.marked(), live)
            start = time.perf_counter()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        screen.write(Text(decoder.finish() + "\n"), live)
        if live is not None:
            live.update(Text(), refresh=True)
            live.stop()
    console.print()
    console.print(screen.legend(not any(step.proposed for step in screen.steps)))
    console.print(screen.gauge(), highlight=False)
    if interrupted:
        raise KeyboardInterrupt
    return screen.steps, screen.seconds
