"""Everything that is refused: the input, and the message. `test_errors` checks it; run as a script it prints the table.

CALLS are Python expressions over the names in `names()`; FILES damage a pair or another file and read it; COMMANDS are
arguments of the command, {root} standing for the folder of a pair.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doubles import Counting, random_gpt
from safetensors.torch import load_file, save_file

import minispec
from minispec import advanced, lab
from minispec.cli import main
from minispec.files import sha256, write_text
from minispec.pair import save_model, save_tokenizer
from minispec.text import complete
from minispec.tokenizer import END_OF_TEXT, PATTERN
from minispec.train.bpe import train_tokenizer
from minispec.train.checkpoint import load_checkpoint
from minispec.train.data import batch_at, read_corpus
from minispec.train.fit import make_optimizer
from minispec.train.recipe import Recipe

BYTES = {bytes([i]): i for i in range(256)}


def names() -> dict[str, Any]:
    """What the expressions speak of: tiny models over 3 tokens with a context of 16, and the package's own names."""
    target, draft = Counting(random_gpt(1)), Counting(random_gpt(2))
    tokenizer = minispec.Tokenizer(BYTES, PATTERN, {END_OF_TEXT: 256})

    def speculate(prompt: Any = (0,), draft: Any = draft, max_new_tokens: Any = 3, **options: Any) -> Any:
        return minispec.speculate(
            target, draft, list(prompt) if prompt == (0,) else prompt, max_new_tokens=max_new_tokens, **options
        )

    class Dropout(torch.nn.Module):
        config, device, dtype = target.config, target.device, target.dtype

        def __init__(self) -> None:
            super().__init__()
            self.drop = torch.nn.Dropout(0.1)

    def completing(stop: Any) -> Any:
        return complete(target, draft, tokenizer, "a", stop, {"max_new_tokens": 3})

    scope = {name: getattr(minispec, name) for name in minispec.__all__}
    scope |= {name: getattr(advanced, name) for name in ("AdaptiveDrafter", "DynamicTree", "HeuristicDrafter")}
    scope |= {"speculate": speculate, "target": target, "draft": draft, "tokenizer": tokenizer, "complete": completing}
    scope |= {"other_vocab": random_gpt(2, vocab=4), "short": random_gpt(2, block=8), "Dropout": Dropout}
    scope |= {"gpt": target.model, "torch": torch, "np": np, "nan": math.nan, "inf": math.inf, "lab": lab}
    scope |= {"Recipe": Recipe, "train_tokenizer": train_tokenizer, "batch_at": batch_at}
    return scope


