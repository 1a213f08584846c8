"""Files written whole or not at all, and tensors in safetensors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "minispec-pair-1"
CONFIG = "config.json"
SCALE = ".scale"  # behind a matrix's name: its rows' scales
AGAIN = "fetch the file again (a fresh clone or install has it), or train a pair: see README"


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it when the block ends well; a kill leaves the old file whole.

    Raises an `OSError` that names `path` where its folder cannot be written.
    """
    temporary = _temporary(path)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # the bytes before the name: a power cut must not leave the name without them
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """An empty file beside `path`, in a folder that is made where it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise type(error)(f"{path}: cannot be written ({error.strerror}); name a folder that can") from None
    os.close(handle)
    return Path(name)


def check_writable(path: Path) -> None:
    """Raise the `OSError` that saving `path` would end in, before the work that is to be saved."""
    _temporary(path).unlink()


def read_text(path: Path) -> str:
    """A UTF-8 text. ValueError or OSError names the file when it is none, or cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise type(error)(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically, with `\\n` line ends on every system."""
    with atomic(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def copy_file(source: Path, path: Path) -> None:
    """Copy a file's bytes atomically."""
    with atomic(path) as temporary:
        shutil.copyfile(source, temporary)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    with atomic(path) as temporary:
        put_tensors(temporary, tensors, metadata)


def put_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; OSError when that fails, as on a full disk."""
    try:
        save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, str(path), dict(metadata or {}))
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from None


def stored(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights as a file holds them: in `dtype`, or as 8-bit integers if that is `torch.int8`.

    Then a matrix (R, C) becomes the integers round(w / scale) in -127..127 and, as `<name>.scale`, a scale a row (R,):
    its largest magnitude / 127, rounded up to four bits, so that half precision holds the products too (`linear`).
    What has been so rounded stays as it is. Vectors, which are few, stay float32.
    """
    if dtype != torch.int8:
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}
    held = {}
    for name, tensor in tensors.items():
        held[name] = w = tensor.float()
        if w.ndim == 2:
            scale = four_bits((w.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny))
            other = four_bits(scale * 1.0625)  # the next one: that of a row whose largest was rounded down
            exact = ((w / other).round() * other == w).all(1, keepdim=True)
            scale = torch.where(exact, other, scale)  # (R, 1)
            held |= {name: (w / scale).round().to(torch.int8), f"{name}{SCALE}": scale[:, 0]}
    return held


def four_bits(x: Tensor) -> Tensor:
    """The least number >= x > 0 of four significant bits."""
    mantissa, exponent = torch.frexp(x)  # in [.5, 1), and that power of two
    return torch.ldexp((mantissa * 16).ceil(), exponent - 4)


def restored(path: Path, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float32 weights of `stored` ones. ValueError names a matrix of integers without a scale for each row."""
    tensors = {}
    for name, tensor in held.items():
        if tensor.dtype == torch.int8:
            scale = held.get(f"{name}{SCALE}")
            if tensor.ndim != 2 or scale is None or scale.shape != tensor.shape[:1]:
                raise ValueError(f"{path}: tensor {name!r} is of 8-bit integers without a scale for each row; {AGAIN}")
            tensors[name] = tensor.float() * scale.float()[:, None]
        elif held.get(name.removesuffix(SCALE), tensor).dtype != torch.int8:
            tensors[name] = tensor.float()
    return tensors


def check_tensors(path: Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Refuse a missing, an extra or a misshapen tensor of a file, by name."""
    asked, there = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (wanted, found))
    for name in sorted(asked.keys() | there.keys()):
        if asked.get(name) != there.get(name):
            raise ValueError(
                f"{path}: tensor {name!r} is {there.get(name, 'missing')}, "
                f"config.json asks for {asked.get(name, 'no such tensor')}; {AGAIN}"
            )


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_config(root: Path) -> dict[str, Any]:
    """`config.json` of a pair, its format checked."""
    path = root / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; {AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); {AGAIN}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else config
        raise ValueError(f"{path}: format is {found!r}, this version reads {FORMAT!r}; {AGAIN}")
    return config


def section(path: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of the configuration in `path`. ValueError where there is none."""
    found = config.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: has no section {name!r}; {AGAIN}")
    return found


def verified(path: Path, digest: object, source: Path) -> Path:
    """`path`, if its bytes have the SHA-256 that `source` gives. Raises `FileNotFoundError`/`ValueError`."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {AGAIN}")
    if not isinstance(digest, str):
        raise ValueError(f"{source}: has no checksum for {path.name}; {AGAIN}")
    found = sha256(path)
    if found != digest:
        raise ValueError(f"{path}: damaged or another file: SHA-256 is {found}, {source.name} says {digest}; {AGAIN}")
    return path
