"""Host programs and systems of other kinds: defaults changed, modes, dtypes, threads, encodings, consoles."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import TableModel, mix, random_gpt
from test_edges_batches import ways
from test_edges_files import SHAPE, TEXT

from minispec import GPT, RULES, GPTConfig, ModelDrafter, Sampling, Tree, generate, load_pair, speculate
from minispec.cli import main
from minispec.files import write_text
from minispec.lab import exact_law, target_law, total_variation


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


HOSTS = {
    "default dtype float16": lambda: default_dtype(torch.float16),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: default_device("meta"),  # where whatever is made without a device has no data
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "one thread": lambda: threads(1),
    "two threads": lambda: threads(2),
    "deterministic algorithms": lambda: contextlib.nullcontext(torch.use_deterministic_algorithms(True)),
}


def outcomes(target: GPT, draft: GPT) -> list[Any]:
    """What every kind of draft and rule gives, at T = 0 and T > 0, for one row and three."""
    found = []
    for what, several in ways(target, draft).items():
        for drafter, options in several:
            sampling = Sampling(0) if what == "greedy" else Sampling(0.9, 5, 0.95)
            shared = {"sampling": sampling, "stop": [2], **options}
            one = speculate(target, drafter, [1, 2, 3], max_new_tokens=9, seed=4, **shared)
            three = speculate(target, drafter, [[1], [4, 5], [3, 3, 1]], max_new_tokens=[3, 8, 6], seed=4, **shared)
            found.append((one, three))
    found.append(generate(target, [[1], [2, 3]], max_new_tokens=9, seed=1))
    found.append(speculate(target, draft, [1], max_new_tokens=20, seed=7))
    return found


@pytest.fixture(scope="module")
def models() -> tuple[GPT, GPT]:
    target = random_gpt(1, vocab=7, block=40, width=16, heads=4, scale=0.4)
    return target, mix(target, random_gpt(2, vocab=7, block=40, width=16, heads=4, scale=0.4), 0.3)


@pytest.fixture(scope="module")
def wanted(models: tuple[GPT, GPT]) -> list[Any]:
    return outcomes(*models)


@pytest.mark.parametrize("host", HOSTS)
def test_what_the_host_program_has_set_changes_nothing(models: tuple[GPT, GPT], wanted: list[Any], host: str) -> None:
    try:
        with HOSTS[host]():
            assert outcomes(*models) == wanted
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("host", ["default dtype float16", "default device meta", "inference mode"])
def test_loading_and_making_models_whatever_the_defaults(host: str, tmp_path: Path) -> None:
    from bad_inputs import make_pair

    make_pair(tmp_path)
    want = load_pair(tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 5, "seed": 1}
    with HOSTS[host]():
        pair = load_pair(tmp_path)
        assert (pair.target.dtype, pair.target.device.type) == (torch.float32, "cpu")
        text = pair.complete("abc", **options)
    assert text == want.complete("abc", **options)
    assert torch.equal(pair.target.wte.weight, want.target.wte.weight)


def test_weights_that_want_gradients_get_none_and_keep_what_they_have(models: tuple[GPT, GPT]) -> None:
    target, draft = (GPT(m.config).double() for m in models)
    for model, like in zip((target, draft), models, strict=True):
        model.load_state_dict(like.state_dict())
    target(torch.tensor([[1, 2]])).sum().backward()
    before = target.wte.weight.grad.clone()  # type: ignore[union-attr]
    result = speculate(target, draft, [1], max_new_tokens=20, seed=7)
    assert result == speculate(*models, [1], max_new_tokens=20, seed=7)
    assert torch.equal(target.wte.weight.grad, before)  # type: ignore[arg-type]
    assert draft.wte.weight.grad is None
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_models_in_train_mode_give_what_they_give_in_eval_mode(models: tuple[GPT, GPT], wanted: list[Any]) -> None:
    try:
        for model in models:
            model.train()
        assert outcomes(*models) == wanted
        assert all(model.training for model in models)
    finally:
        for model in models:
            model.eval()


class Dropping(torch.nn.Module):
    """A user's own model with dropout between the embedding and the rest."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.inner, self.config, self.drop = model, model.config, torch.nn.Dropout(0.5)

    device = property(lambda self: self.inner.device)
    dtype = property(lambda self: self.inner.dtype)

    def forward(self, *args: Any) -> torch.Tensor:
        return self.drop(self.inner(*args))


def test_dropout_does_not_leak_in(models: tuple[GPT, GPT]) -> None:
    """In train mode it would change the law and draw from the global generator: refused, by name, before a pass."""
    target, draft = models
    want = speculate(target, draft, [1], max_new_tokens=20, seed=7)
    own = Dropping(target)
    calls = (
        ("target", lambda: generate(own, [1], max_new_tokens=3)),
        ("target", lambda: speculate(own, draft, [1], max_new_tokens=3)),
        ("draft", lambda: speculate(target, own, [1], max_new_tokens=3)),
        ("draft", lambda: speculate(target, ModelDrafter(own), [1], max_new_tokens=3)),
    )
    for name, call in calls:
        own.train()
        with pytest.raises(
            ValueError, match=rf"{name} must be in eval mode, or without dropout, got .* 0\.5 in 'drop'"
        ):
            call()
        own.eval()
        call()
    assert speculate(own, draft, [1], max_new_tokens=20, seed=7).tokens == want.tokens
    own.train()
    own.drop.p = 0.0
    assert speculate(own, draft, [1], max_new_tokens=20, seed=7).tokens == want.tokens


