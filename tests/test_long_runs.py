"""Long runs: 200 generations, and one of a whole context: live tensors, memory, step time and acceptance stay as they are."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import mix, random_gpt, stored
from test_edges_batches import ways

from minispec import GPT, Pair, Sampling, Tree, speculate, stream


def live() -> tuple[int, int]:
    """Tensors, and the bytes behind them."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return len(tensors), stored(tensors)


def resident() -> int:
    """Bytes of memory that the process holds; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text(encoding="ascii").split()[1]) * 4096 if path.exists() else 0


def long_gpt(seed: int) -> GPT:
    return random_gpt(seed, vocab=7, block=128, width=16, heads=4, scale=0.4)


@pytest.fixture(scope="module")
def models() -> tuple[GPT, GPT]:
    return long_gpt(1), mix(long_gpt(1), long_gpt(2), 0.3)


def test_200_generations(models: tuple[GPT, GPT]) -> None:
    """Every kind of draft in turn. Calls 181 to 200 are calls 1 to 20 again, and give the same steps."""
    target, draft = models
    several = [(d, o, what) for what, pairs in ways(target, draft).items() for d, o in pairs]
    results, seen, memory, times = [], [], [], []
    for i in range(200):
        seed = i % 180
        drafter, options, what = several[seed % len(several)]
        sampling = Sampling(0) if what == "greedy" else Sampling()
        start = time.perf_counter()
        results.append(
            speculate(target, drafter, [1, 2, seed % 7], max_new_tokens=24, seed=seed, sampling=sampling, **options)
        )
        times.append(time.perf_counter() - start)
        if i in (60, 130, 199):
            seen.append(live())
            memory.append(resident())
    assert results[180:] == results[:20]
    kept = sum(len(r.steps) for r in results[61:])  # what the test itself keeps are no tensors
    assert kept > 100
    assert seen[0] == seen[1] == seen[2]
    assert memory[2] - memory[0] < 16 << 20
    print(f"medians of calls: {statistics.median(times[20:40]):.4f} s, {statistics.median(times[-20:]):.4f} s")


@pytest.mark.parametrize("rule", ["token", "rrs", "match", "traversal"])
def test_one_generation_of_a_whole_context(models: tuple[GPT, GPT], rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one token to the last place: no tensor more from step to step."""
    monkeypatch.setattr("minispec.noise.CUT", 1)  # else there are as many more or fewer of them
    target, draft = models
    options: dict[str, Any] = {"draft_len": 3} if rule in ("token", "match") else {"tree": Tree.branching([2, 1, 1])}
    counts, steps = [], []
    for step in stream(target, draft, [1], max_new_tokens=500, seed=3, rule=rule, stop=(), **options):
        steps.append(step)
        if len(steps) % 12 == 0 and sum(len(s.tokens) for s in steps) < 120:  # behind it trees are cut, and cached
            counts.append(live())
    assert steps[-1].finish_reason == "context"
    assert sum(len(s.tokens) for s in steps) == 127
    assert len(counts) > 1
    tensors = [number for number, _ in counts]
    assert max(tensors) - min(tensors) < 12  # less than one a step; a tree of a shape not met before is remembered
    assert max(size for _, size in counts) - min(size for _, size in counts) < 4096


@pytest.mark.slow
def test_200_generations_of_the_shipped_pair_and_one_whole_context(shipped: Pair) -> None:
    """RSS, live tensors, times: printed; memory asserted."""
    prompt = shipped.tokenizer.encode("Once upon a time")
    seen, memory, times, rates = [], [], [], []
    for i in range(200):
        start = time.perf_counter()
        result = speculate(shipped.target, shipped.draft, prompt, max_new_tokens=24, seed=i % 180, stop=(), draft_len=4)
        times.append((time.perf_counter() - start) / len(result.steps))
        rates.append(result.stats.acceptance_rate)
        if i in (20, 100, 199):
            seen.append(live())
            memory.append(resident())
    assert rates[:20] == rates[180:]
    assert seen[0] == seen[2]
    assert memory[2] - memory[0] < 32 << 20
    steps, start, laps = [], time.perf_counter(), []
    for step in stream(shipped.target, shipped.draft, prompt, max_new_tokens=500, seed=1, stop=(), draft_len=4):
        steps.append(step)
        laps.append(time.perf_counter() - start)
        start = time.perf_counter()
    assert steps[-1].finish_reason == "context"
    quarter = len(laps) // 4
    print(f"RSS {[m >> 20 for m in memory]} MB, tensors {seen}, step {statistics.median(times[:20]):.4f} s at first, "
          f"{statistics.median(times[180:]):.4f} s at last; one context: first quarter {statistics.median(laps[1:quarter]):.4f} s "
          f"a step, last {statistics.median(laps[-quarter:]):.4f} s", file=sys.stderr)  # fmt: skip
