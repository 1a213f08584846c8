"""A recorded run as plain JSON, schema `minispec-trace-1`: described in SCHEMA.md beside this file, checked here."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from minispec.files import write_text

SCHEMA = "minispec-trace-1"
NUMBER = (int, float)
MAYBE = (int, float, type(None))

# What each object must have, and of which type.
RUN: dict[str, Any] = {
    "schema": str,
    "minispec": str,
    "rule": str,
    "drafter": str,
    "sampling": dict,
    "seed": (int, type(None)),
    "device": str,
    "vocab_size": int,
    "block_size": int,
    "top": int,
    "prompt": list,
    "prompt_text": str,
    "texts": dict,
    "stop": list,
    "max_new_tokens": int,
    "tokens": list,
    "text": str,
    "finish_reason": (str, type(None)),
    "stats": dict,
    "plain_ms": MAYBE,
    "prefill_ms": NUMBER,
    "steps": list,
}
STEP: dict[str, Any] = {
    "n": int,
    "kind": str,
    "nodes": list,
    "draws": list,
    "coins": list,
    "path": list,
    "token": int,
    "how": str,
    "law": dict,
    "emitted": list,
    "pieces": list,
    "accepted": int,
    "tested": int,
    "proposed": int,
    "cache": dict,
    "ms": dict,
    "finish_reason": (str, type(None)),
}
NODE: dict[str, Any] = {"token": int, "parent": int, "depth": int, "state": str, "next": (dict, type(None))}
TEST: dict[str, Any] = {"x": dict, "laws": dict, "alpha": MAYBE, "ratio": MAYBE}
STATES = ("pending", "accepted", "rejected", "untested", "absent")
HOW = ("residual", "bonus", "own", "cut")


@dataclass(frozen=True)
class Trace:
    """A run that can be saved, sent and watched. `data` is what SCHEMA.md describes."""

    data: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return list(self.data["tokens"])

    def save(self, path: str | Path) -> None:
        """Write the page that plays the run where the name ends in .html, else JSON."""
        path = Path(path)
        write_text(path, self.html() if path.suffix.lower() in (".html", ".htm") else self.json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read JSON that `save` wrote. Raises `ValueError` where it is no trace, naming what is wrong."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error})") from None
        validate(data)
        return Trace(data)

    def json(self) -> str:
        """The trace as JSON on one line; a NaN or an infinity is refused by `ValueError`."""
        return json.dumps(self.data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    def html(self) -> str:
        """One page, complete in itself, that plays the run."""
        from minispec.show.html import page

        return page(self.data)

    def _repr_html_(self) -> str:
        """The page inside a notebook's cell."""
        from minispec.show.html import frame

        return frame(self.data)


def short(value: float) -> float:
    """A number with four significant digits, which is what a picture needs and a file can bear."""
    return float(f"{value:.4g}")


def law(p: Tensor, top: int, also: int | None = None) -> dict[str, Any]:
    """The likeliest tokens of p (V,), `also` among them, their probabilities, and the mass of the rest."""
    ids = _likeliest(p, top, also)
    kept = p[ids]
    return {"token": ids, "p": [short(x) for x in kept.tolist()], "rest": _rest(p, kept)}


def laws(p: Tensor, q: Tensor | None, x: int, top: int) -> dict[str, Any]:
    """p (V,) and q (V,) at the tokens where either is largest, x among them, and the mass of the rest of both."""
    if q is None:
        return law(p, top, x) | {"q": None, "q_rest": None}
    ids = _likeliest(p.maximum(q), top, x)
    return {
        "token": ids,
        "p": [short(v) for v in p[ids].tolist()],
        "rest": _rest(p, p[ids]),
        "q": [short(v) for v in q[ids].tolist()],
        "q_rest": _rest(q, q[ids]),
    }


def _likeliest(p: Tensor, top: int, also: int | None) -> list[int]:
    values, index = p.topk(min(top, len(p)))
    ids: list[int] = index[values > 0].tolist()
    if also is not None and also not in ids:
        ids = [*ids[: top - 1], also]
    return ids


def _rest(p: Tensor, kept: Tensor) -> float:
    rest = float((p.double().sum() - kept.double().sum()).clamp(min=0))
    return short(rest) if rest > 1e-6 else 0.0  # below is what rounding leaves of a whole


