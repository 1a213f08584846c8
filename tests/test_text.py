"""Stop strings: found wherever they lie, whatever the draft; text, ids, statistics and stream agree with plain decoding."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doubles import TableModel
from test_tokenizer import BYTES, PATTERN

import minispec.cli
from minispec import GPT, GPTConfig, NGramDrafter, Pair, Sampling, Step, Tokenizer, Tree
from minispec.result import summarise
from minispec.text import StopSearch, pieces

MERGES = [b"th", b"the", b" c", b" ca", b" cat", b" s", b" sa", b" sat", b"ma", b"mat", b"\xf0\x9f", b"\x98\x80"]
END = 256 + len(MERGES)
TOKENIZER = Tokenizer(BYTES | {b: 256 + i for i, b in enumerate(MERGES)}, PATTERN, {"<|endoftext|>": END})
STORY = "the cat sat, the \U0001f600 cat: aab aabaab! the mat."


def speaker(text: str, wrong: float = 0.0, end: bool = False, ids: list[int] | None = None) -> TableModel:
    """A model that says `text` after a prompt of one token, greedily; with chance `wrong` it errs at a place."""
    ids = TOKENIZER.encode(text) if ids is None else ids
    ids = [*ids, END] if end else ids
    draw = random.Random(1)
    table = torch.full((len(ids) + 1, END + 1, END + 1), 0.5 / END, dtype=torch.float64)
    for position, token in enumerate(ids):
        said = (token + 1) % END if draw.random() < wrong else token
        table[position, :, said] = 0.5
    model = TableModel(table, len(ids) + 1)
    model.end_of_text = END
    return model


class Fake(Pair):
    """A pair of any models."""

    def __post_init__(self) -> None:
        pass


def reference(text: str, stop: list[str]) -> str:
    """`text` read a character at a time, up to the first stop string that is complete, the longest of several."""
    for end in range(1, len(text) + 1):
        for s in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(s):
                return text[: end - len(s)]
    return text


def call(pair: Pair, stop: list[str], **options: object):  # type: ignore[no-untyped-def]
    return pair.complete("t", stop=stop, max_new_tokens=len(STORY), sampling=Sampling(0), **options)


def substrings() -> list[str]:
    found = {STORY[i : i + n] for n in (1, 2, 3, 5) for i in range(len(STORY) - n + 1)}
    return sorted(found) + ["never", STORY, "sat, the \U0001f600 cat: aab"]


def test_every_substring_as_the_stop_string_with_every_draft() -> None:
    """Inside one accepted run, across steps, ending mid-token, in the middle of a character's bytes."""
    target = speaker(STORY)
    drafts = [(target, 6), (target, 1), (speaker(STORY, 0.3), 4), (speaker(STORY, 1.0), 3)]
    ids = TOKENIZER.encode(STORY)
    inside = across = mid = 0
    for stop in substrings():
        plain = call(Fake(target, target, TOKENIZER), [stop], draft_len=0)
        assert plain.text == reference(STORY, [stop])
        whole = next((n for n in range(len(ids) + 1) if stop in TOKENIZER.decode(ids[:n])), len(ids))
        assert plain.result.tokens == ids[:whole]
        assert plain.result.finish_reason == ("stop" if stop in STORY else "context")
        mid += stop in STORY and not TOKENIZER.decode(ids[:whole]).endswith(stop)
        for draft, K in drafts:
            fast = call(Fake(target, draft, TOKENIZER), [stop], draft_len=K)
            assert (fast.text, fast.result.tokens) == (plain.text, plain.result.tokens)
            assert fast.result.finish_reason == plain.result.finish_reason
            assert fast.result.stats == summarise(fast.result.steps)
            assert fast.result.stats.new_tokens == whole
            assert fast.result.stats.accepted <= whole
            last = fast.result.steps[-1]
            assert [s.finish_reason for s in fast.result.steps[:-1]] == [None] * (len(fast.result.steps) - 1)
            assert last.accepted <= len(last.tokens)
            in_last = len(TOKENIZER.decode(ids[: whole - len(last.tokens)])) <= len(plain.text)
            inside += stop in STORY and in_last and last.accepted == len(last.tokens)  # cut within the accepted run
            across += stop in STORY and not in_last
    assert min(inside, across, mid) > 10


