"""`minispec distill` and `minispec eval`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from minispec.files import CONFIG, check_writable, copy_file, read_config, read_text, sha256
from minispec.inputs import check_integer
from minispec.model import GPT, GPTConfig
from minispec.pair import Pair, load_pair, save_model, weights_folder
from minispec.train.alignment import RANKS, Alignment, align, decode_prompts
from minispec.train.data import batch_at, encode_texts, read_corpus
from minispec.train.distillation import NAMES, Batch, distil, kept_batches, measure, own_samples, self_batches
from minispec.train.evaluate import bits_per_byte, token_lengths
from minispec.train.progress import progress
from minispec.train.recipe import Metrics, Recipe

PARAGRAPH = "\n\n"  # where a target's own samples begin


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare both commands."""
    distill = commands.add_parser("distill", help="teach a draft to say what its target will say")
    what = "'self' (the target's own samples), a folder of *.txt, or both: each fills a share of the batch"
    distill.add_argument("--data", nargs="+", required=True, metavar="SOURCE", help=what)
    distill.add_argument("--loss", choices=NAMES, default="fkl+tv", help="default fkl+tv: forward KL, then TV")
    budget = distill.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="time budget, over all runs of one checkpoint")
    budget.add_argument("--steps", type=int, help="number of steps")
    kept = "compute the target's laws once, for N windows kept on disk (a MB each), and learn from those"
    distill.add_argument("--keep", type=int, default=0, metavar="N", help=kept)
    distill.add_argument("--fresh", action="store_true", help="start from a random draft, not from the pair's")
    distill.add_argument("--layers", type=int, default=2, help="of a fresh draft (default 2)")
    distill.add_argument("--heads", type=int, default=4, help="of a fresh draft (default 4)")
    distill.add_argument("--width", type=int, default=128, help="of a fresh draft (default 128)")
    distill.add_argument("--batch", type=int, default=4, help="windows a step (default 4)")
    distill.add_argument("--lr", type=float, help="peak learning rate (default 4e-3 fresh, 1e-3 otherwise)")
    distill.add_argument(
        "--decay", type=float, default=0.5, help="share of the run in which the rate falls (default 0.5)"
    )
    distill.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of matrix products")
    distill.add_argument("--seed", type=int, default=0)
    distill.add_argument("--validation", nargs="+", default=[], metavar="NAME", help="files never trained on")
    distill.add_argument("--out", type=Path, metavar="DIR", help="save the pair with its new draft here")
    distill.add_argument("--checkpoint", type=Path, help="file to save to and resume from")
    distill.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS", help="default 120")
    distill.set_defaults(run=run_distill)
    evaluate = commands.add_parser("eval", help="bits per byte, acceptance and tokens per pass on text files")
    evaluate.add_argument("files", type=Path, nargs="+", metavar="FILE", help="text files (UTF-8), a row each")
    evaluate.add_argument("--draft-len", type=int, default=5, metavar="K", help="chain of the decoding run (default 5)")
    evaluate.add_argument("--windows", type=int, default=64, help="windows a file for the laws (default 64)")
    evaluate.add_argument("--prompts", type=int, default=32, help="prompts a file for decoding (default 32; 0: none)")
    evaluate.add_argument("--draft", default="draft", metavar="NAME", help="another draft file of the pair")
    evaluate.set_defaults(run=run_eval)
    for command in (distill, evaluate):
        command.add_argument("--pair", type=Path, metavar="DIR", help="folder of another pair than the shipped one")
        command.add_argument("--device", default="cpu")


def run_distill(args: argparse.Namespace) -> None:
    pair = load_pair(args.pair, device=args.device)
    for path in (args.out and args.out / CONFIG, args.checkpoint):
        if path is not None:
            check_writable(path)
    target, draft = pair.target, pair.draft
    block = target.config.block_size
    if args.batch < len(args.data):
        raise ValueError(f"batch must be >= the number of sources, got {args.batch} and {len(args.data)}")
    check_integer("keep", args.keep, 0)
    recipe = Recipe(steps=args.steps, minutes=args.minutes, batch=args.batch, context=block, seed=args.seed)
    lr = args.lr if args.lr is not None else 4e-3 if args.fresh else 1e-3
    recipe = replace(recipe, lr=lr, warmup=50, decay=args.decay, validate_every=50, precision=args.precision)
    if args.fresh:
        draft = GPT(GPTConfig(target.config.vocab_size, block, args.layers, args.heads, args.width))
        draft.reset_parameters(torch.Generator().manual_seed(args.seed))
        draft.to(args.device)
    batches, held_out = sources(pair, args, block)

    def validate(draft: GPT) -> Metrics:
        return measure(target, draft, held_out)

    first = validate(draft)
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        progress(f"distilling ({args.loss})", args.batch * block) as on_step,
    ):
        learnt: Callable[[int], Batch] = batches
        if args.keep:
            learnt = kept_batches(target, batches, args.keep, args.batch, recipe, Path(folder))
        options = {
            "checkpoint": args.checkpoint,
            "save_every": args.save_every,
            "validate": validate,
            "on_step": on_step,
        }
        state = distil(target, draft, learnt, recipe, args.loss, **options)
    for name, value in validate(draft).items():
        print(f"{name}: {first[name]:.3f} before, {value:.3f} after {state.step} steps in {state.seconds:.0f} s")
    if args.out is not None:
        what = " and ".join("own samples" if data == "self" else "text" for data in args.data)
        stage = {"name": f"{args.loss} on {what}", "curve": state.history}
        save_pair(args.out, args.pair or weights_folder(), draft, stage, fresh=args.fresh)


