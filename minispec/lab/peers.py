"""Hugging Face transformers under the same bench: our GPT's weights in its GPT-2, its decoders as callables.

`plain`, `assisted` and `lookup` give objects `decoder(prompt, n, seed) -> tokens`, the signature that the
losslessness tests and the speed comparison take. `python -m minispec.lab.peers` tests all of them, on tiny random
models whose output law is known, and prints what it sees. Needs the extra `peers`; uses no network.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minispec.decode import generate
from minispec.lab import models
from minispec.lab.lossless import judge
from minispec.lab.report import JOINT
from minispec.model import GPT
from minispec.noise import mix
from minispec.sampling import Sampling

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of the logits after an export


def transformers() -> Any:
    """The module, told to stay off the network. ImportError names the extra."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers as module
    except ImportError as error:
        raise ImportError('the peers need transformers: pip install "minispec[peers]"') from error
    return module


def gpt2_weights(model: GPT) -> dict[str, Tensor]:
    """The model's weights under the names and in the layout of Hugging Face's `GPT2LMHeadModel`.

    Its projections are `Conv1D`, which stores a weight as (in, out) where a linear layer has (out, in).
    """
    weights = {}
    for name, weight in model.state_dict().items():
        projection = name.endswith(".weight") and name.split(".")[-2].startswith("c_")
        weights[f"transformer.{name}"] = weight.detach().t().contiguous() if projection else weight.detach()
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return weights


def export(model: GPT) -> Any:
    """A `GPT2LMHeadModel` with copies of the model's weights, on its device and in its dtype.

    Raises `ValueError` when its logits are further from the model's than 1e-10 (float64) or 1e-4 (float32).
    """
    config, library = model.config, transformers()
    shape = {name: getattr(config, name) for name in ("vocab_size", "n_embd", "n_layer", "n_head")}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng(devices=[]):  # a new model draws weights, which are then overwritten
        peer = library.GPT2LMHeadModel(library.GPT2Config(n_positions=config.block_size, **shape, **off))
        peer = peer.to(device=model.device, dtype=model.dtype).eval().requires_grad_(False)
        peer.load_state_dict(gpt2_weights(model))
        tokens = torch.arange(min(config.block_size, 64), device=model.device)[None] * 7 % config.vocab_size
        with torch.inference_mode():
            gap = float((peer(tokens).logits - model(tokens)).abs().max())
    if not gap <= TOLERANCE.get(model.dtype, 0.1):
        raise ValueError(f"export: the logits of the two models differ by {gap:.2g} in {model.dtype}")
    return peer


@dataclass(frozen=True)
class Peer:
    """One of transformers' decoders. `peer(prompt, n, seed)` gives the n new tokens, fewer after a stop token.

    settings: of its `GenerationConfig`; arguments: of its `generate`. The global random state that it draws from is
    seeded for the call and restored after it.
    """

    name: str
    model: Any
    settings: dict[str, Any]
    arguments: dict[str, Any]
    library: Any  # transformers

    def __call__(self, prompt: Sequence[int], n: int, seed: int) -> list[int]:
        tokens = torch.tensor([list(prompt)], device=self.model.device)  # (1, T)
        if n == 0:
            return []  # transformers refuses to generate nothing
        config = self.library.GenerationConfig(max_new_tokens=n, **self.settings)
        here = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=here):
            torch.manual_seed(mix(seed, 0))  # neighbouring seeds, unrelated streams
            out = self.model.generate(
                tokens, attention_mask=torch.ones_like(tokens), generation_config=config, **self.arguments
            )
        return [int(token) for token in out[0, len(prompt) :]]


def _about_own_call(record: logging.LogRecord) -> bool:
    """Drops a warning of assisted generation about how it calls its own draft, which nobody else can mend."""
    return "Passing `generation_config` together with" not in record.getMessage()


def settings(sampling: Sampling | None, stop: Sequence[int]) -> dict[str, Any]:
    """`Sampling` in transformers' words. What is not said there has defaults, such as a top-k of 50: say all."""
    sampling = Sampling() if sampling is None else sampling
    # padding is the stop token or none at all: a draft would take any other for padding where a prompt holds it
    pad = stop[0] if stop else None
    ends = {"eos_token_id": list(stop) or None, "bos_token_id": None, "pad_token_id": pad, "use_cache": True}
    if sampling.greedy:
        return {"do_sample": False, **ends}
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": top_p,
        **ends,
    }


def plain(target: GPT, sampling: Sampling | None = None, stop: Sequence[int] = ()) -> Peer:
    """Plain `generate`: one token a pass. `stop` are token ids that end a text; by default none does."""
    return Peer("plain", export(target), settings(sampling, stop), {}, transformers())


