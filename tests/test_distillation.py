"""Distillation: the losses' values and directions, acceptance that rises, runs that resume; evaluation of a pair."""

from __future__ import annotations

import importlib.util
import math
import signal
from pathlib import Path

import pytest
import torch
from doubles import random_gpt
from test_tokenizer import BYTES, END_OF_TEXT, PATTERN, Tokenizer

from minispec import GPT, GPTConfig, Sampling, generate, speculate
from minispec.cli import main
from minispec.files import read_config
from minispec.pair import load_pair, save_model, save_tokenizer
from minispec.result import summarise
from minispec.train.alignment import align, decode_prompts
from minispec.train.distillation import LOSSES, distil, kept_batches, loss_at, measure, own_samples, self_batches
from minispec.train.draft_commands import spread
from minispec.train.recipe import Recipe

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])


def test_losses_of_a_known_pair() -> None:
    got = {name: float(loss(P.log(), Q.log())) for name, loss in LOSSES.items()}
    kl = sum(p * math.log(p / q) for p, q in zip(P.tolist(), Q.tolist(), strict=True))
    back = sum(q * math.log(q / p) for p, q in zip(P.tolist(), Q.tolist(), strict=True))
    assert got == pytest.approx({"fkl": kl, "rkl": back, "tv": 0.3, "nla": -math.log(0.7)}, abs=1e-6)
    for loss in LOSSES.values():
        assert float(loss(P.log(), P.log())) == pytest.approx(0, abs=1e-6)


def test_a_finish_with_total_variation() -> None:
    assert loss_at("fkl+tv", 0.3) is LOSSES["fkl"]
    assert loss_at("fkl+tv", 0.9) is LOSSES["tv"]
    with pytest.raises(ValueError, match=r"loss must be one of fkl, rkl, tv, nla, fkl\+tv, got 'mse'"):
        loss_at("mse", 0.1)


@pytest.fixture(scope="module")
def target() -> GPT:
    return random_gpt(1, vocab=257, block=24, width=16, heads=2, scale=0.5).float()


def fresh(seed: int = 0, width: int = 16) -> GPT:
    model = GPT(GPTConfig(257, 24, 1, 2, width))
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


RECIPE = Recipe(steps=60, batch=8, context=24, lr=1e-2, warmup=5, validate_every=20)


@pytest.mark.parametrize("loss", [*LOSSES, "fkl+tv"])
def test_every_loss_raises_acceptance(target: GPT, loss: str) -> None:
    held_out = own_samples(target, [0], 8, 24, seed=99)
    draft = fresh()
    if loss in ("tv", "rkl"):  # these need a start: nothing pulls a draft that knows nothing
        distil(target, draft, self_batches(target, [0], 8, seed=5), RECIPE, "fkl")
    before = measure(target, draft, held_out)
    frozen = [p.clone() for p in target.parameters()]
    state = distil(
        target,
        draft,
        self_batches(target, [0], 8, seed=1),
        RECIPE,
        loss,
        validate=lambda d: measure(target, d, held_out),
    )
    after = measure(target, draft, held_out)
    assert after["acceptance"] > before["acceptance"] + 0.02
    assert [point["step"] for point in state.history] == [20, 40, 60]
    assert all(torch.equal(a, b) for a, b in zip(frozen, target.parameters(), strict=True))


def test_measure_of_equal_models_is_one(target: GPT) -> None:
    held_out = own_samples(target, [0], 2, 24, seed=1)
    assert measure(target, target, held_out) == pytest.approx({"acceptance": 1.0, "agreement": 1.0})


def test_own_samples_are_the_targets_and_repeat(target: GPT) -> None:
    a = own_samples(target, [3, 4], 3, 20, seed=1)
    assert a.shape == (3, 20)
    assert (a[:, :2] == torch.tensor([3, 4])).all()
    assert torch.equal(a, own_samples(target, [3, 4], 3, 20, seed=1))
    alone = generate(target, a[1, :18].tolist(), max_new_tokens=2, sampling=Sampling(0), stop=())
    assert a[1, 18:].tolist() == alone.tokens  # every second row ends greedily
    batches = self_batches(target, [3], 4, seed=0, rows=8, reuse=1)
    first = [batches(step) for step in range(4)]
    assert all(b.shape == (4, 24) for b in first)
    assert len({tuple(row) for b in first for row in b.tolist()}) > 8  # a second round was drawn


