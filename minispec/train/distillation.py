"""Teach a draft to say what its target will say.

The probability that a draft token is accepted is sum(min(p, q)) = 1 - TV(p, q) (2211.17192), so total variation
is the true objective and the divergences are proxies (DistillSpec, 2310.08461). TV alone trains badly from
scratch, its gradient being zero wherever p > q is not in doubt, so it finishes what forward KL began.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minispec.decode import generate
from minispec.model import GPT
from minispec.noise import mix
from minispec.sampling import Sampling
from minispec.train.fit import fit
from minispec.train.recipe import Metrics, Recipe, State

Batch = Tensor | tuple[Tensor, Tensor]
LEAST = -60.0  # log probabilities below are kept as this: float16 has nothing below -65504, and no use for it
BEGINNING = 16  # sampled tokens before a greedy continuation
FINISH = 0.35  # share of a "fkl+tv" run that is spent on total variation


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum(min(p, q)): (..., V), (..., V) -> (...)."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p / q): covers all that the target may say."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) = sum q log(q / p): says only what the target may say."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """TV(p, q) = 1 - sum min(p, q): the rejection rate itself."""
    return 1 - acceptance(log_p, log_q)


def log_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log sum min(p, q): weighs contexts by 1 / acceptance (LK losses, 2602.23881)."""
    return -acceptance(log_p, log_q).log()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fkl": forward_kl,
    "rkl": reverse_kl,
    "tv": total_variation,
    "nla": log_acceptance,
}
NAMES = (*LOSSES, "fkl+tv")


def loss_at(name: str, progress: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of that name at that share of the run; "fkl+tv" changes over for its finish."""
    if name == "fkl+tv":
        name = "tv" if progress >= 1 - FINISH else "fkl"
    if name not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(NAMES)}, got {name!r}")
    return LOSSES[name]


def own_samples(target: GPT, start: list[int], rows: int, length: int, seed: int) -> Tensor:
    """Text of the target's own: (rows, length) ids that begin with `start`.

    Every second row goes on greedily after `BEGINNING` sampled tokens: a draft must know how its target speaks at
    T = 0 as well as at T = 1.
    """
    texts = generate(target, [start] * rows, max_new_tokens=length - len(start), stop=(), seed=seed)
    sampled = [result.prompt + result.tokens for result in texts]
    begun = [text[: len(start) + BEGINNING] for text in sampled[1::2]]
    if begun:
        greedy = generate(target, begun, max_new_tokens=length, sampling=Sampling(0), stop=())
        sampled[1::2] = [(result.prompt + result.tokens)[:length] for result in greedy]
    return torch.tensor(sampled)


def self_batches(
    target: GPT, start: list[int], batch: int, seed: int, rows: int = 32, reuse: int = 4
) -> Callable[[int], Tensor]:
    """Batches (batch, block_size) of the target's own samples, by step: no corpus is needed.

    Each round of `rows` fresh samples serves for `reuse` epochs, mixed with those of some rounds before.
    """
    generator = torch.Generator().manual_seed(seed)
    rounds: list[Tensor] = []
    steps = max(reuse * rows // batch, 1)

    def batch_of(step: int) -> Tensor:
        if step % steps == 0 or not rounds:
            rounds.append(own_samples(target, start, rows, target.config.block_size, seed + 1 + step))
            del rounds[:-8]
        pool = torch.cat(rounds)
        return pool[torch.randint(len(pool), (batch,), generator=generator)]

    return batch_of


@torch.no_grad()
def kept_batches(
    target: GPT, batches: Callable[[int], Tensor], windows: int, batch: int, recipe: Recipe, folder: Path
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches (ids (b, T), log p (b, T, V)) by step, of windows whose target laws are computed once.

    Takes the first `windows` windows of `batches`, of which each has `batch`, and keeps log p in float16 in a file
    in `folder`: windows x T x V x 2 bytes. The target being the dear part of a step, a draft then sees several times
    as many tokens in the same minutes. Which windows a step has depends on the recipe's seed and the step alone.
    """
    ids = torch.cat([batches(step) for step in range(-(-windows // batch))])[:windows]  # (W, T)
    shape = (*ids.shape, target.config.vocab_size)
    laws = np.memmap(folder / "laws.float16", dtype=np.float16, mode="w+", shape=shape)  # (W, T, V)
    for start in range(0, len(ids), batch):
        with recipe.autocast(target.device):
            logits = target(ids[start : start + batch].to(target.device))
        log_p = logits.float().log_softmax(-1).clamp(min=LEAST)
        laws[start : start + batch] = log_p.half().cpu().numpy()

    def batch_of(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(mix(recipe.seed, step) >> 1)
        chosen = torch.randint(len(ids), (batch,), generator=generator)
        return ids[chosen], torch.from_numpy(laws[chosen.numpy()]).float()

    return batch_of


@torch.no_grad()
def measure(target: GPT, draft: GPT, held_out: Tensor, batch: int = 8) -> Metrics:
    """Acceptance at T = 1 (mean of sum min(p, q)) and at T = 0 (how often both likeliest tokens are one).

    Means over all places of held_out (rows, T) as contexts.
    """
    total, same, count = 0.0, 0.0, 0
    for rows in torch.split(held_out, batch):
        log_p, log_q = (m(rows.to(m.device)).float().log_softmax(-1) for m in (target, draft))
        total += float(acceptance(log_p, log_q).sum())
        same += float((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        count += rows.numel()
    return {"acceptance": total / count, "agreement": same / count}


def distil(
    target: GPT, draft: GPT, batches: Callable[[int], Batch], recipe: Recipe, loss: str = "fkl+tv", **options: Any
) -> State:
    """Train `draft` in place to agree with `target`, which stays as it is.

    batches: step -> ids (b, T), or ids with the target's log p (b, T, V) as `kept_batches` has them. loss: one of
    `NAMES`. Options and result as for `fit.fit`; with `validate=lambda draft: measure(target, draft, held_out)` the
    curve shows acceptance. Raises `ValueError` for an unknown loss.
    """
    loss_at(loss, 0.0)

    def objective(draft: GPT, step: int, progress: float) -> Tensor:
        given = batches(step)
        ids, known = given if isinstance(given, tuple) else (given, None)  # (b, T)
        ids = ids.to(draft.device)
        with recipe.autocast(draft.device):
            if known is None:
                with torch.no_grad():
                    known = target(ids)  # (b, T, V)
            q = draft(ids)
        log_p, log_q = known.to(draft.device).float().log_softmax(-1), q.float().log_softmax(-1)
        return loss_at(loss, progress)(log_p, log_q).mean()

    return fit(draft.requires_grad_(True), objective, recipe, **options)  # a loaded draft is frozen
