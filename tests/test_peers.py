"""Hugging Face's decoders under our bench: the export as tensors, and, where transformers is installed, its decoders."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from doubles import mix, random_gpt
from torch import Tensor

from minispec import GPT, Sampling, generate
from minispec.lab import judge, peers

NO_EXTRA = "needs the extra `peers`, which is not part of `test`: the build machine installs no transformers"


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("transformers", reason=NO_EXTRA)


def pair(vocab: int = 5) -> tuple[GPT, GPT]:
    target = random_gpt(3, vocab, block=32)
    return target, mix(target, random_gpt(1003, vocab, block=32), 0.2)


# --- without transformers ----------------------------------------------------------------------------------


def gpt2(w: dict[str, Tensor], tokens: Tensor, layers: int, heads: int) -> Tensor:
    """GPT-2 as Radford et al. have it, written down once more: x @ W + b, (in, out) weights, heads side by side."""
    T = tokens.shape[1]
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:T]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)

    def project(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    for layer in range(layers):
        here = f"transformer.h.{layer}"
        q, k, v = project(norm(x, f"{here}.ln_1"), f"{here}.attn.c_attn").chunk(3, -1)
        out = []
        for a, b, c in zip(*(t.chunk(heads, -1) for t in (q, k, v)), strict=True):
            scores = (a @ b.transpose(1, 2) / a.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
            out.append(scores.softmax(-1) @ c)
        x = x + project(torch.cat(out, -1), f"{here}.attn.c_proj")
        y = F.gelu(project(norm(x, f"{here}.ln_2"), f"{here}.mlp.c_fc"), approximate="tanh")
        x = x + project(y, f"{here}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["lm_head.weight"].T


def test_the_exported_weights_are_gpt2s() -> None:
    model = random_gpt(7, vocab=11, layers=3, width=12, heads=3, scale=0.4)
    for parameter in model.parameters():  # biases and gains of their own, so that none may be missed
        parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [10, 0, 10, 0, 7, 7, 8, 2]])
    weights = peers.gpt2_weights(model)
    assert (gpt2(weights, tokens, 3, 3) - model(tokens)).abs().max() < 1e-10
    assert weights["transformer.h.0.attn.c_attn.weight"].shape == (12, 36)
    assert weights["lm_head.weight"] is weights["transformer.wte.weight"]
    assert len(weights) == len(model.state_dict()) + 1


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "minispec\[peers\]"'):
        peers.plain(random_gpt(1))


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        (None, {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        (Sampling(0.7, 5, 0.9), {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}),
        (Sampling(0), {"do_sample": False}),
    ],
)
def test_sampling_leaves_no_default_to_the_library(sampling: Sampling | None, want: dict[str, Any]) -> None:
    ends = {"eos_token_id": [3], "bos_token_id": None, "pad_token_id": 3, "use_cache": True}
    assert peers.settings(sampling, [3]) == {**want, **ends}
    assert peers.settings(sampling, []) == {**want, **ends, "eos_token_id": None, "pad_token_id": None}


@pytest.mark.parametrize(("option", "value"), [("--samples", "10"), ("--seed", "-1")])
def test_the_command_refuses_nonsense(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        peers.main([option, value])
    assert exit_.value.code == 2
    assert f"argument {option}: must be at least" in capsys.readouterr().err


# --- with transformers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_the_exported_model_has_our_logits(library: Any, dtype: torch.dtype, tol: float) -> None:
    model = random_gpt(7, vocab=11, block=24, layers=3, width=12, heads=3, scale=0.4).to(dtype)
    peer = peers.export(model)
    assert isinstance(peer, library.GPT2LMHeadModel)
    tokens = torch.randint(11, (4, 24), generator=torch.Generator().manual_seed(0))
    assert peer(tokens).logits.dtype == dtype
    assert (peer(tokens).logits - model(tokens)).abs().max() < tol


def test_an_export_that_differs_is_refused(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_gpt(7, width=12)
    right = peers.gpt2_weights(model)
    spoilt = {**right, "transformer.h.1.attn.c_proj.weight": right["transformer.h.1.attn.c_proj.weight"].T}
    monkeypatch.setattr(peers, "gpt2_weights", lambda model: spoilt)
    with pytest.raises(ValueError, match="export: the logits of the two models differ by"):
        peers.export(model)


def decoders(target: GPT, draft: GPT, sampling: Sampling, stop: tuple[int, ...] = ()) -> list[peers.Peer]:
    return [
        peers.plain(target, sampling, stop),
        peers.assisted(target, draft, 3, sampling, stop),
        peers.lookup(target, 3, sampling, stop),
    ]


def test_greedy_decoders_give_our_own_texts_and_stop_where_we_do(library: Any) -> None:
    target, draft = pair()
    prompts = [[0, 1, 2, 0, 1], [4], [3, 3, 3, 1]]
    for stop in ((), (2,)):
        for prompt in prompts:
            want = generate(target, prompt, max_new_tokens=12, sampling=Sampling(0), stop=stop).tokens
            for peer in decoders(target, draft, Sampling(0), stop):
                assert peer(prompt, 12, 0) == want, (peer.name, prompt, stop)


def test_a_seed_is_a_text_and_the_global_state_stays(library: Any, capfd: pytest.CaptureFixture[str]) -> None:
    target, draft = pair()
    capfd.readouterr()
    for peer in decoders(target, draft, Sampling(0.8)):
        before = torch.get_rng_state()
        texts = [peer([0, 1, 2, 0, 1], 10, seed) for seed in (1, 1, 2, 3, 4)]
        assert texts[0] == texts[1]
        assert len({tuple(text) for text in texts}) > 2
        assert {len(text) for text in texts} == {10}
        assert peer([0], 0, 1) == []
        assert torch.equal(torch.get_rng_state(), before), peer.name
    assert capfd.readouterr() == ("", "")  # no warning, no progress bar


def test_assisted_generation_drafts_as_many_as_it_is_told(library: Any) -> None:
    target, _ = pair()
    for K in (1, 4):
        meter = peers.Metered(peers.assisted(target, target, K, Sampling(0)))
        meter([0, 1], 20, 0)
        assert meter.passes == 20 // (K + 1), K  # draft = target: K accepted and one more, a pass


def test_the_bench_passes_the_target_and_sees_another_model(library: Any) -> None:
    target, draft = pair(3)
    options: dict[str, Any] = {"prompt": [0, 1, 2, 0, 1], "length": 3, "samples": 250}
    assert judge(peers.assisted(target, draft, 1), target, **options).ok
    assert not judge(peers.plain(draft), target, **options).ok


def test_the_report_is_a_table(
    library: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CASES", peers.CASES[:1])
    assert peers.main(["--samples", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert library.__version__ in lines[0]
    rows = [line.split(" | ") for line in lines if line.startswith("| ")]
    assert [row[0][2:] for row in rows[1:]] == ["plain", "assisted", "prompt lookup", peers.CONTROL] * 2
    assert {len(row) for row in rows} == {len(peers.HEAD)}
    assert [row[-1] for row in rows[5:8]] == ["1 of 1 texts equal |"] * 3