def sources(pair: Pair, args: argparse.Namespace, block: int) -> tuple[Callable[[int], Tensor], Tensor]:
    """Batches by step, each source filling its share, and held-out contexts of all of them."""
    parts, held = [], []
    for k, data in enumerate(args.data):  # each source fills its share of every batch
        share = len(range(k, args.batch, len(args.data)))
        if data == "self":
            start = pair.tokenizer.encode(PARAGRAPH)
            held.append(own_samples(pair.target, start, 16, block, args.seed))
            parts.append(self_batches(pair.target, start, share, args.seed))
        else:
            corpus = read_corpus(Path(data), args.validation)
            tokens, rest = (encode_texts(pair.tokenizer, texts) for texts in (corpus.train, corpus.validation))
            held.append(spread(rest, block, 16))
            parts.append(partial(text_batch, tokens, share, block, args.seed))
    held_out = torch.cat(held)

    def batches(step: int) -> Tensor:
        return torch.cat([part(step) for part in parts])

    return batches, held_out


def text_batch(tokens: Tensor, batch: int, context: int, seed: int, step: int) -> Tensor:
    """Windows of a text (batch, context), by step."""
    return batch_at(tokens, step, batch, context, seed)[0]


def save_pair(out: Path, source: Path, draft: GPT, stage: dict[str, Any], fresh: bool) -> None:
    """A copy of the pair in `source` with this draft, whose history gains a stage.

    Draft and `config.json` come last and together, so that a kill leaves the pair that was in `out`, if one was.
    """
    config = read_config(source)
    for file in sorted(source.iterdir()):
        same = (out / file.name).exists() and sha256(out / file.name) == sha256(file)
        if file.suffix in (".tiktoken", ".safetensors", ".txt") and file.stem != "draft" and not same:
            copy_file(file, out / file.name)
    before = [] if fresh else config.get("draft", {}).get("training", {}).get("stages", [])
    save_model(out, "draft", draft, training={"stages": [*before, stage]}, config=config)
    print(f"saved: {out}")


def spread(tokens: Tensor, length: int, rows: int) -> Tensor:
    """At most `rows` windows (rows, length), evenly spread. ValueError when there is not even one."""
    if len(tokens) < length:
        raise ValueError(f"the text has {len(tokens)} tokens, too few for one window of {length}")
    rows = min(rows, len(tokens) // length)
    starts = [i * (len(tokens) - length) // max(rows - 1, 1) for i in range(rows)]
    return torch.stack([tokens[start : start + length] for start in starts])


def run_eval(args: argparse.Namespace) -> None:
    for name, least in (("windows", 1), ("prompts", 0), ("draft_len", 0)):
        check_integer(name, getattr(args, name), least)
    pair = load_pair(args.pair, device=args.device, draft=args.draft)
    table = Table(title=f"K = {args.draft_len}; acceptance, agreement, KL and ranks over contexts of the text, T = 1")
    for name in (
        "file",
        "target bits/byte",
        "draft bits/byte",
        "acceptance",
        "agreement",
        "KL",
        "tokens/pass T=1",
        "T=0",
    ):
        table.add_column(name, justify="left" if name == "file" else "right")
    found = []
    for file in args.files:
        text = read_text(file)
        tokens = torch.tensor(pair.tokenizer.encode(text))
        found.append(evaluate_text(pair, tokens, args, table, file.stem))
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    weights = [a.contexts for a in found]
    by_rank = [sum(a.by_rank[j] * w for a, w in zip(found, weights, strict=True)) / sum(weights) for j in range(RANKS)]
    console.print("acceptance by child rank of a top-k tree: " + " ".join(f"{a:.3f}" for a in by_rank))


def evaluate_text(pair: Pair, tokens: Tensor, args: argparse.Namespace, table: Table, name: str) -> Alignment:
    """Add a row to the table; return the alignment."""
    block, lengths = pair.target.config.block_size, token_lengths(pair.tokenizer)
    windows = spread(tokens, block, args.windows)
    laws = align(pair.target, pair.draft, windows)
    bits = [bits_per_byte(m, tokens, lengths, windows=args.windows) for m in (pair.target, pair.draft)]
    row = [f"{bits[0]:.3f}", f"{bits[1]:.3f}", f"{laws.acceptance:.3f}", f"{laws.agreement:.3f}", f"{laws.kl:.3f}"]
    for temperature in (1.0, 0.0) if args.prompts else ():
        prompts = spread(tokens, block // 8, args.prompts).tolist()
        decoded = decode_prompts(pair.target, pair.draft, prompts, temperature, args.draft_len)
        row.append(f"{decoded.tokens_per_pass:.2f} ({decoded.new_tokens:,})")
    table.add_row(name, *row)
    return laws
