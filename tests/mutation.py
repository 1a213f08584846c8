"""Mutation testing: do the core tests notice when a line of the core is wrong?

    python tests/mutation.py                     # every mutant of verify, sampling, noise, cache, tree, sequoia
    python tests/mutation.py --module verify     # of one module
    python tests/mutation.py --sample 100        # of a hundred, drawn at random
    python tests/mutation.py --listed            # only those that MUTANTS.md lists as survivors

Each mutant is one small change of the source. pytest collects the core tests once; then, for every mutant, a child
process is forked, makes the change and runs the tests until the first failure. Mutants that survive must be listed in MUTANTS.md, with the reason;
any other survivor makes the exit status 1. Needs `os.fork`: not on Windows.

Why not mutmut or cosmic-ray: the first leaves functions with decorators alone (half of tree.py), the second starts
a Python, and loads torch, for every mutant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import select
import signal
import sys
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
MODULES = ("verify", "sampling", "noise", "cache", "tree", "sequoia")

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
    where: str  # the function, dotted; "" at the top of the module
    name: str
    change: Callable[[], ast.Module]

    @property
    def function(self) -> str:
        return f"{self.module}.{self.where}" if self.where else self.module

    @property
    def inside(self) -> bool:
        """Whether it lies in a function (functions are in lower case here, classes are not)."""
        return self.where.split(".")[-1].strip("_")[:1].islower()

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
        if value > 0:  # -1 for 0 is mostly another name of the same place, as in x[..., 0]
            yield ast.Constant(value - 1 if isinstance(value, int) else value / 2)
    elif isinstance(value, str):
        yield ast.Constant(value + "x")


def other_calls(node: ast.Call) -> Iterator[ast.AST]:
    commutes = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
    for i in range(0 if commutes else len(node.args) - 1):
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
    """Every mutant of a module whose code is another than the original's."""
    tree = ast.parse((ROOT / "minispec" / f"{module}.py").read_text(encoding="utf-8"))
    found, seen = [], Counter[str]()
    for parent, field, index, node, where in list(sites(tree)):
        for new in list(variants(node)):
            stand_in = ast.fix_missing_locations(ast.copy_location(ast.Pass() if new is None else new, node))
            if ast.dump(stand_in) == ast.dump(node):
                continue
            after = "(deleted)" if new is None else first_line(ast.unparse(stand_in))
            name = f"{where}: {first_line(ast.unparse(node))} -> {after}".removeprefix(": ")
            seen[name] += 1
            name += f" #{seen[name]}" if seen[name] > 1 else ""
            change = partial(replaced, tree, parent, field, index, stand_in)
            found.append(Mutant(module, getattr(node, "lineno", 0), where, name, change))
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


