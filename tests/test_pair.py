"""Files: what is saved is what is loaded, and damaged files are refused by name (cases 19, 25, 26)."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_tokenizer import BYTES, PATTERN, SPECIAL, Tokenizer

from minispec import GPT, GPTConfig, Pair, load_pair
from minispec.files import four_bits, restored, sha256, stored, write_text
from minispec.pair import save_model, save_tokenizer

END = {next(iter(SPECIAL)): 256}


def small(seed: int, vocab: int = 257, block: int = 8) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab, block, 1, 2, 8))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("a pair – with spaces")
    save_tokenizer(root, Tokenizer(BYTES, PATTERN, END))
    save_model(root, "target", small(1), training={"steps": 3})
    save_model(root, "draft", small(2), dtype=torch.float32)
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "pair")
    return tmp_path / "pair"


def test_round_trip(made: Path) -> None:
    pair = load_pair(made)
    for name, weight in small(2).state_dict().items():
        assert torch.equal(pair.draft.state_dict()[name], weight)
    for name, weight in small(1).state_dict().items():  # saved in bfloat16, loaded as float32
        assert torch.equal(pair.target.state_dict()[name], weight.bfloat16().float())
    assert pair.target.end_of_text == pair.draft.end_of_text == 256
    assert pair.tokenizer.encode("a") == [97]
    assert not pair.target.training
    assert load_pair(made, dtype=torch.float64).target.dtype == torch.float64
    assert json.loads((made / "config.json").read_text())["target"]["training"] == {"steps": 3}
    assert {p.name for p in made.iterdir()} == {
        "config.json",
        "tokenizer.tiktoken",
        "target.safetensors",
        "draft.safetensors",
    }


def test_weights_of_8_bits_are_within_half_a_level(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "pair"
    shutil.copytree(made, root)
    model = small(3)
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight[0] = 0.0  # a row without a largest number
        model.ln_f.weight[0] = 1 / 3
    save_model(root, "target", model, dtype=torch.int8)
    target, scales = load_pair(root).target, load_file(root / "target.safetensors")
    for name, weight in model.state_dict().items():
        found = target.state_dict()[name]
        if weight.ndim == 2:
            level = scales[f"{name}.scale"][:, None]
            assert ((found - weight).abs() <= level * 0.5001).all(), name
            least = weight.abs().amax(1, keepdim=True) / 127
            assert (level >= least * 0.9999).all(), name
            assert (level <= (least * 1.1251).clamp(min=1e-37)).all(), name
            assert (found.half().float() - found).abs().max() < 2**-25, name  # half precision holds them
        else:
            assert torch.equal(found, weight), name
    before = (root / "target.safetensors").read_bytes()
    save_model(root, "target", target, dtype=torch.int8)  # what was read is what is written
    assert load_pair(root).target.state_dict().keys() == target.state_dict().keys()
    assert (root / "target.safetensors").read_bytes() == before
    held = load_file(root / "target.safetensors")
    assert {tensor.dtype for tensor in held.values() if tensor.ndim == 2} == {torch.int8}


def test_weights_once_rounded_to_8_bits_stay_as_they_are() -> None:
    """Also where the largest of a row was rounded down, so that a smaller scale would do."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(20_000, 1, generator=generator) + 0.1
    first = restored(Path("a"), stored({"w": spread * torch.randn(20_000, 8, generator=generator)}, torch.int8))["w"]
    again = restored(Path("a"), stored({"w": first}, torch.int8))["w"]
    assert torch.equal(first, again)


