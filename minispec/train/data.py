"""Text files to token windows: which window comes at which step is a pure function of seed and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minispec.files import read_text
from minispec.tokenizer import Tokenizer

HELD_OUT = 0.02  # share of each file's end used for validation where no file is named for it


@dataclass(frozen=True)
class Corpus:
    """Texts for training and for validation."""

    train: list[str]
    validation: list[str]


def read_corpus(folder: Path, validation: Sequence[str] = ()) -> Corpus:
    """All `*.txt` under `folder` (UTF-8), split by file: those whose name contains one of `validation` are held out.

    Without names the last 2 % of each file are held out. Raises `FileNotFoundError` for an empty folder and
    `ValueError` for a file that is no UTF-8, or a name that matches no file or leaves nothing to train on.
    """
    files = sorted(folder.rglob("*.txt"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.txt file in this folder")
    texts = {file: read_text(file) for file in files}
    if not validation:
        cut = {file: int(len(text) * (1 - HELD_OUT)) for file, text in texts.items()}
        return Corpus([t[: cut[f]] for f, t in texts.items()], [t[cut[f] :] for f, t in texts.items()])
    for name in validation:
        if not any(name in file.name for file in files):
            raise ValueError(f"validation: no file name in {folder} contains {name!r}")
    held_out = {file for file in files if any(name in file.name for name in validation)}
    if len(held_out) == len(files):
        raise ValueError(f"validation: {list(validation)} leaves no file to train on")
    return Corpus([texts[f] for f in files if f not in held_out], [texts[f] for f in sorted(held_out)])


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """One run of ids (int64) of all texts, an end-of-text id after each where the vocabulary has one."""
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text) + end
    return torch.tensor(ids)


def batch_at(tokens: Tensor, step: int, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (batch, context) of one training step.

    Each epoch visits every window once, in its own random order, with its own random offset. ValueError when
    the tokens do not fill a single window.
    """
    count = (len(tokens) - 1) // context - 1
    if count < 1:
        raise ValueError(f"context: {len(tokens)} tokens are too few for two windows of {context}")
    windows = []
    for index in range(step * batch, (step + 1) * batch):
        epoch, place = divmod(index, count)
        order, offset = _epoch(count, context, seed, epoch)
        start = offset + context * int(order[place])
        windows.append(tokens[start : start + context + 1])
    both = torch.stack(windows)  # (batch, context + 1)
    return both[:, :-1], both[:, 1:]


_epochs: dict[tuple[int, int, int, int], tuple[Tensor, int]] = {}


def _epoch(count: int, context: int, seed: int, epoch: int) -> tuple[Tensor, int]:
    key = (count, context, seed, epoch)
    if key not in _epochs:
        while len(_epochs) > 1:
            _epochs.pop(next(iter(_epochs)))
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        offset = int(torch.randint(context, (1,), generator=generator))
        _epochs[key] = (torch.randperm(count, generator=generator), offset)
    return _epochs[key]
