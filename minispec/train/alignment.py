"""How well a draft speaks for a target: acceptance, agreement, divergence, child ranks, tokens per pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minispec.decode import speculate
from minispec.model import GPT
from minispec.result import summarise
from minispec.sampling import Sampling

RANKS = 8


@dataclass(frozen=True)
class Alignment:
    """Means over contexts of real text, T = 1.

    acceptance: sum min(p, q) = 1 - TV(p, q), the chance that a sampled draft token is accepted.
    agreement: how often target and draft have one likeliest token, the acceptance at T = 0.
    kl: KL(p || q) in nats. by_rank[j]: p of the draft's (j+1)-th likeliest token, the chance that a top-k tree's
    child of that rank is the one that `match` follows.
    """

    acceptance: float
    agreement: float
    kl: float
    by_rank: list[float]
    contexts: int


@torch.no_grad()
def align(target: GPT, draft: GPT, windows: Tensor, batch: int = 8) -> Alignment:
    """Compare both models' laws at every place of `windows` (rows, T) of token ids."""
    sums, ranks, count = torch.zeros(3, dtype=torch.float64), torch.zeros(RANKS, dtype=torch.float64), 0
    for rows in torch.split(windows, batch):
        log_p, log_q = (m(rows.to(m.device)).float().log_softmax(-1).cpu() for m in (target, draft))  # (b, T, V)
        p, q = log_p.exp(), log_q.exp()
        sums[0] += torch.minimum(p, q).sum()
        sums[1] += (log_p.argmax(-1) == log_q.argmax(-1)).sum()
        sums[2] += (p * (log_p - log_q)).sum()
        best = log_q.topk(min(RANKS, q.shape[-1]), -1).indices  # (b, T, RANKS)
        ranks[: best.shape[-1]] += p.gather(-1, best).sum((0, 1))
        count += rows.numel()
    means = (sums / count).tolist()
    return Alignment(means[0], means[1], means[2], (ranks / count).tolist(), count)


@dataclass(frozen=True)
class Decoded:
    """What a chain of `draft_len` did in real decoding."""

    temperature: float
    draft_len: int
    new_tokens: int
    tokens_per_pass: float
    acceptance_rate: float  # accepted / tested


def decode_prompts(
    target: GPT, draft: GPT, prompts: Sequence[Sequence[int]], temperature: float, draft_len: int, seed: int = 0
) -> Decoded:
    """Speculate from each prompt to the end of the context, in batches, and count."""
    steps = []
    for i in range(0, len(prompts), 16):
        results = speculate(
            target,
            draft,
            [list(prompt) for prompt in prompts[i : i + 16]],
            max_new_tokens=target.config.block_size,
            sampling=Sampling(temperature),
            draft_len=draft_len,
            stop=(),
            seed=seed + i,
        )
        steps += [step for result in results for step in result.steps]
    stats = summarise(steps)
    return Decoded(temperature, draft_len, stats.new_tokens, stats.tokens_per_pass or 0.0, stats.acceptance_rate or 0.0)
