"""What is checked: the parts named on the command line, or the package's own rules and drafters."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minispec import Drafter, EarlyExitDrafter, ModelDrafter, NGramDrafter, Tree
from minispec.advanced import AdaptiveDrafter, DynamicTree
from minispec.lab.decoder_checks import decoder_suite
from minispec.lab.drafter_checks import drafter_suite
from minispec.lab.models import random_gpt
from minispec.lab.rule_checks import rule_suite
from minispec.lab.suite import Suite
from minispec.verify import RULES

KINDS: dict[str, Callable[..., Suite]] = {"rule": rule_suite, "drafter": drafter_suite, "decoder": decoder_suite}
SUITES = pytest.StashKey[list[Suite]]()
VERDICT = "minispec verdict"  # under which a test hands its suite's verdict to the terminal


def own_drafters() -> Iterator[tuple[str, Any]]:
    """The package's own drafters, by name, as factories (target, draft) -> Drafter."""
    chain, siblings = Tree.chain(2), Tree.branching([2])
    yield "model chain", lambda target, draft: ModelDrafter(draft, chain)
    yield "siblings without replacement", lambda target, draft: ModelDrafter(draft, siblings)
    yield "i.i.d. siblings", lambda target, draft: ModelDrafter(draft, siblings, "iid")
    yield "top-k siblings", lambda target, draft: ModelDrafter(draft, siblings, "top-k")
    yield "coupled chain", lambda target, draft: ModelDrafter(draft, chain, "coupled")
    yield "n-gram", lambda target, draft: NGramDrafter(2)
    yield "adaptive", lambda target, draft: AdaptiveDrafter(draft, 2, 0.2)
    yield "dynamic tree", lambda target, draft: DynamicTree(draft, nodes=4, max_depth=2, width=2)


def early_exit(target: Any, draft: Any) -> Drafter:
    """The first of the target's two layers."""
    return EarlyExitDrafter(target, 1, Tree.chain(2))


def load(place: str) -> Any:
    """The object at FILE.py:NAME. Raises `pytest.UsageError` that says what is missing."""
    file, colon, name = place.rpartition(":")
    path = Path(file)
    if not colon or path.suffix != ".py" or not name:
        raise pytest.UsageError(f"expected FILE.py:NAME, got {place!r}")
    if not path.is_file():
        raise pytest.UsageError(f"{place}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"checked_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # so that it finds the modules beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise pytest.UsageError(f"{place}: importing it raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not hasattr(module, name):
        names = ", ".join(sorted(key for key in vars(module) if not key.startswith("_")))
        raise pytest.UsageError(f"{place}: {path} has no {name!r}; it has {names}")
    return getattr(module, name)


def suites(config: pytest.Config) -> list[Suite]:
    """A suite for each part named, or for all rules and drafters of the package."""
    options: dict[str, Any] = {"level": config.getoption("--level", 1e-6), "seed": config.option.seed}
    if config.getoption("--samples", None) is not None:
        options["samples"] = config.getoption("--samples")
    named = [(kind, place) for kind in KINDS for place in config.getoption(f"--{kind}", [])]
    try:
        if named:
            return [KINDS[kind](load(place), **options) for kind, place in named]
        found = [rule_suite(name, **options) for name in RULES]
        for name, make in own_drafters():
            make.__name__ = name
            found.append(drafter_suite(make, **options))
        two_layers = random_gpt(1, block=32), random_gpt(2, block=32)
        found.append(drafter_suite(early_exit, models=two_layers, **options))
        return found
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error
