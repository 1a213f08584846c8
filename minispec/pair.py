"""A target, its draft and their tokenizer, as files that are checked before they are trusted.

A pair is a folder: `config.json` (shapes, tokenizer pattern, special tokens, SHA-256 of every other file),
`tokenizer.tiktoken`, `target.safetensors`, `draft.safetensors`. Nothing in it is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from minispec.files import sha256, write_tensors, write_text
from minispec.inputs import check_models
from minispec.model import GPT, GPTConfig
from minispec.tokenizer import Tokenizer, dump_ranks, load_tokenizer

FORMAT = "minispec-pair-1"
CONFIG, TOKENIZER = "config.json", "tokenizer.tiktoken"
AGAIN = "fetch the file again (a fresh clone or install has it), or train a pair: see README"


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
    """Load the pair in `folder` (default: the shipped one) onto a device, in float32, float64 or bfloat16.

    `draft` names the draft file without its ending. Raises `FileNotFoundError`/`ValueError` naming the file,
    what is wrong with it (missing, wrong checksum, a tensor too many, too few or misshapen) and what to do.
    """
    root = weights_folder() if folder is None else Path(folder)
    config = read_config(root)
    tokenizer = read_tokenizer(root, config)
    target, small = (_load_model(root, name, config, tokenizer) for name in ("target", draft))
    return Pair(target.to(device=device, dtype=dtype), small.to(device=device, dtype=dtype), tokenizer)


def read_config(root: Path) -> dict[str, Any]:
    """`config.json` of a pair, its format checked."""
    path = root / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; {AGAIN}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); {AGAIN}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else config
        raise ValueError(f"{path}: format is {found!r}, this version reads {FORMAT!r}; {AGAIN}")
    return config


def read_tokenizer(root: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a pair, its checksum verified."""
    path = _verified(root, TOKENIZER, config)
    about = _section(root, config, "tokenizer")
    return load_tokenizer(path, str(about.get("pattern")), dict(about.get("special_tokens", {})))


def _section(root: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise ValueError(f"{root / CONFIG}: has no section {name!r}; {AGAIN}")
    return section


def _verified(root: Path, name: str, config: Mapping[str, Any]) -> Path:
    """The path of a file whose bytes are those `config.json` speaks of."""
    path = root / name
    wanted = _section(root, config, "sha256").get(name)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {AGAIN}")
    if wanted is None:
        raise ValueError(f"{root / CONFIG}: has no checksum for {name}; {AGAIN}")
    found = sha256(path)
    if found != wanted:
        raise ValueError(f"{path}: damaged or another file: SHA-256 is {found}, config.json says {wanted}; {AGAIN}")
    return path


def _load_model(root: Path, name: str, config: Mapping[str, Any], tokenizer: Tokenizer) -> GPT:
    file = f"{name}.safetensors"
    shape = _section(root, config, name)
    try:
        with torch.device("meta"):  # weights come from the file; the global generator stays as it is
            model = GPT(GPTConfig(**{field.name: shape.get(field.name) for field in fields(GPTConfig)}))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{root / CONFIG}: section {name!r}: {error}; {AGAIN}") from None
    path = _verified(root, file, config)
    try:
        tensors = load_file(str(path))
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file ({error}); {AGAIN}") from None
    check_tensors(path, model, tensors)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    model.end_of_text = tokenizer.end_of_text
    return model.eval().requires_grad_(False)


def check_tensors(path: Path, model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a missing, an extra or a misshapen tensor, by name."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"{path}: tensor {name!r} is {found.get(name, 'missing')}, "
                f"config.json asks for {wanted.get(name, 'no such tensor')}; {AGAIN}"
            )


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
) -> None:
    """Add a model to a pair's folder as `<name>.safetensors` in `dtype`, with its checksum and how it was trained.

    The file is complete before `config.json` speaks of it, and each is written whole or not at all.
    """
    root, file = Path(root), f"{name}.safetensors"
    config = read_config(root)
    vocabulary = read_tokenizer(root, config).vocab_size
    if vocabulary != model.config.vocab_size:
        raise ValueError(f"the tokenizer has {vocabulary} tokens, the model's vocab_size is {model.config.vocab_size}")
    write_tensors(root / file, {key: tensor.to(dtype) for key, tensor in model.state_dict().items()})
    config[name] = asdict(model.config) | ({"training": dict(training)} if training else {})
    config["sha256"][file] = sha256(root / file)
    write_text(root / CONFIG, json.dumps(config, indent=2) + "\n")
