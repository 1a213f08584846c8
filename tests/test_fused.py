"""The fused pass: bit for bit what the modules do, taken where it should be, never stale, out of the way of others."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minispec import (
    GPT,
    RULES,
    EarlyExitDrafter,
    GPTConfig,
    KVCache,
    ModelDrafter,
    Randomness,
    Rule,
    Sampling,
    fused,
    generate,
    speculate,
    stream,
)
from minispec.around import Around
from minispec.drafters import ModelSession
from minispec.linear import AVAILABLE as ONEDNN
from minispec.linear import FEW, halves
from minispec.model import Attention, read
from minispec.tree import Tree
from minispec.trust import TRUST, unchanged

SHAPES = {
    "small": GPTConfig(50, 96, 2, 4, 32),
    "by columns": GPTConfig(300, 96, 2, 4, 64),  # some of its weights
    "packed": GPTConfig(1024, 96, 2, 4, 256),
    "one": GPTConfig(3, 8, 1, 1, 4),
    "small halves": GPTConfig(300, 96, 2, 4, 64),  # weights that half precision holds
    "halves": GPTConfig(1024, 96, 2, 4, 256),
}
AVAILABLE = fused.compiled() is not None


def model(name: str = "small") -> GPT:
    torch.manual_seed(0)
    gpt = GPT(SHAPES[name])
    for parameter in gpt.parameters():  # biases and norms too
        nn.init.normal_(parameter, std=0.1)
    if "halves" in name:
        gpt.bfloat16().float()
    return gpt.requires_grad_(False)


@pytest.fixture(autouse=True)
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision is tried on every machine."""
    monkeypatch.setattr("minispec.linear.HALF", True)


@torch.no_grad()
def test_halves_are_halves() -> None:
    for name, index in (("small halves", 0), ("halves", 1)):
        gpt = model(name)
        gpt(torch.tensor([[1]]), KVCache(gpt.config))
        copies = [gpt.h[0].mlp.c_fc.packed.of(gpt.h[0].mlp.c_fc.weight), gpt.head.of(gpt.wte.weight)]
        for copy_ in copies:
            held = (not isinstance(copy_, Tensor), isinstance(copy_, Tensor) and copy_.dtype is torch.uint8)
            assert held == ((False, halves()[0]) if index == 0 else (halves()[1], False))


@torch.no_grad()
def test_a_pass_too_long_for_small_halves_is_the_modules(passes: Callable[[], int]) -> None:
    gpt = model("small halves")
    for count, T in ((1, FEW), (2 - halves()[0], FEW + 1)):
        tokens = torch.arange(T)[None]
        caches = [KVCache(gpt.config) for _ in range(2)]
        same(gpt(tokens, caches[0]), by_modules(gpt, tokens, caches[1]), "small halves")
        assert passes() == count * AVAILABLE


