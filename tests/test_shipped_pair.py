"""The shipped pair: float64 greedy equality, float32 divergences counted, speed in passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minispec import GPT, RULES, Pair, Randomness, Rule, Sampling, generate, load_pair, speculate
from minispec.pair import weights_folder

GREEDY = Sampling(0)


def prompts() -> list[str]:
    return (weights_folder() / "prompts.txt").read_text(encoding="utf-8").splitlines()


def test_there_are_24_prompts() -> None:
    assert len(prompts()) == 24
    assert len(set(prompts())) == 24


def equal_tokens(pair: Pair, K: int, some: list[list[int]], plain: list[list[int]]) -> bool:
    fast = speculate(pair.target, pair.draft, some, max_new_tokens=len(plain[0]), sampling=GREEDY, draft_len=K, stop=())
    return [r.tokens for r in fast] == plain


@pytest.mark.parametrize("tokens", [24, pytest.param(84, marks=pytest.mark.slow)])
def test_float64_greedy_speculation_is_plain_greedy(tokens: int) -> None:
    """84 x 24 prompts = 2,016 tokens under -m slow, for K = 1..8."""
    pair = load_pair(dtype=torch.float64)
    some = [pair.tokenizer.encode(p) for p in prompts()][: 24 if tokens == 84 else 4]
    plain = [r.tokens for r in generate(pair.target, some, max_new_tokens=tokens, sampling=GREEDY, stop=())]
    for K in range(1, 9) if tokens == 84 else (1, 4, 7):
        assert equal_tokens(pair, K, some, plain), K


def first_divergence(target: GPT, prompt: list[int], a: list[int], b: list[int]) -> tuple[int, float] | None:
    """Where two runs part, and the gap of the two largest logits there."""
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y:
            top = target(torch.tensor([prompt + a[:i]]))[0, -1].topk(2).values
            return i, float(top[0] - top[1])
    return None


def test_float32_divergences_are_counted_and_only_at_near_ties(shipped: Pair, record_property) -> None:  # type: ignore[no-untyped-def]
    some = [shipped.tokenizer.encode(p) for p in prompts()]
    plain = generate(shipped.target, some, max_new_tokens=48, sampling=GREEDY, stop=())
    found = []
    for K in (1, 3, 5, 8):
        fast = speculate(shipped.target, shipped.draft, some, max_new_tokens=48, sampling=GREEDY, draft_len=K, stop=())
        for a, b in zip(plain, fast, strict=True):
            part = first_divergence(shipped.target, a.prompt, a.tokens, b.tokens)
            if part:
                found.append((K, *part))
    print(f"\nfloat32 first divergences in {4 * 24 * 48} tokens: {len(found)}", found)
    assert all(gap < 1e-4 for _, _, gap in found)


def test_tokens_per_target_pass(shipped: Pair) -> None:
    some = [shipped.tokenizer.encode(p) for p in prompts()]
    results = speculate(shipped.target, shipped.draft, some, max_new_tokens=64, draft_len=4, seed=1)
    tokens, passes = sum(r.stats.new_tokens for r in results), sum(r.stats.target_passes for r in results)
    assert tokens / passes >= 2.2


def test_a_misaligned_draft_collapses() -> None:
    pair = load_pair(draft="misaligned")
    some = [pair.tokenizer.encode(p) for p in prompts()]
    results = speculate(pair.target, pair.draft, some, max_new_tokens=32, draft_len=4, seed=1)
    tokens, passes = sum(r.stats.new_tokens for r in results), sum(r.stats.target_passes for r in results)
    assert tokens / passes < 1.6
    assert (weights_folder() / "misaligned.safetensors").stat().st_size <= 2e6


@pytest.mark.slow
def test_block_keeps_no_fewer_tokens_than_token_on_the_same_drafts(shipped: Pair) -> None:
    """Both rules on the laws and drafts of real decoding, 20,000 steps, each with its own coins: mean and error."""
    gains: list[torch.Tensor] = []
    coins = Randomness(99)

    def both(p, q, drafted, rng):  # type: ignore[no-untyped-def]
        accepted, emitted = RULES["token"].chain(p, q, drafted, rng)  # type: ignore[misc]
        if drafted.shape[1] == 5:
            gains.append(RULES["block"].chain(p, q, drafted, coins)[0] - accepted)  # type: ignore[misc]
        return accepted, emitted

    rule = Rule("both", frozenset({"chain"}), "without", chain=both)
    some = [shipped.tokenizer.encode(p) for p in prompts()]
    seed = 0
    while sum(map(len, gains)) < 20_000:
        speculate(shipped.target, shipped.draft, some, max_new_tokens=200, draft_len=5, rule=rule, seed=seed, stop=())
        seed += 1
    gain = torch.cat(gains).double()
    mean, error = float(gain.mean()), float(gain.std() / len(gain) ** 0.5)
    print(f"\nblock - token: {mean:.4f} +- {error:.4f} accepted drafts a step, {len(gain)} steps")
    assert mean > 2 * error


def test_no_file_of_the_pair_is_too_large() -> None:
    total = sum(p.stat().st_size for p in Path(weights_folder()).iterdir())
    assert total <= 60e6
