"""Train a byte-level BPE vocabulary with rustbpe (extra `train`)."""

from __future__ import annotations

from collections.abc import Iterable

from minispec.tokenizer import END_OF_TEXT, PATTERN, Tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids: 256 bytes, merges, and one id for the end of a text.

    Raises `ValueError` when `vocab_size` is below 257 or the texts have too few pairs to merge, and
    `ImportError` with the command to run when rustbpe is missing.
    """
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 257:
        raise ValueError(f"vocab_size must be an integer >= 257 (256 bytes and the end of text), got {vocab_size!r}")
    try:
        import rustbpe
    except ImportError:
        raise ImportError("training a tokenizer needs rustbpe: pip install 'minispec[train]'") from None
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size - 1, pattern=PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    if len(ranks) != vocab_size - 1:
        raise ValueError(f"the texts give only {len(ranks)} tokens, fewer than vocab_size - 1 = {vocab_size - 1}")
    return Tokenizer(ranks, PATTERN, {END_OF_TEXT: vocab_size - 1})
