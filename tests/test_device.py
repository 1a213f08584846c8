"""Decoding off the CPU, on a device that is pretended: the same tokens, nothing mixed, one wait a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pretend import DEVICE, Elsewhere, There

from minispec import GPT, NGramDrafter, Sampling, Tree, generate, speculate, verify
from minispec.advanced import AdaptiveDrafter, DynamicTree
from minispec.early_exit import EarlyExitDrafter
from minispec.lab.models import random_gpt, random_pair
from minispec.sampling import check_law
from minispec.verify import RULES

SHAPES = [{"draft_len": 3}, {"tree": Tree.branching([2, 2])}]
WAYS = [("token", 0), ("block", 0), ("match", 0), ("match", 1), ("coupled", 0), ("coupled", 1), ("rrs", 0), ("rrs", 1)]
WAYS += [("specinfer", 1)]


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, too, loops go on to their end: `rrs` draws the coins that decide nothing, as it does on a GPU."""
    monkeypatch.setattr(verify, "_nobody", lambda alive: False)


def test_the_device_is_as_strict_as_a_gpu() -> None:
    with Elsewhere() as device:
        x = torch.arange(6.0, device=DEVICE).view(2, 3)
        assert isinstance(x, There)
        assert x.device.type != "cpu"
        for mixed in (lambda: x + torch.ones(3), lambda: torch.cat([x, torch.ones(2, 3)]), lambda: x @ torch.ones(3)):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        assert device.waits == 0
        assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert float(x.sum()) == 15
        assert bool(x.any())
        assert torch.equal(x.cpu(), torch.arange(6.0).view(2, 3))
        assert device.waits == 4
        x[1] = torch.tensor([1.0], device=DEVICE)
        assert x[torch.tensor([1], device=DEVICE)].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0), Sampling(0.8, top_k=2, top_p=0.9)], ids=str)
@pytest.mark.parametrize(("rule", "shape"), WAYS)
def test_one_wait_a_step_and_the_same_tokens(rule: str, shape: int, sampling: Sampling) -> None:
    target, draft = random_pair()
    options: dict[str, Any] = {"max_new_tokens": 14, "sampling": sampling, "rule": rule, "seed": 5, "stop": ()}
    want = speculate(target, draft, [0, 1], **options, **SHAPES[shape])
    with Elsewhere() as device:
        got = speculate(target.to(DEVICE), draft.to(DEVICE), [0, 1], **options, **SHAPES[shape])
        assert device.waits == len(got.steps)
    assert (got.tokens, got.steps) == (want.tokens, want.steps)


def test_plain_decoding_waits_once_a_token() -> None:
    target, _ = random_pair()
    want = generate(target, [0, 1], max_new_tokens=9, seed=1, stop=())
    with Elsewhere() as device:
        got = generate(target.to(DEVICE), [0, 1], max_new_tokens=9, seed=1, stop=())
        assert device.waits == 9
    assert got.tokens == want.tokens


@pytest.mark.parametrize(("rule", "shape"), [*WAYS, ("traversal", 0), ("traversal", 1)])
def test_rows_of_different_lengths(rule: str, shape: int) -> None:
    target, draft = random_pair()
    prompts, lengths = [[0, 1], [2, 1, 0, 2, 1], [1]], [12, 4, 9]
    options: dict[str, Any] = {"max_new_tokens": lengths, "rule": rule, "seed": 2, "stop": [{2}, (), (0,)]}
    want = speculate(target, draft, prompts, **options, **SHAPES[shape])
    with Elsewhere():
        got = speculate(target.to(DEVICE), draft.to(DEVICE), prompts, **options, **SHAPES[shape])
    assert [r.tokens for r in got] == [r.tokens for r in want]


DRAFTERS = {
    "n-gram": lambda target, draft: NGramDrafter(3, 1),
    "dynamic": lambda target, draft: DynamicTree(draft, 6, max_depth=3, width=2),
    "adaptive": lambda target, draft: AdaptiveDrafter(draft, 3),
    "early exit": lambda target, draft: EarlyExitDrafter(target, 1, Tree.chain(3)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_other_drafters(name: str) -> None:
    target, draft = random_gpt(1, block=32), random_gpt(2, block=32)
    want = speculate(target, DRAFTERS[name](target, draft), [[0, 1], [2]], max_new_tokens=10, seed=3, stop=())
    with Elsewhere():
        target, draft = target.to(DEVICE), draft.to(DEVICE)
        got = speculate(target, DRAFTERS[name](target, draft), [[0, 1], [2]], max_new_tokens=10, seed=3, stop=())
    assert [r.tokens for r in got] == [r.tokens for r in want]


@pytest.mark.core
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0), Sampling(0.7), Sampling(top_k=2), Sampling(top_p=0.6)])
def test_laws_are_made_without_a_wait_and_bad_ones_hold_a_nan(sampling: Sampling) -> None:
    logits = torch.tensor(
        [[1.0, 3.0, 3.0], [0.0, -math.inf, 2.0], [0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3]
    )
    want = sampling.probs(logits[:2])
    with Elsewhere() as device:
        there = logits.to(DEVICE)
        got = sampling.probs(there)
        assert device.waits == 0
        assert torch.equal(got[:2].cpu(), want)
        assert got[2:].isnan().any(1).tolist() == [True] * 3
        with pytest.raises(ValueError, match=r"^draft logits: .* at \(row, node\) \(2,\)$"):
            check_law(got, "draft")
        check_law(got[:2], "draft")


@pytest.mark.core
def test_rules_upload_nothing_that_would_have_to_be_waited_for() -> None:
    class Likeliest:
        def flip(self, prob: torch.Tensor) -> torch.Tensor:
            return prob > 0.5

        def pick(self, weights: torch.Tensor, at: object = None) -> torch.Tensor:
            return weights.argmax(-1)

    tree, chain = Tree.branching([2, 2]), Tree.chain(3)
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(2, 7, 4, generator=generator).softmax(-1) for _ in range(2))
    tokens = torch.randint(4, (2, 7), generator=generator)
    for name, shape in (("match", tree), ("rrs", tree), ("match", chain), ("token", chain), ("block", chain)):
        given = p[:, : shape.size], q[:, : shape.size], tokens[:, : shape.size]
        want = [x.tolist() for x in RULES[name].verify(*given, shape, Likeliest())]
        with Elsewhere() as device:
            there = [x.to(DEVICE) for x in given]
            uploads = device.uploads
            assert uploads == 3
            got = RULES[name].verify(*there, shape, Likeliest())
            assert (device.waits, device.uploads) == (0, uploads)
            assert [x.tolist() for x in got] == want


@pytest.mark.core
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("name", "rule"), [("target", "match"), ("target", "token"), ("draft", "token")])
def test_bad_logits_are_found_at_the_wait(name: str, rule: str, temperature: float) -> None:
    models: dict[str, GPT] = dict(zip(("target", "draft"), random_pair(), strict=True))
    models[name].ln_f.bias.data[0] = float("nan")
    with Elsewhere():
        pair = [model.to(DEVICE) for model in models.values()]
        place = rf"\(0, {int(name == 'draft')}\)"
        with pytest.raises(ValueError, match=rf"^{name} logits: a NaN.* at \(row, node\) {place}$"):
            speculate(*pair, [0], max_new_tokens=3, sampling=Sampling(temperature), rule=rule)