class Loop:
    """A pytest plugin: once the core tests are collected, each mutant gets a child process that runs them.

    The child puts the changed code into the functions and tables that are already there, so that nothing is imported
    or collected again. It runs the tests that killed most of this function's mutants first.
    """

    def __init__(self, mutants: list[Mutant], known: set[str]) -> None:
        self.mutants, self.known = mutants, known
        self.killers: dict[str, Counter[str]] = defaultdict(Counter)  # of a module, and of a function in it
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.new, self.failed, self.sound, self.start = 0, False, True, time.monotonic()
        self.calls: dict[str, set[str]] = {}  # by test, what the first run, of the original, shows
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        start = time.monotonic()
        self.sound = self.survives(session.items, None, 600) is None
        took = time.monotonic() - start
        print(f"{len(session.items)} core tests, {took:.1f} s, {len(self.mutants)} mutants", flush=True)
        for i, mutant in enumerate(self.mutants if self.sound else [], start=1):
            killer = self.survives(self.chosen(session.items, mutant), mutant, 5 * took + 5)
            outcome = "survived" if killer is None else "timeout" if killer == TIMEOUT else "killed"
            self.outcomes[mutant.module, outcome] += 1
            if killer is None:
                self.new += mutant.key not in self.known
                mark = "listed" if mutant.key in self.known else "NEW"
                print(f"{i}/{len(self.mutants)} survived ({mark}) line {mutant.line}: {mutant.key}", flush=True)
            else:
                self.killers[mutant.module][killer] += 1
                self.killers[mutant.function][killer] += 1
        return True

    def chosen(self, items: list[pytest.Item], mutant: Mutant) -> list[pytest.Item]:
        """The tests that call the function (all, for what is no function), likely killers and quick ones first."""
        here, near, name = self.killers[mutant.function], self.killers[mutant.module], mutant.where.split(".")[-1]
        called = [i for i in items if f"{mutant.module}.{name}" in self.calls[i.nodeid]] if mutant.inside else items
        return sorted(called, key=lambda i: (-here[i.nodeid], -near[i.nodeid], self.seconds[i.nodeid]))

    def survives(self, items: list[pytest.Item], mutant: Mutant | None, timeout: float) -> str | None:
        """The test that killed it, `TIMEOUT`, or None. The original (None) also tells what each test calls."""
        reading, writing = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            said = {"killer": "the change"}
            try:
                said = self.run(items, mutant)
            finally:
                with os.fdopen(writing, "w") as pipe:
                    json.dump(said, pipe)
                os._exit(0)
        os.close(writing)
        ready, _, _ = select.select([reading], [], [], timeout)
        if not ready:
            os.kill(child, signal.SIGKILL)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        said = json.loads(text) if text else {"killer": TIMEOUT if not ready else "a crash"}
        if mutant is None:
            self.seconds = said.get("seconds", {})
            self.calls = {test: set(names) for test, names in said.get("calls", {}).items()}
        killer: str | None = said["killer"]
        return killer

    def run(self, items: list[pytest.Item], mutant: Mutant | None) -> dict[str, Any]:
        """In the child: the first test that fails."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)
        if mutant is not None:
            apply(mutant)
        calls: dict[str, list[str]] = {}
        seconds: dict[str, float] = {}
        names = {str(ROOT / "minispec" / f"{module}.py"): module for module in MODULES}
        for item, after in zip(items, [*items[1:], None], strict=True):
            seen: set[str] = set()

            def note(frame: Any, event: str, _: Any, seen: set[str] = seen) -> None:
                if event == "call" and frame.f_code.co_filename in names:
                    seen.add(f"{names[frame.f_code.co_filename]}.{frame.f_code.co_name}")

            start = time.perf_counter()
            sys.setprofile(note if mutant is None else None)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
            sys.setprofile(None)
            calls[item.nodeid], seconds[item.nodeid] = sorted(seen), time.perf_counter() - start
            if self.failed:
                return {"killer": item.nodeid}
        return {"killer": None} if mutant is not None else {"killer": None, "calls": calls, "seconds": seconds}


TIMEOUT = "time-out"


def apply(mutant: Mutant) -> None:
    """Change the module that is already imported, so that everyone who has imported from it sees the change."""
    module = sys.modules[f"minispec.{mutant.module}"]
    parts = mutant.function.split(".")[1:]
    owner: Any = module
    for name in parts[:-1]:
        owner = vars(owner)[name]
    found = vars(owner).get(parts[-1]) if parts else None
    if isinstance(found, type) or found is None:
        rebind(mutant, module)
        return
    function = unwrapped(found)
    scratch = types.ModuleType(module.__name__)
    scratch.__dict__.update(vars(module))
    sys.modules[module.__name__] = scratch  # dataclasses look their module up
    try:
        exec(compile(mutant.change(), str(module.__file__), "exec"), scratch.__dict__)
    finally:
        sys.modules[module.__name__] = module
    other: Any = scratch
    for name in parts:
        other = vars(other)[name]
    changed = unwrapped(other)
    function.__code__, function.__defaults__ = changed.__code__, changed.__defaults__
    function.__kwdefaults__ = changed.__kwdefaults__
    for cached in (module.__dict__.get("best_parents"), *vars(module.__dict__.get("Tree", object)).values()):
        inner = getattr(cached, "__func__", cached)
        if hasattr(inner, "cache_clear"):
            inner.cache_clear()


def unwrapped(found: Any) -> types.FunctionType:
    """The function inside a property, a cached property, a static method or a cache."""
    for attribute in ("fget", "func", "__func__", "__wrapped__"):
        found = getattr(found, attribute, None) or found
    assert isinstance(found, types.FunctionType), found
    return found


def rebind(mutant: Mutant, module: types.ModuleType) -> None:
    """Carry out the changed top-level statement in the module; a class there gives its fields' defaults only."""
    original = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    pairs = zip(original.body, mutant.change().body, strict=True)
    was, changed = next((before, after) for before, after in pairs if ast.dump(before) != ast.dump(after))
    if isinstance(changed, ast.Pass):
        for name in [
            node.id for node in ast.walk(was) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]:
            delattr(module, name)
        return
    space = dict(vars(module))
    if isinstance(changed, ast.ClassDef):
        exec(compile(ast.Module([changed], []), str(module.__file__), "exec"), space)
        old, new = vars(module)[changed.name], space[changed.name]
        old.__init__.__defaults__ = new.__init__.__defaults__
        old.__init__.__kwdefaults__ = new.__init__.__kwdefaults__
        return
    exec(compile(ast.Module([changed], []), str(module.__file__), "exec"), space)
    for name in [n for n, value in space.items() if n in vars(module) and vars(module)[n] is not value]:
        old, new = vars(module)[name], space[name]
        if isinstance(old, dict):
            old.clear(), old.update(new)
            continue
        for user in list(sys.modules.values()):
            if getattr(user, "__dict__", {}).get(name) is old:
                setattr(user, name, new)


