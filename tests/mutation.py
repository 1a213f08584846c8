"""Mutation testing: do the core tests notice when a line of the core is wrong?

    python tests/mutation.py                     # every mutant of verify, sampling, cache, tree
    python tests/mutation.py --module verify     # of one module
    python tests/mutation.py --sample 100        # of a hundred, drawn at random
    python tests/mutation.py --listed            # only those that MUTANTS.md lists as survivors

Each mutant is one small change of the source. A child process, forked from one that has already loaded torch, runs
`pytest -m core` on it until the first failure. Mutants that survive must be listed in MUTANTS.md, with the reason;
any other survivor makes the exit status 1. Needs `os.fork`: not on Windows.

Why not mutmut or cosmic-ray: the first leaves functions with decorators alone (half of tree.py), the second starts
a Python, and loads torch, for every mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.machinery
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
MODULES = ("verify", "sampling", "cache", "tree")
FIRST = {  # the test files that know most of a module, which therefore run first
    "verify": ["test_verify.py", "test_core.py", "test_trees.py"],
    "sampling": ["test_sampling.py", "test_core.py", "test_verify.py"],
    "cache": ["test_cache.py", "test_core.py"],
    "tree": ["test_trees.py", "test_core.py", "test_cache.py"],
}

# --- the mutants -------------------------------------------------------------------------------------------

COMPARE: dict[type, list[type]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
BINARY: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
TWINS = {}
for one, other in [
    ("min", "max"), ("any", "all"), ("argmax", "argmin"), ("amax", "amin"), ("cumprod", "cumsum"),
    ("ones_like", "zeros_like"), ("ones", "zeros"), ("new_zeros", "new_ones"), ("tiny", "max"),
]:  # fmt: skip
    TWINS[one], TWINS[other] = other, TWINS.get(other, one)


@dataclass(frozen=True)
class Mutant:
    """One change. `name` says it without line numbers, so that it outlives edits elsewhere."""

    module: str
    line: int
    name: str
    tree: ast.Module

    @property
    def key(self) -> str:
        return f"{self.module}.{self.name}"


def variants(node: ast.AST) -> Iterator[ast.AST | None]:
    """What may stand in a node's place; None deletes a statement."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for op in COMPARE[type(node.ops[0])]:
            yield ast.Compare(node.left, [op()], node.comparators)
    elif isinstance(node, ast.Compare):
        for i, found in enumerate(node.ops):
            for op in COMPARE[type(found)]:
                yield ast.Compare(node.left, [*node.ops[:i], op(), *node.ops[i + 1 :]], node.comparators)
    elif isinstance(node, ast.BinOp):
        yield ast.BinOp(node.left, BINARY[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for i in range(len(node.values)):
            left = [*node.values[:i], *node.values[i + 1 :]]
            yield left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
    elif isinstance(node, ast.Constant):
        yield from other_constants(node.value)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Slice):
        for part in ("lower", "upper"):
            if getattr(node, part) is not None:
                yield ast.Slice(**{"lower": node.lower, "upper": node.upper, "step": node.step, part: None})
    elif isinstance(node, ast.Attribute) and node.attr in TWINS and isinstance(node.ctx, ast.Load):
        yield ast.Attribute(node.value, TWINS[node.attr], ast.Load())
    elif isinstance(node, ast.Name) and node.id in TWINS:
        yield ast.Name(TWINS[node.id], ast.Load())
    elif isinstance(node, ast.Call):
        yield from other_calls(node)
    elif isinstance(node, ast.stmt):
        yield from other_statements(node)


def other_constants(value: object) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, (int, float)):
        yield ast.Constant(value + 1)
        yield ast.Constant(value - 1 if isinstance(value, int) else value / 2)
    elif isinstance(value, str):
        yield ast.Constant(value + "x")


def other_calls(node: ast.Call) -> Iterator[ast.AST]:
    for i in range(len(node.args) - 1):
        swapped = [*node.args[:i], node.args[i + 1], node.args[i], *node.args[i + 2 :]]
        yield ast.Call(node.func, swapped, node.keywords)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg == "strict":
            continue  # of zip: an assertion, never false
        yield ast.Call(node.func, node.args, [*node.keywords[:i], *node.keywords[i + 1 :]])
    if isinstance(node.func, ast.Attribute) and not (
        isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    ):
        yield node.func.value  # x.clamp(...) becomes x


def other_statements(node: ast.stmt) -> Iterator[ast.AST | None]:
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Raise, ast.Break, ast.Continue, ast.Expr)):
        yield None
    elif isinstance(node, ast.Return) and not isinstance(node.value, (ast.Constant, type(None))):
        yield ast.Return(None)
    elif isinstance(node, (ast.If, ast.While)):
        yield type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)


def sites(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, str]]:
    """(parent, field, index, node, function) of everything that runs: no annotation, docstring, message, decorator."""

    def walk(parent: ast.AST, where: str) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, str]]:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "ops", "op", "ctx", "type_params", "bases"):
                continue
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(node, ast.AST) or passive(node):
                    continue
                inner = where
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    inner = f"{where}.{node.name}" if where else node.name
                yield parent, field, index, node, inner
                if not isinstance(node, ast.Raise):  # the message is words
                    yield from walk(node, inner)

    yield from walk(tree, "")