@pytest.mark.parametrize("seed", range(6))
def test_several_stop_strings_and_a_drafter_of_another_kind(seed: int) -> None:
    draw = random.Random(seed)
    target = speaker(STORY)
    for _ in range(15):
        stop = draw.sample(substrings(), draw.randint(2, 5))
        want = reference(STORY, stop)
        for draft in (None, NGramDrafter(3), speaker(STORY, 0.5)):
            assert call(Fake(target, target, TOKENIZER), stop, draft=draft).text == want
        tree = call(Fake(target, speaker(STORY, 0.2), TOKENIZER), stop, tree=Tree.branching([2, 2, 1]))
        assert tree.text == want


def steps_of(tokens: list[int], cuts: list[int]) -> list[Step]:
    """Steps that emit `tokens`, cut at these places, as an all-accepting chain would."""
    steps = []
    for start, end in itertools.pairwise([0, *cuts, len(tokens)]):
        run = tuple(tokens[start:end])
        reason = "length" if end == len(tokens) else None
        steps.append(Step(run, run[:-1], tuple(range(-1, len(run) - 1)), tuple(range(len(run))), reason))
    return steps


def test_the_stream_joined_is_the_text_wherever_the_steps_are_cut() -> None:
    ids = TOKENIZER.encode(STORY)
    for seed in range(60):
        draw = random.Random(seed)
        cuts = sorted(draw.sample(range(1, len(ids)), draw.randint(0, 8)))
        stop = draw.sample(substrings(), draw.randint(0, 3))
        got = list(pieces(TOKENIZER, steps_of(ids, cuts), stop))
        assert "".join(p.text for p in got) == reference(STORY, stop)
        assert [p.step.finish_reason is None for p in got] == [True] * (len(got) - 1) + [False]


def outcomes(text: str, stop: list[str], alphabet: str) -> list[str]:
    """What the answer may become, for every continuation as long as the longest stop string."""
    longest = max(map(len, stop), default=0)
    ends = ("".join(letters) for n in range(longest + 1) for letters in itertools.product(alphabet, repeat=n))
    return [reference(text + end, stop) for end in ends]


def common(texts: list[str]) -> str:
    """The longest common beginning."""
    low, high = min(texts), max(texts)
    return next((low[:i] for i in range(len(low)) if low[i] != high[i : i + 1]), low)


@pytest.mark.parametrize("seed", range(40))
def test_held_back_text_is_as_short_as_it_can_be(seed: int) -> None:
    """After any beginning, all is out that belongs to the answer however the text goes on, and nothing else."""
    draw = random.Random(seed)
    stop = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
    text = "".join(draw.choices("abc", k=12))
    search, released = StopSearch(stop), ""
    at = 0
    while at < len(text):
        step = draw.randint(1, 4)
        released += search.feed(text[at : at + step])
        at = min(at + step, len(text))
        assert released == common(outcomes(text[:at], stop, "abc")), (stop, text[:at])
        assert search.found == any(s in text[:at] for s in stop)
    assert released + search.finish() == reference(text, stop)


def test_the_first_to_be_complete_wins_and_of_those_the_longest() -> None:
    for stop, want in ((["bcd", "c"], "ab"), (["bcd", "cd"], "a"), (["cd", "bcd", "d"], "a"), (["x", "abcde"], "")):
        for size in (1, 2, 5):
            search = StopSearch(stop)
            got = "".join(search.feed("abcde"[i : i + size]) for i in range(0, 5, size)) + search.finish()
            assert (got, search.found) == (want, True), stop


def test_the_end_of_text_token_is_no_part_of_the_text() -> None:
    target = speaker("the cat", end=True)
    done = Fake(target, target, TOKENIZER).complete("t", max_new_tokens=50, sampling=Sampling(0))
    assert done.text == "the cat"
    assert done.result.tokens[-1] == END
    assert done.result.finish_reason == "stop"


def test_bytes_that_are_no_character_come_at_the_end_and_may_complete_a_stop_string() -> None:
    cut_short = [ord("a"), 0xF0, 0x9F]
    target = speaker("", ids=cut_short)
    pair = Fake(target, target, TOKENIZER)
    done = pair.complete("t", max_new_tokens=50, sampling=Sampling(0))
    assert (done.text, done.result.finish_reason) == ("a�", "context")
    done = pair.complete("t", stop=["�"], max_new_tokens=50, sampling=Sampling(0))
    assert (done.text, done.result.finish_reason, done.result.tokens) == ("a", "stop", cut_short)


