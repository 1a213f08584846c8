"""Training: it learns, it repeats, it resumes exactly, it grows without a change of function."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from doubles import random_gpt
from safetensors.torch import save_file

from minispec import GPT, GPTConfig
from minispec.cli import main
from minispec.pair import load_pair
from minispec.train import fit as fit_module
from minispec.train.checkpoint import load_checkpoint, model_from_checkpoint, read_checkpoint
from minispec.train.data import batch_at, read_corpus
from minispec.train.evaluate import bits_per_byte
from minispec.train.fit import advance, make_optimizer, update
from minispec.train.grow import deepen, grow, widen
from minispec.train.language_model import train
from minispec.train.recipe import Recipe, State

TEXT = "The fox said to the crow: sing to me. And the crow sang to the fox, and the cheese fell. "
RECIPE = Recipe(steps=30, batch=4, context=16, lr=3e-3, warmup=5, validate_every=10)


def tokens() -> torch.Tensor:
    return torch.tensor(list((TEXT * 20).encode()))


def fresh() -> GPT:
    model = GPT(GPTConfig(257, 16, 1, 2, 16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model


def curve(model: GPT, recipe: Recipe, checkpoint: Path | None = None, **options: object) -> list[float]:
    losses: list[float] = []
    train(model, tokens(), recipe, checkpoint=checkpoint, on_step=lambda s, p: losses.append(s.loss), **options)  # type: ignore[arg-type]
    return losses


def test_it_learns_and_repeats() -> None:
    a, b = fresh(), fresh()
    first, second = curve(a, RECIPE), curve(b, RECIPE)
    assert first == second
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    long = curve(fresh(), replace(RECIPE, steps=150))
    assert long[-1] < 0.7 * long[0]
    assert curve(fresh(), replace(RECIPE, seed=1)) != first


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = curve(fresh(), RECIPE)
    path, losses = tmp_path / "run.checkpoint", []

    def press_at_13(state: State, progress: float) -> None:
        losses.append(state.loss)
        if state.step == 13:
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(fresh(), tokens(), RECIPE, checkpoint=path, on_step=press_at_13)
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(losses) == 13
    model = fresh()
    losses += curve(model, RECIPE, path)
    assert losses == pytest.approx(whole, abs=1e-5)
    again = model_from_checkpoint(path)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))
    assert curve(fresh(), RECIPE, path) == []  # nothing is left to do


def test_a_failure_within_a_step_saves_nothing_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.checkpoint"
    whole = curve(fresh(), RECIPE)
    calls = 0

    def failing(*args: object) -> None:
        nonlocal calls
        calls += 1
        update(*args)  # type: ignore[arg-type]
        if calls == 13:  # the weights have moved, the step is not counted yet
            raise RuntimeError("out of memory")

    monkeypatch.setattr(fit_module, "update", failing)
    with pytest.raises(RuntimeError):
        train(fresh(), tokens(), RECIPE, checkpoint=path, save_every=0.0)
    monkeypatch.undo()
    assert steps_of(path) == 12
    assert curve(fresh(), RECIPE, path)[-1] == pytest.approx(whole[-1], abs=1e-5)


def test_a_trapezoid_keeps_a_copy_from_which_a_longer_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.checkpoint"
    train(fresh(), tokens(), RECIPE, checkpoint=path)
    state = load_checkpoint(tmp_path / "run.stable.checkpoint", model := fresh(), make_optimizer(model, RECIPE))
    assert state.step == 21  # 30 steps, the last 30 % of which decay


def test_learning_rates() -> None:
    r = Recipe(steps=100, lr=1.0, warmup=10, decay=0.5)
    assert [r.rate(0, 0), r.rate(4, 0.04), r.rate(30, 0.3), r.rate(75, 0.75), r.rate(100, 1)] == [0.1, 0.5, 1, 0.5, 0]
    c = replace(r, schedule="cosine")
    assert [c.rate(50, 0.5), c.rate(100, 1.0)] == pytest.approx([0.5, 0])


@pytest.mark.parametrize(
    "bad",
    [{"steps": None}, {"minutes": 1.0}, {"batch": 0}, {"lr": -1}, {"schedule": "steps"}, {"precision": "int8"}],
    ids=str,
)
def test_bad_recipes(bad: dict) -> None:
    with pytest.raises(ValueError, match=r"must be|give either steps or minutes"):
        replace(RECIPE, **bad)


def test_a_time_budget_ends_the_run() -> None:
    state = train(fresh(), tokens(), Recipe(minutes=0.02, batch=4, context=16))
    assert state.step > 3
    assert 1.2 <= state.seconds < 3


def test_bad_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.checkpoint"
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"run\.checkpoint: not a checkpoint"):
        curve(fresh(), RECIPE, path)
    save_file({"a": torch.zeros(1)}, str(path), {"format": "minispec-checkpoint-0"})
    with pytest.raises(ValueError, match=r"run\.checkpoint: written as 'minispec-checkpoint-0', this version reads"):
        curve(fresh(), RECIPE, path)
    path.unlink()
    curve(fresh(), replace(RECIPE, steps=1), path)
    with pytest.raises(ValueError, match=r"run\.checkpoint: holds .*'n_layer': 1.* this run trains .*'n_layer': 2"):
        curve(GPT(GPTConfig(257, 16, 2, 2, 16)), RECIPE, path)


def test_every_window_once_an_epoch() -> None:
    numbers = torch.arange(165)
    seen = torch.cat([batch_at(numbers, step, 3, 16, seed=0)[0] for step in range(3)])  # 9 windows: one epoch
    starts = sorted(seen[:, 0].tolist())
    assert [b - a for a, b in itertools.pairwise(starts)] == [16] * 8
    x, y = batch_at(numbers, 0, 3, 16, seed=0)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert not torch.equal(x, batch_at(numbers, 3, 3, 16, seed=0)[0])
    with pytest.raises(ValueError, match="too few for two windows of 200"):
        batch_at(numbers, 0, 1, 200, seed=0)


def test_growing_keeps_the_function() -> None:
    model = random_gpt(3, vocab=50, block=20, width=16, heads=2, scale=0.3)
    batch = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))
    wide = widen(model).double()
    deep = deepen(wide).double()
    assert (deep.config.n_embd, deep.config.n_head, deep.config.n_layer) == (32, 4, 4)
    for grown in (wide, deep):
        assert (grown(batch) - model(batch)).abs().max() < 1e-5  # the grown weights pass through float32
    assert grow(model, deep.config).config == deep.config
    for width, heads in ((48, 2), (20, 2), (8, 1)):  # other sizes of heads, or less than there is
        with pytest.raises(ValueError, match="heads of the same size"):
            grow(model, replace(model.config, n_embd=width, n_head=heads))
    c_fc = wide.h[0].mlp.c_fc.weight
    assert (c_fc[:, :16] - c_fc[:, 16:]).abs().max() > 1e-3  # the copies are not equal for ever


@pytest.mark.parametrize("width", [24, 40])  # half as wide again; doubled, and a half head more
def test_growing_by_less_than_double_keeps_the_function(width: int) -> None:
    model = random_gpt(3, vocab=50, block=20, width=16, heads=2, scale=0.3)
    with torch.no_grad():  # trained models have norms and biases of their own, and a stream whose mean is not 0
        for name, parameter in model.named_parameters():
            parameter += (
                0.1
                if name.endswith("bias")
                else 0.02 * torch.arange(float(len(parameter)))[(...,) + (None,) * (parameter.ndim - 1)]
            )
    config = replace(model.config, n_embd=width, n_head=width // 8)
    wide = grow(model, config).double()
    assert wide.config == config
    batch = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))
    want = model.double()(batch)
    assert (wide(batch) - want).abs().max() < 1e-3 * want.abs().max()  # LayerNorm's epsilon weighs more
    loss = wide(batch).logsumexp(-1).sum()
    loss.backward()
    fresh = wide.h[0].mlp.c_proj.weight.grad
    assert fresh is not None
    assert fresh[:, 64:].abs().min() > 0  # what is not read yet learns to be


def test_bits_per_byte_of_known_models() -> None:
    model = fresh()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    lengths = torch.ones(257, dtype=torch.long)
    assert bits_per_byte(model, tokens()[:200], lengths) == pytest.approx(math.log2(257), abs=1e-4)
    assert bits_per_byte(model, tokens()[:200], 2 * lengths, windows=3) == pytest.approx(math.log2(257) / 2, abs=1e-4)
    with pytest.raises(ValueError, match="need at least 2"):
        bits_per_byte(model, tokens()[:1], lengths)


def test_bits_per_byte_counts_each_token_once_with_the_context_of_its_window() -> None:
    model, text, nats = fresh().requires_grad_(False), torch.arange(97) * 7 % 251, 0.0
    for i in range(1, 97):  # windows start at 0, 8, .. 80 and count what no earlier one has counted
        start = 0 if i <= 16 else (i - 9) // 8 * 8
        nats -= float(model(text[None, start:i]).log_softmax(-1)[0, -1, text[i]])
    assert bits_per_byte(model, text, torch.ones(257, dtype=torch.long)) == pytest.approx(
        nats / 96 / math.log(2), rel=1e-5
    )


def test_corpus_is_split_by_file_or_by_tail(tmp_path: Path) -> None:
    for name, text in (("a", "x" * 100), ("b", "y" * 100)):
        (tmp_path / f"{name}.txt").write_text(text)
    tails = read_corpus(tmp_path)
    assert [len(t) for t in tails.train] == [98, 98]
    assert [len(t) for t in tails.validation] == [2, 2]
    files = read_corpus(tmp_path, ["b"])
    assert (files.train, files.validation) == (["x" * 100], ["y" * 100])
    with pytest.raises(ValueError, match=r"no file name in .* contains 'c'"):
        read_corpus(tmp_path, ["c"])
    with pytest.raises(ValueError, match="leaves no file to train on"):
        read_corpus(tmp_path, ["a", "b"])
    with pytest.raises(FileNotFoundError, match=r"no \*\.txt file"):
        read_corpus(tmp_path / "nowhere")


def test_from_text_to_a_pair_that_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tales").mkdir()
    (tmp_path / "tales" / "fox.txt").write_text(TEXT * 60)
    pair, folder = str(tmp_path / "my pair"), str(tmp_path / "tales")
    assert main(["train-tokenizer", folder, "--pair", pair, "--vocab-size", "285"]) == 0
    shape = ["--pair", pair, "--block-size", "32", "--layers", "1", "--heads", "2", "--batch", "2", "--lr", "0.01"]
    assert main(["train", folder, "--size", "target", "--width", "32", "--steps", "30", *shape]) == 0
    assert main(["train", folder, "--size", "draft", "--width", "16", "--steps", "30", *shape]) == 0
    assert "30 steps" in capsys.readouterr().out
    assert load_pair(pair).target.config.n_embd == 32
    assert (
        main(["generate", "The fox", "--pair", pair, "--max-new-tokens", "8", "--draft-len", "4", "--seed", "1"]) == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("The fox")
    assert "8 tokens," in out
    grown = ["--size", "target", "--width", "32", "--steps", "2", "--grow-from", f"{pair}/draft.checkpoint"]
    grown += ["--store", "int8"]
    shape[shape.index("--heads") + 1] = "4"
    assert main(["train", folder, *grown, *shape, "--checkpoint", f"{pair}/grown.checkpoint"]) == 0
    assert load_pair(pair).target.config.n_head == 4
    shape[shape.index("--heads") + 1] = "2"
    capsys.readouterr()
    assert main(["train", folder, "--size", "draft", "--width", "24", "--steps", "9", *shape]) == 2  # another shape
    assert "draft.checkpoint: holds" in capsys.readouterr().err


def test_the_time_a_process_was_stopped_is_not_spent() -> None:
    state = State(step=100, seconds=10.0, loss=1.0)
    advance(state, 1.0, 600.0)
    assert state.seconds == pytest.approx(12.0)
    advance(state, 1.0, 0.2)
    assert state.seconds == pytest.approx(12.2)


def test_a_killed_process_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Killed, then interrupted, while it saves all the time: no half file under the final name, the same model at last.

    With as many threads as these tests have: sums in another order round otherwise.
    """
    (tmp_path / "tales").mkdir()
    (tmp_path / "tales" / "fox.txt").write_text(TEXT * 60)
    pair = tmp_path / "pair"
    assert main(["train-tokenizer", str(tmp_path / "tales"), "--pair", str(pair), "--vocab-size", "280"]) == 0
    shape = ["--block-size", "32", "--layers", "1", "--heads", "2", "--width", "32", "--batch", "2", "--steps", "400"]
    args = ["train", str(tmp_path / "tales"), "--size", "draft", "--pair", str(pair), *shape]
    whole, broken = tmp_path / "whole.checkpoint", tmp_path / "broken.checkpoint"
    assert main([*args, "--checkpoint", str(whole)]) == 0
    command = [sys.executable, "-m", "minispec", *args, "--save-every", "0", "--checkpoint", str(broken)]
    done = 0
    for signal_ in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        while process.poll() is None and (not broken.exists() or steps_of(broken) < done + 20):
            time.sleep(0.05)
        process.send_signal(signal_)
        process.wait()
        assert process.returncode in (-signal_, 130)
        done = steps_of(broken)
        assert 0 < done < 400
    assert main([*args, "--checkpoint", str(broken)]) == 0
    a, b = model_from_checkpoint(whole), model_from_checkpoint(broken)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert (x - y).abs().max() < 1e-5
    assert read_checkpoint(whole)[1]["state"]["loss"] == pytest.approx(
        read_checkpoint(broken)[1]["state"]["loss"], abs=1e-5
    )


def steps_of(checkpoint: Path) -> int:
    return int(read_checkpoint(checkpoint)[1]["state"]["step"])
