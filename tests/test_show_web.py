"""The page in a real browser: headless Chromium opens it from disk, plays it, clicks it, and is asked what it shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minispec import NGramDrafter, Pair, Tree
from minispec.advanced import DynamicTree
from minispec.show import Trace, record

try:
    from selenium import webdriver
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait
except ImportError:
    webdriver = None

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
SIZES = [(1280, 720), (390, 844)]
THEMES = ["light", "dark"]


def obstacle() -> str | None:
    """Why the browser cannot be driven here."""
    if webdriver is None:
        return 'needs selenium: pip install ".[web]"'
    if BROWSER is None or DRIVER is None:
        return "needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
    try:
        with socket.socket() as ear:
            ear.bind(("127.0.0.1", 0))
            ear.listen()
            socket.create_connection(ear.getsockname(), timeout=2).close()
    except OSError as error:
        return f"needs the loopback device to talk to chromedriver: {error}"
    return None


OBSTACLE = obstacle()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere, but for the loopback device, through which the browser is driven."""
    connect = socket.socket.connect

    def local(self: socket.socket, address: Any) -> None:
        assert address[0] in ("127.0.0.1", "localhost", "::1"), f"the network was used: {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)


@pytest.fixture(scope="module")
def traces(shipped: Pair) -> dict[str, Trace]:
    prompt = shipped.tokenizer.encode("Once upon a time")
    repeated = shipped.tokenizer.encode("the king, the king, the king")
    whole: dict[str, Any] = {"seed": 3, "tokenizer": shipped.tokenizer}
    target, draft = shipped.target, shipped.draft
    return {
        "chain": record(target, draft, prompt, max_new_tokens=30, plain_steps=3, **whole),
        "tree": record(target, draft, prompt, max_new_tokens=16, tree=Tree.branching([3, 2, 1]), **whole),
        "dynamic": record(target, DynamicTree(draft, nodes=8), prompt, max_new_tokens=10, **whole),
        "n-gram": record(target, NGramDrafter(3), repeated, max_new_tokens=8, **whole),
        "coupled": record(target, draft, prompt, max_new_tokens=8, rule="coupled", **whole),
        "nothing": record(target, draft, prompt, max_new_tokens=0, **whole),
    }