@torch.no_grad()
def test_only_for_onednn_few_rows_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "LEAST", 4)  # as with AVX-512
    for name in ("small", "packed", "halves"):
        gpt = model(name)
        kept = fused.keep(gpt)
        assert kept.least == (4 if any(weight.is_mkldnn for weight in kept.weights) else 1)
        assert (kept.least == 4) == (name == "packed" and ONEDNN) or (name == "halves" and not all(halves()))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many passes were fused."""
    count = 0
    run = fused.compiled()

    def counted(*args: object) -> Tensor:
        nonlocal count
        assert run is not None
        logits = run(*args)
        count += 1
        return logits

    monkeypatch.setattr(fused, "compiled", lambda: counted if AVAILABLE else None)
    return lambda: count


def by_modules(gpt: GPT, tokens: Tensor, cache: KVCache, *args: Tensor | None) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "compiled", lambda: None)
        return gpt(tokens, cache, *args)


def same(a: Tensor, b: Tensor, name: str) -> None:
    """To the last bit; but a single row is carried four times through all layers where some are packed."""
    assert torch.equal(a, b) if name != "packed" else (a - b).abs().max() < 2e-6


def test_torchscript_is_there() -> None:
    """On every Python below 3.14 the pass is really fused: otherwise all below would compare modules with modules."""
    assert (sys.version_info < (3, 14)) == AVAILABLE


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_bit_for_bit_what_the_modules_do(name: str, rows: int, passes: Callable[[], int]) -> None:
    gpt = model(name)
    caches = [KVCache(gpt.config, rows, 12 if name == "one" else 128) for _ in range(2)]
    lengths = [1, 2, 1, 1, 3] if name == "one" else [1, 30, 1, 1, 6, 11, 2, 1]
    for seed, T in enumerate(lengths):
        tokens = torch.randint(gpt.config.vocab_size, (rows, T), generator=torch.Generator().manual_seed(seed))
        same(gpt(tokens, caches[0]), by_modules(gpt, tokens, caches[1]), name)
        same(caches[0].kv, caches[1].kv, name)
        assert caches[0].lengths == caches[1].lengths
    long = sum(rows * T > FEW for T in lengths) if "halves" in name and halves()[0] else 0
    assert passes() == (len(lengths) - long) * AVAILABLE


@pytest.mark.parametrize("name", ["small", "by columns", "packed", "small halves", "halves"])
@torch.no_grad()
def test_ragged_rows_and_trees(name: str, passes: Callable[[], int]) -> None:
    gpt, tree = model(name), Tree.branching([3, 2])

    def some_passes(cache: KVCache) -> None:
        read(gpt, cache, [[1, 2, 3], [4], [5, 6, 7, 8, 9]])
        gpt(torch.tensor([[1, 2], [3, 4], [5, 6]]), cache)
        positions = torch.tensor(cache.lengths)[:, None] + tree.depths
        gpt(torch.arange(30).view(3, 10), cache, positions, tree.mask)
        cache.keep([[0, 1, 4], [0], [0, 3]], 10)
        cache.select([0, 2])
        gpt(torch.tensor([[1], [2]]), cache)

    caches = [KVCache(gpt.config, 3, 128) for _ in range(2)]
    some_passes(caches[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "compiled", lambda: None)
        some_passes(caches[1])
    same(caches[0].kv, caches[1].kv, name)
    assert passes() == 4 * AVAILABLE


def test_what_the_modules_do_themselves(passes: Callable[[], int]) -> None:
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        model()(tokens)  # no cache
        gpt = model().double()
        gpt(tokens, KVCache(gpt.config, dtype=torch.float64))
        gpt = model().bfloat16()
        gpt(tokens, KVCache(gpt.config, dtype=torch.bfloat16))
        gpt = model()
        with torch.autocast("cpu", torch.bfloat16):
            gpt(tokens, KVCache(gpt.config))

        class Own(KVCache):
            pass

        gpt(tokens, Own(gpt.config))
    gpt = model()
    gpt(tokens, KVCache(gpt.config))  # there might be something to differentiate
    assert passes() == 0


def changes() -> list[Callable[[GPT], None]]:
    def in_place(gpt: GPT) -> None:
        gpt.h[0].mlp.c_fc.weight.mul_(2)
        gpt.wte.weight.mul_(2)

    def a_small_one(gpt: GPT) -> None:
        gpt.h[1].ln_2.bias.add_(1)

    def state_dict(gpt: GPT) -> None:
        gpt.load_state_dict({name: 2 * value for name, value in gpt.state_dict().items()})

    def assigned(gpt: GPT) -> None:
        gpt.load_state_dict({name: 2 * value for name, value in gpt.state_dict().items()}, assign=True)

    def round_trip(gpt: GPT) -> None:
        gpt.bfloat16().float()

    def data(gpt: GPT) -> None:
        gpt.h[0].attn.c_attn.bias.data = torch.ones_like(gpt.h[0].attn.c_attn.bias)

    def data_of_a_weight(gpt: GPT) -> None:
        gpt.h[0].mlp.c_fc.weight.data = 2 * gpt.h[0].mlp.c_fc.weight

    def data_of_the_table(gpt: GPT) -> None:
        gpt.wte.weight.data = 2 * gpt.wte.weight

    def evolved(gpt: GPT) -> None:  # the numbers before the last ones lie free, and the next may get their place
        start = nn.utils.parameters_to_vector(gpt.parameters()).clone()
        for _ in range(4):
            nn.utils.vector_to_parameters(start + 0.1 * torch.randn_like(start), gpt.parameters())
            gpt(torch.tensor([[1]]), KVCache(gpt.config))
            nn.utils.vector_to_parameters(start, gpt.parameters())
        nn.utils.vector_to_parameters(2 * start, gpt.parameters())

    def sampled_before_the_step(gpt: GPT) -> None:
        gpt.requires_grad_(True)
        optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1, fused=True)
        with torch.enable_grad():
            gpt(torch.ones(1, 5, dtype=torch.long)).logsumexp(-1).sum().backward()
        gpt(torch.tensor([[1]]), KVCache(gpt.config))
        optimizer.step()
        optimizer.zero_grad()

    def trained(gpt: GPT) -> None:
        gpt.requires_grad_(True)
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.1, fused=True)
        with torch.enable_grad():
            gpt(torch.ones(1, 5, dtype=torch.long)).logsumexp(-1).sum().backward()
        optimizer.step()
        gpt.requires_grad_(False)

    def another_parameter(gpt: GPT) -> None:
        gpt.h[1].attn.c_proj.weight = nn.Parameter(2 * gpt.h[1].attn.c_proj.weight, requires_grad=False)

    def another_module(gpt: GPT) -> None:
        gpt.h[0] = copy.deepcopy(gpt.h[1])

    def fewer_layers(gpt: GPT) -> None:
        gpt.h[1].mlp = copy.deepcopy(gpt.h[0].mlp)

    def a_module_of_another_kind(gpt: GPT) -> None:
        gpt.h[0].ln_1 = nn.Identity()

    def a_norm_of_another_kind(gpt: GPT) -> None:
        gpt.ln_f = nn.LayerNorm(gpt.config.n_embd, eps=0.1)

    def a_hook(gpt: GPT) -> None:
        gpt.h[0].mlp.register_forward_hook(lambda module, args, out: 2 * out)

    def a_hook_before(gpt: GPT) -> None:
        gpt.h[0].attn.c_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))

    def its_own_forward(gpt: GPT) -> None:
        before = gpt.h[1].mlp.forward
        gpt.h[1].mlp.forward = lambda x: 2 * before(x)

    def its_own_gelu(gpt: GPT) -> None:
        gpt.h[1].mlp.c_fc.gelu = gpt.h[1].mlp.c_fc.forward

    return [value for value in locals().values() if callable(value)]


@pytest.mark.parametrize("name", ["small", "by columns", "packed", "small halves", "halves"])
@pytest.mark.parametrize("change", changes(), ids=lambda f: f.__name__)
@torch.no_grad()
def test_a_changed_model_gives_what_its_modules_give(name: str, change: Callable[[GPT], None]) -> None:
    gpt = model(name)
    before, tokens = KVCache(gpt.config), torch.tensor([[3, 1, 4, 1, 5]])
    old = gpt(tokens, before)
    change(gpt)
    caches = KVCache(gpt.config), KVCache(gpt.config)
    new = gpt(tokens, caches[0])
    assert torch.equal(new, by_modules(gpt, tokens, caches[1]))
    assert not torch.equal(new, old) or change.__name__ == "round_trip"


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_a_state_dict_loaded_in_inference_mode(name: str) -> None:
    gpt, tokens = model(name), torch.tensor([[1, 2, 1]])
    gpt(tokens, KVCache(gpt.config))
    gpt.load_state_dict({name: 2 * value for name, value in gpt.state_dict().items()})
    same(gpt(tokens, KVCache(gpt.config)), by_modules(copy.deepcopy(gpt), tokens, KVCache(gpt.config)), name)


@torch.no_grad()
def test_while_an_optimizer_is_about_to_step_the_modules_do_it(passes: Callable[[], int]) -> None:
    gpt = model("by columns").requires_grad_(True)
    with torch.enable_grad():
        gpt(torch.tensor([[1, 2]])).sum().backward()
    gpt(torch.tensor([[1]]), KVCache(gpt.config))
    assert passes() == 0
    gpt.zero_grad()
    gpt(torch.tensor([[1]]), KVCache(gpt.config))
    assert passes() == AVAILABLE


@torch.no_grad()
def test_hooks_see_a_pass_and_are_forgotten(passes: Callable[[], int]) -> None:
    gpt, seen = model(), []
    cache = KVCache(gpt.config)
    gpt(torch.tensor([[1]]), cache)
    with_hooks = [
        gpt.h[0].attn.register_forward_hook(lambda *args: seen.append("attention")),
        nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(type(module).__name__)),
    ]
    for left in (2, 1, 0):
        gpt(torch.tensor([[1]]), cache)
        assert passes() == (1 + (left == 0)) * AVAILABLE
        if left:
            with_hooks.pop(0).remove()
    assert seen.count("attention") == 1
    assert seen.count("Attention") == 4  # both layers of both passes


@torch.no_grad()
def test_a_class_that_was_patched(monkeypatch: pytest.MonkeyPatch, passes: Callable[[], int]) -> None:
    gpt, cache = model(), KVCache(SHAPES["small"])
    gpt(torch.tensor([[1]]), cache)
    monkeypatch.setattr(Attention, "forward", lambda self, x, *args: x)
    gpt(torch.tensor([[1]]), cache)
    assert passes() == AVAILABLE
    assert not cache.kv[:, :, :, :, 1].any()


@torch.no_grad()
def test_the_default_dtype_does_not_matter(passes: Callable[[], int]) -> None:
    gpt, tokens = model("packed"), torch.tensor([[3, 1]])
    want = gpt(tokens, KVCache(gpt.config))
    torch.set_default_dtype(torch.float64)
    try:
        cache = KVCache(gpt.config)
        assert torch.equal(gpt(tokens, cache), want)
        gpt(tokens, cache)  # with a mask
    finally:
        torch.set_default_dtype(torch.float32)
    assert passes() == 3 * AVAILABLE


@torch.no_grad()
def test_copies_of_weights_are_given_up_when_the_model_moves() -> None:
    gpt = model("packed")
    gpt(torch.tensor([[1]]), KVCache(gpt.config))
    assert (gpt.fused._kept is not None) == AVAILABLE
    gpt.double()
    assert gpt.fused._kept is None


@torch.no_grad()
def test_models_that_share_layers(passes: Callable[[], int]) -> None:
    target = model("packed")
    draft = EarlyExitDrafter(target, 1).model
    tokens = torch.tensor([[3, 1, 4]])
    for _ in range(2):
        caches = KVCache(draft.config), KVCache(draft.config)
        same(draft(tokens, caches[0]), by_modules(draft, tokens, caches[1]), "packed")
        target(tokens, KVCache(target.config))
        target.h[0].mlp.c_fc.weight.mul_(2)
        target.ln_f.bias.add_(1)
    assert passes() == 4 * AVAILABLE


@torch.no_grad()
def test_an_error_is_the_modules_own() -> None:
    gpt, cache = model(), KVCache(SHAPES["small"])
    for tokens in ([[50]], [[-1]]):
        with pytest.raises(IndexError, match="out of range"):
            gpt(torch.tensor(tokens), cache)
    assert cache.lengths == [0]
    gpt(torch.tensor([[1]]), cache)
    assert cache.lengths == [1]


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch 2.4, unpickling its own
@pytest.mark.parametrize("name", ["packed", "halves"])
@torch.no_grad()
def test_copies_threads_and_weights_made_in_inference_mode(name: str) -> None:
    gpt, tokens = model(name), torch.tensor([[3, 1, 4, 1, 5]])
    want = gpt(tokens, KVCache(gpt.config))
    for other in (copy.deepcopy(gpt), pickle.loads(pickle.dumps(gpt))):
        assert other.fused is not gpt.fused
        assert torch.equal(other(tokens, KVCache(gpt.config)), want)

    def again(_: int) -> Tensor:
        with torch.no_grad():
            return gpt(tokens, KVCache(gpt.config))

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(got, want) for got in pool.map(again, range(40)))
    with torch.inference_mode():
        made = model(name)
        got = made(tokens, KVCache(gpt.config))  # small weights that do not count their changes are read themselves
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # which other kernels may sum in another order


@torch.no_grad()
def test_as_plain_python_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler is given to read."""
    for name in SHAPES:
        gpt = model(name)
        rows = [[1, 2], [0, 1]]
        want = read(gpt, KVCache(gpt.config, 2), rows), read(gpt, KVCache(gpt.config), rows[:1])
        with monkeypatch.context() as patch:
            patch.setattr(fused, "compiled", lambda: fused.stack)
            assert torch.equal(read(gpt, KVCache(gpt.config, 2), rows), want[0])
            assert torch.equal(read(gpt, KVCache(gpt.config), rows[:1]), want[1])
        cache, prompt = KVCache(gpt.config), torch.tensor([[1, 2]])
        found = gpt.fused.chain(gpt, prompt, cache, 3, 0.5, None)
        if found is not None:
            kept = gpt.fused.look(gpt)
            cache.rollback(0)
            place = (kept.weights, kept.halves, cache.kv, 0, gpt.config.n_head, kept.least)
            again = fused.chain(prompt, cache.begin_write(2), *place, [], 3, 0.5)
            assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


