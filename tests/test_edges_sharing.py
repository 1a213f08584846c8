"""Threads, exceptions, streams left half-way: nothing is shared that matters, and nothing stays behind."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from doubles import mix, random_gpt
from test_edges_batches import ways

from minispec import GPT, KVCache, ModelDrafter, Pair, Sampling, Tree, generate, speculate, stream
from minispec.around import Around
from minispec.linear import LARGE, Linear


@pytest.fixture(scope="module")
def models() -> tuple[GPT, GPT]:
    target = random_gpt(1, vocab=7, block=64, width=16, heads=4, scale=0.4)
    return target, mix(target, random_gpt(2, vocab=7, block=64, width=16, heads=4, scale=0.4), 0.3)


def jobs(target: GPT, draft: GPT) -> list[Callable[[], Any]]:
    """A call of every kind of draft and rule."""
    found: list[Callable[[], Any]] = []
    for what, several in ways(target, draft).items():
        for number, (drafter, options) in enumerate(several):
            sampling = Sampling(0) if what == "greedy" else Sampling(0.8)
            call = {"max_new_tokens": 30, "sampling": sampling, "seed": number, **options}
            found.append(lambda d=drafter, c=call: speculate(target, d, [[1], [2, 3]], **c))
    return found


def at_once(calls: list[Callable[[], Any]], workers: int) -> list[Any]:
    """Results of the calls, begun together."""
    barrier = threading.Barrier(workers)

    def run(share: list[Callable[[], Any]]) -> list[Any]:
        barrier.wait()
        return [call() for call in share]

    with ThreadPoolExecutor(workers) as pool:
        shares = list(pool.map(run, [calls[i::workers] for i in range(workers)]))
    return [shares[i % workers][i // workers] for i in range(len(calls))]


def test_two_threads_on_one_pair_give_what_one_gives(models: tuple[GPT, GPT]) -> None:
    calls = jobs(*models)
    want = [call() for call in calls]
    for workers in (2, 4):
        assert at_once(calls, workers) == want
    twice = [call for call in calls for _ in range(2)]  # the same drafter object in both threads at the same time
    assert at_once(twice, 2) == [result for result in want for _ in range(2)]


def test_two_threads_on_the_shipped_pair(shipped: Pair) -> None:
    """Large weights are packed once for all threads, and by whichever comes first."""
    for linear in (m for m in shipped.target.modules() if isinstance(m, Linear)):
        linear.packed.clear()
    shipped.target.head.clear()
    calls = [
        lambda s=seed: speculate(
            shipped.target, shipped.draft, [5, 6, 7], max_new_tokens=16, sampling=Sampling(0.7), seed=s, stop=()
        )
        for seed in range(4)
    ]
    together = at_once(calls, 2)  # the first thing done with these weights
    assert together == [call() for call in calls]


def test_a_layer_shared_by_threads_that_pack_and_unpack_it() -> None:
    """One thread decodes, another one trains or works with autocast on the same layer and so throws the copy away."""
    layer = Linear(512, 512)
    assert layer.weight.numel() >= LARGE
    x = torch.randn(4, 512)
    with torch.no_grad():
        want = layer(x)
    wrong: list[Any] = []
    stop = threading.Event()

    def unpack() -> None:
        while not stop.is_set():
            layer(x)  # with gradients: the plain path, which forgets the packed copy

    def decode() -> None:
        try:
            with torch.inference_mode():
                for _ in range(300):
                    if not torch.allclose(layer(x), want, atol=1e-5):
                        wrong.append("another result")
        except Exception as error:
            wrong.append(error)

    others = [threading.Thread(target=unpack) for _ in range(2)]
    workers = [threading.Thread(target=decode) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many chances to meet as there can be
    try:
        for thread in others + workers:
            thread.start()
        for thread in workers:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
    for thread in others:
        thread.join()
    assert wrong == []


# --- exceptions and abandoned streams -------------------------------------------------------------------------


class Breaking:
    """A drafter whose session raises at the n-th call of one of its methods."""

    def __init__(self, inner: ModelDrafter, method: str, after: int) -> None:
        self.inner, self.method, self.after = inner, method, after
        self.kind, self.max_nodes, self.model = inner.kind, inner.max_nodes, inner.model

    def begin(self, prompts: Any, sampling: Sampling) -> Any:
        if self.method == "begin":
            raise ZeroDivisionError("begin")
        session, left = self.inner.begin(prompts, sampling), self.after
        original = getattr(session, self.method)

        def broken(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise ZeroDivisionError(self.method)
            return original(*args)

        setattr(session, self.method, broken)
        return session


@pytest.mark.parametrize("method", ["begin", "propose", "commit", "select"])
def test_case_14_an_exception_in_a_drafter_leaves_nothing_behind(
    models: tuple[GPT, GPT], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models
    caches: weakref.WeakSet[KVCache] = weakref.WeakSet()
    original = KVCache.__init__

    def watched(self: KVCache, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        caches.add(self)

    monkeypatch.setattr(KVCache, "__init__", watched)
    drafter = ModelDrafter(draft, Tree.branching([2, 1]))
    call: dict[str, Any] = {"max_new_tokens": [20, 3, 9], "seed": 5}
    prompts = [[1, 2], [3], [4, 4, 4]]
    want = speculate(target, drafter, prompts, **call)
    state = torch.get_rng_state()
    weights = {n: w.clone() for n, w in target.state_dict().items()}
    for after in (0, 1, 2) if method in ("propose", "commit") else (0,):
        with pytest.raises(ZeroDivisionError, match=method):
            speculate(target, Breaking(drafter, method, after), prompts, **call)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert speculate(target, drafter, prompts, **call) == want
    assert all(torch.equal(w, weights[n]) for n, w in target.state_dict().items())
    gc.collect()
    assert len(caches) == 0


def test_case_14_a_stream_left_at_any_step_leaves_nothing_behind(models: tuple[GPT, GPT]) -> None:
    target, draft = models
    drafter = ModelDrafter(draft, Tree.chain(3))
    call: dict[str, Any] = {"max_new_tokens": 20, "seed": 5}
    want = list(stream(target, drafter, [1, 2], **call))
    gc.collect()
    before = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    for taken in range(len(want) + 1):
        half = stream(target, drafter, [1, 2], **call)
        assert list(itertools.islice(half, taken)) == want[:taken]
        other = stream(target, drafter, [1, 2], **call)  # two at once, step by step
        assert next(other) == want[0]
        assert list(half) == want[taken:]
        del half, other
    gc.collect()
    assert sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()) <= before
    assert not torch.is_inference_mode_enabled()


def test_every_pass_runs_in_inference_mode_and_no_caller_does(models: tuple[GPT, GPT]) -> None:
    seen: list[bool] = []

    class Watched(Around):
        def __call__(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(torch.is_inference_mode_enabled())
            return super().__call__(tokens, *args, **kwargs)

    target, draft = (Watched(model) for model in models)
    steps = 0
    for _ in stream(target, draft, [1, 2], max_new_tokens=12, seed=1, stop=()):
        steps += 1
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert len(seen) > 2 * steps
    assert all(seen)
    seen.clear()
    speculate(target, draft, [1, 2], max_new_tokens=12, seed=1, stop=())
    assert all(seen)
    assert not torch.is_inference_mode_enabled()


def test_streams_interleaved_are_what_they_are_alone(models: tuple[GPT, GPT]) -> None:
    target, draft = models
    calls = [{"max_new_tokens": 20, "seed": s, "rule": r} for s, r in ((1, "token"), (2, "match"), (1, "block"))]
    alone = [list(stream(target, draft, [1], **c)) for c in calls]
    mixed: list[list[Any]] = [[] for _ in calls]
    for steps in itertools.zip_longest(*(stream(target, draft, [1], **c) for c in calls)):
        for found, step in zip(mixed, steps, strict=True):
            found += [step] if step is not None else []
    assert mixed == alone


def test_ctrl_c_in_the_middle_of_a_pass_ends_the_call_and_nothing_else(models: tuple[GPT, GPT]) -> None:
    target, draft = models

    class Pressed:
        config, device, dtype = target.config, target.device, target.dtype

        def __init__(self, at: int) -> None:
            self.left = at

        def __call__(self, *args: Any) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return target(*args)

    want = speculate(target, draft, [1, 2], max_new_tokens=20, seed=1)
    for at in range(4):
        with pytest.raises(KeyboardInterrupt):
            speculate(Pressed(at), draft, [1, 2], max_new_tokens=20, seed=1)
        with pytest.raises(KeyboardInterrupt):
            generate(Pressed(at), [1, 2], max_new_tokens=20, seed=1)
        assert not torch.is_inference_mode_enabled()
        assert speculate(target, draft, [1, 2], max_new_tokens=20, seed=1) == want
    got = []
    with pytest.raises(KeyboardInterrupt):
        for step in stream(Pressed(3), draft, [1, 2], max_new_tokens=20, seed=1):
            got.append(step)
    assert got == want.steps[:2]  # what was produced: a prefill and two passes