def assisted(
    target: GPT, draft: GPT, draft_len: int = 4, sampling: Sampling | None = None, stop: Sequence[int] = ()
) -> Peer:
    """Assisted generation: `draft_len` tokens of the draft a step, never fewer for want of confidence."""
    helper = export(draft)
    helper.generation_config.update(
        num_assistant_tokens=draft_len,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    logging.getLogger("transformers.generation.utils").addFilter(_about_own_call)
    return Peer("assisted", export(target), settings(sampling, stop), {"assistant_model": helper}, transformers())


def lookup(target: GPT, draft_len: int = 4, sampling: Sampling | None = None, stop: Sequence[int] = ()) -> Peer:
    """Prompt lookup: up to `draft_len` tokens that followed the last two, or the last one, before."""
    ways = {**settings(sampling, stop), "prompt_lookup_num_tokens": draft_len}
    return Peer("prompt lookup", export(target), ways, {}, transformers())


# --- the suite ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One setting. Tested is the joint law of K + 2 tokens: a whole step, its bonus, and the step after it."""

    vocab_size: int
    draft_len: int
    sampling: Sampling
    prompt: tuple[int, ...] = ()
    seed: int = 2  # of the models
    share: float = 1.0  # of the samples

    def __str__(self) -> str:
        filters = f", top-k {self.sampling.top_k}" if self.sampling.top_k else ""
        filters += f", top-p {self.sampling.top_p}" if self.sampling.top_p else ""
        return f"V = {self.vocab_size}, K = {self.draft_len}, T = {self.sampling.temperature:g}{filters}"

    def models(self) -> tuple[GPT, GPT]:
        """Target and draft in float64, a fifth of the draft's weights being another model's."""
        target, other = (models.random_gpt(seed, self.vocab_size, block=32) for seed in (self.seed, self.seed + 1000))
        return target, models.mix(target, other, 0.2)

    def decoders(self) -> dict[str, Peer]:
        """What is tested, by name, and a control that must be seen."""
        target, draft = self.models()
        return {
            "plain": plain(target, self.sampling),
            "assisted": assisted(target, draft, self.draft_len, self.sampling),
            "prompt lookup": lookup(target, self.draft_len, self.sampling),
            CONTROL: plain(draft, self.sampling),
        }


CONTROL = "control: the draft, plain"
CASES = (  # seeds at which mean TV(p, q) lies in .2 to .5, memory reaches two tokens back, and no law is narrow
    Case(3, 2, Sampling(), (0, 1, 2, 0, 1), seed=5),
    Case(4, 1, Sampling(0.7, top_p=0.9), (0, 1, 2, 3, 0, 1), seed=104, share=0.5),
    Case(5, 1, Sampling(1.5, top_k=3), (0, 3, 1, 4, 0, 3), seed=3, share=0.5),
)
GREEDY = Case(5, 3, Sampling(0.0), seed=3)


class Metered:
    """A decoder that counts its tokens and its target's passes."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.tokens, self.passes = peer, 0, 0
        peer.model.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.passes += 1

    def __call__(self, prompt: Sequence[int], n: int, seed: int) -> list[int]:
        out = self.peer(prompt, n, seed)
        self.tokens += len(out)
        return out

    @property
    def rate(self) -> str:
        return f"{self.tokens / self.passes:.2f}"


def sampled(case: Case, samples: int, seed: int) -> Iterator[list[str]]:
    """Lines of the table for a case with sampling, the control on a quarter of the samples."""
    target, _ = case.models()
    for name, peer in case.decoders().items():
        decoder, size = Metered(peer), int(samples * case.share * (0.25 if name == CONTROL else 1))
        report = judge(
            decoder,
            target,
            prompt=case.prompt,
            length=case.draft_len + 2,
            sampling=case.sampling,
            samples=size,
            seed=seed,
        )
        figures, joint = ["", "", ""], report.finding(JOINT)
        if joint is not None and joint.tv is not None and joint.tv_interval is not None:
            low, high = joint.tv_interval
            figures = [
                f"{joint.tv:.3f} ({low:.3f} to {high:.3f})",
                f"{joint.detectable_tv:.3f}",
                f"{joint.p_value:.2g}",
            ]
        seen = "no difference" if report.ok else "differs: " + ", ".join(sorted(report.failed))
        yield [name, str(case), decoder.rate, f"{size:,}", *figures, seen]


def greedy(case: Case, prompts: int, seed: int) -> Iterator[list[str]]:
    """Lines for greedy decoding: texts of 16 tokens equal to those of minispec's own plain decoding."""
    target, generator = case.models()[0], torch.Generator().manual_seed(seed)
    starts = torch.randint(case.vocab_size, (prompts, 6), generator=generator).tolist()
    want = [r.tokens for r in generate(target, starts, max_new_tokens=16, sampling=case.sampling)]
    for name, peer in case.decoders().items():
        decoder = Metered(peer)
        equal = sum(decoder(start, 16, seed) == text for start, text in zip(starts, want, strict=True))
        yield [name, str(case), decoder.rate, f"{prompts:,}", "", "", "", f"{equal} of {prompts} texts equal"]


HEAD = ("decoder", "setting", "tokens a target pass", "texts", "TV (95 %)", "TV sure to show", "p-value", "seen")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print versions and a Markdown table, a line as soon as it is known. It is a report: the exit status is 0."""
    parser = argparse.ArgumentParser(prog="python -m minispec.lab.peers", description="Test Hugging Face's decoders.")
    parser.add_argument("--samples", type=int, default=6000, help="texts a decoder and setting (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first text; the next ones count up from it")
    options = parser.parse_args(arguments)
    if options.samples < 100:
        parser.error(f"argument --samples: must be at least 100, got {options.samples}")
    if options.seed < 0:
        parser.error(f"argument --seed: must be at least 0, got {options.seed}")
    versions = f"transformers {transformers().__version__}, torch {torch.__version__}"
    print(f"Versions: {versions}, Python {platform.python_version()}. Seed {options.seed}.\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    start, busy = time.perf_counter(), time.process_time()
    lines = [sampled(case, options.samples, options.seed) for case in CASES]
    for line in itertools.chain(*lines, greedy(GREEDY, max(options.samples // 100, 1), options.seed)):
        print(f"| {' | '.join(line)} |", flush=True)
    print(f"\nTook {time.perf_counter() - start:.0f} s, {time.process_time() - busy:.0f} s of processor time.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
