"""A target, its draft and their tokenizer, as files that are checked before they are trusted.

A pair is a folder: `config.json` (shapes, tokenizer pattern, special tokens, SHA-256 of every other file),
`tokenizer.tiktoken`, `target.safetensors`, `draft.safetensors`. Nothing in it is ever executed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from typing_extensions import Unpack

from minispec.drafters import Drafter
from minispec.files import (
    AGAIN,
    CONFIG,
    FORMAT,
    atomic,
    check_tensors,
    put_tensors,
    read_config,
    restored,
    section,
    sha256,
    stored,
    verified,
    write_text,
)
from minispec.inputs import TextOptions, check_dtype, check_models, find_device, is_integer
from minispec.model import GPT, GPTConfig, LanguageModel
from minispec.text import Completion, complete
from minispec.tokenizer import Tokenizer, dump_ranks, load_tokenizer

TOKENIZER = "tokenizer.tiktoken"


@dataclass(frozen=True)
class Pair:
    """What `load_pair` returns. Raises `ValueError` where target, draft and tokenizer do not fit together."""

    target: GPT
    draft: GPT
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        check_models(self.target, self.draft)
        if self.tokenizer.vocab_size != self.target.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, "
                f"the models' vocab_size is {self.target.config.vocab_size}"
            )

    def complete(
        self,
        text: str,
        *,
        stop: Sequence[str] = (),
        draft: LanguageModel | Drafter | None = None,
        **options: Unpack[TextOptions],
    ) -> Completion:
        """Continue `text` speculatively, up to the first of the `stop` strings, which is no part of the answer.

        draft: another draft than the pair's own, a model or a `Drafter`. The other options are those of `speculate`
        for one prompt; `minispec.text.pieces` gives the text as it comes. Raises `ValueError`/`TypeError` before any
        forward pass.
        """
        return complete(self.target, self.draft if draft is None else draft, self.tokenizer, text, stop, options)


def weights_folder() -> Path:
    """Where the shipped pair lies: inside an installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / "weights"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "weights"


def load_pair(
    folder: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    draft: str = "draft",
) -> Pair:
    """Load the pair in `folder` (default: the shipped one) onto a device, in a floating-point dtype.

    `draft` names the draft file without its ending. Raises `FileNotFoundError`/`ValueError` naming the file,
    what is wrong with it (missing, wrong checksum, a tensor too many, too few or misshapen) and what to do.
    """
    device, root = find_device(device), weights_folder() if folder is None else Path(folder)
    check_dtype(dtype)
    config = read_config(root)
    tokenizer = read_tokenizer(root, config)
    target, small = (_load_model(root, name, config, tokenizer) for name in ("target", draft))
    try:
        return Pair(target.to(device=device, dtype=dtype), small.to(device=device, dtype=dtype), tokenizer)
    except ValueError as error:
        raise ValueError(f"{root / CONFIG}: {error}; {AGAIN}") from None


def read_tokenizer(root: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a pair, its checksum verified."""
    path = _verified(root, TOKENIZER, config)
    about = section(root / CONFIG, config, "tokenizer")
    pattern, special = about.get("pattern"), about.get("special_tokens")
    if not isinstance(pattern, str) or not isinstance(special, dict) or not all(map(is_integer, special.values())):
        wanted = "section 'tokenizer' must hold a pattern, a string, and special_tokens, ids by name"
        raise ValueError(f"{root / CONFIG}: {wanted}; {AGAIN}")
    try:
        return load_tokenizer(path, pattern, special)
    except ValueError as error:
        raise ValueError(f"{root}: {error}") from None


def _verified(root: Path, name: str, config: Mapping[str, Any]) -> Path:
    """The path of a file whose bytes are those `config.json` speaks of."""
    return verified(root / name, section(root / CONFIG, config, "sha256").get(name), root / CONFIG)


def _load_model(root: Path, name: str, config: Mapping[str, Any], tokenizer: Tokenizer) -> GPT:
    shape = section(root / CONFIG, config, name)
    path = _verified(root, f"{name}.safetensors", config)
    try:
        tensors = load_file(str(path))
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file ({error}); {AGAIN}") from None
    try:
        built = GPTConfig(**{field.name: shape.get(field.name) for field in fields(GPTConfig)})  # type: ignore[arg-type]
        if built.n_layer > len(tensors):  # before so many are made
            raise ValueError(f"n_layer must fit the {len(tensors)} tensors of {path.name}, got {built.n_layer}")
        with torch.device("meta"):  # weights come from the file; the global generator stays as it is
            model = GPT(built)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{root / CONFIG}: section {name!r}: {error}; {AGAIN}") from None
    tensors = restored(path, tensors)
    check_tensors(path, model.state_dict(), tensors)
    model.load_state_dict(tensors, assign=True)
    model.end_of_text = tokenizer.end_of_text
    return model.eval().requires_grad_(False)


def save_tokenizer(root: str | Path, tokenizer: Tokenizer) -> None:
    """Begin a pair's folder: `tokenizer.tiktoken` and `config.json`. Earlier models there no longer count."""
    root = Path(root)
    ranks = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - len(tokenizer.special_tokens))}
    write_text(root / TOKENIZER, dump_ranks(ranks))
    about = {"pattern": tokenizer.pattern, "special_tokens": tokenizer.special_tokens}
    config = {"format": FORMAT, "tokenizer": about, "sha256": {TOKENIZER: sha256(root / TOKENIZER)}}
    write_text(root / CONFIG, json.dumps(config, indent=2) + "\n")


def save_model(
    root: str | Path,
    name: str,
    model: GPT,
    *,
    dtype: torch.dtype = torch.bfloat16,
    training: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Add a model to a pair's folder as `<name>.safetensors` in `dtype` (`stored`), with its checksum and its history.

    config: what the folder's `config.json` is to say of all else; default what it says now.

    Both files are complete before either has its name. A kill between the two renamings leaves a pair that is
    refused, never one that is wrong; saving once more mends it.
    """
    root, file = Path(root), f"{name}.safetensors"
    config = read_config(root) if config is None else copy.deepcopy(dict(config))
    vocabulary = read_tokenizer(root, config).vocab_size
    if vocabulary != model.config.vocab_size:
        raise ValueError(f"the tokenizer has {vocabulary} tokens, the model's vocab_size is {model.config.vocab_size}")
    with atomic(root / CONFIG) as about, atomic(root / file) as weights:
        put_tensors(weights, stored(model.state_dict(), dtype))
        config[name] = asdict(model.config) | ({"training": dict(training)} if training else {})
        config["sha256"][file] = sha256(weights)
        about.write_bytes(json.dumps(config, indent=2).encode("utf-8") + b"\n")