def validate(data: Any) -> None:
    """Raise `ValueError`, naming the place, unless `data` is a trace as SCHEMA.md describes it."""
    _fields(data, RUN, "trace")
    _need(data["schema"] == SCHEMA, "trace", f"schema is {data['schema']!r}, this version reads {SCHEMA!r}")
    _finite(data, "trace")
    length, tokens, before = len(data["prompt"]), [], len(data["prompt"]) - 1
    for i, step in enumerate(data["steps"]):
        at = f"steps[{i}]"
        _fields(step, STEP, at)
        _need(step["n"] == length, at, f"n is {step['n']}, the row holds {length} tokens")
        _need(step["how"] in HOW, at, f"how is {step['how']!r}")
        _nodes(step, at)
        _step(step, at)
        _law(step["law"], f"{at}.law")
        target = step["cache"]["target"]
        _need(target["before"] == before == length - 1, at, f"the target's cache holds {target['before']} entries")
        before = target["after"] if step["how"] != "cut" else length - 1 + len(step["emitted"])
        tokens += step["emitted"]
        length += len(step["emitted"])
    _need(tokens == data["tokens"], "trace", "tokens are not what the steps emitted")
    known = data["texts"].keys()
    used = {str(t) for t in _tokens(data)}
    _need(used <= known, "trace", f"texts lacks the tokens {sorted(used - known)[:5]}")


def _tokens(value: Any) -> set[int]:
    """Every token id that a trace speaks of; -1 is an absent node."""
    found: set[int] = set()
    for step in value["steps"]:
        found |= {*step["emitted"], step["token"], *step["law"]["token"]}
        for node in step["nodes"]:
            found |= {node["token"]} - {-1}
            for laws in (node["next"], (node.get("test") or {}).get("laws")):
                found |= set(laws["token"]) if laws else set()
    return found | set(value["prompt"])


def _nodes(step: dict[str, Any], at: str) -> None:
    for k, node in enumerate(step["nodes"]):
        here = f"{at}.nodes[{k}]"
        _fields(node, NODE, here)
        _need(node["state"] in STATES, here, f"state is {node['state']!r}")
        _need(-1 <= node["parent"] < max(k, 0) or (k == 0 and node["parent"] == -1), here, "parent is no earlier node")
        if node["next"] is not None:
            _law(node["next"], f"{here}.next")
        if k and node["state"] != "absent":
            _fields(node.get("test"), TEST, f"{here}.test")
            _law(node["test"]["laws"], f"{here}.test.laws")
        accepted = k > 0 and k in step["path"]
        _need((node["state"] == "accepted") == accepted, here, f"state is {node['state']!r}, the path {step['path']}")


def _step(step: dict[str, Any], at: str) -> None:
    nodes, path = step["nodes"], step["path"]
    _need(path[:1] == [0] and all(nodes[b]["parent"] == a for a, b in itertools.pairwise(path)), at, "path")
    run = [nodes[node]["token"] for node in path[1:]] + [step["token"]]
    _need(run[: len(step["emitted"])] == step["emitted"], at, "emitted is not the path's tokens and one more")
    _need(step["how"] == "cut" or len(run) == len(step["emitted"]), at, "emitted ends early, and how is not 'cut'")
    _need(len(step["pieces"]) == len(step["emitted"]), at, "pieces")
    target = step["cache"]["target"]
    _need(target["read"] == len(nodes) and target["after"] == target["before"] + len(path), at, "the target's cache")
    for coin in [*step["draws"], *step["coins"]]:
        op = coin.get("op")
        _need(op in ("flip", "pick") and len(coin["outcome"]) == len(coin["node"]), at, f"coin {coin}")
        _need(op == "pick" or all(0 <= p <= 1 for p in coin["prob"]), at, "a coin's probability")


def _law(law: dict[str, Any], at: str) -> None:
    for p, rest in (("p", "rest"), ("q", "q_rest")):
        if law.get(p) is not None:
            _need(len(law[p]) == len(law["token"]), at, f"{p} and token differ in length")
            mass = sum(law[p]) + law[rest]
            _need(min([*law[p], law[rest]]) >= 0 and abs(mass - 1) < 5e-3, at, f"the mass of {p} is {mass}")


def _fields(value: Any, wanted: dict[str, Any], at: str) -> None:
    _need(isinstance(value, dict), at, f"must be an object, got {type(value).__name__}")
    for name, kind in wanted.items():
        _need(name in value, at, f"lacks {name!r}")
        right = isinstance(value[name], kind) and not isinstance(value[name], bool)
        _need(right, f"{at}.{name}", f"has the type {type(value[name]).__name__}")


def _finite(value: Any, at: str) -> None:
    if isinstance(value, float):
        _need(math.isfinite(value), at, f"is {value}")
    elif isinstance(value, dict):
        for name, item in value.items():
            _finite(item, f"{at}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _finite(item, f"{at}[{i}]")


def _need(condition: bool, at: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{at}: {message}")
