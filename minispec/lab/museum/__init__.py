"""The museum of bugs: what implementations of speculative decoding got wrong, each in a few lines.

`PIECES` lists them; `python -m minispec.lab.museum` prints which check catches which, and with how many samples.
"""

from minispec.lab.museum import caches, decoders, drafters, rules  # noqa: F401 - each hangs its pieces
from minispec.lab.museum.piece import PIECES, Piece

__all__ = ["PIECES", "Piece"]
