"""The command line: what it prints, how it fails (one line, status 2), odd terminals, no network."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minispec.cli import main

SUMMARY = re.compile(
    r"12 tokens, \d\.\d\d per target pass, acceptance (\d\.\d\d|n/a) of tested and (\d\.\d\d|n/a) of proposed, \d+ tokens/s, seed 3"
)
SHORT = ["--max-new-tokens", "12", "--seed", "3", "--draft-len", "4"]


def run(*args: str, stdin: str | None = None, env: dict[str, str] | None = None, cwd: Path | None = None):  # type: ignore[no-untyped-def]
    """The command in its own process, with the network cut."""
    block = "import socket\ndef no(*a, **k): raise OSError('network used')\nsocket.socket.connect = no\nsocket.create_connection = no\n"
    code = block + "import sys\nfrom minispec.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        input=stdin, capture_output=True, cwd=cwd, env={**os.environ, **(env or {})}, encoding="utf-8", errors="replace",
    )  # fmt: skip


def test_generate_prints_the_story_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Once upon a time", *SHORT]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Once upon a time")
    assert SUMMARY.search(out)
    assert main(["generate", "Once upon a time", *SHORT]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[:-1] == out.splitlines()[:-1]


def test_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (
        ["--temperature", "0"],
        ["--temperature", "1", "--top-k", "5", "--top-p", "0.9", "--draft-len", "2", "--rule", "match"],
        ["--draft", "ngram"],
        ["--draft", "early-exit", "--draft-len", "2", "--rule", "block"],
        ["--draft", "misaligned"],
        ["--draft-len", "0", "--device", "cpu"],
    ):
        assert main(["generate", "Once upon a time", *SHORT, *options]) == 0
        assert SUMMARY.search(capsys.readouterr().out)


def test_colour_marks_the_targets_tokens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["generate", "Once upon a time", *SHORT, "--colour"]) == 0
    out = capsys.readouterr().out
    assert "[" in out  # no terminal, so marks and no colours
    assert "\x1b" not in out

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for no_color, colours in ((None, True), ("1", False)):
        with monkeypatch.context() as patch:  # ends before capsys does, which has a stdout of its own
            patch.delenv("NO_COLOR", raising=False)
            patch.setenv("TERM", "xterm")
            if no_color:
                patch.setenv("NO_COLOR", no_color)
            patch.setattr(sys, "stdout", terminal := Terminal())
            main(["generate", "Once upon a time", *SHORT, "--colour"])
        assert ("\x1b[32m" in terminal.getvalue()) == colours


def test_compare_prints_both_and_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Once upon a time", "--compare", *SHORT]) == 0
    out = capsys.readouterr().out
    assert re.search(r"plain: +60 tokens, 1\.00 per target pass, acceptance n/a of tested", out)
    assert re.search(r"speculative: +60 tokens", out)
    assert re.search(r"measured ratio: \d+\.\d\dx \(medians of 5 interleaved runs\)", out)


def test_prompt_from_stdin_and_a_cp1252_terminal(tmp_path: Path) -> None:
    done = run("generate", *SHORT, stdin="Once upon a time\n", env={"PYTHONIOENCODING": "cp1252"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    done = run("generate", "-", *SHORT, stdin="The king", env={"HOME": str(tmp_path), "NO_COLOR": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    weird = run(
        "generate", "\U0001f600 火", *SHORT, env={"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}, cwd=tmp_path
    )
    assert weird.returncode == 0, weird.stderr
    assert weird.stderr == ""


BAD = [
    (["generate", "x", "--temperature", "-1"], "temperature must be a finite number >= 0, got -1.0"),
    (["generate", "x", "--temperature", "nan"], "temperature must be a finite number >= 0, got nan"),
    (["generate", "x", "--temperature", "hot"], "argument --temperature: invalid float value: 'hot'"),
    (["generate", "x", "--top-k", "0"], "top_k must be an integer >= 1 or None, got 0"),
    (["generate", "x", "--top-p", "1.5"], "top_p must be a number in (0, 1] or None, got 1.5"),
    (["generate", "x", "--draft-len", "-1"], "draft_len must be an integer >= 0, got -1"),
    (["generate", "x", "--draft-len", "1.9"], "argument --draft-len: invalid int value: '1.9'"),
    (["generate", "x", "--max-new-tokens", "-1"], "max_new_tokens must be an integer >= 0, got -1"),
    (["generate", "x", "--rule", "nonsense"], "argument --rule: invalid choice: 'nonsense'"),
    (["generate", "x", "--rule", "token", "--draft", "ngram"], "does not accept a draft of kind 'chosen'"),
    (["generate", ""], "prompt must not be empty"),
    (["generate", "word " * 2000], "(block_size), got"),
    (["generate", "x", "--device", "tpu9"], "device must be cpu, cuda, mps or auto"),
    (["generate", "x", "--pair", "nowhere"], "no such file"),
    (["generate", "x", "--draft", "nobody"], "has no section 'nobody'"),
    (["train", "nowhere", "--size", "draft", "--steps", "1", "--pair", "nowhere"], "no such file"),
    (["train-tokenizer", "nowhere", "--pair", "nowhere"], "no *.txt file"),
    (["frobnicate"], "invalid choice: 'frobnicate'"),
    ([], "the following arguments are required: COMMAND"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "")
def test_case_18_bad_input_is_one_line_and_status_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main(args)
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("minispec")


def test_no_prompt_on_a_terminal_says_how(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["generate"]) == 2
    assert 'give a text, as in: minispec generate "Once upon a time"' in capsys.readouterr().err


def test_a_reader_that_goes_away_and_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import minispec.cli

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(minispec.cli, "load_pair", interrupted)
    assert main(["generate", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err
    command = f"{sys.executable} -m minispec generate 'Once upon a time' --draft-len 4 | head -c 5"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "Once "
    assert done.stderr == ""


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for args, expected in (
        (["--help"], "COMMAND"),
        (["generate", "--help"], "--draft-len"),
        (["--version"], "minispec 0"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == 0
        assert expected in capsys.readouterr().out


def test_the_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "minispec", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("minispec ")


def test_threads_are_left_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    main(["generate", "Once", *SHORT])
    assert torch.get_num_threads() == before
