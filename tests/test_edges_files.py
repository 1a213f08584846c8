"""Files where things go wrong: kills while saving, folders that cannot be written, full disks, odd names."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bad_inputs import DAMAGE, make_pair, small
from safetensors import SafetensorError, safe_open

from minispec import files, load_pair
from minispec.cli import main
from minispec.files import atomic, read_config, write_tensors, write_text
from minispec.pair import save_model, save_tokenizer
from minispec.train import draft_commands
from minispec.train.checkpoint import read_checkpoint

TEXT = "The fox said to the hen, come out. The hen said to the fox, I will not. "
SHAPE = ["--block-size", "32", "--layers", "1", "--heads", "2", "--width", "16", "--batch", "2"]


# --- killed while saving -----------------------------------------------------------------------------------


def readable(folder: Path) -> int:
    """How many final files there are, each of which must be whole; a pair that is complete must load."""
    count = 0
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue  # a temporary name: what a kill leaves behind, and nobody reads
        if path.suffix == ".checkpoint":
            read_checkpoint(path)
        elif path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt") as file:
                assert all(torch.isfinite(file.get_tensor(name)).all() for name in file.keys())  # noqa: SIM118
        elif path.suffix == ".json":
            config = read_config(folder)
            if {"target", "draft"} <= config.keys():
                load_pair(folder)
        count += path.is_file()
    return count


def killed(command: list[str], saved: Path, seconds: float) -> bool:
    """Run the command, kill it so long after it has begun to save; False where it was over before."""
    code = "import sys, minispec.cli as c\nsys.exit(c.main(sys.argv[1:]))"
    run, env = [sys.executable, "-c", code, *command], os.environ | {"OMP_NUM_THREADS": "1"}
    before = saved.stat().st_mtime_ns if saved.exists() else 0
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)
    while process.poll() is None and not (saved.exists() and saved.stat().st_mtime_ns > before):
        time.sleep(0.01)
    time.sleep(seconds)
    process.kill()
    _, error = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0, 1), error.decode()  # 1: how Windows kills
    return process.returncode != 0


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of tiny models and the text that they know."""
    root = tmp_path_factory.mktemp("begun")
    write_text(root / "tales" / "fox.txt", TEXT * 60)
    tales, pair = str(root / "tales"), str(root / "pair")
    assert main(["train-tokenizer", tales, "--pair", pair, "--vocab-size", "280"]) == 0
    for size in ("target", "draft"):
        assert main(["train", tales, "--size", size, "--pair", pair, "--steps", "2", *SHAPE]) == 0
        (root / "pair" / f"{size}.checkpoint").unlink()
    return root


@pytest.mark.slow
@pytest.mark.parametrize("what", ["train", "distill"])
def test_case_25_killed_at_ten_random_moments(begun: Path, tmp_path: Path, what: str) -> None:
    """Saving at every step, and the pair at the end: each final file stays whole, and the run goes on each time."""
    pair, out = tmp_path / "pair", tmp_path / "out"
    shutil.copytree(begun / "pair", pair)
    saved = tmp_path / "run.checkpoint"
    shared = ["--pair", str(pair), "--checkpoint", str(saved), "--save-every", "0"]
    draw, kills, steps, done, ends = random.Random(what), 0, 0, 0, 0
    for attempt in itertools.count():
        length = str(steps + draw.choice([2, 6, 4000]))  # some moments near the end of a run, where the pair is saved
        if what == "train":
            command = ["train", str(begun / "tales"), "--size", "draft", *shared, "--steps", length, *SHAPE]
        else:
            data = ["--data", str(begun / "tales"), "self"][: 2 + attempt % 2]
            command = ["distill", *data, *shared, "--steps", length, "--out", str(out), "--batch", "2"]
        hit = killed(command, saved, draw.uniform(0, 2.0))
        kills, ends = kills + hit, ends + (not hit)
        assert readable(pair) >= 4
        assert not out.exists() or readable(out) >= 0
        done = int(read_checkpoint(saved)[1]["state"]["step"]) if saved.exists() else 0
        assert done >= steps  # goes on, never back
        steps = done
        if kills == 10:
            break
    assert steps > 20
    assert (
        main(
            [*command[: command.index("--steps")], "--steps", str(steps + 3), *command[command.index("--steps") + 2 :]]
        )
        == 0
    )
    assert int(read_checkpoint(saved)[1]["state"]["step"]) == steps + 3
    folder = pair if what == "train" else out
    load_pair(folder)
    print(f"{what}: {kills} kills, {ends} runs that were over before, {steps} steps in all")


