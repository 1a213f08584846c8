"""A promise that no model changes for a while, so that it is looked at once and not at each pass.

To see whether the weights are still those that were copied takes time at each pass, as what is to be looked at lies out
of the processor's caches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class Trust(threading.local):
    """The fused passes that this thread has looked at while nothing changes; None: anything may."""

    known: set[Any] | None = None


TRUST = Trust()


@contextlib.contextmanager
def unchanged(promised: bool = True) -> Iterator[None]:
    """Meanwhile nothing in this thread changes a model or what stands around it, if so `promised`.

    What another thread does to a weight in place counts from the next such time on.
    """
    outer = TRUST.known
    if promised and outer is None:
        TRUST.known = set()
    try:
        yield
    finally:
        TRUST.known = outer