CALLS = [
    "speculate(prompt=[])",
    "speculate(prompt=[0] * 17)",
    "speculate(prompt=[0, 3])",
    "speculate(prompt=[-1])",
    "speculate(prompt=[0, 1.5])",
    "speculate(prompt=[True])",
    "speculate(prompt='abc')",
    "speculate(prompt=None)",
    "speculate(prompt={0: 1})",
    "speculate(prompt=torch.zeros(2))",
    "speculate(prompt=torch.zeros(1, 1, 1, dtype=torch.long))",
    "speculate(prompt=np.array([1.0]))",
    "speculate(prompt=[[0], []])",
    "speculate(prompt=[[0], 'ab'])",
    "speculate(prompt=[[0], 1])",
    "speculate(prompt=[0, [1]])",
    "speculate(max_new_tokens=-1)",
    "speculate(max_new_tokens=2.5)",
    "speculate(max_new_tokens=True)",
    "speculate(max_new_tokens='4')",
    "speculate(max_new_tokens=None)",
    "speculate(max_new_tokens=[3, 3])",
    "speculate([[0], [1]], max_new_tokens=[3, -1])",
    "speculate([[0], [1]], max_new_tokens=[3, 1.5])",
    "speculate([[0], [1]], max_new_tokens={3, 4})",
    "speculate(max_new_tokens=np.array([[1]]))",
    "speculate(stop=1)",
    "speculate(stop='a')",
    "speculate(stop=[3])",
    "speculate(stop=[-1])",
    "speculate(stop=['a'])",
    "speculate(stop=[True])",
    "speculate(stop=[[1], [2]])",
    "speculate([[0], [1]], stop=[[1], 2])",
    "speculate([[0], [1]], stop=[[1], [5]])",
    "speculate(sampling=0.7)",
    "Sampling(temperature=-1)",
    "Sampling(temperature=nan)",
    "Sampling(temperature=inf)",
    "Sampling(temperature='0.7')",
    "Sampling(temperature=True)",
    "Sampling(top_k=0)",
    "Sampling(top_k=1.5)",
    "Sampling(top_k=True)",
    "Sampling(top_p=0)",
    "Sampling(top_p=1.1)",
    "Sampling(top_p=nan)",
    "Sampling(top_p='0.5')",
    "Sampling().probs(torch.tensor([[0.0, nan]]), 'draft')",
    "speculate(draft_len=-1)",
    "speculate(draft_len=1.9)",
    "speculate(draft_len=True)",
    "speculate(draft_len='4')",
    "speculate(tree=4)",
    "speculate(tree=Tree.chain(1), draft_len=1)",
    "speculate(tree='auto', draft_len=1)",
    "speculate(tree='auto', draft=NGramDrafter(2))",
    "speculate(tree='auto', draft=other_vocab)",
    "speculate(tree='auto', prompt=[3])",
    "speculate(tree='auto', rule='nonsense')",
    "speculate(tree='best')",
    "speculate(tree=Tree.from_parents([[-1, 0], [-1, 0]]))",
    "Tree.from_parents([])",
    "Tree.from_parents([0])",
    "Tree.from_parents([-1, 1])",
    "Tree.from_parents([-1, 0, 1, 0])",
    "Tree.from_parents([[-1, 0], [-1]])",
    "Tree.from_parents(5)",
    "Tree.branching([2, 0])",
    "Tree.best((1.2,), 3)",
    "Tree.best((0.5,), 0)",
    "speculate(rule='tokens')",
    "speculate(rule=5)",
    "speculate(rule='token', tree=Tree.from_parents([-1, 0, 0]))",
    "speculate(rule='token', draft=NGramDrafter(2))",
    "speculate(rule='coupled', draft=ModelDrafter(gpt))",
    "Rule('mine', frozenset({'chain'}), 'without')",
    "Rule('mine', frozenset({'guess'}), 'without', chain=print)",
    "speculate(seed='1')",
    "speculate(seed=1.5)",
    "speculate(seed=True)",
    "speculate(seed=[1, 2])",
    "speculate(seed=1, rng=Randomness(1))",
    "speculate(rng=5)",
    "speculate([[0], [1]], rng=Randomness(1))",
    "speculate(draft='gpt2')",
    "speculate(draft=None)",
    "speculate(draft=other_vocab)",
    "speculate(draft=short)",
    "speculate(draft=Dropout())",
    "generate(Dropout(), [0], max_new_tokens=3)",
    "speculate(draft=NGramDrafter(2), draft_len=2)",
    "stream(target, draft, [[0], [1]], max_new_tokens=3)",
    "ModelDrafter(gpt, how='best')",
    "EarlyExitDrafter(gpt, 2)",
    "EarlyExitDrafter(gpt, True)",
    "NGramDrafter(-1)",
    "NGramDrafter(2, max_n=0)",
    "NGramDrafter(2, branches=1.5)",
    "DynamicTree(gpt, nodes=0)",
    "DynamicTree(gpt, confidence=0)",
    "AdaptiveDrafter(gpt, max_len=-1)",
    "AdaptiveDrafter(gpt, cost=nan)",
    "HeuristicDrafter(gpt, first=0)",
    "HeuristicDrafter(gpt, first=4, max_len=3)",
    "GPTConfig(0, 8, 1, 1, 4)",
    "GPTConfig(3, 8, 1.5, 1, 4)",
    "GPTConfig(3, 8, 1, 3, 4)",
    "gpt(torch.zeros(1, 17, dtype=torch.long))",
    "KVCache(gpt.config, batch=0)",
    "KVCache(gpt.config, capacity=4).begin_write(5)",
    "KVCache(gpt.config).rollback(1)",
    "KVCache(gpt.config).keep([[0]], 2)",
    "KVCache(gpt.config, batch=2).select([1, 0])",
    "complete(stop='end')",
    "complete(stop=[3])",
    "complete(stop=[''])",
    "Pair(gpt, other_vocab, tokenizer)",
    "Pair(gpt, gpt, tokenizer)",
    "tokenizer.encode(3)",
    "tokenizer.decode([257])",
    "tokenizer.decode([-1])",
    "Tokenizer({b'a': 0}, '(', {})",
    "load_pair('nowhere')",
    "load_pair(device='tpu9')",
    "load_pair(dtype=torch.int8)",
    "Recipe()",
    "Recipe(steps=1, minutes=1)",
    "Recipe(steps=-5)",
    "Recipe(steps=1.5)",
    "Recipe(minutes=0)",
    "Recipe(minutes=nan)",
    "Recipe(steps=1, batch=0)",
    "Recipe(steps=1, lr=-1)",
    "Recipe(steps=1, decay=1.5)",
    "Recipe(steps=1, seed=2**40)",
    "Recipe(steps=1, schedule='linear')",
    "Recipe(steps=1, precision='int8')",
    "train_tokenizer(['abc'], 256)",
    "train_tokenizer(['abc'], 300)",
    "batch_at(torch.arange(9), 0, 1, 8, 0)",
    "lab.chi_squared({}, {'a': 1.0})",
    "lab.chi_squared({'a': 1}, {'a': 0.5})",
]


