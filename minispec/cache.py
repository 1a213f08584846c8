"""The key-value cache: preallocated, one length a row, rollback by changing that length.

A *slot* is a place in the cache; slot = position for committed tokens. Entries at and beyond a row's length
are stale: hidden by the mask, then overwritten. So rolling back costs nothing, and a tree whose nodes lie in
consecutive slots is committed by gathering the accepted path to the front (`keep`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class CacheShape(Protocol):
    """The part of a `GPTConfig` that a cache needs."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_embd(self) -> int: ...


class KVCache:
    """Keys and values (`kv`) of `n_layer` layers for `batch` rows of `capacity` slots, and each row's length.

    Lengths live on the host, since every decision about them is taken there. `write` is called by the model
    between `begin_write` and `end_write`; everyone else uses `rollback`, `keep` and `select`.
    """

    def __init__(
        self,
        config: CacheShape,
        batch: int = 1,
        capacity: int = 1024,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"batch and capacity must be >= 1, got {batch} and {capacity}")
        shape = (config.n_layer, 2, batch, config.n_head, capacity, config.n_embd // config.n_head)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)  # (L, 2, B, H, S, D); zeros, as 0 x NaN is NaN
        self.lengths = [0] * batch
        self.rows: Tensor | None = None  # (B, 1) and (B, T): where a ragged write goes, set by `begin_write`
        self.slots: Tensor | None = None
        self._causal = torch.ones(capacity, capacity, device=device, dtype=torch.bool).tril()  # made once, then sliced

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        return self.kv.shape[4]

    # --- what the model calls -------------------------------------------------------------------------

    def begin_write(self, T: int, mask: Tensor | None = None) -> Tensor | None:
        """Prepare to append T slots to each row; return the attention mask (B or 1, 1, T, S), or None.

        None means that T = 1 or nothing is cached, and attention is plain or causal. `mask` (T, M) or (B, T, M)
        covers the last M slots, as in `GPT.forward`. Raises `ValueError` when a row would overflow.
        """
        longest = max(self.lengths)
        if longest + T > self.capacity:
            raise ValueError(f"cache: {longest} + {T} slots exceed its capacity of {self.capacity}")
        if min(self.lengths) == longest:  # one row, or rows in step: slices, no index writes
            self.rows = self.slots = None
            if mask is None and (T == 1 or longest == 0):
                return None
        else:
            self.rows = torch.arange(self.batch, device=self.kv.device)[:, None]  # (B, 1)
            self.slots = torch.tensor(self.lengths, device=self.kv.device)[:, None] + torch.arange(
                T, device=self.kv.device
            )
        return self._attention_mask(T, mask)

    def write(self, layer: int, kv: Tensor) -> Tensor:
        """Store keys and values (2, B, H, T, D) in the next T slots; return all up to the longest row's end."""
        B, T = self.batch, kv.shape[3]
        start = max(self.lengths)
        store = self.kv[layer][:, :B]  # (2, B, H, S, D)
        if self.slots is None:
            store.narrow(3, start, T).copy_(kv)
        else:
            store[:, self.rows, :, self.slots] = kv.permute(1, 3, 0, 2, 4)  # (B, T, 2, H, D)
        return store.narrow(3, 0, start + T)

    def end_write(self, T: int) -> None:
        """The T new slots of each row count from now on."""
        self.lengths = [length + T for length in self.lengths]

    def _attention_mask(self, T: int, mask: Tensor | None) -> Tensor:
        device, longest = self.kv.device, max(self.lengths)
        if mask is None and self.slots is None:  # causal, aligned bottom right, for all rows
            return self._causal[None, None, longest : longest + T, : longest + T]
        slots = torch.arange(longest + T, device=device)  # (S,)
        if mask is None:
            assert self.slots is not None
            return (slots <= self.slots[..., None])[:, None]  # (B, 1, T, S): the same, row by row
        lengths = torch.tensor(self.lengths, device=device).view(-1, 1, 1)  # (B, 1, 1)
        M = mask.shape[-1]
        start = lengths + T - M  # (B, 1, 1): the first slot that the mask speaks of
        node = slots - start  # (B, 1, S)
        inside = mask.expand(self.batch, T, M).gather(2, node.clamp(0, M - 1).expand(-1, T, -1))  # (B, T, S)
        return ((node < 0) | (inside & (node < M)))[:, None]  # (B, 1, T, S)

    # --- what the decoder calls -----------------------------------------------------------------------

    def rollback(self, lengths: int | Sequence[int]) -> None:
        """Forget every slot from `lengths` (one for all rows, or one a row) on. O(1): nothing is moved.

        Raises `ValueError`, and changes nothing, when a length is negative or more than is there.
        """
        wanted = [lengths] * self.batch if isinstance(lengths, int) else list(lengths)
        if len(wanted) != self.batch or any(not 0 <= w <= n for w, n in zip(wanted, self.lengths, strict=False)):
            raise ValueError(f"rollback: lengths must lie in 0..{self.lengths}, got {wanted}")
        self.lengths = wanted

    def keep(self, paths: Sequence[Sequence[int]], nodes: int) -> None:
        """Of each row's last `nodes` slots keep only those in its path, gathered to the front, in order.

        Paths are strictly increasing indices below `nodes`. Raises `ValueError`, and changes nothing, otherwise.
        """
        if len(paths) != self.batch or not 0 <= nodes <= min(self.lengths):
            raise ValueError(f"keep: {len(paths)} paths of {nodes} nodes do not fit lengths {self.lengths}")
        paths = [[int(node) for node in path] for path in paths]
        for path in paths:
            if path != sorted({*path}) or (path and not 0 <= path[0] <= path[-1] < nodes):
                raise ValueError(f"keep: a path must increase strictly within 0..{nodes - 1}, got {path}")
        moves: list[tuple[int, int, int]] = []  # row, slot from, slot to
        for row, path in enumerate(paths):
            base = self.lengths[row] - nodes
            moves += [(row, base + node, base + i) for i, node in enumerate(path) if node != i]
            self.lengths[row] = base + len(path)
        if moves:
            which, old, new = torch.tensor(moves, device=self.kv.device).unbind(1)
            self.kv[:, :, which, :, new] = self.kv[:, :, which, :, old]  # gather first, then write: they may overlap

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows (increasing), moved to the front; the others cost nothing from now on."""
        if any(b <= a for a, b in zip([-1, *rows], [*rows, self.batch], strict=True)):
            raise ValueError(f"select: rows must increase strictly within 0..{self.batch - 1}, got {list(rows)}")
        for new, old in enumerate(rows):
            if new != old:
                self.kv[:, :, new].copy_(self.kv[:, :, old])
        self.lengths = [self.lengths[row] for row in rows]