def test_a_kill_while_a_pair_is_copied_leaves_no_half_file(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after each file in turn: what is there is whole, and no pair is there before it is complete."""
    source, draft = begun / "pair", load_pair(begun / "pair").draft
    stage = {"name": "none", "curve": []}
    left, original = 0, files.os.fsync

    def fsync(handle: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        original(handle)

    for stops in range(5):
        left = stops
        out = tmp_path / f"out {stops}"
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", fsync)
            with contextlib.suppress(KeyboardInterrupt):
                draft_commands.save_pair(out, source, draft, stage, fresh=False)
        names = {p.name for p in out.iterdir()} if out.exists() else set()
        for name in names & {"target.safetensors", "tokenizer.tiktoken"}:
            assert (out / name).read_bytes() == (source / name).read_bytes()
        assert not [name for name in names if name.startswith(".")]
        if "config.json" in names:
            assert load_pair(out).draft.config == draft.config
    assert "config.json" in names


def test_saving_a_model_again_replaces_it_and_its_checksum_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted anywhere before the first renaming, the old pair is still there and loads."""
    make_pair(tmp_path)
    before = load_pair(tmp_path).draft.wte.weight.clone()
    for broken in ("put_tensors", "sha256"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"minispec.pair.{broken}", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
            save_model(tmp_path, "draft", small(9))
        assert torch.equal(load_pair(tmp_path).draft.wte.weight, before)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    save_model(tmp_path, "draft", small(9))
    assert not torch.equal(load_pair(tmp_path).draft.wte.weight, before)


# --- places that cannot be written --------------------------------------------------------------------------


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder with a pair that may be read and not written, by a user for whom that counts."""
    if os.name == "nt":
        pytest.skip("on Windows a folder's read-only mark does not keep files out")
    root = Path(tempfile.mkdtemp(prefix="read only "))
    make_pair(root)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    user = os.geteuid()
    if user == 0:  # root may write anywhere
        try:
            os.seteuid(65534)
        except OSError:
            pytest.skip("root in a user namespace of its own, where there is no other user to be")
    try:
        yield root
    finally:
        if user == 0:
            os.seteuid(0)
        for path in [root, root / "text"]:
            path.chmod(0o755)
        shutil.rmtree(root)


def test_a_read_only_folder_is_read_and_refused_for_writing_before_any_work(
    read_only: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, text = str(read_only), str(read_only / "text")
    assert load_pair(read_only).tokenizer.vocab_size == 257
    for work in (
        "minispec.train.commands.train",
        "minispec.train.draft_commands.distil",
        "minispec.train.commands.train_tokenizer",
    ):
        monkeypatch.setattr(work, lambda *a, **k: pytest.fail("work that could not be saved"))
    steps = ["--steps", "1"]
    for args, file in (
        (["train-tokenizer", text, "--pair", pair], "tokenizer.tiktoken"),
        (["train", text, "--size", "draft", "--pair", pair, *steps, "--block-size", "8"], "config.json"),
        (["distill", "--data", text, "--pair", pair, *steps, "--out", pair], "config.json"),
        (["distill", "--data", text, "--pair", pair, *steps, "--checkpoint", f"{pair}/c"], "c"),
    ):
        assert main(args) == 2
        error = capsys.readouterr().err
        assert f"{read_only / file}: cannot be written (Permission denied); name a folder that can" in error
        assert error.count("\n") == 1
    assert main(["generate", "abc", "--pair", pair, "--max-new-tokens", "3", "--draft-len", "4"]) == 0


def test_a_full_disk_is_an_error_that_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    write_tensors(path, {"a": torch.zeros(2)})
    before = path.read_bytes()

    def full(tensors: object, name: str, metadata: object) -> None:
        Path(name).write_bytes(b"half")
        raise SafetensorError("Error while serializing: No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match=r"cannot be written \(.*No space left"):
        write_tensors(path, {"a": torch.ones(2)})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a limit that only Unix has")
def test_a_disk_that_fills_up_while_training(begun: Path, tmp_path: Path) -> None:
    """With files limited to 4 kB the run ends with one line and status 2, and no half file has the final name."""
    shutil.copytree(begun / "pair", tmp_path / "pair")
    code = (
        "import resource, signal, sys, minispec.cli as c\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "sys.exit(c.main(sys.argv[1:]))"
    )
    args = ["train", str(begun / "tales"), "--size", "draft", "--pair", str(tmp_path / "pair"), "--steps", "2", *SHAPE]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "draft.checkpoint" in done.stderr
    assert not (tmp_path / "pair" / "draft.checkpoint").exists()
    assert readable(tmp_path / "pair") == 4


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    with atomic(tmp_path / "f") as a, atomic(tmp_path / "f") as b:
        assert a != b
        a.write_text("aa")
        b.write_text("b")
    assert (tmp_path / "f").read_text() == "aa"  # the outer one is renamed last


# --- whatever stands in config.json --------------------------------------------------------------------------

JUNK = [None, [], {}, "x", "", "(", -1, 0, 1.5, True, 10**6, 10**12, [1], {"a": 1}, {"a": "b"}]


def places(node: object, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every place of a JSON document."""
    yield at
    if isinstance(node, dict):
        for key, value in node.items():
            yield from places(value, (*at, key))


def test_case_25_any_junk_anywhere_in_the_config_is_refused_by_name_or_harmless(tmp_path: Path) -> None:
    make_pair(tmp_path)
    config = read_config(tmp_path)
    refused = 0
    for at in places(config):
        for junk in JUNK:
            changed = json.loads(json.dumps(config))
            node = changed
            for key in at[:-1]:
                node = node[key]
            if at:
                node[at[-1]] = junk
            write_text(tmp_path / "config.json", json.dumps(changed if at else junk))
            if at == ("tokenizer", "pattern") and isinstance(junk, str) and junk != "(":
                load_pair(tmp_path)  # any regular expression will do
                continue
            with pytest.raises((ValueError, FileNotFoundError), match=re.escape(str(tmp_path))):
                load_pair(tmp_path)
            refused += 1
    assert refused > 200


def test_case_25_every_damage_to_every_file_is_in_the_table() -> None:
    table = (Path(__file__).parent / "MESSAGES.md").read_text(encoding="utf-8")
    for file in ("target.safetensors", "tokenizer.tiktoken"):
        assert all(f"`{file}: {how}`" in table for how in DAMAGE)


def test_odd_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spaces, accents, another script, a quote; a name that looks like an option needs ./ as everywhere."""
    root = tmp_path / "Märchen von 火 – it's \U0001f600"
    write_text(root / "texts" / "Rotkäppchen 1.txt", TEXT * 60)
    pair, tales = str(root / "ein Paar"), str(root / "texts")
    assert main(["train-tokenizer", tales, "--pair", pair, "--vocab-size", "280"]) == 0
    for size in ("target", "draft"):
        assert main(["train", tales, "--size", size, "--pair", pair, "--steps", "2", *SHAPE]) == 0
    out = str(root / "noch eins")
    assert main(["distill", "--data", tales, "--pair", pair, "--steps", "1", "--out", out, "--batch", "2"]) == 0
    assert (
        main(["eval", str(root / "texts" / "Rotkäppchen 1.txt"), "--pair", out, "--windows", "2", "--prompts", "1"])
        == 0
    )
    assert (
        main(["generate", "Thé fox 火", "--pair", out, "--max-new-tokens", "3", "--draft-len", "4", "--seed", "1"]) == 0
    )
    assert "Thé fox 火" in capsys.readouterr().out
    save_tokenizer(root / "again", load_pair(out).tokenizer)
    assert load_pair(out).tokenizer.encode("é") == load_pair(pair).tokenizer.encode("é")