def small(seed: int, vocab: int = 257, block: int = 8) -> minispec.GPT:
    model = minispec.GPT(minispec.GPTConfig(vocab, block, 1, 2, 8))
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


def make_pair(root: Path) -> None:
    """A pair of tiny models, a checkpoint beside it, and a folder with a text."""
    save_tokenizer(root, minispec.Tokenizer(BYTES, PATTERN, {END_OF_TEXT: 256}))
    save_model(root, "target", small(1))
    save_model(root, "draft", small(2))
    write_text(root / "text" / "a.txt", "abc def " * 40)


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


Damage = Callable[[Path], Any]
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a pickle": lambda data: pickle.dumps(Bomb()),
    "one byte short": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "a Git-LFS pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "an HTML page": lambda data: b"<!DOCTYPE html><html></html>",
    "one flipped data byte": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


def replaced(file: str, how: str, rehash: bool = False) -> Damage:
    def damage(root: Path) -> None:
        path = root / file
        path.write_bytes(DAMAGE[how](path.read_bytes()))
        if rehash:
            change_config(lambda c: c["sha256"].update({file: sha256(path)}))(root)

    return damage


def change_config(change: Callable[[Any], Any]) -> Damage:
    def damage(root: Path) -> None:
        config = json.loads((root / "config.json").read_text(encoding="utf-8"))
        change(config)
        write_text(root / "config.json", json.dumps(config))

    return damage


def change_tensors(change: Callable[[Any], Any]) -> Damage:
    def damage(root: Path) -> None:
        tensors = load_file(str(root / "draft.safetensors"))
        change(tensors)
        save_file(tensors, str(root / "draft.safetensors"))
        change_config(lambda c: c["sha256"].update({"draft.safetensors": sha256(root / "draft.safetensors")}))(root)

    return damage


def written(file: str, content: bytes) -> Damage:
    return lambda root: (root / file).write_bytes(content)