# --- dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", ["token", "block", "rrs", "specinfer", "match", "traversal"])
def test_the_exact_law_with_logits_of_lower_precision(dtype: torch.dtype, rule: str) -> None:
    """Laws are those of the rounded logits, in float32: the output law is the target's to its precision."""
    generator = torch.Generator().manual_seed(3)
    tables = [torch.rand(3, 3, generator=generator, dtype=torch.float64) + 0.05 for _ in range(2)]

    class Rounded(TableModel):
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().__call__(*args, **kwargs).to(dtype)

    target, draft = (Rounded(t / t.sum(-1, keepdim=True)) for t in tables)
    tree = {"draft_len": 2} if rule in ("token", "block") else {"tree": Tree.branching([2])}
    law = exact_law(
        lambda rng: tuple(speculate(target, draft, [0], max_new_tokens=3, rule=rule, rng=rng, **tree).tokens)
    )
    assert total_variation(law, target_law(target, [0], 3)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_lower_precision_run_with_every_rule(dtype: torch.dtype, models: tuple[GPT, GPT]) -> None:
    target, draft = (GPT(m.config) for m in models)
    for model, like in zip((target, draft), models, strict=True):
        model.load_state_dict(like.state_dict())
        model.to(dtype)
    for rule in sorted(RULES):
        tree = Tree.chain(3) if rule in ("token", "block") else Tree.branching([2, 1])
        for sampling in (Sampling(0), Sampling(0.7, 4, 0.9)):
            rows = speculate(
                target, draft, [[1], [2, 3]], max_new_tokens=12, tree=tree, rule=rule, sampling=sampling, seed=1
            )
            assert [len(r.tokens) for r in rows] == [12, 12]
    same = speculate(target, target, [1], max_new_tokens=30, sampling=Sampling(0), draft_len=3)
    assert same.stats.acceptance_rate is not None
    assert same.stats.acceptance_rate > 0.9  # rounding differs between passes of other lengths; near-ties may fall


# --- encodings and consoles ----------------------------------------------------------------------------------

DRIVER = """
import sys
from minispec.cli import main
root = sys.argv[1]
tales, pair, out = root + "/tales", root + "/a pair \\u2013 \\u706b", root + "/out"
shape = sys.argv[2:]
steps = ["--steps", "2"]
for args in (
    ["train-tokenizer", tales, "--pair", pair, "--vocab-size", "280"],
    ["train", tales, "--size", "target", "--pair", pair, *steps, *shape],
    ["train", tales, "--size", "draft", "--pair", pair, *steps, *shape],
    ["distill", "--data", tales, "--pair", pair, *steps, "--out", out, "--batch", "2"],
    ["eval", tales + "/f\\u00fcchse.txt", "--pair", out, "--windows", "2", "--prompts", "1"],
    ["generate", "Th\\u00e9 fox \\u706b \\U0001f600", "--pair", out, "--max-new-tokens", "4", "--draft-len", "4", "--stop", "zz"],
    ["generate", "The fox", "--pair", out, "--max-new-tokens", "2", "--draft-len", "4", "--compare"],
    ["bench", "--pair", out, "--passes", "--prompts", "1", "--repeats", "1", "--max-new-tokens", "4", "--json", root + "/b.json"],
):
    assert main(args) == 0, args
"""


@pytest.mark.parametrize(
    "settings",
    [
        {
            "python": ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"],
            "env": {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0", "NO_COLOR": "1"},
        },
        {
            "python": [],
            "env": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        },
    ],
    ids=["a cp1252 console, no default encoding", "the C locale"],
)
def test_every_command_under_other_encodings(settings: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "with a space"
    write_text(root / "tales" / "füchse.txt", (TEXT + "Füchse – 火. ") * 300)
    if "LC_ALL" in settings["env"]:  # then file names are bytes that ASCII has no letters for
        root = root.rename(tmp_path / "plain")
        (root / "tales" / "füchse.txt").rename(root / "tales" / "fox.txt")
        driver = DRIVER.replace("f\\u00fcchse", "fox").replace(" \\u2013 \\u706b", "")
    else:
        driver = DRIVER
    command = [sys.executable, *settings["python"], "-c", driver, str(root), *SHAPE, "--block-size", "128"]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | settings["env"]
    done = subprocess.run(command, capture_output=True, env=env, cwd=tmp_path, check=False)
    error = done.stderr.decode("utf-8", errors="replace")
    assert done.returncode == 0, error
    assert "Warning" not in error
    assert b"per target pass" in done.stdout


def test_a_console_without_the_characters_gets_question_marks(tmp_path: Path) -> None:
    code = "import sys; from minispec.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "generate", "火 \U0001f600 é", "--max-new-tokens", "2", "--draft-len", "1"]
    env = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("cp1252").startswith("? ? é")


def test_case_26_an_empty_home_no_network_another_folder(tmp_path: Path) -> None:
    """`.ci/run` does the same with the installed wheel."""
    code = (
        "import socket\n"
        "def no(*a, **k): raise AssertionError('the network was used')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = no\n"
        "import minispec\n"
        "pair = minispec.load_pair()\n"
        "print(pair.complete('Once upon a time', max_new_tokens=4, seed=1).result.stats.new_tokens)\n"
    )
    (tmp_path / "home").mkdir()
    keep = {name: value for name, value in os.environ.items() if name.upper() in ("PATH", "PYTHONPATH", "SYSTEMROOT")}
    env = keep | {"HOME": str(tmp_path / "home"), "USERPROFILE": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4"
    assert list((tmp_path / "home").iterdir()) == []


def test_the_command_leaves_the_host_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bad_inputs import make_pair

    make_pair(tmp_path)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype(), dict(os.environ), os.getcwd()
    assert main(["generate", "abc", "--pair", str(tmp_path), "--max-new-tokens", "4", "--draft-len", "4"]) == 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), torch.get_default_dtype(), dict(os.environ), os.getcwd()) == before[1:]
    assert GPTConfig(3, 4, 1, 1, 4).vocab_size == 3