# --- a chain of passes in one call ----------------------------------------------------------------------


def level_by_level(
    gpt: GPT, rows: list[list[int]], cache: KVCache, count: int, T: float, rng: Randomness | None
) -> Any:
    """What `GPT.chain` does, by a pass, a law and a draw at a time."""
    tokens = torch.tensor(rows)
    drawn, laws = [tokens[:, -1:]], []
    for _ in range(count):
        laws.append(Sampling(T).probs(gpt(tokens, cache)[:, -1]))
        tokens = (laws[-1].argmax(-1) if rng is None else rng.pick(laws[-1]))[:, None]
        drawn.append(tokens)
    return torch.cat(drawn, 1), torch.stack(laws, 1)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "one"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drawn", [True, False])
@torch.no_grad()
def test_a_chain_is_its_passes(name: str, rows: int, drawn: bool) -> None:
    gpt = model(name)
    caches = [KVCache(gpt.config, rows, 40) for _ in range(2)]
    rngs = [Randomness(5, rows) if drawn else None for _ in range(2)]
    shape = (rows, gpt.config.vocab_size)
    for count, T, n in ((1, 1.0, 1), (3, 0.7, 3), (5, 1.0, 2), (2, 1e-30, 1), (4, 3.0, 2)):
        prompt = [[(7 * row + i + count) % 50 for i in range(n)] for row in range(rows)]
        noise = None if rngs[0] is None else partial(rngs[0]._noise.fresh.next, shape, torch.float32)
        found = gpt.chain(prompt, caches[0], count, T, noise)
        want = level_by_level(gpt, prompt, caches[1], count, T, rngs[1])
        assert (found is not None) == AVAILABLE
        if found is not None:
            assert [x.shape for x in found] == [(rows, count + 1), (rows, count, shape[1])]
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
            assert torch.equal(caches[0].kv, caches[1].kv)
            assert caches[0].lengths == caches[1].lengths
        for cache in caches:
            cache.rollback(cache.lengths[0] - count // 2)


@torch.no_grad()
def test_where_there_is_no_such_call_nothing_is_done() -> None:
    def never() -> Tensor:
        raise AssertionError("noise was taken")

    gpt, text = model(), [[1, 2, 3]]
    full = KVCache(gpt.config, 1, 128)
    gpt(torch.zeros(1, 92, dtype=torch.long), full)
    ragged = KVCache(gpt.config, 2, 20)
    read(gpt, ragged, [[1], [1, 2]])
    for cache, rows, count in (
        (full, text, 3),  # 92 + 3 + 2 tokens of 96
        (KVCache(gpt.config, 1, 5), text, 4),  # 3 + 3 slots of 5
        (ragged, [[1], [2]], 2),
        (KVCache(gpt.config, 2, 9), [[1], [2, 3]], 2),
    ):
        lengths = list(cache.lengths)
        assert gpt.chain(rows, cache, count, 1.0, never) is None
        assert cache.lengths == lengths
    assert (gpt.chain(text, full, 2, 1.0, None) is not None) == AVAILABLE
    assert (gpt.chain(text, KVCache(gpt.config, 1, 5), 3, 1.0, None) is not None) == AVAILABLE
    hooked = model()
    hooked.h[0].register_forward_hook(lambda *args: None)
    wide = model("small halves")
    others = [hooked, model().double(), model().bfloat16(), *([wide] if halves()[0] else [])]
    for other in others:
        cache = KVCache(other.config, 1, 96, dtype=other.dtype)
        assert other.chain([[1] * (FEW + 1)], cache, 2, 1.0, never) is None
        assert cache.lengths == [0]
    with torch.enable_grad():
        assert gpt.requires_grad_(True).chain(text, KVCache(gpt.config), 2, 1.0, never) is None


@pytest.mark.parametrize("rule", ["token", "block", "match", "rrs", "coupled"])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.6), Sampling(0), Sampling(1, top_k=20), Sampling(1, top_p=0.9)]
)
def test_a_call_says_the_same_with_and_without(rule: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one length, so that rows go in step at first; the ends of the rows and of the context included."""
    target = model()
    torch.manual_seed(1)
    draft = GPT(replace(SHAPES["small"], n_layer=1)).requires_grad_(False)
    calls, chain = 0, GPT.chain

    def counted(self: GPT, *args: Any) -> Any:
        nonlocal calls
        found = chain(self, *args)
        calls += found is not None
        return found

    def decoded() -> list[Any]:
        options = {"sampling": sampling, "rule": rule, "draft_len": 4}
        alone = speculate(target, draft, [3, 1, 4], max_new_tokens=120, seed=2, **options)
        return [
            alone,
            *speculate(target, draft, [[3, 1], [2, 7], [5, 5]], max_new_tokens=[30, 9, 1], seed=3, **options),
        ]

    monkeypatch.setattr(GPT, "chain", counted)
    with_it, taken = decoded(), calls
    monkeypatch.setattr(GPT, "chain", lambda self, *args: None)
    assert decoded() == with_it
    plain = rule == "match" or (rule != "coupled" and sampling in (Sampling(), Sampling(0.6)))
    assert (taken > 10) == (AVAILABLE and plain)
    assert taken == 0 or (AVAILABLE and plain)


@pytest.mark.parametrize("name", ["draw", "read_level", "read_last"])
@pytest.mark.parametrize("by", ["subclass", "instance"])
def test_a_session_of_ones_own_does_every_step(name: str, by: str) -> None:
    target, asked = model(), []

    def watched(session: ModelSession, *args: Any) -> Any:
        asked.append(name)
        return getattr(ModelSession, name)(session, *args)

    class Own(ModelDrafter):
        def begin(self, *args: Any) -> ModelSession:
            if by == "subclass":
                return type("Mine", (ModelSession,), {name: watched})(self, *args)
            session = super().begin(*args)
            setattr(session, name, partial(watched, session))
            return session

    found = speculate(target, Own(target, Tree.chain(2)), [1, 2], max_new_tokens=9, rule="token", seed=4)
    assert len(asked) >= 3
    assert found == speculate(target, target, [1, 2], max_new_tokens=9, draft_len=2, rule="token", seed=4)


def test_an_rng_of_ones_own_sees_every_draw() -> None:
    class Own(Randomness):
        picks = 0

        def pick(self, weights: Tensor, at: Any = None) -> Tensor:
            Own.picks += 1
            return super().pick(weights, at)

    target = model()
    mine = speculate(target, target, [1, 2], max_new_tokens=9, draft_len=2, rule="token", rng=Own(4))
    assert Own.picks == 9
    assert mine == speculate(target, target, [1, 2], max_new_tokens=9, draft_len=2, rule="token", seed=4)


def test_a_draft_with_a_nan_is_refused_all_the_same() -> None:
    target, draft = model(), model()
    draft.ln_f.bias[0] = torch.nan
    for rule in ("match", "token", "block"):
        with pytest.raises(ValueError, match="draft logits: a NaN"):
            speculate(target, draft, [1, 2], max_new_tokens=9, draft_len=3, rule=rule, seed=0)


# --- a promise that nothing changes ------------------------------------------------------------------------


def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whoever is looked at."""
    seen: list[Any] = []
    look = fused.Fused.look

    def watched(self: Any, model: Any) -> Any:
        seen.append(model)
        return look(self, model)

    monkeypatch.setattr(fused.Fused, "look", watched)
    return seen


def test_in_a_call_of_our_own_parts_each_model_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = model(), looks(monkeypatch)
    draft = GPT(replace(SHAPES["small"], n_layer=1)).requires_grad_(False)
    speculate(target, draft, [1, 2], max_new_tokens=20, seed=0)
    assert seen == [target, draft] * AVAILABLE
    seen.clear()
    generate(target, [1, 2], max_new_tokens=5, seed=0)
    assert seen == [target] * AVAILABLE
    seen.clear()
    list(stream(target, draft, [1, 2], max_new_tokens=20, seed=0))  # a caller may do anything between two steps
    assert len(seen) > 6 * AVAILABLE
    assert TRUST.known is None


@pytest.mark.parametrize("who", ["rng", "rule", "drafter", "target", "draft", "between steps"])
def test_a_weight_changed_by_anothers_code_counts_at_once(who: str) -> None:
    """The same as without TorchScript, where every pass reads the weights."""

    def change(gpt: GPT) -> None:
        with torch.no_grad():
            gpt.wte.weight[:] = torch.roll(gpt.wte.weight, 1, 0)  # of which there is a copy, for the head

    def run() -> list[int]:
        target, draft = model("by columns"), model("by columns")

        class Own(Randomness):
            def flip(self, prob: Tensor) -> Tensor:
                change(target)
                return super().flip(prob)

        def verify(*args: Any) -> Any:
            change(target)
            return RULES["token"].chain(*args)

        class Trained(ModelDrafter):
            def begin(self, *args: Any) -> Any:
                session = super().begin(*args)
                commit = session.commit

                def committed(paths: Any) -> None:
                    change(target)
                    commit(paths)

                session.commit = committed
                return session

        class Changing(Around):
            def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
                change(target)
                return super().__call__(*args, **kwargs)

        options: dict[str, Any] = {"max_new_tokens": 40, "draft_len": 2, "rule": "token", "seed": 1}
        if who == "rng":
            options |= {"rng": Own(1), "seed": None}
        if who == "rule":
            options["rule"] = Rule("own", frozenset({"chain"}), "without", chain=verify)
        if who == "drafter":
            del options["draft_len"]
            return speculate(target, Trained(draft, Tree.chain(2)), [1, 2], **options).tokens
        if who == "target":
            return speculate(Changing(target), draft, [1, 2], **options).tokens
        if who == "draft":
            return speculate(target, Changing(draft), [1, 2], **options).tokens
        if who == "between steps":
            tokens = []
            for step in stream(target, draft, [1, 2], **options):
                tokens += step.tokens
                change(target)
            return tokens
        return speculate(target, draft, [1, 2], **options).tokens

    got = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "compiled", lambda: None)
        assert run() == got


