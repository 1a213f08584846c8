"""The benchmark: what it prints adds up. No time is asserted."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import random_gpt
from test_tokenizer import BYTES, PATTERN, SPECIAL, Tokenizer

from minispec import GPT, ModelDrafter, Pair, Sampling, Tree, auto, generate
from minispec.bench import machine, timing
from minispec.bench.machine import bytes_read, emulate_layers, memory_times, middle, read_bandwidth, shares
from minispec.bench.report import describe
from minispec.bench.setups import Setup, model_setup
from minispec.bench.timing import Predictor, once, one_round, timings
from minispec.cli import main
from minispec.cost import ownership
from minispec.linear import halves
from minispec.pair import save_model, save_tokenizer
from minispec.planner import Costs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of the least size that has room for the shipped prompts, byte by byte."""
    root = tmp_path_factory.mktemp("pair")
    save_tokenizer(root, Tokenizer(BYTES, PATTERN, {next(iter(SPECIAL)): 256}))
    for seed, name in enumerate(("target", "draft")):
        save_model(root, name, random_gpt(seed, vocab=257, block=256, width=8, layers=1, scale=0.2))
    return root


SMALL = ["--max-new-tokens", "8", "--repeats", "1", "--draft-len", "2", "--nodes", "4", "--prompts", "2", "--json"]


@pytest.fixture(autouse=True)
def small_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINISPEC_CACHE", str(tmp_path / "plans"))
    monkeypatch.setattr(machine, "BUFFER", 1 << 20)
    for name, value in (("TEXTS", 2), ("CHAINS", (2,)), ("NODES", (4,))):
        monkeypatch.setattr(auto, name, value)