def checkpoint(version: str) -> Damage:
    return lambda root: save_file({"a": torch.zeros(1)}, str(root / "run.checkpoint"), {"format": version})


def read_checkpoint(root: Path) -> None:
    model = small(1)
    load_checkpoint(root / "run.checkpoint", model, make_optimizer(model, Recipe(steps=1)))


load = minispec.load_pair
FILES: list[tuple[str, Damage, Damage]] = [
    *[
        (f"{file}: {how}", replaced(file, how), load)
        for file in ("target.safetensors", "tokenizer.tiktoken")
        for how in DAMAGE
    ],
    ("target.safetensors: a pickle, its checksum right", replaced("target.safetensors", "a pickle", True), load),
    ("target.safetensors: one byte short, its checksum right", replaced("target.safetensors", "one byte short", True), load),
    ("target.safetensors: an HTML page, its checksum right", replaced("target.safetensors", "an HTML page", True), load),
    ("tokenizer.tiktoken: an HTML page, its checksum right", replaced("tokenizer.tiktoken", "an HTML page", True), load),
    ("tokenizer.tiktoken: empty, its checksum right", replaced("tokenizer.tiktoken", "empty", True), load),
    ("config.json: empty", replaced("config.json", "empty"), load),
    ("config.json: an HTML page", replaced("config.json", "an HTML page"), load),
    ("config.json: a pickle", replaced("config.json", "a pickle"), load),
    ("config.json: nothing but a list", written("config.json", b"[1]"), load),
    ("config.json: nested a hundred thousand deep", written("config.json", b"[" * 100_000), load),
    ("config.json: of another version", change_config(lambda c: c.update(format="minispec-pair-9")), load),
    ("config.json: no section target", change_config(lambda c: c.pop("target")), load),
    ("config.json: no checksum", change_config(lambda c: c["sha256"].pop("target.safetensors")), load),
    ("config.json: n_layer 2", change_config(lambda c: c["target"].update(n_layer=2)), load),
    ("config.json: n_layer '2'", change_config(lambda c: c["target"].update(n_layer="2")), load),
    ("config.json: n_layer 10**9", change_config(lambda c: c["target"].update(n_layer=10**9)), load),
    ("config.json: n_embd 10**12", change_config(lambda c: c["target"].update(n_embd=10**12)), load),
    ("config.json: n_head missing", change_config(lambda c: c["target"].pop("n_head")), load),
    ("config.json: special_tokens a list", change_config(lambda c: c["tokenizer"].update(special_tokens=[1])), load),
    ("config.json: pattern '('", change_config(lambda c: c["tokenizer"].update(pattern="(")), load),
    ("config.json: a special token more", change_config(lambda c: c["tokenizer"]["special_tokens"].update(x=257)), load),
    ("config.json: a special token twice", change_config(lambda c: c["tokenizer"]["special_tokens"].update(x=256)), load),
    ("a tensor missing", change_tensors(lambda t: t.pop("ln_f.bias")), load),
    ("a tensor too many", change_tensors(lambda t: t.update(extra=torch.zeros(2))), load),
    ("a tensor misshapen", change_tensors(lambda t: t.update({"ln_f.bias": torch.zeros(9)})), load),
    ("target.safetensors missing", lambda root: (root / "target.safetensors").unlink(), load),
    ("config.json missing", lambda root: (root / "config.json").unlink(), load),
    ("a checkpoint of another version", checkpoint("minispec-checkpoint-0"), read_checkpoint),
    ("a checkpoint that is none", written("run.checkpoint", b"nonsense"), read_checkpoint),
    ("a text that is no UTF-8", written("text/b.txt", b"caf\xe9"), lambda root: read_corpus(root / "text")),
    ("a folder without texts", lambda root: None, lambda root: read_corpus(root / "nowhere")),
    ("a folder that is a file", lambda root: None, lambda root: save_tokenizer(root / "config.json" / "x", minispec.Tokenizer(BYTES, PATTERN, {END_OF_TEXT: 256}))),
    ("a model of another vocabulary", lambda root: None, lambda root: save_model(root, "draft", small(1, vocab=300))),
]  # fmt: skip