def test_a_promise_is_ones_own() -> None:
    with unchanged(False):
        assert TRUST.known is None
    with unchanged():
        known = TRUST.known
        assert known == set()
        with unchanged(), unchanged(False):
            assert TRUST.known is known
        assert TRUST.known is known
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: TRUST.known).result() is None
    assert TRUST.known is None
    with pytest.raises(KeyError), unchanged():
        raise KeyError
    assert TRUST.known is None


@torch.no_grad()
def test_weights_loaded_while_nothing_was_to_change_are_looked_at() -> None:
    gpt, tokens = model(), torch.tensor([[1, 2]])
    with unchanged():
        gpt(tokens, KVCache(gpt.config))
        gpt.load_state_dict({name: 2 * value for name, value in gpt.state_dict().items()})
        assert torch.equal(gpt(tokens, KVCache(gpt.config)), by_modules(gpt, tokens, KVCache(gpt.config)))


def test_where_there_is_no_torchscript(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object) -> object:
        raise RuntimeError("no source")

    monkeypatch.setattr(torch.jit, "script", broken)
    assert fused.script.__wrapped__(fused.stack) is None
    monkeypatch.undo()
    monkeypatch.setattr(sys, "version_info", (3, 14))
    assert fused.script.__wrapped__(fused.stack) is None