def passive(node: ast.AST) -> bool:
    """Docstrings, imports, assertions, f-strings, signatures of protocols."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.ClassDef):
        return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.JoinedStr))


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant of a module that compiles to other code than the original."""
    source = (ROOT / "minispec" / f"{module}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    original, found, seen = ast.dump(tree), [], Counter[str]()
    for parent, field, index, node, where in list(sites(tree)):
        for new in list(variants(node)):
            before = after = "" if new is None else ast.unparse(ast.fix_missing_locations(new))
            before = first_line(ast.unparse(node))
            after = "(deleted)" if new is None else first_line(after)
            stand_in = ast.copy_location(ast.Pass() if new is None else new, node)
            changed = replaced(tree, parent, field, index, stand_in)
            if ast.dump(changed) == original:
                continue
            name = f"{where}: {before} -> {after}".removeprefix(": ")
            seen[name] += 1
            name += f" #{seen[name]}" if seen[name] > 1 else ""
            found.append(Mutant(module, getattr(node, "lineno", 0), name, changed))
    return found


def first_line(text: str) -> str:
    lines = text.splitlines() or [""]
    return lines[0] + (" ..." if len(lines) > 1 else "")


def replaced(tree: ast.Module, parent: ast.AST, field: str, index: int | None, node: ast.AST) -> ast.Module:
    """A copy of the tree with `node` in that place; the tree itself stays as it is."""
    held = getattr(parent, field)
    if index is None:
        setattr(parent, field, node)
    else:
        setattr(parent, field, [*held[:index], node, *held[index + 1 :]])
    changed = copy.deepcopy(tree)
    setattr(parent, field, held)
    return ast.fix_missing_locations(changed)


# --- one run -----------------------------------------------------------------------------------------------


def survives(mutant: Mutant | None, timeout: float) -> str:
    """ "survived", "killed" or "timeout" of the core tests in a forked child; None stands for the original."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            status = run_tests(mutant)
        finally:
            os._exit(status)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def run_tests(mutant: Mutant | None) -> int:
    import pytest

    files = sorted(
        path.name for path in TESTS.glob("test_*.py") if "pytest.mark.core" in path.read_text(encoding="utf-8")
    )
    if mutant is not None:
        name, code = f"minispec.{mutant.module}", compile(mutant.tree, f"{mutant.module}.py", "exec")
        original = importlib.machinery.SourceFileLoader.get_code

        def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> object:
            return code if fullname == name else original(self, fullname)

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
        files.sort(key=lambda file: [*FIRST[mutant.module], file].index(file))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        os.dup2(nowhere.fileno(), 1), os.dup2(nowhere.fileno(), 2)
        options = ["-m", "core", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
        return int(pytest.main([*options, *(str(TESTS / file) for file in files)]))


def listed() -> set[str]:
    """The survivors that MUTANTS.md names, each a line `| `module.function: old -> new` | reason |`."""
    text = (TESTS / "MUTANTS.md").read_text(encoding="utf-8") if (TESTS / "MUTANTS.md").exists() else ""
    return {match.replace("\\|", "|") for match in re.findall(r"^\| `` (.*?) `` \|", text, re.MULTILINE)}


def preload() -> None:
    """What the tests import and no mutant changes, once for all children."""
    sys.path[:0] = [str(ROOT), str(TESTS)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import scipy.optimize
    import scipy.stats  # noqa: F401
    import torch

    torch.set_num_threads(1)  # no thread pool that a fork would lose
    assert not any(name.startswith("minispec") for name in sys.modules)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation testing of the core.")
    parser.add_argument("--module", choices=MODULES, action="append", help="only this one (may be repeated)")
    parser.add_argument("--sample", type=int, help="only so many, drawn at random")
    parser.add_argument("--listed", action="store_true", help="only the survivors that MUTANTS.md lists")
    parser.add_argument("--match", help="only those whose name holds this text")
    options = parser.parse_args()
    mutants = [m for module in options.module or MODULES for m in mutants_of(module)]
    known = listed()
    if options.listed:
        mutants = [m for m in mutants if m.key in known]
    if options.match:
        mutants = [m for m in mutants if options.match in m.key]
    if options.sample:
        mutants = random.Random(0).sample(mutants, min(options.sample, len(mutants)))
    preload()
    start = time.monotonic()
    if survives(None, 120) != "survived":
        print("the core tests fail on the unchanged source: pytest -m core -n 0")
        return 2
    limit = 10 * (time.monotonic() - start) + 5
    outcomes: Counter[tuple[str, str]] = Counter()
    new = 0
    for i, mutant in enumerate(mutants, start=1):
        outcome = survives(mutant, limit)
        outcomes[mutant.module, outcome] += 1
        if outcome == "survived":
            new += mutant.key not in known
            mark = "listed" if mutant.key in known else "NEW"
            print(f"{i}/{len(mutants)} survived ({mark}) line {mutant.line}: {mutant.key}", flush=True)
    print(summary(outcomes, time.monotonic() - start))
    return 1 if new else 0


def summary(outcomes: Counter[tuple[str, str]], seconds: float) -> str:
    lines = ["module | mutants | killed | of these by time-out | survived | score", "---|---|---|---|---|---"]
    for module in (*MODULES, "all"):
        of = {
            o: sum(n for (m, k), n in outcomes.items() if k == o and module in (m, "all"))
            for o in ("killed", "timeout", "survived")
        }
        total = sum(of.values())
        if total:
            killed = of["killed"] + of["timeout"]
            lines.append(f"{module} | {total} | {killed} | {of['timeout']} | {of['survived']} | {killed / total:.1%}")
    return "\n".join([*lines, f"{seconds:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