def test_kept_laws_are_the_targets_and_teach_as_well(target: GPT, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    pool = torch.randint(target.config.vocab_size, (64, target.config.block_size), generator=generator)

    def batches(step: int) -> torch.Tensor:
        return pool[4 * step : 4 * step + 4]

    recipe = Recipe(steps=40, batch=4, context=target.config.block_size, lr=1e-2, warmup=1, seed=2)
    kept = kept_batches(target, batches, 30, 4, recipe, tmp_path)
    ids, log_p = kept(5)
    assert ids.shape == (4, target.config.block_size)
    assert (log_p.exp() - target(ids).softmax(-1)).abs().max() < 2e-3
    assert torch.equal(kept(5)[0], ids)  # by step, whatever was asked before
    assert not torch.equal(kept(6)[0], ids)
    seen = {tuple(row) for step in range(40) for row in kept(step)[0].tolist()}
    assert seen == {tuple(row) for row in pool[:30].tolist()}
    draft = random_gpt(5, vocab=target.config.vocab_size, block=target.config.block_size).float()
    before = measure(target, draft, pool[32:])["acceptance"]
    distil(target, draft, kept, recipe, "fkl")
    assert measure(target, draft, pool[32:])["acceptance"] > before + 0.02


def test_distillation_resumes_as_if_nothing_had_happened(target: GPT, tmp_path: Path) -> None:
    texts = own_samples(target, [0], 32, 24, seed=7)

    def batches(step: int) -> torch.Tensor:
        return texts[step * 8 % 32 : step * 8 % 32 + 8]

    whole: list[float] = []
    distil(target, fresh(), batches, RECIPE, on_step=lambda s, p: whole.append(s.loss))
    losses: list[float] = []

    def interrupt(state, progress) -> None:  # type: ignore[no-untyped-def]
        losses.append(state.loss)
        if state.step == 17:
            signal.raise_signal(signal.SIGINT)

    path = tmp_path / "d.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        distil(target, fresh(), batches, RECIPE, checkpoint=path, on_step=interrupt)
    distil(target, fresh(), batches, RECIPE, checkpoint=path, on_step=lambda s, p: losses.append(s.loss))
    assert losses == pytest.approx(whole, abs=1e-5)


def test_alignment_of_known_laws(target: GPT) -> None:
    draft, windows = fresh(3), own_samples(target, [0], 4, 24, seed=2)
    found = align(target, draft, windows)
    p, q = (m(windows).detach().softmax(-1) for m in (target, draft))
    assert found.acceptance == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-5)
    assert found.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=1e-6)
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), abs=1e-4)
    first = p.gather(-1, q.argmax(-1, keepdim=True)).mean()
    assert found.by_rank[0] == pytest.approx(float(first), abs=1e-5)
    assert found.contexts == windows.numel()
    own = align(target, target, windows)
    assert (own.acceptance, own.agreement, own.kl) == pytest.approx((1, 1, 0), abs=1e-6)
    assert own.by_rank == sorted(own.by_rank, reverse=True)


def test_decoding_counts_are_those_of_speculate(target: GPT) -> None:
    draft = fresh(3)
    found = decode_prompts(target, draft, [[1, 2], [3, 4]], 1.0, 3, seed=5)
    results = speculate(
        target, draft, [[1, 2], [3, 4]], max_new_tokens=24, sampling=Sampling(1.0), draft_len=3, stop=(), seed=5
    )
    stats = summarise([s for r in results for s in r.steps])
    assert (found.new_tokens, found.tokens_per_pass) == (stats.new_tokens, stats.tokens_per_pass)


def test_windows_are_spread_over_the_whole_text() -> None:
    got = spread(torch.arange(100), 10, 4)
    assert got[:, 0].tolist() == [0, 30, 60, 90]
    assert spread(torch.arange(25), 10, 4).shape == (2, 10)
    with pytest.raises(ValueError, match="the text has 5 tokens, too few for one window of 10"):
        spread(torch.arange(5), 10, 4)


@pytest.fixture
def pair(tmp_path: Path, target: GPT) -> Path:
    save_tokenizer(tmp_path / "pair", Tokenizer(BYTES, PATTERN, {END_OF_TEXT: 256}))
    save_model(tmp_path / "pair", "target", target)
    save_model(tmp_path / "pair", "draft", fresh(3))
    return tmp_path / "pair"


def test_distil_and_eval_from_the_command_line(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "better"
    shape = ["--layers", "1", "--heads", "2", "--width", "16"]
    args = ["distill", "--pair", str(pair), "--data", "self", "--fresh", "--steps", "60", "--out", str(out), *shape]
    assert main(args) == 0
    text = capsys.readouterr().out
    before, after = (float(text.split(word)[0].split()[-1]) for word in (" before", " after"))
    assert after > before
    assert load_pair(out).draft.config.n_layer == 1
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("The crow sang to the fox. " * 80)
    assert (
        main(
            [
                "distill",
                "--pair",
                str(out),
                "--data",
                str(folder),
                "self",
                "--steps",
                "5",
                "--loss",
                "nla",
                "--keep",
                "8",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    stages = read_config(out)["draft"]["training"]["stages"]
    assert [stage["name"] for stage in stages] == ["fkl+tv on own samples", "nla on text and own samples"]
    assert stages[0]["curve"][-1]["acceptance"] > stages[0]["curve"][0]["acceptance"]
    drawn = main(["curves", str(tmp_path / "curves.svg"), "--pair", str(out)])
    assert drawn == (0 if importlib.util.find_spec("matplotlib") else 2)
    capsys.readouterr()
    args = ["eval", str(folder / "a.txt"), "--pair", str(out), "--windows", "4", "--prompts", "2", "--draft-len", "2"]
    assert main(args) == 0
    assert "acceptance by child rank" in capsys.readouterr().out


def test_bad_input_is_one_line(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("abc")
    for args, message in (
        (["eval", str(tmp_path / "none.txt"), "--pair", str(pair)], "none.txt"),
        (["eval", str(tmp_path / "short.txt"), "--pair", str(pair)], "too few for one window"),
        (["distill", "--pair", str(pair), "--data", str(tmp_path / "nowhere"), "--steps", "1"], "no *.txt file"),
        (
            ["distill", "--pair", str(pair), "--data", "self", "--steps", "1", "--lr", "-1"],
            "lr must be a finite number > 0",
        ),
        (
            ["distill", "--pair", str(pair), "--data", "self", "--steps", "1", "--keep", "-1"],
            "keep must be an integer >= 0",
        ),
        (
            ["distill", "--pair", str(pair), "--data", "self", "self", "--steps", "1", "--batch", "1"],
            "batch must be >=",
        ),
    ):
        assert main(args) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
