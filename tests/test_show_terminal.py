"""The run in the terminal: marks and colours, widths, gauge, trees; odd terminals; the `trace` command."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from minispec import GPT, Pair, Sampling, Step, Tree, speculate
from minispec.cli import main
from minispec.lab import exact_law
from minispec.show import Trace, replay, validate
from minispec.show.commands import WARM_UP
from minispec.show.progress import enumeration, progress
from minispec.show.recorder import Recording
from minispec.show.terminal import Piece, Screen, show

WORDS = [" the", " king", " had", "\n", " three", " sons", ".", " "]


class Words:
    """A tokenizer of eight words."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(WORDS[token] for token in tokens)

    def stream(self) -> Words:
        return self

    def feed(self, token: int) -> str:
        return WORDS[token]

    def finish(self) -> str:
        return ""


CHAIN = (-1, 0, 1, 2)
STEPS = [
    Step((0, 1, 2, 4), (0, 1, 2), CHAIN, (0, 1, 2, 3)),  # all accepted, a bonus
    Step((5, 2), (5, 3, 6), CHAIN, (0, 1)),  # the second guess, a line break, gives way to " had"
    Step((4, 6), (1, 4, 6, 7, 0, 2), (-1, 0, 0, 1, 2, 2, 4), (0, 2)),  # a tree: " ", " the" tested below " three"
]


def printed(width: int, colour: bool = False, steps: Sequence[Step] = STEPS, trees: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, color_system="standard" if colour else None)
    if colour:
        console._environ = {"TERM": "dumb"}  # type: ignore[misc] # no cursor movements among what is compared
    show(console, Words(), "Once", steps, trees)  # type: ignore[arg-type]
    return out.getvalue()


def test_every_origin_has_a_mark_of_its_own() -> None:
    text = printed(200).splitlines()
    assert text[0] == "Once the king had {three} sons~\\n~ [had] three~_~ ~the~[.]"
    assert text[2] == "guessed, accepted   ~guessed, rejected~   [in its place]   {bonus}"
    assert text[3].startswith("[##############......] accepted 0.71, 2.67 tokens a pass, 8 tokens")


def test_the_text_without_marks_is_the_text() -> None:
    for width in (20, 60, 80, 200):
        lines = printed(width).splitlines()
        assert max(map(len, lines)) <= width
        story = " ".join(lines[: lines.index("")])
        bare = re.sub(r" ?~[^~]*~", "", story)
        assert re.sub(r"[\[\]{}\s]", "", bare) == "Oncethekinghadthreesonshadthree."


def test_line_breaks_of_the_text_stay() -> None:
    steps = [Step((0, 3, 1), (0, 3), (-1, 0, 1), (0, 1, 2))]
    assert printed(80, steps=steps).splitlines()[:2] == ["Once the", " {king}"]


def test_colours_and_no_colour() -> None:
    plain, colour = printed(80), printed(80, colour=True)
    assert "\x1b" not in plain
    for code in ("\x1b[36m", "\x1b[9;31m", "\x1b[1;33m", "\x1b[1;35m"):  # accepted, struck through, replaced, bonus
        assert code in colour
    assert re.sub(r"\x1b\[[\d;]*m", "", colour) == plain  # the same marks with and without


def test_a_live_gauge_only_where_the_cursor_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    for term, moves in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", term)
        monkeypatch.delenv("NO_COLOR", raising=False)
        out = io.StringIO()
        console = Console(file=out, width=60, force_terminal=True)
        assert Screen(console, Words()).live == moves  # type: ignore[arg-type]
        show(console, Words(), "Once", STEPS)  # type: ignore[arg-type]
        assert ("\x1b[2K" in out.getvalue()) == moves  # a line is erased
        assert (out.getvalue().count("accepted 0.71") > 1) == moves


def test_trees_are_drawn_as_trees() -> None:
    out = printed(60, trees=True)
    assert "step 3\n" in out
    for line in ("├── king", "└── three <-", "    ├── ~' '~", "    │   └── had", "    └── ~the~"):
        assert line in out, out
    assert "step 1" not in out  # chains are not


def test_ctrl_c_leaves_a_readable_screen() -> None:
    def interrupted() -> Iterator[Step]:
        yield STEPS[0]
        raise KeyboardInterrupt

    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        show(Console(file=out, width=80), Words(), "Once", interrupted())  # type: ignore[arg-type]
    assert out.getvalue().startswith("Once the king had {three}\n\nguessed, accepted")
    assert "4.00 tokens a pass" in out.getvalue()


def test_plain_decoding_has_no_marks() -> None:
    steps = [Step((token,), (), (-1,), (0,)) for token in (0, 1, 6)]
    out = printed(80, steps=steps)
    assert out.startswith("Once the king.\n")
    assert "every token is the target's own" in out
    assert "accepted n/a, 1.00 tokens a pass" in out