def test_it_warns_of_nothing_and_loads_nothing_slow() -> None:
    code = (
        "import sys, torch; from minispec import *; g = GPT(GPTConfig(9, 9, 1, 1, 4)); generate(g, [1], max_new_tokens=3, seed=1); "
        "g = GPT(GPTConfig(300, 9, 1, 1, 256)).bfloat16().float(); generate(g, [1], max_new_tokens=3, seed=1); "
        "from minispec.fused import script; assert script.cache_info().currsize == 1; "
        "print([m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-W", "error::UserWarning", "-c", code],
        capture_output=True,
        text=True,
    )
    assert (out.returncode, out.stdout.strip(), out.stderr) == (0, "[]", "")


@torch.no_grad()
def test_only_a_model_that_was_looked_at_is_trusted() -> None:
    """Not one whose first pass was for the modules."""
    gpt, tokens = model("by columns"), torch.tensor([[1, 2]])
    gpt(tokens, KVCache(gpt.config))
    gpt.h[0].mlp.c_fc.weight.mul_(2)
    with unchanged():
        with torch.enable_grad():
            gpt(tokens, KVCache(gpt.config))
        assert TRUST.known == set()
        assert torch.equal(gpt(tokens, KVCache(gpt.config)), by_modules(gpt, tokens, KVCache(gpt.config)))
        assert TRUST.known == ({gpt.fused} if AVAILABLE else set())