PAIR = ["--pair", "{root}"]
TRAIN = ["train", "{root}/text", "--size", "draft", *PAIR]
DISTIL = ["distill", "--data", "{root}/text", *PAIR]
EVAL = ["eval", "{root}/text/a.txt", *PAIR]
COMMANDS: list[list[str]] = [
    [],
    ["frobnicate"],
    ["generate", ""],
    ["generate", "word " * 20, *PAIR],
    ["generate", "x", "--temperature", "-1"],
    ["generate", "x", "--temperature", "nan"],
    ["generate", "x", "--temperature", "hot"],
    ["generate", "x", "--top-k", "0"],
    ["generate", "x", "--top-p", "1.5"],
    ["generate", "x", "--draft-len", "-1", *PAIR],
    ["generate", "x", "--draft-len", "1.9"],
    ["generate", "x", "--max-new-tokens", "-1", *PAIR],
    ["generate", "x", "--stop", "", *PAIR],
    ["generate", "x", "--rule", "nonsense"],
    ["generate", "x", "--rule", "token", "--draft", "ngram", *PAIR],
    ["generate", "x", "--draft", "early-exit", *PAIR],
    ["generate", "x", "--device", "tpu9"],
    ["generate", "x", "--pair", "{root}/nowhere"],
    ["generate", "x", "--draft", "nobody", *PAIR],
    ["train-tokenizer", "{root}/nowhere", "--pair", "{root}/new"],
    ["train-tokenizer", "{root}/text", "--vocab-size", "12", "--pair", "{root}/new"],
    ["train-tokenizer", "{root}/text", "--pair", "{root}/config.json"],
    ["train", "{root}/text", "--size", "draft", "--steps", "1", "--pair", "{root}/nowhere"],
    [*TRAIN, "--steps", "-5"],
    [*TRAIN, "--minutes", "0"],
    [*TRAIN],
    [*TRAIN, "--steps", "1", "--layers", "0"],
    [*TRAIN, "--steps", "1", "--heads", "3", "--width", "8"],
    [*TRAIN, "--steps", "1", "--lr", "0"],
    [*TRAIN, "--steps", "1", "--seed", "99999999999999999999"],
    [*TRAIN, "--steps", "1", "--device", "tpu9"],
    [*TRAIN, "--steps", "1", "--validation", "none"],
    [*TRAIN, "--steps", "1", "--validation", "a"],
    [*TRAIN, "--steps", "1"],
    [*TRAIN, "--steps", "1", "--block-size", "8", "--checkpoint", "{root}/config.json/x"],
    [*TRAIN, "--steps", "1", "--block-size", "8", "--grow-from", "{root}/nowhere"],
    ["distill", "--data", "{root}/nowhere", "--steps", "1", *PAIR],
    [*DISTIL, "--steps", "1", "--lr", "-1"],
    [*DISTIL, "--minutes", "nan"],
    ["distill", "--data", "self", "self", "--batch", "1", "--steps", "1", *PAIR],
    [*DISTIL, "--steps", "1", "--fresh", "--seed", "-1"],
    [*DISTIL, "--steps", "1", "--out", "{root}/config.json/x"],
    [*DISTIL, "--steps", "1", "--loss", "mse"],
    [*EVAL, "--windows", "0"],
    [*EVAL, "--prompts", "-1"],
    [*EVAL, "--draft-len", "-1"],
    ["eval", "{root}/nowhere.txt", *PAIR],
    ["eval", "{root}/config.json", "{root}/tokenizer.tiktoken", "{root}/target.safetensors", *PAIR],
    ["bench", "--nodes", "1"],
    ["bench", "--repeats", "0"],
    ["bench", "--device", "tpu9"],
    ["curves", "{root}/out.png", *PAIR],
]  # fmt: skip


