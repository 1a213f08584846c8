"""Times of both models' passes on the machine at hand: what the cost model (`planner`) reckons with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from minispec.cache import KVCache
from minispec.model import LanguageModel
from minispec.planner import Costs

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32)
STEPS = 4  # of the draft, timed together


@torch.inference_mode()
def measure(
    target: LanguageModel,
    draft: LanguageModel,
    context: int = 64,
    sizes: Sequence[int] = SIZES,
    repeats: int = 15,
    batch: int = 1,
) -> Costs:
    """Time the passes of both models over n tokens of each of `batch` rows, behind `context` tokens.

    Medians, sizes in turn. A draft step is one of some, made as the loop makes them, after the first behind a target
    pass: that one finds its weights thrown out of the processor's cache, once a step, which counts as overhead.
    Overheads are left at 0.
    """
    count = min(STEPS, draft.config.block_size - context)
    room = context + max(*sizes, count)
    caches = [KVCache(m.config, batch, room, device=m.device, dtype=m.dtype) for m in (target, draft)]
    text = torch.zeros(batch, context, dtype=torch.long, device=target.device)
    for model, cache in zip((target, draft), caches, strict=True):
        model(text, cache)

    def timed(model: LanguageModel, cache: KVCache, n: int) -> float:
        cache.rollback(context)
        ids = text[:, :1].expand(batch, n)
        return seconds(lambda: model(ids, cache), target.device)

    passes: dict[int, list[float]] = {n: [] for n in sizes}
    steps: list[float] = []
    for repeat in range(repeats + 2):  # the first two rounds warm up
        for n in sizes:
            spent = timed(target, caches[0], n)
            timed(draft, caches[1], 1)
            caches[1].rollback(context)
            step = seconds(lambda: take_steps(draft, caches[1], count), target.device) / count
            if repeat > 1:
                passes[n].append(spent)
                steps.append(step)
    return Costs({n: statistics.median(spent) for n, spent in passes.items()}, statistics.median(steps))


def take_steps(model: LanguageModel, cache: KVCache, count: int) -> None:
    """`count` passes over one token of each row, one after the other: in one call where the loop has it so."""
    chain, rows = getattr(type(model), "chain", None), [[0]] * cache.batch
    if chain is None or chain(model, rows, cache, count, 1.0, None) is None:
        ids = torch.tensor(rows, device=model.device)
        for _ in range(count):
            model(ids, cache)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of `work`, the device's queue included."""
    wait = waiting(device)
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def waiting(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done all that it was told to do."""
    return {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
