"""A trace as one HTML page: styles, script and data inside, no network, no build step."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

LIMIT = 600_000  # bytes of a page; longer laws are shortened to stay below it
SHORTEST = 4  # tokens of a law that a page shows at least


def page(data: dict[str, Any], limit: int = LIMIT) -> str:
    """The page that plays the trace `data`, within `limit` bytes where that can be had by showing less.

    First laws are cut to fewer tokens (4 at least); then the laws of nodes that the path did not come to are left out,
    and the choices made while drafting, which the page does not show.
    """
    rule, steps = data["rule"], len(data["steps"])
    parts = {
        "title": html.escape(f"minispec: {rule}, {steps} steps, {len(data['tokens'])} tokens"),
        "css": _file("player.css"),
        "js": _file("player.js"),
    }
    frame = _file("player.html")
    for name, text in parts.items():
        frame = frame.replace(f"%%{name}%%", text)
    room = limit - len(frame.encode("utf-8"))
    top = data["top"]
    text = _inside(data)
    while len(text.encode("utf-8")) > room and top > SHORTEST:
        top = max(top * 3 // 4, SHORTEST)
        text = _inside(shorten(data, top))
    if len(text.encode("utf-8")) > room:
        text = _inside(lean(shorten(data, top)))
    return frame.replace("%%data%%", text)


def frame(data: dict[str, Any], height: int = 900) -> str:
    """The page in an inline frame, for a notebook's cell."""
    source = html.escape(page(data), quote=True)
    return (
        f'<iframe srcdoc="{source}" title="A run of speculative decoding, step by step" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )


def shorten(data: dict[str, Any], top: int) -> dict[str, Any]:
    """The same trace with the likeliest `top` tokens of each law; what goes is added to the mass of the rest."""
    steps = []
    for step in data["steps"]:
        nodes = []
        for node in step["nodes"]:
            node = node | {"next": node["next"] and _shorter(node["next"], top, None)}
            if "test" in node:
                node["test"] = node["test"] | {"laws": _shorter(node["test"]["laws"], top, node["token"])}
            nodes.append(node)
        steps.append(step | {"nodes": nodes, "law": _shorter(step["law"], top, step["token"])})
    return data | {"top": top, "steps": steps}


def lean(data: dict[str, Any]) -> dict[str, Any]:
    """The same trace without the laws of untested nodes and the draws of the draft: enough to watch, not to replay."""
    steps = []
    for step in data["steps"]:
        nodes = [node | {"next": None} if node["state"] == "untested" else node for node in step["nodes"]]
        for i, node in enumerate(nodes):
            if node["state"] == "untested":
                nodes[i] = node | {"test": {name: node["test"][name] for name in ("x", "ratio", "alpha", "coin")}}
        steps.append(step | {"nodes": nodes, "draws": []})
    return data | {"steps": steps}


def _shorter(law: dict[str, Any], top: int, keep: int | None) -> dict[str, Any]:
    order = range(len(law["token"]))  # a law is sorted by size, a token that had to be in it last
    kept = [i for i in order if i < top or law["token"][i] == keep]
    found = dict(law)
    for name, rest in (("p", "rest"), ("q", "q_rest")):
        if law.get(name) is not None:
            gone = sum(law[name][i] for i in order if i not in kept)
            found[name] = [law[name][i] for i in kept]
            found[rest] = float(f"{law[rest] + gone:.4g}")
    return found | {"token": [law["token"][i] for i in kept]}


def _inside(data: dict[str, Any]) -> str:
    """JSON that may stand in a script element: no `<` in it can end or open one."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _file(name: str) -> str:
    return (resources.files("minispec.show") / name).read_text(encoding="utf-8")