def refused(expression: str) -> tuple[str, list[Any]]:
    """The message with which an expression is refused, and the passes that the models made all the same."""
    scope = names()
    try:
        eval(expression, scope)
    except (ValueError, TypeError, FileNotFoundError) as error:
        return str(error), scope["target"].passes + scope["draft"].passes
    except Exception as error:
        return f"(a crash: {error!r})", []
    return "(not refused)", []


def refused_file(damage: Damage, read: Damage, root: Path) -> str:
    """The message with which a damaged folder is refused."""
    make_pair(root)
    damage(root)
    try:
        read(root)
    except (ValueError, OSError) as error:
        return str(error)
    except Exception as error:
        return f"(a crash: {error!r})"
    return "(not refused)"


def refused_command(args: list[str], root: Path) -> tuple[int, str]:
    """Exit status and what stands on stderr."""
    make_pair(root)
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main([arg.replace("{root}", root.as_posix()) for arg in args])
        except SystemExit as stop:
            status = int(stop.code or 0)
        except Exception as crash:
            return 1, f"(a crash: {crash!r})"
    return status, error.getvalue()


VARIABLE = [  # what differs between machines and versions of libraries
    (r"\b[0-9a-f]{64}\b", "..."),
    (r"\(choose from .*\)", "(choose from ...)"),
    (r"(not JSON|not a safetensors file|not a checkpoint|not a tiktoken vocabulary file) \(.*?\)(;|$)", r"\1 (...)\2"),
    (r"(got 'tpu9'|regular expression, got '\('): .*", r"\1: ..."),
    (r"(section '\w+': )(Storage size|\[enforce).*?(; fetch)", r"\1...\3"),
]


def stable(message: str, root: Path) -> str:
    """The message without what differs from machine to machine, fit for a cell of the table."""
    text = message.strip().replace(str(root), "{root}").replace(root.as_posix(), "{root}").replace("\\", "/")
    for found, instead in VARIABLE:
        text = re.sub(found, instead, text)
    return text.replace("|", "/")


def table() -> dict[str, str]:
    """Input and message of every case, in order."""
    rows = {}
    for number, expression in enumerate(CALLS):
        with folder(number) as root:
            rows[expression] = stable(refused(expression)[0], root)
    for number, (name, damage, read) in enumerate(FILES):
        with folder(number) as root:
            rows[name] = stable(refused_file(damage, read, root), root)
    for number, args in enumerate(COMMANDS):
        with folder(number) as root:
            rows[" ".join(["minispec", *map(repr_of, args)])] = stable(refused_command(args, root)[1], root)
    return rows


@contextlib.contextmanager
def folder(number: int) -> Iterator[Path]:
    """A place of its own for a case, which is also the working directory."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix=f"case {number} ") as name:
        os.chdir(name)
        try:
            yield Path(name) / "pair"
        finally:
            os.chdir(before)


def repr_of(arg: str) -> str:
    return f'"{arg}"' if not arg or " " in arg else arg


GOLDEN = Path(__file__).parent / "MESSAGES.md"
INTRO = """# What is refused, and how

Every bad input of `bad_inputs.py` and the message it meets, before any forward pass. `test_errors` compares; `python
tests/bad_inputs.py` writes this page anew. "..." stands for what a library says or what differs from run to run.

| input | message |
|---|---|
"""


def read_golden() -> dict[str, str]:
    """The table as it stands in `MESSAGES.md`."""
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    cells = [line.strip("|").split(" | ") for line in lines[lines.index("|---|---|") + 1 :]]
    return {left.strip().strip("`"): right.strip() for left, right in cells}


if __name__ == "__main__":
    body = "".join(f"| `{left}` | {right} |\n" for left, right in table().items())
    write_text(GOLDEN, INTRO + body)
