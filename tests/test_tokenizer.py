"""The tokenizer and its streaming decoder (case 22)."""

from __future__ import annotations

from pathlib import Path

import pytest

from minispec.tokenizer import END_OF_TEXT, PATTERN, Tokenizer, dump_ranks, load_tokenizer

BYTES = {bytes([i]): i for i in range(256)}
RANKS = BYTES | {b"th": 256, b"the": 257, b" the": 258}
SPECIAL = {END_OF_TEXT: 259}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(RANKS, PATTERN, SPECIAL)


TEXTS = [
    "",
    "the other",
    "naïve – “quoted”\n\n  indented\t tab",
    "火と水",
    "\U0001f600\U0001f680",
    "a" * 300,
    "\x00\x7f",
    "  \n \r\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_stream(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    stream = tokenizer.stream()
    assert "".join(stream.feed(t) for t in tokens) + stream.finish() == text


def test_merges_are_used(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("the the") == [257, 258]


def test_case_22_an_emoji_comes_whole_or_not_at_all(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("\U0001f600")
    assert len(tokens) == 4
    stream = tokenizer.stream()
    assert [stream.feed(t) for t in tokens] == ["", "", "", "\U0001f600"]
    assert stream.finish() == ""
    cut = tokenizer.stream()
    assert [cut.feed(t) for t in tokens[:3]] + [cut.finish()] == ["", "", "", "�"]
    assert tokenizer.decode(tokens[:3]) == "�"


def test_case_22_chunks_joined_equal_the_whole_for_bytes_that_are_no_utf8(tokenizer: Tokenizer) -> None:
    for tokens in ([0xE2, 0x82, 0x41], [0xFF, 0x80, 0xC3], [0xF0, 0x9F, 0xC3, 0xA9], [0xC3], [0xE2, 0x82, 0xAC, 0xE2]):
        stream = tokenizer.stream()
        chunks = [stream.feed(t) for t in tokens] + [stream.finish()]
        assert "".join(chunks) == tokenizer.decode(tokens)


def test_text_that_spells_a_special_token_is_ordinary(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"a {END_OF_TEXT} b")
    assert tokenizer.end_of_text == 259
    assert 259 not in tokens
    assert tokenizer.decode(tokens) == f"a {END_OF_TEXT} b"
    assert tokenizer.decode([259]) == END_OF_TEXT


@pytest.mark.parametrize("bad", [260, -1, 1.5, "a"])
def test_bad_ids(tokenizer: Tokenizer, bad: object) -> None:
    with pytest.raises(ValueError, match="token must be an id of the vocabulary, got"):
        tokenizer.decode([bad])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        tokenizer.encode(b"abc")  # type: ignore[arg-type]


def test_file_round_trip(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "t.tiktoken"
    path.write_text(dump_ranks(RANKS))
    again = load_tokenizer(path, PATTERN, SPECIAL)
    assert again.encode("the the") == [257, 258]
    assert again.vocab_size == 260


@pytest.mark.parametrize(
    "content", ["", "AA== x\n", "?? 0\n", "AA==\n", "<html>\n", dump_ranks(BYTES) + "dGg= 300\n", "é"]
)
def test_bad_files_are_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.tiktoken"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.tiktoken: .*; fetch the file again"):
        load_tokenizer(path, PATTERN, {END_OF_TEXT: 256})


def test_training_gives_exactly_the_size_asked_for() -> None:
    from minispec.train.bpe import train_tokenizer

    text = "The fox said to the crow: sing, and the crow sang and sang. " * 50
    trained = train_tokenizer([text], 280)
    assert trained.vocab_size == 280
    assert trained.end_of_text == 279
    assert trained.decode(trained.encode(text)) == text
    assert len(trained.encode(text)) < len(text) / 2
    for size in (256, 10.5, True):
        with pytest.raises(ValueError, match="vocab_size must be an integer >= 257"):
            train_tokenizer([text], size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fewer than vocab_size - 1"):
        train_tokenizer(["ab"], 400)