def listed() -> set[str]:
    """The survivors that MUTANTS.md names, each a line `| `module.function: old -> new` | reason |`."""
    text = (TESTS / "MUTANTS.md").read_text(encoding="utf-8") if (TESTS / "MUTANTS.md").exists() else ""
    return {match.replace("\\|", "|") for match in re.findall(r"^\| `` (.*?) `` \|", text, re.MULTILINE)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation testing of the core.")
    parser.add_argument("--module", choices=MODULES, action="append", help="only this one (may be repeated)")
    parser.add_argument("--sample", type=int, help="only so many, drawn at random")
    parser.add_argument("--listed", action="store_true", help="only the survivors that MUTANTS.md lists")
    parser.add_argument("--match", help="only those whose name holds this text")
    parser.add_argument(
        "--names", type=Path, help="only those named in this file, one a line (an earlier output will do)"
    )
    options = parser.parse_args()
    mutants, known = [m for module in options.module or MODULES for m in mutants_of(module)], listed()
    if options.listed:
        mutants = [m for m in mutants if m.key in known]
    if options.match:
        mutants = [m for m in mutants if options.match in m.key]
    if options.names:
        wanted = {line.split(": ", 1)[-1] for line in options.names.read_text(encoding="utf-8").splitlines()}
        mutants = [m for m in mutants if m.key in wanted]
    if options.sample:
        mutants = random.Random(0).sample(mutants, min(options.sample, len(mutants)))
    loop = Loop(mutants, known)
    sys.path[:0] = [str(ROOT), str(TESTS)]
    files = [str(path) for path in sorted(TESTS.glob("test_*.py")) if MARK in path.read_text(encoding="utf-8")]
    pytest.main(["-m", "core", "-n", "0", "-q", "-s", "-p", "no:cacheprovider", "--no-summary", *files], [loop])
    if not loop.sound:
        print("the core tests fail on the unchanged source: pytest -m core -n 0")
        return 2
    print(summary(loop.outcomes, time.monotonic() - loop.start))
    return 1 if loop.new else 0


MARK = "pytest.mark." + "core"  # in two parts, as this file has no tests


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
