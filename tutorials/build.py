"""Make the notebooks from `sources/`: with exercises for learners, with solutions for teachers, both executed.

A source is a Python file in the percent format (as jupytext reads it). An exercise is two cells, one marked
`# %% exercise NAME` and one `# %% solution NAME`, of which each notebook gets one; everything else they share.

    python tutorials/build.py            # all of them
    python tutorials/build.py 03 04      # those that begin so
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES, SOLUTIONS = HERE / "sources", HERE / "solutions"
MARKER = re.compile(r"^# %%(?: \[(markdown)\]| (exercise|solution) (\S+))?$", re.MULTILINE)
LIMIT = 300_000  # bytes of a notebook


def cells(source: Path, solved: bool) -> list[tuple[str, str, list[str]]]:
    """(type, text, tags) of each cell, with the exercises or with their solutions."""
    parts = MARKER.split(source.read_text(encoding="utf-8"))[1:]  # (markdown, kind, name, text) of each cell
    found = []
    for markdown, kind, name, text in zip(*[iter(parts)] * 4, strict=True):
        if markdown:
            lines = [re.sub(r"^# ?", "", line) for line in text.strip().splitlines()]
            found.append(("markdown", "\n".join(lines), []))
        elif kind != ("exercise" if solved else "solution"):
            found.append(("code", text.strip(), [kind, name] if kind else []))
    return found


def make(source: Path, solved: bool) -> Any:
    """The notebook of a source, not executed."""
    from nbformat import v4

    made = []
    for i, (kind, text, tags) in enumerate(cells(source, solved)):
        cell = v4.new_markdown_cell(text) if kind == "markdown" else v4.new_code_cell(text)
        cell.id = f"cell-{i}"
        if tags:
            cell.metadata["tags"] = tags
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=made, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def execute(notebook: Any) -> float:
    """Run it in an empty folder; return the seconds. ValueError where a cell writes to stderr."""
    from nbclient import NotebookClient

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = neutral(output["text"])
            if output.get("name") == "stderr":
                raise ValueError(f"a cell writes to stderr:\n{cell.source}\n{output.text}")
    return time.perf_counter() - start


def neutral(text: str) -> str:
    """Printed text without what is only true of this machine's folders, nor spaces at the ends of lines."""
    for folder, name in ((HERE.parent, "minispec"), (Path.home(), "~"), (Path(sys.prefix), "venv")):
        text = text.replace(str(folder), name)
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def pairs(source: Path) -> list[tuple[Path, bool]]:
    """Where the notebooks of a source go, and whether they hold the solutions."""
    return [(HERE / f"{source.stem}.ipynb", False), (SOLUTIONS / f"{source.stem}.ipynb", True)]


def main(wanted: list[str]) -> None:
    import nbformat

    SOLUTIONS.mkdir(exist_ok=True)
    for source in sorted(SOURCES.glob("*.py")):
        if wanted and not source.name.startswith(tuple(wanted)):
            continue
        for path, solved in pairs(source):
            notebook = make(source, solved)
            seconds = execute(notebook)
            text = nbformat.writes(notebook) + "\n"
            if len(text) > LIMIT:
                raise ValueError(f"{path.name}: {len(text)} bytes, more than {LIMIT}")
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(HERE)}: {seconds:.1f} s, {len(text) // 1000} KB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
