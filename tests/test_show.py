"""A recorded run: the same tokens as the run that is not recorded, every figure right, and replayed from its coins."""

from __future__ import annotations

import copy
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import Scripted, TableModel, random_gpt, rows_of

import minispec
from minispec import (
    GPT,
    RULES,
    EarlyExitDrafter,
    ModelDrafter,
    NGramDrafter,
    Pair,
    Randomness,
    Rule,
    Sampling,
    Tree,
    verify,
)
from minispec.advanced import AdaptiveDrafter, DynamicTree, HeuristicDrafter
from minispec.show import Recording, Replay, Trace, coins, record, replay, validate
from minispec.show.html import page, shorten
from minispec.show.watchers import WatchedRng

BUSHY = Tree.branching([2, 2, 1])
Two = tuple[GPT, GPT]


def ways(two: Two) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Every rule, shape and kind of drafter: what to draft with, and how."""
    target, draft = two
    return {
        "token": (draft, {"draft_len": 3}),
        "block": (draft, {"draft_len": 3, "rule": "block"}),
        "match": (draft, {"tree": BUSHY, "rule": "match"}),
        "coupled": (draft, {"tree": BUSHY, "rule": "coupled"}),
        "rrs": (draft, {"tree": BUSHY}),
        "specinfer": (draft, {"tree": BUSHY, "rule": "specinfer"}),
        "traversal": (draft, {"tree": BUSHY, "rule": "traversal"}),
        "greedy": (draft, {"tree": BUSHY, "sampling": Sampling(0)}),
        "filtered": (draft, {"draft_len": 3, "sampling": Sampling(1.0, top_k=2, top_p=0.9)}),
        "n-gram": (NGramDrafter(3, branches=2), {}),
        "early exit": (EarlyExitDrafter(target, 1, Tree.chain(2)), {}),
        "dynamic": (DynamicTree(draft, nodes=6, max_depth=3, width=2), {}),
        "adaptive": (AdaptiveDrafter(draft, max_len=4), {}),
        "heuristic": (HeuristicDrafter(draft), {}),
        "empty": (draft, {"draft_len": 0}),
        "plain": (None, {}),
    }


WAYS = tuple(ways((random_gpt(1), random_gpt(2))))


@pytest.fixture(scope="module")
def traces(two: Two) -> dict[str, Trace]:
    return {
        name: record(two[0], draft, [0, 1, 0], max_new_tokens=13, seed=5, **how)
        for name, (draft, how) in ways(two).items()
    }


@pytest.mark.parametrize("name", WAYS)
def test_recording_changes_nothing_and_its_coins_give_the_run_again(
    two: Two, traces: dict[str, Trace], name: str
) -> None:
    draft, how = ways(two)[name]
    whole: dict[str, Any] = {"max_new_tokens": 13, **how}
    trace, target = traces[name], two[0]
    if draft is None:
        run = minispec.generate(target, [0, 1, 0], seed=5, **whole)
    else:
        run = minispec.speculate(target, draft, [0, 1, 0], seed=5, **whole)
        rng = Replay.of(trace)
        assert minispec.speculate(target, draft, [0, 1, 0], rng=rng, **whole).tokens == run.tokens
        assert rng.choices == []  # no more and no fewer choices
    assert trace.tokens == run.tokens
    assert replay(trace) == run.tokens  # from the file alone
    validate(json.loads(trace.json()))
    stats = trace.data["stats"]
    for figure in ("new_tokens", "target_passes", "proposed", "tested", "accepted"):
        assert stats[figure] == getattr(run.stats, figure)
    for step, seen in zip(run.steps, trace.data["steps"], strict=True):
        assert (step.tokens, step.accepted, step.tested) == (tuple(seen["emitted"]), seen["accepted"], seen["tested"])
        assert tuple(node["parent"] for node in seen["nodes"]) == step.parents
        assert tuple(node["token"] for node in seen["nodes"][1:]) == step.drafted
        assert step.finish_reason == seen["finish_reason"]


@pytest.mark.parametrize("name", [name for name in WAYS if name not in ("n-gram", "plain")])
def test_figures_of_every_node_are_those_of_the_models(two: Two, traces: dict[str, Trace], name: str) -> None:
    """p at every node from an uncached pass; q, alpha and the ratio from both."""
    target, trace = two[0], traces[name]
    sampling = Sampling(**trace.data["sampling"])
    text = list(trace.data["prompt"])
    for step in trace.data["steps"]:
        nodes = step["nodes"]
        for i, node in enumerate(nodes):
            if node["token"] < 0:
                continue
            path, at = [], i
            while at >= 0:
                path.insert(0, nodes[at]["token"])
                at = nodes[at]["parent"]
            context = torch.tensor([[*text, *path[1:]]])
            if context.shape[1] > target.config.block_size:
                continue
            p = sampling.probs(target(context)[:, -1])[0].tolist()
            assert dense(node["next"], "p") == pytest.approx(p, rel=1e-3, abs=1e-6)
            if i and node["test"]["laws"]["q"] is not None:
                test, x = node["test"], node["token"]
                p, q = dense(test["laws"], "p"), dense(test["laws"], "q")
                assert test["alpha"] == pytest.approx(sum(map(min, p, q)), abs=2e-3)
                assert (test["x"]["p"], test["x"]["q"]) == (p[x], q[x])
                assert test["ratio"] == pytest.approx(min(1, p[x] / q[x]), rel=2e-3)
        text += step["emitted"]


def many_steps(two: Two, name: str) -> list[dict[str, Any]]:
    """Steps of runs under several seeds, so that rare outcomes are among them."""
    draft, how = ways(two)[name]
    runs = [record(two[0], draft, [0, 1, 0], max_new_tokens=13, seed=seed, **how) for seed in range(8)]
    return [step for run in runs for step in run.data["steps"]]


@pytest.mark.parametrize("name", ["token", "rrs", "specinfer"])
def test_a_coin_falls_with_the_chance_of_its_node(two: Two, name: str) -> None:
    """min(1, p/q) of the laws in `test`: of a later sibling, what those rejected before it left of p."""
    later = 0
    for step in many_steps(two, name):
        nodes = step["nodes"]
        for i, node in enumerate(nodes[1:], start=1):
            coin = node["test"]["coin"] if node["token"] >= 0 else None
            if coin is not None:
                chance = step["coins"][coin]["prob"][step["coins"][coin]["node"].index(i)]
                assert chance == pytest.approx(node["test"]["ratio"], rel=2e-3)
                later += nodes[i - 1]["parent"] == node["parent"]
    assert later > 0 or name == "token"


def dense(law: dict[str, Any], name: str, V: int = 3) -> list[float]:
    values = [0.0] * V
    for token, value in zip(law["token"], law[name], strict=True):
        values[token] = value
    return values


@pytest.mark.parametrize("name", ["token", "rrs", "specinfer"])
def test_the_last_token_is_drawn_from_the_residual_or_the_bonus_law(two: Two, name: str) -> None:
    seen = set()
    for step in many_steps(two, name):
        seen.add(step["how"])
        law = dense(step["law"], "p")
        end = step["path"][-1]
        if step["how"] == "bonus":
            assert law == pytest.approx(dense(step["nodes"][end]["next"], "p"), abs=1e-3)
        elif step["how"] == "residual":
            last = [node for node in step["nodes"] if node["state"] == "rejected" and node["parent"] == end][-1]
            p, q = (dense(last["test"]["laws"], which) for which in ("p", "q"))
            rest = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
            assert law == pytest.approx([r / sum(rest) for r in rest], abs=5e-3)
    assert seen >= {"bonus", "residual"}


@pytest.mark.parametrize("name", WAYS)
def test_states_follow_from_the_coins(traces: dict[str, Trace], name: str) -> None:
    rule = traces[name].data["rule"]
    for step in traces[name].data["steps"]:
        nodes, path = step["nodes"], step["path"]
        for coin in step["coins"]:
            for node, outcome in zip(coin["node"], coin["outcome"], strict=True):
                if node is None or coin["op"] == "pick":
                    continue
                if rule in ("rrs", "specinfer"):
                    assert (node in path) == bool(outcome)
                if rule == "traversal" and outcome:
                    assert node == path[-1]
                if rule == "token" and node <= len(path):
                    assert (node in path) == bool(outcome)
        if step["coins"]:
            assert step["coins"][-1]["op"] == "pick"
            assert step["coins"][-1]["outcome"] == [step["token"]]
            assert step["coins"][-1]["node"] == [path[-1]]
        for i, node in enumerate(nodes[1:], start=1):
            if node["state"] == "rejected":
                assert node["parent"] in path
                assert i not in path


@pytest.mark.parametrize("name", WAYS)
def test_caches_hold_what_the_decoder_promises(traces: dict[str, Trace], name: str) -> None:
    trace = traces[name].data
    for step, after in zip(trace["steps"], [*trace["steps"][1:], None], strict=True):
        target, draft = step["cache"]["target"], step["cache"]["draft"]
        assert target["before"] == step["n"] - 1
        assert target["read"] == len(step["nodes"])
        assert target["after"] == step["n"] - 1 + len(step["path"])
        assert target["moved"] == [i for i, node in enumerate(step["path"]) if i != node]
        if after is not None:
            assert after["cache"]["target"]["before"] == target["after"]
        assert (draft is None) == (name in ("n-gram", "plain"))
        if draft is not None:
            assert draft["rolled_back"] <= draft["before"]
            assert draft["end"] == draft["rolled_back"] + sum(draft["passes"])
            assert draft["after"] <= draft["end"]
            assert after is None or after["cache"]["draft"]["before"] == draft["after"]


def test_a_stop_token_inside_the_accepted_run_cuts_it() -> None:
    model = TableModel(rows_of(0.0, 1.0))
    trace = record(model, model, [0], max_new_tokens=8, draft_len=3, stop=[1], seed=0)
    assert trace.tokens == [1] == replay(trace)
    assert trace.data["steps"][0]["how"] == "cut"
    assert trace.data["finish_reason"] == "stop"
    validate(trace.data)


def test_a_rule_and_a_drafter_of_ones_own(two: Two) -> None:
    """Both are recorded; which node a coin was about is not known, and is not made up."""

    def shy(p: Any, q: Any, drafted: Any, rng: Any) -> Any:
        rng.flip(torch.full((1, 1), 0.5))
        return torch.zeros(1, dtype=torch.long), rng.pick(p[:, 0])

    def never(p: Any, q: Any, tokens: Any, tree: Any, rng: Any) -> Any:
        rng.flip(torch.full((1,), 0.5))
        return torch.tensor([[0, -1]]), rng.pick(p[:, 0])

    class Own:
        kind, max_nodes = "chosen", 2

        def begin(self, prompts: Any, sampling: Sampling) -> Any:
            return NGramDrafter(1).begin(prompts, sampling)

    rule = Rule("never", verify.ANY, "top-k", tree=never)
    trace = record(two[0], Own(), [0, 1, 0, 1], max_new_tokens=4, rule=rule, seed=0)
    assert [coin["node"] for coin in trace.data["steps"][0]["coins"]] == [[None], [None]]
    validate(trace.data)
    with pytest.raises(ValueError, match="rule must be one of"):
        replay(trace)
    chain = record(
        two[0], two[1], [0], max_new_tokens=4, rule=Rule("shy", frozenset({"chain"}), "without", chain=shy), seed=0
    )
    assert len(chain.tokens) == 4
    assert {node for step in chain.data["steps"] for coin in step["coins"] for node in coin["node"]} == {None}
    validate(chain.data)


def test_only_flip_and_pick_of_an_rng_are_called(two: Two) -> None:
    rng = Scripted([True] * 60, [1] * 60)
    trace = record(two[0], two[1], [0], max_new_tokens=5, draft_len=2, rng=rng)
    assert trace.tokens == [1] * 5
    assert trace.data["seed"] is None
    assert len(rng.asked) == len(Replay.of(trace).choices)


@pytest.mark.parametrize("tree", [BUSHY, Tree.branching([3]), Tree.from_parents([-1, 0, 0, 1, 2, 2])])
def test_coins_are_told_apart_where_a_rule_does_not_look(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `rrs` asks for coins that decide nothing: they are about no node, and the others keep theirs."""
    generator = torch.Generator().manual_seed(0)

    def run(seed: int, p: Any, q: Any, tokens: Any) -> list[Any]:
        rng = WatchedRng(Randomness(seed))
        path, _ = verify.rrs(p, q, tokens, tree, rng)
        return [[choice.outcome for choice in rng.choices], [node for node in path[0].tolist() if node >= 0]]

    for seed in range(30):
        p, q = (torch.rand(1, tree.size, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        tokens = torch.randint(4, (1, tree.size), generator=generator)
        with monkeypatch.context() as patch:
            patch.setattr(verify, "_nobody", lambda alive: False)
            outcomes, path = run(seed, p, q, tokens)
        about = coins.places(RULES["rrs"], outcomes, tokens[0].tolist(), tree, path, early=False)
        passed = [node for (node,), (outcome,) in zip(about[:-1], outcomes[:-1], strict=True) if outcome]
        assert passed == path[1:]
        asked = [node for (node,) in about[:-1] if node is not None]
        assert len(asked) == len(set(asked))


def test_a_batch_and_other_mistakes_are_refused(two: Two) -> None:
    target, draft = two
    with pytest.raises(TypeError, match="a trace follows one row"):
        record(target, draft, [[0], [1]], max_new_tokens=2)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="give either seed or rng"):
        record(target, draft, [0], max_new_tokens=2, seed=1, rng=Randomness(1))
    with pytest.raises(TypeError, match=r"tree must be a Tree, got 'auto': give a plan's own"):
        record(target, draft, [0], max_new_tokens=2, tree="auto")
    with pytest.raises(ValueError, match="top must be an integer >= 1, got 0"):
        record(target, draft, [0], max_new_tokens=2, top=0)
    with pytest.raises(ValueError, match="does not accept a draft of kind 'chosen'"):
        record(target, NGramDrafter(), [0], max_new_tokens=2, rule="token")
    with pytest.raises(ValueError, match="trace is at its end"):
        Replay([]).flip(torch.ones(1))
    with pytest.raises(ValueError, match="the trace has a pick of 1, not a flip of 2"):
        Replay([{"op": "pick", "outcome": [0]}]).flip(torch.ones(2))


def test_no_token_no_step(two: Two) -> None:
    trace = record(*two, [0], max_new_tokens=0, seed=0)
    assert trace.tokens == []
    validate(trace.data)
    assert "minispec-trace-1" in trace.html()


def test_recording_step_by_step_and_timing_a_plain_step(two: Two) -> None:
    run = Recording(*two, [0], max_new_tokens=6, seed=1)
    first = next(iter(run))
    assert run.trace().tokens == list(first.tokens)
    assert run.trace().data["plain_ms"] is None
    assert record(*two, [0], max_new_tokens=6, seed=1, plain_steps=3).data["plain_ms"] > 0


# --- the file -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story(shipped: Pair) -> Trace:
    return draw(shipped, Tree.branching([2, 1]), 24)


def draw(shipped: Pair, tree: Tree, length: int) -> Trace:
    prompt = shipped.tokenizer.encode("Once upon a time")
    return record(
        shipped.target,
        shipped.draft,
        prompt,
        max_new_tokens=length,
        seed=3,
        tokenizer=shipped.tokenizer,
        tree=tree,
    )


def test_texts_and_the_twenty_likeliest(shipped: Pair, story: Trace, tmp_path: Path) -> None:
    data = story.data
    assert data["text"] == shipped.tokenizer.decode(story.tokens)
    assert "".join(piece for step in data["steps"] for piece in step["pieces"]) == data["text"]
    assert data["prompt_text"] == "Once upon a time"
    laws = [node["next"] for step in data["steps"] for node in step["nodes"]]
    assert max(len(law["token"]) for law in laws) == 20
    for law in laws:
        assert sum(law["p"]) + law["rest"] == pytest.approx(1, abs=2e-3)
    for step in data["steps"]:
        for node in step["nodes"][1:]:
            assert node["token"] in node["test"]["laws"]["token"]
    story.save(tmp_path / "run.json")
    assert Trace.load(tmp_path / "run.json").data == data
    assert replay(Trace.load(tmp_path / "run.json")) == story.tokens


def test_half_a_character_is_shown_as_its_bytes(shipped: Pair) -> None:
    """A token may end inside a character: the text stays whole, the token's name says which bytes it has."""
    letters = shipped.tokenizer.encode("é火")
    assert len(letters) > 2
    trace = record(
        TableModel(torch.full((2048, 2048), 1 / 2048)),
        None,
        letters,
        max_new_tokens=1,
        tokenizer=shipped.tokenizer,
        seed=0,
    )
    assert trace.data["prompt_text"] == "é火"
    assert re.fullmatch(r"(<[0-9A-F]{2}>)+", trace.data["texts"][str(letters[-1])])


BREAKS = {
    "schema": lambda d: d.update(schema="minispec-trace-0"),
    "lacks": lambda d: d.pop("steps"),
    "type": lambda d: d.update(tokens=None),
    "nan": lambda d: d["steps"][0]["ms"].update(step=math.nan),
    "length": lambda d: d["steps"][1].update(n=3),
    "cache": lambda d: d["steps"][1]["cache"]["target"].update(before=1),
    "after": lambda d: d["steps"][0]["cache"]["target"].update(after=1),
    "emitted": lambda d: d["steps"][0]["emitted"].append(1),
    "tokens": lambda d: d["tokens"].pop(),
    "mass": lambda d: d["steps"][0]["nodes"][0]["next"]["p"].__setitem__(0, 0.0),
    "state": lambda d: d["steps"][0]["nodes"][1].update(state="maybe"),
    "path": lambda d: d["steps"][0].update(path=[0, 2]),
    "parent": lambda d: d["steps"][0]["nodes"][1].update(parent=7),
    "how": lambda d: d["steps"][0].update(how="luck"),
    "text": lambda d: d["texts"].pop("0"),
    "coin": lambda d: d["steps"][0]["coins"][0].update(op="roll"),
    "prob": lambda d: d["steps"][0]["coins"][0].update(prob=[1.5, 0.0, 0.0]),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_validator_refuses(traces: dict[str, Trace], name: str) -> None:
    data = copy.deepcopy(traces["token"].data)
    validate(data)
    BREAKS[name](data)
    with pytest.raises(ValueError, match=r"^(trace|steps)"):
        validate(data)


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not JSON"):
        Trace.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="trace: must be an object"):
        Trace.load(tmp_path / "x.json")


def test_nothing_but_numbers(traces: dict[str, Trace]) -> None:
    for trace in traces.values():
        assert not re.search(r"NaN|Infinity", trace.json())
    with pytest.raises(ValueError, match="JSON compliant"):
        Trace({"x": math.nan}).json()


# --- the page -----------------------------------------------------------------------------------------


def test_the_page_is_complete_in_itself(story: Trace, tmp_path: Path) -> None:
    story.save(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "%%" not in text
    for outside in ("http:", "https:", "src=", "href=", "@import", "url("):
        assert outside not in text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    data = re.search(r'<script type="application/json" id="trace">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == story.data


def test_text_cannot_end_the_script(two: Two) -> None:
    trace = record(*two, [0], max_new_tokens=2, seed=0)
    trace.data["prompt_text"] = "</script><script>alert(1)</script><!--"
    assert trace.html().count("</script>") == 2
    inside = re.search(r'id="trace">(.*?)</script>', trace.html(), re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1])["prompt_text"] == trace.data["prompt_text"]


def test_a_hundred_steps_stay_below_600_kilobytes(shipped: Pair, story: Trace) -> None:
    """Chains of the default length do with whole laws; the page of a large tree shows shorter ones."""
    for tree, whole in ((Tree.chain(4), True), (Tree.branching([3, 2, 1]), False)):
        data = draw(shipped, tree, 24).data
        data["steps"] = [data["steps"][i % len(data["steps"])] for i in range(100)]
        text = page(data)
        assert len(text.encode("utf-8")) < 600_000
        assert ('"top":20,' in text) == whole
        assert all(law in text for law in ('"state":"rejected"', '"laws":'))
    short = shorten(story.data, 5)
    assert short["steps"][0]["nodes"][1]["test"]["x"] == story.data["steps"][0]["nodes"][1]["test"]["x"]
    validate(short)  # the mass of what went is in the rest
    assert max(len(n["next"]["token"]) for s in short["steps"] for n in s["nodes"]) == 5


def test_a_notebook_shows_the_page(story: Trace) -> None:
    frame = story._repr_html_()
    source = re.search(r'srcdoc="([^"]*)"', frame)
    assert source is not None
    assert html.unescape(source[1]) == story.html()
    assert 'title="' in frame


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_contrast_is_aa_in_light_and_dark() -> None:
    css = (Path(minispec.__file__).parent / "show" / "player.css").read_text(encoding="utf-8")
    themes = re.findall(r'^:root(?:\[data-theme="dark"\])? \{(.*?)\}', css, re.DOTALL | re.MULTILINE)[:2]
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", theme))
        pairs = [(ink, back) for ink in ("ink", "soft") for back in ("back", "card")]
        pairs += [(name, f"{name}-back") for name in ("accepted", "rejected", "residual", "bonus", "pending")]
        pairs += [("ink", name) for name in ("p", "q", "min", "r", "pending-back", "accepted-back", "rejected-back")]
        pairs += [
            ("soft", name) for name in ("accepted-back", "rejected-back", "residual-back", "pending-back", "bonus-back")
        ]
        pairs += [("accepted", "card"), ("back", "soft")]
        for ink, back in pairs:
            light, dark = sorted((luminance(colours[ink]), luminance(colours[back])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, back, theme[:30])
        for line, back in (
            ("focus", "back"),
            ("p-ink", "back"),
            ("q-ink", "back"),
            ("pending", "card"),
            ("residual", "card"),
        ):
            light, dark = sorted((luminance(colours[line]), luminance(colours[back])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3, (line, back)


def test_a_drafter_that_already_has_its_shape_keeps_it(two: Two) -> None:
    drafter = ModelDrafter(two[1], Tree.chain(2))
    assert record(two[0], drafter, [0], max_new_tokens=4, seed=0).data["drafter"] == "ModelDrafter"
    assert drafter.model is two[1]  # the caller's drafter is left alone


def test_the_decoder_knows_nothing_of_recording() -> None:
    """What is off costs nothing: only the command line reaches for `minispec.show`."""
    package = Path(minispec.__file__).parent
    users = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "minispec.show" in path.read_text(encoding="utf-8") and path.parent.name != "show"
    ]
    assert users == ["cli.py"]