def test_the_scales_of_8_bit_weights_have_four_bits() -> None:
    x = torch.tensor([1.0, 1.01, 15.0, 15.5, 16.0, 17.0, 0.1])
    assert four_bits(x).tolist() == [1.0, 1.125, 15.0, 16.0, 16.0, 18.0, 0.1015625]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("wte.weight.scale"),
        lambda t: t.update({"wte.weight.scale": torch.ones(5)}),
        lambda t: t.update({"wte.weight": t["wte.weight"][:, 0].contiguous()}),
    ],
)
def test_8_bit_weights_without_their_scales_are_refused(
    made: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    root = tmp_path / "pair"
    shutil.copytree(made, root)
    save_model(root, "target", small(3), dtype=torch.int8)
    tensors = load_file(root / "target.safetensors")
    change(tensors)
    save_file(tensors, root / "target.safetensors")
    rehash(root)
    with pytest.raises(
        ValueError, match=r"target\.safetensors: tensor 'wte\.weight' is of 8-bit integers without a scale"
    ):
        load_pair(root)


def test_a_scale_without_its_matrix_is_refused(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "pair"
    shutil.copytree(made, root)
    tensors = load_file(root / "target.safetensors")
    save_file(tensors | {"wte.weight.scale": torch.ones(257)}, root / "target.safetensors")
    rehash(root)
    with pytest.raises(
        ValueError, match=r"tensor 'wte\.weight\.scale' is \(257,\), config\.json asks for no such tensor"
    ):
        load_pair(root)


def test_loading_leaves_the_global_generator_alone(made: Path) -> None:
    before = torch.get_rng_state()
    load_pair(made)
    assert torch.equal(torch.get_rng_state(), before)


class Bomb:
    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (Path.touch, (Path("executed"),))


def flip_last_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "pickle": lambda data: pickle.dumps(Bomb()),
    "one byte short": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "LFS pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "HTML page": lambda data: b"<!DOCTYPE html><html></html>",
    "one flipped data byte": flip_last_byte,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["target.safetensors", "draft.safetensors", "tokenizer.tiktoken"])
def test_case_25_damaged_files_are_refused_by_name(
    copy: Path, file: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy)
    path = copy / file
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(ValueError, match=rf"{file}: damaged or another file: .*fetch the file again"):
        load_pair(copy)
    assert not Path("executed").exists()


@pytest.mark.parametrize("damage", [d for d in DAMAGE if d != "one flipped data byte"])
def test_case_25_damage_with_a_matching_checksum_is_refused_too(copy: Path, damage: str) -> None:
    path = copy / "draft.safetensors"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    rehash(copy)
    with pytest.raises(ValueError, match=r"draft\.safetensors: (not a safetensors file|tensor)"):
        load_pair(copy)


@pytest.mark.parametrize("damage", [d for d in DAMAGE if d != "one flipped data byte"])
def test_case_25_a_damaged_config_is_refused(copy: Path, damage: str) -> None:
    path = copy / "config.json"
    path.write_bytes(DAMAGE[damage](path.read_bytes().rstrip()))
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        load_pair(copy)


@pytest.mark.parametrize("file", ["target.safetensors", "draft.safetensors", "tokenizer.tiktoken", "config.json"])
def test_case_25_a_missing_file_is_named(copy: Path, file: str) -> None:
    (copy / file).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{file}: no such file; fetch"):
        load_pair(copy)


def rehash(root: Path) -> None:
    config = json.loads((root / "config.json").read_text())
    config["sha256"] = {name: sha256(root / name) for name in config["sha256"]}
    (root / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("ln_f.bias"), r"tensor 'ln_f.bias' is missing, config.json asks for \(8,\)"),
        (lambda t: t.update(extra=torch.zeros(2)), r"tensor 'extra' is \(2,\), config.json asks for no such tensor"),
        (
            lambda t: t.update({"ln_f.bias": torch.zeros(9)}),
            r"tensor 'ln_f.bias' is \(9,\), config.json asks for \(8,\)",
        ),
    ],
)
def test_case_25_wrong_tensors_are_named(copy: Path, change: Callable, message: str) -> None:  # type: ignore[type-arg]
    tensors = load_file(str(copy / "draft.safetensors"))
    change(tensors)
    save_file(tensors, str(copy / "draft.safetensors"))
    rehash(copy)
    with pytest.raises(ValueError, match=r"draft\.safetensors: " + message):
        load_pair(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["draft"].update(n_layer=2), r"draft\.safetensors: tensor 'h\.1\."),
        (lambda c: c["draft"].update(n_layer="2"), r"config\.json: section 'draft': n_layer must be an integer"),
        (
            lambda c: c["draft"].pop("n_head"),
            r"config\.json: section 'draft': n_head must be an integer >= 1, got None",
        ),
        (lambda c: c.pop("target"), r"config\.json: has no section 'target'"),
        (lambda c: c["sha256"].pop("draft.safetensors"), r"config\.json: has no checksum for draft\.safetensors"),
        (
            lambda c: c.update(format="minispec-pair-9"),
            r"config\.json: format is 'minispec-pair-9', this version reads",
        ),
    ],
)
def test_case_25_a_config_that_disagrees(copy: Path, change: Callable, message: str) -> None:  # type: ignore[type-arg]
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_pair(copy)


def test_case_19_models_and_tokenizer_must_share_a_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BYTES, PATTERN, END)
    with pytest.raises(ValueError, match="draft's vocab_size is 300, the target's 257"):
        Pair(small(1), small(2, vocab=300), tokenizer)
    with pytest.raises(ValueError, match="tokenizer has 257 tokens, the models' vocab_size is 300"):
        Pair(small(1, vocab=300), small(2, vocab=300), tokenizer)
    with pytest.raises(ValueError, match="draft's block_size is 4, the target's 8"):
        Pair(small(1), small(2, block=4), tokenizer)
    save_tokenizer(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="tokenizer has 257 tokens, the model's vocab_size is 300"):
        save_model(tmp_path, "draft", small(1, vocab=300))


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    from minispec.files import atomic

    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), atomic(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_case_26_the_shipped_pair_loads(shipped: Pair) -> None:
    assert shipped.target.config.vocab_size == shipped.tokenizer.vocab_size
    ratio = sum(p.numel() for p in shipped.target.parameters()) / sum(p.numel() for p in shipped.draft.parameters())
    assert 10 <= ratio <= 50
