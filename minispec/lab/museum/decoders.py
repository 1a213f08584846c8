"""Broken loops: positions, chance, filters, stop tokens, batches. And one that is only slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minispec.around import Around
from minispec.cache import KVCache
from minispec.decode import speculate, stream
from minispec.drafters import Draft, ModelDrafter, ModelSession
from minispec.lab.museum.drafters import Spoilt
from minispec.lab.museum.piece import decoder_piece
from minispec.lab.museum.rules import token_with
from minispec.lab.parts import as_rule
from minispec.lab.report import CACHE, EACH, EFFICIENCY, EXACT, GREEDY, JOINT, ROWS, STEPS, STOP, ZERO
from minispec.model import LanguageModel
from minispec.sampling import Randomness, Rng, Sampling
from minispec.tree import Tree
from minispec.verify import residual

Prompt = Sequence[int]
OPTIONS: dict[str, Any] = {"draft_len": 2, "rule": "token"}


class ByNode(Around):
    """Gives the nodes of a tree the positions of their slots."""

    def __call__(
        self, tokens: Tensor, cache: KVCache | None = None, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if mask is not None and positions is not None:
            nodes = torch.arange(tokens.shape[1], device=tokens.device)
            positions = (positions[:, :1] + nodes).clamp(max=self.config.block_size - 1)
        return self.model(tokens, cache, positions, mask)


@decoder_piece("position = node index in a tree", ZERO, EACH, JOINT, STEPS, EXACT, GREEDY, CACHE, EFFICIENCY)
def position_of_node(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Prompt],
    n: int,
    rng: Rng,
    sampling: Sampling,
    stop: Prompt,
) -> list[list[int]]:
    """Tree nodes stand at the position of their slot, in place of that of their depth.

    `arange` over the nodes, as for a chain. The first branch is right; all others are scored as if they came later
    in the text.
    """
    tree = Tree.branching([2, 1])
    options: dict[str, Any] = {"max_new_tokens": n, "tree": tree, "rng": rng, "sampling": sampling, "stop": stop}
    return [r.tokens for r in speculate(ByNode(target), draft, prompts, **options)]


class Remembering(Around):
    """Keeps the logits of its last pass."""

    logits: Tensor

    def __call__(
        self, tokens: Tensor, cache: KVCache | None = None, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        self.logits = self.model(tokens, cache, positions, mask)
        return self.logits


@decoder_piece("top-p missing at the bonus token", ZERO, EXACT, kind="sampler")
def bonus_unfiltered(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Prompt],
    n: int,
    rng: Rng,
    sampling: Sampling,
    stop: Prompt,
) -> list[list[int]]:
    """Filters are applied where draft tokens are tested, and forgotten where the bonus token is drawn.

    At top_p = 1 all is well, which is what tests take. With a filter, one token in K + 1 may be anything.
    """
    seen, plain = Remembering(target), Sampling(sampling.temperature)
    rule = as_rule(lambda p, q, x, rng: token_with(p, q, x, rng, bonus=lambda p, q: plain.probs(seen.logits[:, -1])))
    options: dict[str, Any] = {"max_new_tokens": n, "draft_len": 2, "rng": rng, "sampling": sampling, "stop": stop}
    return [r.tokens for r in speculate(seen, draft, prompts, rule=rule, **options)]


class OneNoise(Randomness):
    """Draws with noise that was drawn once."""

    def __init__(self, seed: int, rows: int, vocabulary: int) -> None:
        super().__init__(seed, rows)
        generator = torch.Generator().manual_seed(seed)
        self.noise = torch.empty(rows, vocabulary, dtype=torch.float64).exponential_(generator=generator)

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        return (weights / self.noise).argmax(-1)

    def select(self, rows: Sequence[int]) -> Randomness:
        chosen = super().select(rows)
        chosen.noise = self.noise[list(rows)]  # type: ignore[attr-defined]
        return chosen


class Restarted:
    """Randomness that begins again when it is told to."""

    def __init__(self, seed: int, rows: int) -> None:
        self.seed, self.keys = seed, list(range(rows))
        self.restart()

    def restart(self) -> None:
        self.rng = Randomness(self.seed, len(self.keys))

    def flip(self, prob: Tensor) -> Tensor:
        return self.rng.flip(prob)

    def pick(self, weights: Tensor, at: Sequence[int] | None = None) -> Tensor:
        return self.rng.pick(weights, at=at)

    def select(self, rows: Sequence[int]) -> Restarted:
        self.keys = [self.keys[row] for row in rows]
        return self


@decoder_piece("noise drawn once per prompt", JOINT, STEPS, kind="sampler", bench="flat")
def noise_once(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Prompt],
    n: int,
    seed: int,
    sampling: Sampling,
    stop: Prompt,
) -> list[list[int]]:
    """Gumbel noise is drawn once, and every token of the text is the argmax with the same noise.

    Each token has the right law for itself. A text is not one: what was drawn once is drawn again and again, and
    the same words come back throughout.
    """
    options: dict[str, Any] = {"max_new_tokens": n, "draft_len": 2, "sampling": sampling, "stop": stop}
    rng = OneNoise(seed, len(prompts), target.config.vocab_size)
    return [r.tokens for r in speculate(target, draft, prompts, rule="match", rng=rng, **options)]


@decoder_piece("generator reseeded each step", EACH, JOINT, STEPS, kind="sampler", bench="flat")
def reseeded(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Prompt],
    n: int,
    seed: int,
    sampling: Sampling,
    stop: Prompt,
) -> list[list[int]]:
    """The generator is seeded at the top of the step.

    "For reproducibility". The first step is right, and every later one plays it again.
    """
    rng = Restarted(seed, len(prompts))

    def spoil(session: ModelSession, sampling: Sampling) -> None:
        propose = session.propose

        def seeded(new_tokens: Sequence[Prompt], depth_limit: Prompt, here: Rng) -> Draft:
            rng.restart()
            return propose(new_tokens, depth_limit, here)

        session.propose = seeded  # type: ignore[method-assign, assignment]

    drafter = Spoilt(ModelDrafter(draft, Tree.chain(2)), spoil)
    options: dict[str, Any] = {"max_new_tokens": n, "rng": rng, "sampling": sampling, "stop": stop}
    return [r.tokens for r in speculate(target, drafter, prompts, rule="token", **options)]


@decoder_piece("tokens after the stop token kept", EXACT, STOP)
def after_the_stop(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Prompt],
    n: int,
    rng: Rng,
    sampling: Sampling,
    stop: Prompt,
) -> list[list[int]]:
    """Looks for the stop token after each step, and keeps the whole step.

    Up to K tokens after the end of the text: a chat that answers itself.
    """
    out = []
    options: dict[str, Any] = {"max_new_tokens": n, "rng": rng, "sampling": sampling, "stop": []}
    for result in speculate(target, draft, prompts, **OPTIONS, **options):
        tokens: list[int] = []
        for step in result.steps:
            tokens += step.tokens
            if set(stop) & set(step.tokens):
                break
        out.append(tokens)
    return out


@decoder_piece("greedy by softmax ratio", GREEDY, kind="sampler")
def greedy_by_ratio(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Prompt],
    n: int,
    rng: Rng,
    sampling: Sampling,
    stop: Prompt,
) -> list[list[int]]:
    """At temperature 0 the draft's argmax is still put to the ratio test, on the laws of temperature 1.

    "temperature = 0 means argmax, the rest stays". Greedy output depends on the draft and on the seed.
    """
    options: dict[str, Any] = {"max_new_tokens": n, "draft_len": 2, "rng": rng, "stop": stop}
    if not sampling.greedy:
        return [r.tokens for r in speculate(target, draft, prompts, rule="token", sampling=sampling, **options)]
    seen, own = Remembering(target), Remembering(draft)

    def rule(p: Tensor, q: Tensor, drafted: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
        soft_p = seen.logits.softmax(-1)
        soft_q = own.logits[:, -1:].softmax(-1).expand_as(q)
        return token_with(soft_p, soft_q, drafted, rng, rest=top_residual, bonus=lambda _, q: p[:, -1])

    def top_residual(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        rest = residual(p, q)
        return torch.zeros_like(rest).scatter(1, rest.argmax(1)[:, None], 1.0)

    return [r.tokens for r in speculate(seen, own, prompts, rule=as_rule(rule), sampling=sampling, **options)]


@decoder_piece("whole prefix read again", EFFICIENCY, slow=True)
def prefix_again(
    target: LanguageModel, draft: LanguageModel, prompt: Prompt, n: int, rng: Rng, sampling: Sampling, stop: Prompt
) -> list[int]:
    """No cache outlives a step.

    Right, and as slow as the text is long: each step costs a pass over all of it.
    """
    tokens: list[int] = []
    while len(tokens) < n and not (tokens and tokens[-1] in stop):
        text = [*prompt, *tokens]
        step = next(
            stream(
                target, draft, text, max_new_tokens=n - len(tokens), rng=rng, sampling=sampling, stop=stop, **OPTIONS
            )
        )
        tokens += step.tokens
    return tokens


@decoder_piece("batch padding visible", ROWS)
def padding_visible(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Prompt],
    n: int,
    rng: Rng,
    sampling: Sampling,
    stop: Prompt,
) -> list[list[int]]:
    """Prompts of a batch are padded on the left with token 0, and nobody masks the padding.

    Alone a prompt is right; in company with a longer one it is continued as if it began with token 0.
    """
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    options: dict[str, Any] = {"max_new_tokens": n, "rng": rng, "sampling": sampling, "stop": stop}
    return [r.tokens for r in speculate(target, draft, padded, **OPTIONS, **options)]