def test_generate_takes_the_plan_of_this_machine(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "Once", "--pair", str(tiny), "--max-new-tokens", "8", "--seed", "1"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert "measuring this machine once" in first.err
    assert "plan: " in first.out
    assert main(command) == 0
    again = capsys.readouterr()
    assert again.err == ""
    assert again.out.splitlines()[-1] == first.out.splitlines()[-1]
    assert main([*command, "--plan"]) == 0
    assert "measuring this machine once" in capsys.readouterr().err
    assert main([*command[:-4], "--max-new-tokens", "-1"]) == 2
    assert "measuring" not in capsys.readouterr().err


def test_tokens_per_pass(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert main(["bench", "--passes", *SMALL, str(out), "--pair", str(tiny)]) == 0
    rows = json.loads(out.read_text())["rows"]
    names = {row["setup"] for row in rows if row["temperature"] == 1.0}
    assert names >= {
        "plain",
        "token, chain 2",
        "block, chain 3",
        "rrs, best tree",
        "match, dynamic tree",
        "match, n-gram",
    }
    assert all(row["new_tokens"] == 2 * 8 for row in rows)
    plain = [row for row in rows if row["setup"] == "plain"]
    assert all(row["tokens_per_pass"] == 1 and row["acceptance_rate"] is None for row in plain)
    assert all(1 <= row["tokens_per_pass"] <= row["nodes"] for row in rows)
    assert "rrs, best tree" in capsys.readouterr().out


def test_times_predictions_shares_and_the_picture(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `tutorials` draws pictures")
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    command = [
        "bench",
        "--temperature",
        "0",
        "--plot",
        str(picture),
        "--emulate-layers",
        "1",
        *SMALL,
        str(out),
        "--pair",
        str(tiny),
    ]
    assert main(command) == 0
    found = json.loads(out.read_text())
    rows = {row["setup"]: row for row in found["rows"]}
    assert all(row["tokens_per_second"] > 0 and row["ratio"] > 0 for row in rows.values())
    assert rows["plain"]["ratio"] == rows["plain"]["predicted"] == 1
    unknown = {"match, n-gram", "match, dynamic tree"}
    assert all((row["predicted"] is None) == (name in unknown) for name, row in rows.items())
    assert sum(name.startswith("auto (") for name in rows) == 1
    for part in found["shares"].values():
        assert part["target"] + part["draft"] + part["verify"] + part["other"] == pytest.approx(1)
        assert min(part.values()) > -0.01
    printed = capsys.readouterr().out
    assert "draft step" in printed
    assert "% of a plain read" in printed
    assert "EMULATION" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_growth(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "growth.json"
    assert main(["bench", "--growth", "--temperature", "1", *SMALL, str(out), "--pair", str(tiny)]) == 0
    rows = json.loads(out.read_text())["growth"]
    assert {row["context"] for row in rows if row["batch"] == 1} == {64, 96, 128, 160, 192, 224}
    assert [row["batch"] for row in rows if row["batch"] > 1] == [2, 4, 8, 16, 32]
    assert all(row["ratio"] > 0 for row in rows)
    assert "ms a token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value"), [("--nodes", "1"), ("--repeats", "0"), ("--prompts", "0"), ("--emulate-layers", "-1")]
)
def test_bad_input(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", option, value]) == 2
    assert "nodes must be >= 2, repeats and prompts >= 1, emulate-layers >= 0" in capsys.readouterr().err


def test_emulated_layers_change_nothing_but_the_cost() -> None:
    model = random_gpt(1).float()
    larger = emulate_layers(model, 3)
    assert larger.config.n_layer == model.config.n_layer + 3
    ids = torch.tensor([[0, 1, 2, 1, 0]])
    with torch.inference_mode():
        assert torch.equal(larger(ids), model(ids))
    before = [p.clone() for p in model.parameters()]
    assert generate(larger, [0, 1], max_new_tokens=8, seed=0) == generate(model, [0, 1], max_new_tokens=8, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert bytes_read(larger) > 2 * bytes_read(model)
    with pytest.raises(ValueError, match="extra must be >= 0"):
        emulate_layers(model, -1)


def test_bytes_of_a_pass_are_all_weights_but_the_positions() -> None:
    model = random_gpt(1)
    assert bytes_read(model) == 8 * (sum(p.numel() for p in model.parameters()) - model.wpe.weight.numel())
    assert bytes_read(model, held=True) == bytes_read(model)  # float64 is read as it is
    assert read_bandwidth(torch.device("cpu"), repeats=1) > 0
    passes, reads = memory_times(model, repeats=3)
    assert (len(passes), len(reads)) == (6, 3)
    assert min(passes + reads) > 0


def test_bytes_as_held_are_half_where_half_precision_holds_the_weights(
    shipped: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, seconds = Costs({1: 2e-3, 32: 4e-3}, 1e-4), [2e-3, 2e-3]
    for half in (True, False):
        monkeypatch.setattr("minispec.linear.HALF", half)
        target = copy.deepcopy(shipped.target)
        weights = bytes_read(target)
        assert bytes_read(target, held=True) == weights  # nothing is copied yet
        memory_times(target, repeats=1)
        held = bytes_read(target, held=True)
        matrices = sum(p.numel() for p in target.parameters() if p.ndim == 2) - target.wpe.weight.numel()
        assert held == weights - (2 * matrices if half and all(halves()) else 0)
        text = describe(costs, weights, held, seconds, [1e-3])
        assert "196 MB of weights at 98.2 GB/s, 50 % of a plain read" in text
        assert ("as held, 98 MB in half precision, 25 %" in text) == (held < weights)


def test_expectations_are_the_median_of_what_was_measured_after_each_round(
    shipped: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, dynamic = model_setup(shipped, "token", Tree.chain(4), "without", "chain 4"), Setup("x", "match", None, 9)
    plain, peer = Setup("plain", None, None, 1, 0), Setup("peer", None, None, 1, peer=lambda *_: [])
    tree = model_setup(shipped, "rrs", Tree.branching([2]), "without", "tree")
    asked: list[list[int]] = []
    first: list[list[int]] = []
    asked_yields: list[tuple[str, int, int]] = []
    scale = iter((1.0, 8.0, 2.0))

    def costs(search: auto.Search, drafters: list[Any], trees: list[Tree], rule: str) -> Costs:
        asked.append([tree.size for tree in trees])
        first.append(search.texts[0])
        now = len(predictor.rounds)
        return Costs({1: 1.0, 3: 1.5, 5: 1.5}, 0.0, overhead=(0.5, 6.5, 2.5)[now])

    def tokens(search: auto.Search, drafter: Any, rule: str, seed: int) -> float:
        asked_yields.append((rule, drafter.tree.max_depth, seed - auto.SEED))
        return 3.0 + (seed - auto.SEED)

    monkeypatch.setattr(auto.Search, "costs", costs)
    monkeypatch.setattr(auto.Search, "passes", property(lambda search: Costs({1: next(scale)}, 0.5)))
    monkeypatch.setattr(auto.Search, "tokens_per_step", tokens)
    predictor = Predictor(shipped, Sampling(), [[1], [2], [3]], 8)
    for _ in range(3):
        predictor.measure([plain, chain, dynamic, peer, tree])
    assert asked == [[3, 9], [3]] * 3  # chains of a rule by two of them, a tree by itself
    assert first == [[1], [1], [3], [3], [2], [2]]  # each round on other texts
    found = predictor.speed_ups([plain, chain, dynamic, peer, tree])
    assert asked_yields == [("token", 4, draw) for draw in range(4)] + [("rrs", 1, draw) for draw in range(4)]
    assert found == {"plain": 1.0, chain.name: 4.5 / 4, "x": None, "peer": None, tree.name: 4.5 / 4}  # 4 of 2, 8 and 4
    assert predictor.typical() == Costs({1: 2.0}, 0.5)
    assert (len(predictor.alone), len(predictor.reads)) == (3 * 20, 3 * 10)
    asked_yields.clear()
    assert Predictor(shipped, Sampling(0), [[1]], 8).tokens_per_step([plain, chain, dynamic]) == {chain.name: 3}
    assert asked_yields == [("token", 4, 0)]  # greedy decoding has but one outcome


def test_the_yields_of_many_chains_are_one_curve(shipped: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    law = {k: 1 + 0.8 * sum(0.9**i for i in range(k)) for k in range(1, 9)}
    noise = (0.2, -0.2, 0.1, -0.1, 0.1, -0.1, 0.2, -0.2)
    chains = [model_setup(shipped, "block", Tree.chain(k), "without", f"chain {k}") for k in law]
    monkeypatch.setattr(
        auto.Search, "tokens_per_step", lambda search, drafter, *_: law[(k := drafter.tree.max_depth)] + noise[k - 1]
    )
    found = Predictor(shipped, Sampling(), [[1]], 8).tokens_per_step(chains)
    assert [found[setup.name] for setup in chains] == pytest.approx(list(law.values()), abs=0.1)


def test_every_setup_is_set_against_the_plain_runs_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Setup(name, None, None, 1, 0) for name in ("plain", *"abcdef")]
    plain_seconds = iter([1.0, 2.0, 4.0, 3.0, 5.0, 1.0] * 4)  # three plain runs a prompt, 10 tokens each
    order: list[str] = []
    ended: list[str] = []

    def run(pair: Any, setup: Setup, prompt: list[int], *rest: Any) -> tuple[int, float, list[Any]]:
        order.append(setup.name)
        return (10, next(plain_seconds), []) if setup is found[0] else (20, 0.5, [])

    monkeypatch.setattr(timing, "once", run)
    none: Any = None
    tallies, _ = one_round(none, found, [[1], [2]], Sampling(), 4, 1, lambda: ended.append("prompt"))
    assert "".join(order) == 2 * "plainabcdplainefplain"
    assert (tallies["plain"].tokens, tallies["plain"].seconds, tallies["plain"].plainly) == (60, 16.0, 16.0)
    assert (tallies["a"].tokens, tallies["a"].seconds) == (40, 1.0)
    assert tallies["a"].plainly == pytest.approx(20 * (0.1 + 0.2) / 2 + 20 * (0.3 + 0.5) / 2)
    assert tallies["e"].plainly == pytest.approx(20 * (0.2 + 0.4) / 2 + 20 * (0.5 + 0.1) / 2)
    rows = timings(none, found, [[1], [2]], Sampling(), 4, 2, lambda: None, lambda: ended.append("round"))
    assert [row.ratio for row in rows] == [1.0, *[pytest.approx(11.0)] * 4, *[pytest.approx(12.0)] * 2]
    assert [row.new_tokens for row in rows] == [120, *[80] * 6]
    assert rows[1].tokens_per_second == pytest.approx(40.0)
    assert ended == ["prompt"] * 2 + ["round"] * 2


def test_rates_and_ratios_are_medians_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Setup(name, None, None, 1, 0) for name in ("plain", "a")]

    def run(
        pair: Any, setup: Setup, prompt: list[int], sampling: Sampling, n: int, seed: int
    ) -> tuple[int, float, list[Any]]:
        return (10, 1.0, []) if setup is found[0] else (10, (9.0, 0.5, 0.1, 0.4)[seed], [])

    monkeypatch.setattr(timing, "once", run)
    none: Any = None
    row = timings(none, found, [[1]], Sampling(), 4, 3, lambda: None)[1]
    assert (row.tokens_per_second, row.ratio) == pytest.approx((25.0, 2.5))  # of 20, 100 and 25 tokens a second
    assert row.spread == pytest.approx(10 - 2)


def test_the_usual_shares_are_those_with_the_middle_overhead() -> None:
    parts = [machine.Shares(0.01, 0.7, 0.1, share, 0.0) for share in (0.3, 0.1, 0.2)]
    assert middle(parts) is parts[2]
    assert middle([]) is None


def test_another_librarys_decoder_is_timed_in_the_same_run(shipped: Pair) -> None:
    calls: list[tuple[int, int]] = []

    def peer(prompt: list[int], n: int, seed: int) -> list[int]:
        calls.append((n, seed))
        return [0] * n

    setup = Setup("peer", None, None, 1, peer=peer)
    plain = Setup("plain", None, None, 1, 0)
    tokens, _, steps = once(shipped, setup, [1, 2], Sampling(), 5, 7)
    assert (tokens, steps, calls) == (5, [], [(5, 7)])
    rows = timings(shipped, [plain, setup], [[1, 2], [3]], Sampling(), 4, 2, lambda: None)
    assert rows[1].ratio is not None
    assert rows[1].ratio > 1
    assert rows[1].tokens_per_pass is None
    assert len(calls) == 1 + 3 * 2
    assert rows[1].new_tokens == 16


def test_shares_cover_every_setup_with_a_model(shipped: Pair) -> None:
    assert shares(shipped, Setup("plain", None, None, 1, 0), [[1]], Sampling(), 4) is None
    for rule, how in (("token", "without"), ("match", "top-k"), ("coupled", "coupled"), ("rrs", "without")):
        found = shares(shipped, model_setup(shipped, rule, Tree.chain(2), how, "x"), [[1, 2]], Sampling(), 6)
        assert found is not None
        assert found.overhead == pytest.approx(1 - found.target - found.draft)


def test_cost_of_ownership() -> None:
    cost = ownership(1000 / 3.6, 50, price_per_hour=0.2, price_per_kwh=0.3)  # a million tokens an hour
    assert (cost.hours, cost.energy, cost.money) == pytest.approx((1.0, 0.05, 0.2 + 0.015))
    twice = ownership(2000 / 3.6, 50, 0.2, 0.3)
    assert twice.money == pytest.approx(cost.money / 2)
    for bad in ({"tokens_per_second": 0}, {"power": -1}, {"price_per_kwh": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ownership(**({"tokens_per_second": 1.0, "power": 1.0} | bad))


def test_shares_are_those_of_a_call_without_anything_around(shipped: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses in one call, each model looked at once; so are the passes that a plan is made with."""
    from minispec.decode import search_run
    from minispec.fused import compiled
    from minispec.trust import TRUST

    calls, promised, chain, measure = 0, [], GPT.chain, auto.measure

    def counted(self: GPT, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        promised.append(TRUST.known is not None)
        return chain(self, *args)

    def measured(*args: Any, **kwargs: Any) -> Costs:
        promised.append(TRUST.known is not None)
        return measure(*args, **kwargs, repeats=1)

    monkeypatch.setattr(GPT, "chain", counted)
    setup = Setup("x", "token", ModelDrafter(shipped.draft, Tree.chain(2)), 3, 2)
    found = shares(shipped, setup, [[1, 2]], Sampling(), 6)
    assert found is not None
    assert found.draft > 0
    assert found.target + found.draft + found.verify + found.other == pytest.approx(1)
    assert calls >= 2 * (compiled() is not None)
    monkeypatch.setattr(auto, "measure", measured)
    search = auto.Search(shipped.target, shipped.draft, Sampling(), None, search_run(shipped.target))
    assert search.passes.draft_step > 0
    assert all(promised)
    assert len(promised) > calls