def test_marks_are_ascii_and_a_cp1252_console_does_not_crash() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="cp1252", errors="replace", write_through=True), width=60)
    show(console, Words(), "Once \U0001f600 火", STEPS, trees=True)  # type: ignore[arg-type]
    text = raw.getvalue().decode("cp1252")
    assert "Once ? ?" in text
    assert "`-- three <-" in text
    assert Piece("…", "rejected").marked().plain == "~…~"


def test_show_prints_the_tokens_of_the_run(shipped: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--max-new-tokens", "12", "--seed", "3", "--temperature", "0"]
    assert main(["generate", "Once upon a time", "--show", "--tree", "2,1", *args]) == 0
    shown = capsys.readouterr().out
    assert main(["generate", "Once upon a time", "--tree", "2,1", *args]) == 0
    summary = capsys.readouterr().out.splitlines()[-1]
    assert shown.splitlines()[-1].split(", seed")[0].rsplit(",", 1)[0] == summary.split(", seed")[0].rsplit(",", 1)[0]
    assert "step 1\n" in shown
    prompt = shipped.tokenizer.encode("Once upon a time")
    run = speculate(shipped.target, shipped.draft, prompt, max_new_tokens=12, seed=3, tree=Tree.branching([2, 1]))
    assert run.stats.new_tokens == 12


def test_odd_terminals_in_a_process_of_their_own(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0", "TERM": "dumb", "COLUMNS": "60"}
    done = subprocess.run(
        [sys.executable, "-m", "minispec", "generate", "\U0001f600 火", "--show", "--max-new-tokens", "8", "--seed", "1", "--tree", "2,2"],
        capture_output=True, env=environment, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    lines = done.stdout.decode("cp1252").splitlines()
    assert lines[0].startswith("? ?")
    assert max(map(len, lines[:-1])) <= 60  # the last line is the one that generate always prints
    assert b"\x1b" not in done.stdout


def test_trace_writes_both_kinds_of_file(shipped: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["trace", "Once upon a time", "--max-new-tokens", "10", "--seed", "3", "-o"]
    for name in ("run.json", "run.html"):
        assert main([*args, str(tmp_path / name)]) == 0
        assert re.search(r"run\.(json|html): \d+ steps, 10 tokens, \d+ kB, seed 3", capsys.readouterr().out)
    data = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    validate(data)
    assert data["plain_ms"] > 0
    prompt = shipped.tokenizer.encode("Once upon a time")
    run = speculate(shipped.target, shipped.draft, prompt, max_new_tokens=10, seed=3, sampling=Sampling(0.8))
    assert replay(Trace(data)) == run.tokens == data["tokens"]
    assert "<svg" not in (tmp_path / "run.json").read_text(encoding="utf-8")


def test_trace_warms_up_on_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's first steps are slow (weights are packed, passes compiled): on the page they would be the run's."""
    runs: list[Recording] = []

    class Kept(Recording):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            runs.append(self)

    monkeypatch.setattr("minispec.show.commands.Recording", Kept)
    assert (
        main(["trace", "Once upon a time", "--max-new-tokens", "20", "--seed", "3", "-o", str(tmp_path / "x.json")])
        == 0
    )
    data = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert [len(run.taken) for run in runs] == [WARM_UP, len(data["steps"])]
    assert data["tokens"] == [token for step in runs[1].taken for token in step.tokens]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trace", "x", "-o", "run.txt"], "output must end in .json or .html, got 'run.txt'"),
        (["trace", "x"], "the following arguments are required: -o/--output"),
        (["trace", "x", "-o", "x.json", "--top", "0"], "top must be an integer >= 1, got 0"),
        (["trace", "x", "-o", "nowhere/\0/x.json"], "null"),
        (["generate", "x", "--tree", "3,0"], "must be integers >= 1 such as 3,2,1, got '3,0'"),
        (["generate", "x", "--tree", "3", "--draft-len", "2"], "give either --tree or --draft-len"),
        (["generate", "x", "--tree", "3", "--draft", "ngram"], "give either --tree or --draft ngram"),
    ],
)
def test_mistakes_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(args)
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_progress_bar_has_the_time_left(monkeypatch: pytest.MonkeyPatch, two: tuple[GPT, GPT]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress("tracing", 4) as tick:
        tick(2)
    assert "tracing" in terminal.getvalue()
    assert "2/4" in terminal.getvalue()
    assert re.search(r"(-|\d):(-|\d)\S:\S\S", terminal.getvalue())  # time left
    monkeypatch.setattr(sys, "stderr", quiet := io.StringIO())
    with progress("tracing", 4) as tick:
        tick(2)
    assert quiet.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with enumeration(lambda rng: tuple(speculate(*two, [0], max_new_tokens=2, draft_len=1, rng=rng).tokens)) as watched:
        law = exact_law(watched)
    assert sum(law.values()) == pytest.approx(1)
    assert "enumerating" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
