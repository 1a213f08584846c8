"""Files written whole or not at all, and tensors in safetensors."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it when the block ends well; a kill leaves the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically, with `\\n` line ends on every system."""
    with atomic(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    with atomic(path) as temporary:
        save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, str(temporary), dict(metadata or {}))


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
