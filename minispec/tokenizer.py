"""Byte-level BPE through tiktoken, and a streaming decoder that never emits half a character."""

from __future__ import annotations

import base64
import binascii
import codecs
from collections.abc import Iterable, Mapping
from pathlib import Path

import tiktoken

END_OF_TEXT = "<|endoftext|>"

# Letters with one leading space or mark, digits in pairs, punctuation runs, line breaks, other space.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A `tiktoken.Encoding` whose special tokens can only be written by id, never by text."""

    def __init__(self, ranks: Mapping[bytes, int], pattern: str, special_tokens: Mapping[str, int]) -> None:
        self.pattern, self.special_tokens = pattern, dict(special_tokens)
        try:
            self.encoding = tiktoken.Encoding(
                "minispec", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=self.special_tokens
            )
        except ValueError as error:
            raise ValueError(f"pattern must be a regular expression, got {pattern!r}: {error}") from None

    @property
    def vocab_size(self) -> int:
        return self.encoding.n_vocab

    @property
    def end_of_text(self) -> int | None:
        """Id of the token that ends a text, if the vocabulary has one."""
        return self.special_tokens.get(END_OF_TEXT)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Text that spells a special token is ordinary text. TypeError unless str."""
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        return self.encoding.encode_ordinary(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`; bytes that are no UTF-8 become U+FFFD. ValueError for an id out of range."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token. ValueError for an id out of range."""
        try:
            return self.encoding.decode_single_token_bytes(token)
        except (KeyError, OverflowError, TypeError):
            raise ValueError(f"token must be an id of the vocabulary, got {token!r}") from None

    def stream(self) -> StreamDecoder:
        """A decoder for tokens that arrive one after the other."""
        return StreamDecoder(self)


class StreamDecoder:
    """Text of a growing run of tokens: `feed` returns only whole characters, `finish` whatever is left.

    The chunks joined always equal `Tokenizer.decode` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, *tokens: int) -> str:
        return "".join(self._decoder.decode(self._tokenizer.token_bytes(token)) for token in tokens)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def dump_ranks(ranks: Mapping[bytes, int]) -> str:
    """Mergeable ranks in tiktoken's text format: one `base64 rank` a line."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return "".join(f"{base64.b64encode(token).decode('ascii')} {rank}\n" for token, rank in ordered)


def load_tokenizer(path: Path, pattern: str, special_tokens: Mapping[str, int]) -> Tokenizer:
    """Read a file in tiktoken's text format. ValueError names the file and what is wrong with it."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{path}: not a tiktoken vocabulary file ({error}); fetch the file again") from None
    ids = sorted([*ranks.values(), *special_tokens.values()])
    if ids != list(range(len(ids))) or len(ids) < 256:
        raise ValueError(f"{path}: token ids must be 0..V-1, each once, V >= 256; fetch the file again")
    return Tokenizer(ranks, pattern, special_tokens)
