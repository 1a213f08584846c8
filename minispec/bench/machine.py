"""Where the time goes: memory bandwidth, shares of a step, growth with context and batch, emulated larger targets."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from minispec.around import Around
from minispec.bench.setups import Setup, decode
from minispec.cache import KVCache
from minispec.linear import Linear
from minispec.model import GPT, Block, GPTConfig, LanguageModel
from minispec.pair import Pair
from minispec.sampling import Sampling
from minispec.stopwatch import seconds, waiting
from minispec.trust import unchanged
from minispec.verify import Rule, find_rule

CONTEXTS, BATCHES, CONTINUED = (64, 96, 128, 160, 192, 224), (2, 4, 8, 16, 32), 24  # of `growth`
BUFFER = 256 << 20  # bytes: more than the processor's caches hold


def read_bandwidth(device: torch.device, repeats: int = 7) -> float:
    """Bytes a second of a plain read: the sum of a buffer larger than the caches, best of some."""
    buffer = torch.ones(BUFFER // 4, device=device)
    return BUFFER / min(seconds(buffer.sum, device) for _ in range(repeats + 1))


@torch.inference_mode()
def memory_times(model: LanguageModel, repeats: int = 10) -> tuple[list[float], list[float]]:
    """Seconds of a one-token pass behind 64 tokens, and of a plain read of as many bytes, in turn."""
    context = min(64, model.config.block_size - 1)
    cache = KVCache(model.config, 1, context + 1, device=model.device, dtype=model.dtype)
    text = torch.zeros(1, context + 1, dtype=torch.long, device=model.device)
    buffer = torch.ones(bytes_read(model) // 4, device=model.device)
    model(text[:, :context], cache)
    passes, reads = [], []
    for turn in range(3 * (repeats + 2)):  # two passes, then a read; the first two rounds warm up
        if turn % 3 < 2:
            cache.rollback(context)
            passes.append(seconds(lambda: model(text[:, :1], cache), model.device))
        else:
            reads.append(seconds(buffer.sum, model.device))
    return passes[4:], reads[2:]


def bytes_read(model: Any, held: bool = False) -> int:
    """What a pass over one token reads: all weights but the position table, the token table being the head too.

    `held`: of each as it is held for it since the last pass, which may be in half precision.
    """
    tables = (model.wpe.weight,)
    bytes = {id(p): p.numel() * p.element_size() for p in model.parameters() if all(p is not t for t in tables)}
    if held:
        layers = [(module.weight, module.packed) for module in model.modules() if isinstance(module, Linear)]
        for weight, packed in [*layers, (model.wte.weight, model.head)]:
            bytes[id(weight)] = packed.size(weight)
    return sum(bytes.values())


def emulate_layers(model: GPT, extra: int) -> GPT:
    """The same function at the cost of a larger model: `extra` blocks appended whose output projections are zero.

    An emulation for teaching: outputs are bit for bit those of `model`, time and memory those of n_layer + extra.
    Raises `ValueError` for a negative number.
    """
    if extra < 0:
        raise ValueError(f"extra must be >= 0 layers, got {extra}")
    config = GPTConfig(**{**vars(model.config), "n_layer": model.config.n_layer + extra})
    with torch.device("meta"):  # no weights are drawn: every one is copied
        larger = GPT(config)
    larger.end_of_text, larger.wte, larger.wpe, larger.ln_f = model.end_of_text, model.wte, model.wpe, model.ln_f
    blocks = list(model.h)
    for i in range(extra):
        block = copy.deepcopy(blocks[i % model.config.n_layer])
        assert isinstance(block, Block)
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            nn.init.zeros_(projection.weight)
            nn.init.zeros_(projection.bias)
        blocks.append(block)
    larger.h = nn.ModuleList(blocks)
    return larger.eval().requires_grad_(False)


class Timed(Around):
    """A model that keeps the time of its passes."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.spent, self.wait = 0.0, waiting(model.device)

    def __call__(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits: Tensor = self.timed(self.model, tokens, *args, **kwargs)
        return logits

    def chain(self, *args: Any) -> Any:
        """`GPT.chain`, the drawing of its tokens included."""
        return self.timed(self.model.chain, *args) if isinstance(self.model, GPT) else None

    def timed(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.wait()
        start = time.perf_counter()
        found = work(*args, **kwargs)
        self.wait()
        self.spent += time.perf_counter() - start
        return found


@dataclass(frozen=True)
class Shares:
    """Where a step's time goes, as shares of it; `step` in seconds."""

    step: float
    target: float
    draft: float
    verify: float
    other: float  # sampling the draft's tokens, p, bookkeeping

    @property
    def overhead(self) -> float:
        """All but the two models' passes."""
        return self.verify + self.other


def shares(pair: Pair, setup: Setup, prompts: list[list[int]], sampling: Sampling, length: int) -> Shares | None:
    """Time spent in both models' passes and in the rule; None for a setup without a draft model."""
    if setup.rule is None or not hasattr(setup.drafter, "model"):
        return None
    target, draft, rule = Timed(pair.target), Timed(pair.draft), find_rule(setup.rule)
    verifying = [0.0]

    def timed(*args: Any) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        found = rule.verify(*args)
        verifying[0] += time.perf_counter() - start
        return found

    watched = Rule(rule.name, rule.kinds, rule.how, tree=timed)
    setup = replace(setup, drafter=replace(setup.drafter, model=draft), rule=watched)  # type: ignore[arg-type]
    parts: list[tuple[float, ...]] = []
    for repeat, prompt in enumerate([prompts[0], *prompts]):  # the first warms up
        before = target.spent, draft.spent, verifying[0]
        with unchanged():  # as in a call without anything around the models
            result = decode(_Watched(target), setup, prompt, sampling, length, 0)[0]  # type: ignore[arg-type]
        spent = (target.spent - before[0], draft.spent - before[1], verifying[0] - before[2])
        if repeat:
            parts.append((result.stats.seconds, len(result.steps), *spent))
    total, steps, t, d, v = (statistics.fmean(column) for column in zip(*parts, strict=True))
    return Shares(total / steps, t / total, d / total, v / total, 1 - (t + d + v) / total)


def middle(parts: list[Shares]) -> Shares | None:
    """Of several measurements the one whose overhead is in the middle; None of none."""
    return sorted(parts, key=lambda part: part.overhead)[len(parts) // 2] if parts else None


@dataclass(frozen=True)
class _Watched:
    """A pair as far as `decode` looks at it."""

    target: Timed


def growth(
    pair: Pair, setup: Setup, text: list[int], sampling: Sampling, repeats: int, tick: Callable[[], None]
) -> list[dict[str, float]]:
    """Milliseconds a token of plain and speculative decoding, by context length at one row and by batch.

    text: a long one, of block_size tokens, that is cut to the contexts.
    """
    block, plain = pair.target.config.block_size, Setup("plain", None, None, 1, 0)
    cases = [(context, 1) for context in CONTEXTS if context + CONTINUED <= block]
    cases += [(CONTEXTS[0], batch) for batch in BATCHES]
    rows = []
    for context, batch in cases:
        found: dict[str, list[float]] = {"plain": [], "speculative": []}
        for repeat in range(repeats + 1):
            for name, way in (("plain", plain), ("speculative", setup)):
                results = decode(pair, way, [text[:context]] * batch, sampling, CONTINUED, repeat)
                if repeat:
                    tokens = sum(len(result.tokens) for result in results)
                    found[name].append(1e3 * results[0].stats.seconds / tokens)
            tick()
        plain_ms, fast_ms = (statistics.median(found[name]) for name in ("plain", "speculative"))
        ratio = statistics.median(a / b for a, b in zip(found["plain"], found["speculative"], strict=True))
        rows.append({"context": context, "batch": batch, "plain_ms": plain_ms, "fast_ms": fast_ms, "ratio": ratio})
    return rows
