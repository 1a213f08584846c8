"""`minispec train-tokenizer` and `minispec train`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minispec.files import CONFIG, check_writable, read_config, restored, stored
from minispec.model import GPT, GPTConfig
from minispec.pair import TOKENIZER, read_tokenizer, save_model, save_tokenizer
from minispec.train.bpe import train_tokenizer
from minispec.train.checkpoint import model_from_checkpoint
from minispec.train.data import encode_texts, read_corpus
from minispec.train.evaluate import bits_per_byte, token_lengths
from minispec.train.grow import grow
from minispec.train.language_model import train
from minispec.train.progress import progress
from minispec.train.recipe import Metrics, Recipe

SIZES: dict[str, tuple[Any, ...]] = {  # layers, heads, width, peak learning rate
    "target": (8, 8, 512, 6e-4),
    "draft": (2, 4, 128, 4e-3),
}
STORES = ("float32", "bfloat16", "int8")


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare both commands."""
    bpe = commands.add_parser("train-tokenizer", help="train a byte-level BPE vocabulary on a folder of *.txt")
    bpe.add_argument("folder", type=Path, metavar="DIR", help="folder with *.txt files (UTF-8)")
    bpe.add_argument("--vocab-size", type=int, default=1024, help="ids, the end of text included (default 1024)")
    bpe.set_defaults(run=run_tokenizer)
    lm = commands.add_parser("train", help="train a target or a draft on a folder of *.txt")
    lm.add_argument("folder", type=Path, metavar="DIR", help="folder with *.txt files (UTF-8)")
    lm.add_argument("--size", choices=sorted(SIZES), required=True, help="which model of the pair, and its shape")
    for name in ("layers", "heads", "width"):
        lm.add_argument(f"--{name}", type=int, help=f"{name}, where the size's own is not wanted")
    lm.add_argument("--block-size", type=int, default=256, help="longest context in tokens (default 256)")
    budget = lm.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="time budget, over all runs of one checkpoint")
    budget.add_argument("--steps", type=int, help="number of steps: repeatable to the bit")
    lm.add_argument("--batch", type=int, default=8, help="windows a step (default 8)")
    lm.add_argument("--lr", type=float, help="peak learning rate, where the size's own is not wanted")
    lm.add_argument("--decay", type=float, default=0.3, help="share of the run in which the rate falls (default 0.3)")
    lm.add_argument(
        "--grow-from", type=Path, metavar="CHECKPOINT", help="start from a smaller model, made wider or deeper"
    )
    lm.add_argument("--store", choices=STORES, default="bfloat16", help="weights in the file (default bfloat16)")
    lm.add_argument("--schedule", choices=("trapezoid", "cosine"), default="trapezoid")
    lm.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of matrix products")
    lm.add_argument("--seed", type=int, default=0)
    lm.add_argument("--device", default="cpu")
    lm.add_argument("--checkpoint", type=Path, help="file to save to and resume from (default: PAIR/SIZE.checkpoint)")
    lm.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS", help="default 120")
    lm.set_defaults(run=run_train)
    for command in (bpe, lm):
        command.add_argument("--pair", type=Path, required=True, help="folder of the pair that is being made")
        command.add_argument("--validation", nargs="+", default=[], metavar="NAME", help="files never trained on")


def run_tokenizer(args: argparse.Namespace) -> None:
    corpus = read_corpus(args.folder, args.validation)
    check_writable(args.pair / TOKENIZER)
    tokenizer = train_tokenizer(corpus.train, args.vocab_size)
    save_tokenizer(args.pair, tokenizer)
    text = "".join(corpus.validation)[:200_000]
    rate = len(text.encode("utf-8")) / max(len(tokenizer.encode(text)), 1)
    print(f"{args.pair}: {tokenizer.vocab_size} tokens, {rate:.2f} bytes a token on held-out text")


def run_train(args: argparse.Namespace) -> None:
    tokenizer = read_tokenizer(args.pair, read_config(args.pair))
    checkpoint = args.checkpoint or args.pair / f"{args.size}.checkpoint"
    for path in (args.pair / CONFIG, checkpoint):
        check_writable(path)
    given, usual = (args.layers, args.heads, args.width, args.lr), SIZES[args.size]
    layers, heads, width, lr = (b if a is None else a for a, b in zip(given, usual, strict=True))
    config = GPTConfig(tokenizer.vocab_size, args.block_size, layers, heads, width)
    recipe = Recipe(steps=args.steps, minutes=args.minutes, batch=args.batch, lr=lr, seed=args.seed)
    recipe = replace(
        recipe, context=args.block_size, schedule=args.schedule, precision=args.precision, decay=args.decay
    )
    corpus = read_corpus(args.folder, args.validation)
    tokens, held_out = (encode_texts(tokenizer, texts) for texts in (corpus.train, corpus.validation))
    lengths = token_lengths(tokenizer)
    model = GPT(config)
    model.reset_parameters(torch.Generator().manual_seed(args.seed))
    if args.grow_from is not None:
        model = grow(model_from_checkpoint(args.grow_from), config, args.seed)
    model.to(args.device)

    def validate(model: GPT) -> Metrics:
        return {"bits_per_byte": bits_per_byte(model, held_out, lengths, windows=32)}

    with progress(f"training {args.size}", args.batch * args.block_size) as on_step:
        options = {"checkpoint": checkpoint, "save_every": args.save_every, "validate": validate, "on_step": on_step}
        state = train(model, tokens, recipe, **options)
    store = getattr(torch, args.store)
    model.load_state_dict(restored(args.pair, stored(model.state_dict(), store)))  # as it will be read
    final = bits_per_byte(model, held_out, lengths, windows=400)
    about = {"steps": state.step, "seconds": round(state.seconds), "tokens": state.step * args.batch * args.block_size}
    shape = f"{config.n_layer} x {config.n_embd}"
    stages = [{"name": f"cross-entropy, {shape}", "curve": state.history}]
    about |= {"bits_per_byte": round(final, 4), "stages": stages}
    save_model(args.pair, args.size, model, dtype=store, training=about)
    print(f"{args.pair / args.size}.safetensors: {state.step} steps, {final:.3f} bits per byte on held-out text")