@pytest.fixture(scope="module")
def files(traces: dict[str, Trace], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    for name, trace in traces.items():
        trace.save(folder / f"{name}.html")
    (folder / "notebook.html").write_text(f"<!doctype html>{traces['chain']._repr_html_()}", encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in (*traces, "notebook")}


@pytest.fixture(scope="module")
def browser(files: dict[str, str]) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    flags = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    flags += ["--disable-background-networking", "--no-first-run", "--disable-dev-shm-usage"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium's own does not work for root
    for flag in flags:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The browser, whose console and requests are looked at when a test is done with it."""
    view(browser, 1280, 720, "light")
    yield browser
    assert [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []
    messages = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert all(url.startswith(("file:///", "data:", "about:")) for url in asked), asked


def view(browser: Any, width: int, height: int, theme: str) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})


def text(page: Any, selector: str) -> str:
    return str(page.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def texts(page: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    return list(page.execute_script(script, selector))


def at(page: Any) -> tuple[int, str]:
    """Step and phase that are shown."""
    step, phase = page.execute_script("return [document.body.dataset.step, document.body.dataset.phase]")
    return int(step), phase


def press(page: Any, *keys: str) -> None:
    actions = webdriver.ActionChains(page)
    for key in keys[:-1]:
        actions.key_down(key)
    actions.send_keys(keys[-1])
    for key in keys[:-1]:
        actions.key_up(key)
    actions.perform()


def click(page: Any, selector: str) -> None:
    page.execute_script(
        "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click', {bubbles: true}))", selector
    )


@pytest.mark.parametrize("name", ["chain", "tree", "dynamic", "n-gram"])
def test_it_plays_to_the_end(page: Any, files: dict[str, str], traces: dict[str, Trace], name: str) -> None:
    data = traces[name].data
    page.get(files[name])
    assert at(page) == (0, "commit")
    page.execute_script("document.querySelector('#speed').value = '16'")
    page.find_element("css selector", "#play").click()
    assert text(page, "#play") == "Pause"
    WebDriverWait(page, 60).until(lambda p: at(p) == (len(data["steps"]) - 1, "commit"))
    WebDriverWait(page, 10).until(lambda p: text(p, "#play") == "Play")
    shown = text(page, "#text")
    dropped = "".join(texts(page, "#text del"))
    assert shown.replace(dropped, "", 1) if dropped else shown
    assert "".join(texts(page, "#text > .tok, #text .now > span")) == data["prompt_text"] + data["text"]


def test_steps_and_phases_by_buttons_and_keys(page: Any, files: dict[str, str], traces: dict[str, Trace]) -> None:
    last = len(traces["chain"].data["steps"]) - 1
    page.get(files["chain"])
    for button, step in (
        ("next", 1),
        ("next", 2),
        ("back", 1),
        ("last", last),
        ("next", last),
        ("first", 0),
        ("back", 0),
    ):
        page.find_element("css selector", f"#{button}").click()
        assert at(page) == (step, "commit")
    page.execute_script("document.activeElement.blur()")
    for keys, wanted in (
        ((Keys.ARROW_RIGHT,), (1, "commit")),
        ((Keys.SHIFT, Keys.ARROW_RIGHT), (2, "draft")),
        ((Keys.SHIFT, Keys.ARROW_RIGHT), (2, "score")),
        ((Keys.SHIFT, Keys.ARROW_RIGHT), (2, "verify")),
        ((Keys.SHIFT, Keys.ARROW_LEFT), (2, "score")),
        ((Keys.ARROW_LEFT,), (1, "commit")),
        ((Keys.END,), (last, "commit")),
        ((Keys.HOME,), (0, "commit")),
    ):
        press(page, *keys)
        assert at(page) == wanted
    press(page, " ")
    assert text(page, "#play") == "Pause"
    press(page, " ")
    assert text(page, "#play") == "Play"
    page.execute_script("const s = document.querySelector('#seek'); s.value = 3; s.dispatchEvent(new Event('input'))")
    assert at(page) == (2, "commit")


@pytest.mark.parametrize("name", ["chain", "tree", "dynamic", "coupled"])
def test_the_numbers_are_those_of_the_trace(
    page: Any, files: dict[str, str], traces: dict[str, Trace], name: str
) -> None:
    data = traces[name].data
    page.get(files[name])
    for k, step in enumerate(data["steps"][: 2 if name == "tree" else 5]):
        assert at(page) == (k, "commit")
        for i, node in enumerate(step["nodes"][1:], start=1):
            click(page, f'.node[data-node="{i}"]')
            assert data["texts"][str(node["token"])].strip() in text(page, "#h-detail").replace("␣", " ").replace(
                "⏎", "\n"
            )
            test, x = node["test"], node["test"]["x"]
            assert float(text(page, '[data-number="p"]')) == x["p"]
            if x["q"] is None:
                assert text(page, '[data-number="q"]') == "none"
            else:
                assert float(text(page, '[data-number="q"]')) == x["q"]
                assert float(text(page, '[data-number="min(p, q)"]')) == min(x["p"], x["q"])
                assert float(text(page, '[data-number="min(1, p/q)"]')) == test["ratio"]
                assert float(text(page, '[data-number="Σ min(p, q)"]')) == test["alpha"]
            rows(page, test["laws"], test["alpha"])
            if test["coin"] is not None:
                coin = step["coins"][test["coin"]]
                place = coin["node"].index(i)
                fell = "heads" if coin["outcome"][place] else "tails"
                said = re.match(r"Coin with probability (\S+): (heads|tails)\.", text(page, "#coin"))
                assert said is not None
                assert (float(said[1]), said[2]) == (coin["prob"][place], fell)
            state = page.execute_script(f"return document.querySelector('.node[data-node=\"{i}\"]').classList[1]")
            assert state == node["state"]
        figures(page, data, k)
        caches(page, step)
        page.find_element("css selector", "#next").click()


def rows(page: Any, laws: dict[str, Any], alpha: float | None) -> None:
    """The table of a node: p, q, min and residual of every token, and the rest."""
    script = """return Object.fromEntries([...document.querySelectorAll('#laws tbody tr')].map(
        row => [row.dataset.token, [...row.querySelectorAll('td')].map(cell => cell.textContent)]))"""
    shown = page.execute_script(script)
    assert set(shown) == {*map(str, laws["token"]), "rest"}
    assert float(shown["rest"][0]) == laws["rest"]
    for k, token in enumerate(laws["token"]):
        cells = [float(cell) for cell in shown[str(token)]]
        if laws["q"] is None:
            assert cells == [laws["p"][k]]
        else:
            p, q = laws["p"][k], laws["q"][k]
            assert cells[:3] == [p, q, min(p, q)]
            residual = max(p - q, 0) / (1 - alpha) if alpha is not None and alpha < 1 else 0
            assert cells[3] == pytest.approx(residual, rel=1e-3)


def figures(page: Any, data: dict[str, Any], k: int) -> None:
    done = data["steps"][: k + 1]
    tokens, accepted, tested = (
        sum(s[n] if n != "tokens" else len(s["emitted"]) for s in done) for n in ("tokens", "accepted", "tested")
    )
    assert text(page, '[data-figure="tokens"]') == str(tokens)
    assert float(text(page, '[data-figure="tokens a pass"]')) == pytest.approx(tokens / (k + 1), abs=0.006)
    assert float(text(page, '[data-figure="accepted of tested"]')) == pytest.approx(accepted / tested, abs=0.006)
    speed = text(page, '[data-figure="times plain decoding"]')
    if data["plain_ms"] is None:
        assert speed == "–"
    else:
        assert float(speed) == pytest.approx(tokens * data["plain_ms"] / sum(s["ms"]["step"] for s in done), abs=0.006)


def caches(page: Any, step: dict[str, Any]) -> None:
    """Cells by kind: what was there, what is kept, gathered, gone."""
    for which in ("target", "draft"):
        cache = step["cache"][which]
        kinds = page.execute_script(
            f"return [...document.querySelectorAll('#{which}-cache .cell')].map(c => c.classList[1])"
        )
        hidden = page.execute_script(f"return document.querySelector('#{which}-cache .more')?.textContent")
        start = cache["before"] if which == "target" else cache["rolled_back"]
        end = cache["before"] + cache["read"] if which == "target" else max(cache["end"], cache["before"])
        old = kinds.count("old") + (int(hidden.split("…")[1]) + 1 if hidden else 0)
        assert old == min(start, cache["before"])
        assert kinds.count("gone") == end - cache["after"]
        assert kinds.count("gathered") == len(cache["moved"])
        assert kinds.count("kept") == cache["after"] - old - len(cache["moved"])


def test_the_mask_is_the_trees(page: Any, files: dict[str, str], traces: dict[str, Trace]) -> None:
    page.get(files["tree"])
    nodes = traces["tree"].data["steps"][0]["nodes"]
    mask = Tree.from_parents([node["parent"] for node in nodes]).mask[0]
    cells = page.execute_script(
        "return [...document.querySelectorAll('[data-mask]')].map(c => [c.dataset.mask, c.classList[0]])"
    )
    assert len(cells) == len(nodes) ** 2
    for place, kind in cells:
        i, j = map(int, place.split(","))
        assert (kind != "blind") == bool(mask[i, j])
    assert "Node 4 sees the" in text(page, "#mask ul")


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_fits_the_window_in_light_and_dark(
    page: Any, files: dict[str, str], size: tuple[int, int], theme: str
) -> None:
    for name in ("chain", "tree"):
        view(page, *size, theme)
        page.get(files[name])
        width, inner, back = page.execute_script(
            "return [document.documentElement.scrollWidth, innerWidth, getComputedStyle(document.body).backgroundColor]"
        )
        assert width == inner == size[0]
        assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 20, 25)"}[theme]
        boxes = page.execute_script(
            """const seen = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.right, b.width, b.height]; };
            return [...document.querySelectorAll('main > section, button, select, #text')].map(seen)"""
        )
        assert all(left >= 0 and right <= size[0] and w > 20 and h > 20 for left, right, w, h in boxes)
        overflow = page.execute_script(
            """return [...document.querySelectorAll('.node .word, .node .small')].filter((t) => {
                const box = t.parentNode.querySelector('.box').getBoundingClientRect(), own = t.getBoundingClientRect();
                return own.left < box.left - 1 || own.right > box.right + 1; }).map((t) => t.textContent)"""
        )
        assert overflow == []
    page.find_element("css selector", "#theme").click()
    other = page.execute_script("return document.documentElement.dataset.theme")
    assert other == {"light": "dark", "dark": "light"}[theme]


def test_it_can_be_used_by_keyboard_and_heard(page: Any, files: dict[str, str]) -> None:
    page.get(files["tree"])
    nameless = page.execute_script(
        """const named = (e) => e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.textContent.trim() ||
            e.closest('label')?.textContent.trim();
        return [...document.querySelectorAll('button, select, input, [role], [tabindex]')].filter((e) => !named(e)).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    lost = page.execute_script(
        "return [...document.querySelectorAll('[aria-labelledby]')].filter(e => !document.getElementById(e.getAttribute('aria-labelledby'))).length"
    )
    assert lost == 0
    assert page.execute_script("return document.documentElement.lang") == "en"
    reached = []
    for _ in range(40):
        press(page, Keys.TAB)
        reached.append(
            page.execute_script("const e = document.activeElement; return e.dataset.node ?? (e.id || e.tagName)")
        )
    for wanted in ("theme", "first", "play", "seek", "speed", "text", "0", "1", "15", "laws", "mask"):
        assert wanted in reached, wanted
    page.execute_script("document.querySelector('.node[data-node=\"2\"]').focus()")
    press(page, Keys.ENTER)
    assert text(page, "#h-detail").startswith("Node 2")
    assert page.execute_script("return document.activeElement.dataset.node") == "2"  # the focus stays
    press(page, Keys.ARROW_RIGHT)
    assert at(page)[0] == 1
    label = page.execute_script("return document.querySelector('.node[data-node=\"1\"]').getAttribute('aria-label')")
    assert label.startswith("Node 1, “")
    assert ", p 0." in label or ", p 1" in label
    assert text(page, "#where").startswith("Step 2 of")
    assert page.execute_script("return document.querySelector('#where').getAttribute('aria-live')") == "polite"


def test_it_prints_light_and_without_controls(page: Any, files: dict[str, str]) -> None:
    view(page, 1280, 720, "dark")
    page.get(files["tree"])
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    back, shown = page.execute_script(
        "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('#play')).display]"
    )
    assert (back, shown) == ("rgb(255, 255, 255)", "none")
    pdf = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert len(pdf["data"]) > 10_000


def test_a_run_without_a_step_says_so(page: Any, files: dict[str, str]) -> None:
    page.get(files["nothing"])
    assert text(page, "#where") == "This run has no step."
    for button in ("play", "next", "back", "last", "first"):
        page.find_element("css selector", f"#{button}").click()


def test_it_plays_inside_a_notebook(page: Any, files: dict[str, str], traces: dict[str, Trace]) -> None:
    page.get(files["notebook"])
    page.switch_to.frame(0)
    page.find_element("css selector", "#last").click()
    assert text(page, '[data-figure="tokens"]') == str(len(traces["chain"].tokens))
    page.switch_to.default_content()


def test_skipping_is_said_and_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no browser the reason names what to install."""
    monkeypatch.setitem(globals(), "BROWSER", None)
    assert "apt-get install chromium" in str(obstacle())
    assert Path(str(BROWSER)).name == "None"