def test_nothing_to_generate() -> None:
    target = speaker(STORY)
    pair = Fake(target, target, TOKENIZER)
    none = pair.complete("t", stop=["x"], max_new_tokens=0)
    assert (none.text, none.result.tokens, none.result.finish_reason) == ("", [], "length")
    full = pair.complete("t" * target.config.block_size, max_new_tokens=3)
    assert (full.text, full.result.tokens, full.result.finish_reason) == ("", [], "context")
    assert target.calls == []


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("end", "stop must be a list of strings, got 'end'"),
        (None, "stop must be a list of strings, got None"),
        (["a", 3], "stop must hold strings, got 3"),
        (["a", ""], "stop must hold strings of at least one character, got ''"),
    ],
)
def test_bad_stop_strings(stop: object, message: str) -> None:
    target = speaker(STORY)
    with pytest.raises((TypeError, ValueError), match=message):
        Fake(target, target, TOKENIZER).complete("t", stop=stop, max_new_tokens=5)
    assert target.calls == []


def test_text_must_be_text() -> None:
    pair = Pair(*(GPT(GPTConfig(END + 1, 8, 1, 1, 4)) for _ in range(2)), TOKENIZER)
    with pytest.raises(TypeError, match="text must be a str, got int"):
        pair.complete(3, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"prompt must have 1\.\.8 tokens"):
        pair.complete("", max_new_tokens=2)
    assert isinstance(pair.complete("a", max_new_tokens=2, seed=1).text, str)


# --- the shipped pair, and the command ----------------------------------------------------------------------


def test_the_shipped_pair_stops_where_plain_decoding_does(shipped: Pair) -> None:
    options = {"max_new_tokens": 40, "sampling": Sampling(0)}
    whole = shipped.complete("Once upon a time", **options).text
    words = whole.split(" ")
    for stop in ([words[3]], [whole[5:9], whole[12:15]], [" ", "\n"]):
        fast = shipped.complete("Once upon a time", stop=stop, draft_len=5, **options)
        plain = shipped.complete("Once upon a time", stop=stop, draft_len=0, **options)
        assert fast.text == plain.text == reference(whole, stop)
        assert fast.result.tokens == plain.result.tokens


def test_stop_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    short = [
        "generate",
        "Once upon a time",
        "--max-new-tokens",
        "30",
        "--temperature",
        "0",
        "--seed",
        "1",
        "--draft-len",
        "4",
    ]
    assert minispec.cli.main(short) == 0
    whole = capsys.readouterr().out.rsplit("\n", 2)[0].removeprefix("Once upon a time")
    stop = whole[20:23]
    for extra in ([], ["--colour"], ["--draft-len", "0"]):
        assert minispec.cli.main([*short, "--stop", stop, "--stop", "never said", *extra]) == 0
        out = capsys.readouterr().out
        if extra != ["--colour"]:
            assert out.rsplit("\n", 2)[0] == "Once upon a time" + reference(whole, [stop])
        assert "\n30 tokens, " not in out
    assert minispec.cli.main([*short, "--stop", ""]) == 2
    assert "stop must hold strings of at least one character" in capsys.readouterr().err


def test_ctrl_c_ends_with_what_was_produced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = minispec.cli.stream

    def pressed(*args, **kwargs):  # type: ignore[no-untyped-def]
        yield from itertools.islice(original(*args, **kwargs), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(minispec.cli, "stream", pressed)
    for extra in ([], ["--compare"], ["--colour"]):
        assert minispec.cli.main(["generate", "Once upon a time", "--seed", "1", "--draft-len", "4", *extra]) == 130
        out, err = capsys.readouterr()
        assert out.startswith("Once upon a time")
        assert "per target pass" in out
        assert "seed 1" in out
        assert err.strip() == ""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one child")
def test_a_real_ctrl_c(tmp_path: Path) -> None:
    """Sent when the first words are out."""
    slow = (
        "import signal, sys, time, minispec.cli as c\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background begins with it ignored
        "original = c.stream\n"
        "def slow(*a, **k):\n"
        "    for step in original(*a, **k):\n"
        "        yield step\n"
        "        time.sleep(0.2)\n"
        "c.stream = slow\n"
        "sys.exit(c.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", slow, "generate", "Once upon a time", "--seed", "1", "--draft-len", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    assert process.stdout is not None
    first = process.stdout.read(24)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    text = (first + out).decode("utf-8")
    assert text.startswith("Once upon a time")
    assert "per target pass" in text.splitlines()[-1]
    assert err.strip() == b""
