"""The cache: splits, rollback, trees' paths, ragged rows, stale slots, errors (cases 4, 10, 11, 15)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from doubles import random_gpt
from torch import Tensor

from minispec import GPT, GPTConfig, KVCache, Tree
from minispec.model import read

core = pytest.mark.core


def model_of(dtype: torch.dtype = torch.float64, block: int = 40, device: str = "cpu") -> GPT:
    return random_gpt(3, vocab=7, block=block, width=16, heads=4, scale=0.3).to(device=device, dtype=dtype)


def cache_for(model: GPT, batch: int = 1, extra: int = 40) -> KVCache:
    return KVCache(model.config, batch, model.config.block_size + extra, device=model.device, dtype=model.dtype)


def tokens_of(n: int, batch: int = 1, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randint(7, (batch, n), generator=torch.Generator().manual_seed(seed)).to(device)


def splits() -> list[list[int]]:
    chance = random.Random(0)
    out = [[32], [1] * 32, [5] * 6 + [2]]
    for _ in range(5):
        cuts = sorted(chance.sample(range(1, 32), 6))
        out.append([b - a for a, b in zip([0, *cuts], [*cuts, 32], strict=True)])
    return out


@core
@pytest.mark.parametrize("split", splits(), ids=str)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_case_10_every_split_gives_the_uncached_logits(
    split: list[int], dtype: torch.dtype, tol: float, device: str
) -> None:
    if device == "mps" and dtype == torch.float64:
        return  # MPS has no float64
    model = model_of(dtype, device=device)
    tokens, cache = tokens_of(32, 2, device=device), cache_for(model, 2)
    parts = [model(part, cache) for part in tokens.split(split, dim=1)]
    assert (torch.cat(parts, 1) - model(tokens)).abs().max() < tol
    assert cache.lengths == [32, 32]


@core
def test_case_10_the_causal_mask_is_aligned_bottom_right() -> None:
    cache = KVCache(GPTConfig(7, 40, 1, 1, 4), capacity=16)
    cache.lengths = [5]
    mask = cache.begin_write(3)
    assert mask is not None
    assert mask[0, 0].int().tolist() == [[1] * 6 + [0] * 2, [1] * 7 + [0], [1] * 8]


@core
def test_case_11_append_rollback_append() -> None:
    model, tokens, other = model_of(), tokens_of(7), tokens_of(4, seed=1)
    cache = cache_for(model)
    model(tokens, cache)
    cache.rollback(3)
    got = model(other, cache)
    want = model(torch.cat([tokens[:, :3], other], 1))[:, 3:]
    assert (got - want).abs().max() < 1e-10


@core
@pytest.mark.parametrize("length", [-1, 8, [7, 7]])
def test_case_11_bad_rollback_changes_nothing(length: object) -> None:
    model, cache = model_of(), cache_for(model_of())
    model(tokens_of(7), cache)
    with pytest.raises(ValueError, match="rollback: lengths must lie in"):
        cache.rollback(length)  # type: ignore[arg-type]
    assert cache.lengths == [7]


@core
@pytest.mark.parametrize("junk", [1e4, math.nan])
def test_case_11_slots_beyond_the_length_change_no_logit(junk: float) -> None:
    model, tokens = model_of(), tokens_of(9)
    cache = cache_for(model)
    cache.kv.fill_(junk)
    model(tokens[:, :5], cache)
    cache.kv[..., 5:, :] = junk
    assert (model(tokens[:, 5:], cache) - model(tokens)[:, 5:]).abs().max() < 1e-10


@core
def test_case_11_stale_slots_of_shorter_rows_change_no_logit() -> None:
    model, tokens = model_of(), tokens_of(12, 2)
    cache = cache_for(model, 2)
    cache.kv.fill_(1e4)
    read(model, cache, [tokens[0, :9].tolist(), tokens[1, :4].tolist()])
    got = read(model, cache, [tokens[0, 9:].tolist(), tokens[1, 4:5].tolist()])
    assert (got[0] - model(tokens[:1])[0, 11]).abs().max() < 1e-10
    assert (got[1] - model(tokens[1:, :5])[0, 4]).abs().max() < 1e-10
    assert cache.lengths == [12, 5]


@core
@pytest.mark.parametrize("seed", range(10))
def test_ragged_reads_equal_uncached_rows(seed: int) -> None:
    chance, model = random.Random(seed), model_of()
    cache = cache_for(model, 4, extra=1)
    texts = [tokens_of(40, seed=10 * seed + b)[0].tolist() for b in range(4)]
    done = [0] * 4
    for _ in range(5):
        more = [min(chance.randrange(9), 40 - n) for n in done]
        if not any(more):
            continue
        got = read(model, cache, [t[n : n + m] for t, n, m in zip(texts, done, more, strict=True)])
        done = [n + m for n, m in zip(done, more, strict=True)]
        assert cache.lengths == done
        for b in range(4):
            if more[b]:
                assert (got[b] - model(torch.tensor([texts[b][: done[b]]]))[0, -1]).abs().max() < 1e-10


@core
def test_a_read_past_the_end_is_taken_in_pieces() -> None:
    model = model_of(block=12)
    cache = cache_for(model, 2, extra=1)
    texts = [tokens_of(12, seed=b)[0].tolist() for b in range(2)]
    read(model, cache, [texts[0][:11], texts[1][:2]])
    got = read(model, cache, [texts[0][11:], texts[1][2:]])  # 1 and 10 tokens: 11 + 10 slots are not there
    for b in range(2):
        assert (got[b] - model(torch.tensor([texts[b]]))[0, -1]).abs().max() < 1e-10
    assert cache.lengths == [12, 12]


def random_tree(chance: random.Random, nodes: int) -> Tree:
    parents = [-1]
    for node in range(1, nodes):
        low = parents[-1] if node > 1 else 0
        parents.append(chance.randint(max(low, 0), node - 1))
    return Tree.from_parents(parents)


def path_to(tree: Tree, node: int, row: int = 0) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, tree.rows[row][path[0]])
    return path


@core
def test_case_15_mask_by_hand() -> None:
    tree = Tree.from_parents([-1, 0, 0, 1, 2])
    assert tree.mask[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]
    assert tree.depths[0].tolist() == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=core if seed < 8 else ()) for seed in range(200)])
def test_case_15_each_node_sees_its_path_and_keep_leaves_a_prefill(seed: int) -> None:
    chance = random.Random(seed)
    model, tree = model_of(), random_tree(random.Random(seed), chance.randint(2, 32))
    n, prompt = 6, tokens_of(6, seed=seed)
    nodes = tokens_of(tree.size, seed=seed + 1000)
    cache = cache_for(model)
    model(prompt, cache)
    logits = model(nodes, cache, n + tree.depths, tree.mask)
    for node in range(tree.size):
        run = torch.cat([prompt, nodes[:, path_to(tree, node)]], 1)
        assert (logits[0, node] - model(run)[0, -1]).abs().max() < 1e-10
    path = path_to(tree, chance.randrange(tree.size))
    cache.keep([path], tree.size)
    fresh = cache_for(model)
    model(torch.cat([prompt, nodes[:, path]], 1), fresh)
    assert cache.lengths == fresh.lengths
    m = fresh.lengths[0]
    assert (cache.kv[..., :m, :] - fresh.kv[..., :m, :]).abs().max() < 1e-10


@core
def test_case_15_changing_a_node_changes_itself_and_its_descendants_only() -> None:
    model, tree = model_of(), Tree.from_parents([-1, 0, 0, 1, 2])
    nodes, cache = tokens_of(5), cache_for(model)
    changed = nodes.clone()
    changed[0, 1] = (changed[0, 1] + 1) % 7
    before = model(nodes, cache, tree.depths, tree.mask)
    cache.rollback(0)
    after = model(changed, cache, tree.depths, tree.mask)
    moved = ((before - after).abs().amax(-1) > 1e-9)[0].tolist()
    assert moved == [False, True, False, True, False]


@core
def test_keep_with_a_path_a_row_then_decoding_goes_on() -> None:
    model, tree = model_of(), Tree.from_parents([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 1, 2, 3]])
    prompts, nodes = tokens_of(5, 2), tokens_of(6, 2, seed=1)
    cache = cache_for(model, 2)
    read(model, cache, [prompts[0].tolist(), prompts[1, :3].tolist()])
    start = torch.tensor([[5], [3]])
    logits = model(nodes, cache, start + tree.depths, tree.mask)
    paths = [[0, 2, 5], [0, 1]]
    cache.keep(paths, 6)
    runs = [
        torch.cat([prompts[:1, :5], nodes[:1, paths[0]]], 1),
        torch.cat([prompts[1:, :3], nodes[1:, paths[1]]], 1),
    ]
    for b, run in enumerate(runs):
        assert (logits[b, paths[b][-1]] - model(run)[0, -1]).abs().max() < 1e-10
    assert cache.lengths == [8, 5]
    got = read(model, cache, [[1, 2], [3]])
    for b, (run, more) in enumerate(zip(runs, ([1, 2], [3]), strict=True)):
        assert (got[b] - model(torch.cat([run, torch.tensor([more])], 1))[0, -1]).abs().max() < 1e-10


@core
@pytest.mark.parametrize(
    ("paths", "nodes"),
    [
        ([[torch.tensor(0), torch.tensor(1), torch.tensor(1)]], 3),
        ([[0, 0]], 3),
        ([[1, 0]], 3),
        ([[0, 3]], 3),
        ([[-1]], 3),
        ([[0]], 8),
        ([[0], [0]], 3),
    ],
)
def test_bad_paths_change_nothing(paths: list[list[int]], nodes: int) -> None:
    model, cache = model_of(), cache_for(model_of())
    model(tokens_of(7), cache)
    before = cache.kv.clone()
    with pytest.raises(ValueError, match="keep: "):
        cache.keep(paths, nodes)
    assert cache.lengths == [7]
    assert torch.equal(cache.kv, before)


@core
@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_paths_may_be_any_sequence_of_integers(kind: Callable[[list[int]], Any]) -> None:
    model, caches = model_of(), [cache_for(model_of()) for _ in range(2)]
    for cache, path in zip(caches, ([0, 2, 3], kind([0, 2, 3])), strict=True):
        model(tokens_of(7), cache)
        cache.keep([path], 5)
    assert caches[0].lengths == caches[1].lengths == [5]
    assert torch.equal(caches[0].kv, caches[1].kv)


@core
def test_f4_cache_arithmetic() -> None:
    K = 4
    for accepted in range(K + 1):
        cache = cache_for(model_of())
        cache.lengths = [10 + K + 1]  # n - 1 = 10 entries, then the pending token and K drafts
        cache.keep([list(range(accepted + 1))], K + 1)
        assert cache.lengths == [10 + K + 1 - (K - accepted)]  # K - a rows dropped


@core
def test_select_moves_rows_to_the_front() -> None:
    model, texts = model_of(), tokens_of(10, 4)
    cache = cache_for(model, 4)
    read(model, cache, [texts[b, : 3 + b].tolist() for b in range(4)])
    cache.select([1, 3])
    assert cache.lengths == [4, 6]
    got = read(model, cache, [texts[1, 4:5].tolist(), texts[3, 6:8].tolist()])
    assert (got[0] - model(texts[1:2, :5])[0, -1]).abs().max() < 1e-10
    assert (got[1] - model(texts[3:4, :8])[0, -1]).abs().max() < 1e-10
    for rows in ([1, 0], [2], [-1]):
        with pytest.raises(ValueError, match="select: rows must increase"):
            cache.select(rows)
    assert cache.lengths == [5, 8]


@core
def test_overflow_and_nonsense_are_errors_that_change_nothing() -> None:
    model = model_of(block=8)
    cache = KVCache(model.config, capacity=6, dtype=torch.float64)
    model(tokens_of(5), cache)
    with pytest.raises(ValueError, match=r"cache: 5 \+ 2 slots exceed its capacity of 6"):
        model(tokens_of(2), cache)
    assert cache.lengths == [5]
    with pytest.raises(ValueError, match="batch and capacity must be >= 1"):
        KVCache(model.config, 0, 4)
    full = cache_for(model)
    model(tokens_of(8), full)
    with pytest.raises(ValueError, match="8 cached \\+ 1 new positions exceed block_size 8"):
        model(tokens_of(1), full)


@core
def test_nothing_is_allocated_while_decoding() -> None:
    model, cache = model_of(), cache_for(model_of())
    where = cache.kv.data_ptr()
    for _ in range(20):
        model(tokens_of(3), cache)
        cache.keep([[0, 2]], 3)
        cache.rollback(max(cache.lengths[0] - 2, 0))
    assert cache.kv.data_ptr() == where
