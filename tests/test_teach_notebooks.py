"""The notebooks: made from their sources, run to the end, every exercise asked and answered."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_teach import EXERCISES

from minispec.teach.grading import LESSONS

TUTORIALS = Path(__file__).parent.parent / "tutorials"
SOURCES = sorted((TUTORIALS / "sources").glob("*.py"))
SPEC = importlib.util.spec_from_file_location("build", TUTORIALS / "build.py")
assert SPEC is not None
assert SPEC.loader is not None
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)
NOTEBOOKS = [(source, path, solved) for source in SOURCES for path, solved in build.pairs(source)]
IDS = [str(path.relative_to(TUTORIALS)) for _, path, _ in NOTEBOOKS]


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def printed(notebook: dict[str, Any]) -> str:
    return "".join("".join(output.get("text", [])) for output in outputs(notebook))


def test_there_is_a_notebook_for_each_lesson_and_nothing_else() -> None:
    assert [source.name[:2] for source in SOURCES] == list(LESSONS)
    assert {path for _, path, _ in NOTEBOOKS} == {*TUTORIALS.glob("*.ipynb"), *TUTORIALS.glob("solutions/*.ipynb")}


@pytest.mark.parametrize(("source", "path", "solved"), NOTEBOOKS, ids=IDS)
def test_notebook_and_source_are_one(source: Path, path: Path, solved: bool) -> None:
    cells = load(path)["cells"]
    made = [(cell["cell_type"], "".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in cells]
    assert made == build.cells(source, solved)


@pytest.mark.parametrize(("source", "path", "solved"), NOTEBOOKS, ids=IDS)
def test_notebook_has_been_run_and_every_check_says_what_it_should(source: Path, path: Path, solved: bool) -> None:
    notebook = load(path)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [
        output for output in outputs(notebook) if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    assert path.stat().st_size < build.LIMIT
    names = [name for name in EXERCISES if name.startswith(source.name[:2])]
    wanted = "✓ right" if solved else "… not yet"
    assert re.findall(r"^(\S+ [\w ]+?) · (\d\d\.\w+) · ", printed(notebook), re.MULTILINE) == [
        (wanted, n) for n in names
    ]


@pytest.mark.parametrize(("source", "path", "solved"), NOTEBOOKS, ids=IDS)
def test_notebook_shows_nothing_of_the_machine_it_was_made_on(source: Path, path: Path, solved: bool) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])(/root|/home|/tmp|/Users|C:\\\\)", text)
    assert '"execution":' not in text


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_every_notebook_has_goals_predictions_exercises_a_summary_and_papers(source: Path) -> None:
    cells = build.cells(source, solved=False)
    prose = "\n".join(text for kind, text, _ in cells if kind == "markdown")
    code = "\n".join(text for kind, text, _ in cells if kind == "code")
    assert re.match(rf"# {source.name[:2]} · .+\n\n\*\d+ minutes", cells[0][1])
    assert "**Goals.**" in cells[0][1]
    assert "my_guess = ..." in code
    assert re.search(r"\[\d{4}\.\d{4,5}\]\(https://arxiv.org/abs/\d{4}\.\d{4,5}\)", prose.split("**Papers.**")[1])
    assert all(a == b for a, b in re.findall(r"\[(\d{4}\.\d+)\]\(https://arxiv.org/abs/(\d{4}\.\d+)\)", prose))
    asked = [tags[1] for _, _, tags in cells if tags]
    checked = re.findall(r'^check\("([\w.]+)", \w+\)$', code, re.MULTILINE)
    assert asked == checked == [name for name in EXERCISES if name.startswith(source.name[:2])]
    solved = [tags[1] for _, _, tags in build.cells(source, solved=True) if tags]
    assert solved == asked
