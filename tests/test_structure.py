"""The shape of the code: sizes, imports, layering."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

CORE = ("model", "cache", "sampling", "tree", "verify", "drafters", "planner", "result", "decode", "tokenizer", "pair")
PACKAGE = Path(__file__).parent.parent / "minispec"
MODULES = sorted(PACKAGE.rglob("*.py"))
LAYERS = {  # what each core module may import of the package; the list of the design
    "cache": set(),
    "sampling": {"noise"},
    "noise": set(),
    "sequoia": set(),
    "tree": {"sequoia"},
    "linear": set(),
    "trust": set(),
    "fused": {"cache", "linear", "trust"},
    "model": {"cache", "fused", "linear"},
    "verify": {"sampling", "tree"},
    "ngram": {"drafters", "sampling", "tree"},
    "drafters": {"cache", "model", "sampling", "tree"},
    "early_exit": {"drafters", "model", "tree"},
    "result": {"planner"},
    "tokenizer": set(),
    "files": set(),
    "planner": {"tree"},
    "stopwatch": {"cache", "model", "planner"},
    "inputs": {"drafters", "model", "sampling", "tree", "verify"},
    "auto": {
        "drafters",
        "files",
        "model",
        "planner",
        "result",
        "sampling",
        "stopwatch",
        "tree",
        "trust",
        "verify",
        "advanced.statistics",
    },
    "decode": {
        "auto",
        "cache",
        "drafters",
        "fused",
        "inputs",
        "model",
        "planner",
        "result",
        "sampling",
        "tree",
        "trust",
        "verify",
    },
    "text": {"decode", "drafters", "inputs", "model", "result", "tokenizer"},
    "pair": {"drafters", "files", "inputs", "model", "text", "tokenizer"},
}


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minispec."):
            found.add(str(node.module).removeprefix("minispec."))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_over_350_lines_and_no_function_over_45(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= 350
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node, clean=False)
            lines = (node.end_lineno or 0) - node.lineno + 1 - (doc.count("\n") + 1 if doc else 0)
            assert lines <= 45, f"{node.name}: {lines} lines"


@pytest.mark.parametrize("name", LAYERS)
def test_arrows_point_down(name: str) -> None:
    assert imports(PACKAGE / f"{name}.py") <= LAYERS[name]


def test_the_core_has_no_import_cycle() -> None:
    seen: list[str] = []

    def visit(name: str, path: tuple[str, ...] = ()) -> None:
        assert name not in path, f"cycle: {' -> '.join([*path, name])}"
        if name not in seen and (PACKAGE / f"{name.replace('.', '/')}.py").exists():
            for other in imports(PACKAGE / f"{name.replace('.', '/')}.py"):
                visit(other, (*path, name))
            seen.append(name)

    for path in MODULES:
        visit(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def test_the_core_is_read_in_one_sitting() -> None:
    lines = 0
    for path in (PACKAGE / f"{name}.py" for name in CORE):
        tree = ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")
        for node in ast.walk(tree):  # code lines: without docstrings, comments and blank lines
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
        lines += len([line for line in ast.unparse(tree).splitlines() if line.strip()])
    assert lines <= 1200


def test_importing_the_package_loads_no_luxury() -> None:
    code = (
        "import sys, minispec; "
        "print([m for m in ('rich', 'scipy', 'matplotlib', 'rustbpe', 'pytest', 'minispec.train', 'minispec.lab') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_command_and_a_pair_load_without_what_takes_seconds() -> None:
    """torch's compiler, which drawing numbers on the meta device pulls in, and parts of scipy."""
    code = (
        "import sys, minispec, minispec.cli; from minispec.bench.machine import emulate_layers; "
        "pair = minispec.load_pair(); minispec.EarlyExitDrafter(pair.target, 2); emulate_layers(pair.target, 1); "
        "print([m for m in ('torch._dynamo', 'scipy.stats', 'scipy.special') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_has_a_docstring() -> None:
    import minispec

    for name in minispec.__all__:
        item = getattr(minispec, name)
        if callable(item):
            assert item.__doc__, name
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), path.name


def test_every_case_has_tests_where_the_table_says() -> None:
    folder = Path(__file__).parent
    rows = re.findall(r"^\| (\d+) \|.*?\| (.*) \|$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 27))
    for number, files in rows:
        for file in re.findall(r"`(test_[a-z_]+)`(?=[,:])", files):
            source = (folder / f"{file}.py").read_text(encoding="utf-8")
            assert f"def test_case_{number}_" in source, f"case {number}: {file}"
