"""`minispec doctor`: is this machine ready? What is here, what works, how fast it can be, and what to do otherwise."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minispec.auto import cache_folder
from minispec.bench.machine import BUFFER, read_bandwidth
from minispec.decode import speculate
from minispec.files import AGAIN, read_config
from minispec.lab.law import exact_law, target_law, total_variation
from minispec.model import GPT, GPTConfig
from minispec.pair import Pair, load_pair, weights_folder
from minispec.show import measures
from minispec.show.measures import Speed

PYTHONS = ((3, 10), (3, 13))
EXTRAS = {"pytest": "test", "rustbpe": "train", "jupyterlab": "tutorials", "matplotlib": "tutorials"}
NEEDED = ("tokenizer.tiktoken", "target.safetensors", "draft.safetensors")
EXACT = 1e-10  # total variation below which a law enumerated in float64 is the law
SLOW = 5.0  # tokens a second below which a workshop is no fun
LOOK = {"ok": ("green", "ok"), "note": ("yellow", "note"), "fail": ("bold red", "FAIL"), "skipped": ("dim", "--")}


@dataclass(frozen=True)
class Finding:
    """One line. state: "ok", "note" (works, but read it), "fail", "skipped" (could not be tried).

    needed: whether generation cannot work where this fails. todo: what to do about a note or a failure.
    """

    name: str
    state: str
    found: str
    todo: str | None = None
    needed: bool = False
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Patient:
    """What later examinations need of earlier ones."""

    root: Path
    device: torch.device | str
    broken: list[str] = field(default_factory=list)  # needed files that are not what they should be
    pair: Pair | None = None


def examine(
    folder: Path | None = None, device: str = "auto", tick: Callable[[], object] = lambda: None
) -> list[Finding]:
    """Run every examination on the pair in `folder` (default: the shipped one); `tick` is called after each."""
    patient = Patient(weights_folder() if folder is None else folder, device)
    findings: list[Finding] = []
    for examination in EXAMINATIONS:
        try:
            findings += list(examination(patient))
        except Exception as error:  # whatever goes wrong is what is being looked for
            name = examination.__name__.strip("_").replace("_", " ")
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            needed = examination in (_generation, _device, _weights)
            findings.append(Finding(name, "fail", message, "report this with the output of --json", needed))
        tick()
    return findings


def ready(findings: list[Finding]) -> bool:
    """Whether generation works here: nothing failed that it needs."""
    return not any(finding.state == "fail" and finding.needed for finding in findings)


def report(findings: list[Finding]) -> dict[str, Any]:
    """The findings as JSON: schema, ready, and one object a finding."""
    names = ("name", "state", "found", "todo", "needed", "figures")
    found = [{name: getattr(finding, name) for name in names} for finding in findings]
    return {"schema": "minispec-doctor-1", "ready": ready(findings), "findings": found}


def show(findings: list[Finding], console: Console) -> None:
    """One screen: a line a finding, and what to do below those that need something."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=console.width >= 80, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        style, mark = LOOK[finding.state]
        table.add_row(Text(mark, style), finding.name, Text(finding.found))
        if finding.todo and finding.state in ("fail", "note"):
            table.add_row("", "", Text(f"-> {finding.todo}", "italic"))
    console.print(table)
    good = ready(findings)
    verdict = "ready: generation works here" if good else "NOT ready: generation cannot work before the above is mended"
    console.print(Text(verdict, "bold green" if good else "bold red"))


def _python(patient: Patient) -> Iterator[Finding]:
    version = platform.python_version()
    least, most = PYTHONS
    known = least <= sys.version_info[:2] <= most
    todo = None if known else "use Python {}.{} to {}.{}".format(*least, *most)
    found = f"{version}, {platform.system()} {platform.machine()}"
    yield Finding("Python", "ok" if known else "note", found, todo, figures={"version": version})
    encoding = (getattr(sys.stdout, "encoding", None) or "unknown").lower()
    wide = encoding.replace("-", "").startswith("utf")
    todo = None if wide else "set PYTHONUTF8=1, or some characters of the tales are shown as ?"
    yield Finding("terminal", "ok" if wide else "note", encoding, todo, figures={"encoding": encoding})


def _torch(patient: Patient) -> Iterator[Finding]:
    backends: Any = torch.backends  # not all of it is typed
    has = {name: bool(getattr(backends, name).is_available()) for name in ("mkl", "mkldnn", "mps")}
    has["cuda"] = torch.cuda.is_available()
    there = ", ".join(name for name, here in has.items() if here) or "none of mkl, mkldnn, cuda, mps"
    figures = {"version": torch.__version__, "backends": has}
    yield Finding("torch", "ok", f"{torch.__version__}; {there}", figures=figures)


def _threads(patient: Patient) -> Iterator[Finding]:
    threads, cores = torch.get_num_threads(), measures.cores()
    figures = {"threads": threads, "cores": cores}
    if threads == 1:
        todo = "unset OMP_NUM_THREADS, or call torch.set_num_threads" if cores > 1 else "nothing: there is one core"
        yield Finding(
            "threads", "note", f"one thread, {cores} {'core' if cores == 1 else 'cores'}", todo, False, figures
        )
    else:
        yield Finding("threads", "ok", f"{threads} of {cores} cores", figures=figures)
    load = measures.load()
    if load is not None and load > cores:
        todo = "close other programs before trusting the times below"
        yield Finding("load", "note", f"{load:.1f} on {cores} cores: busy", todo, False, {"load": measures.short(load)})


def _device(patient: Patient) -> Iterator[Finding]:
    name = str(patient.device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    patient.device = "cpu"  # in case the one that was asked for is not there
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        yield Finding("device", "fail", f"{name}: {reason}", "ask for --device cpu", True, {"device": name})
        return
    patient.device = name
    what = torch.cuda.get_device_name() if name.startswith("cuda") else measures.processor()
    yield Finding("device", "ok", f"{name}: {what}", figures={"device": name, "model": what})


def _cache_folder(patient: Patient) -> Iterator[Finding]:
    folder = cache_folder()
    problem = measures.unwritable(folder)
    figures = {"folder": str(folder), "writable": problem is None}
    if problem is None:
        yield Finding("cache folder", "ok", f"{folder} is writable", figures=figures)
    else:
        todo = "set MINISPEC_CACHE to a folder of yours; without one, tree='auto' measures again each time"
        yield Finding("cache folder", "fail", f"{folder}: {problem}", todo, False, figures)


def _weights(patient: Patient) -> Iterator[Finding]:
    try:
        wanted: dict[str, str] = dict(read_config(patient.root).get("sha256", {}))
    except (OSError, ValueError) as error:
        patient.broken.append("config.json")
        yield Finding("weights", "fail", str(error), AGAIN, True)
        return
    good = 0
    for name in dict.fromkeys([*NEEDED, *wanted]):
        problem = measures.damage(patient.root / name, wanted.get(name))
        if problem is None:
            good += 1
            continue
        needed = name in NEEDED
        patient.broken += [name] if needed else []
        yield Finding(f"weights: {name}", "fail", problem, AGAIN, needed, {"file": name})
    figures = {"folder": str(patient.root), "good": good}
    if not patient.broken:
        yield Finding("weights", "ok", f"{good} files with the right SHA-256 in {patient.root}", figures=figures)


def _generation(patient: Patient) -> Iterator[Finding]:
    if patient.broken:
        yield Finding("generation", "skipped", f"not tried without {', '.join(patient.broken)}")
        return
    patient.pair = pair = load_pair(patient.root, device=patient.device)
    prompt = pair.tokenizer.encode("Once upon a time")
    run = speculate(pair.target, pair.draft, prompt, max_new_tokens=20, seed=0, stop=())
    text = " ".join(pair.tokenizer.decode(run.tokens).split())
    rate = len(run.tokens) / run.stats.seconds
    figures = {"tokens": len(run.tokens), "tokens_per_second": measures.short(rate)}
    slow = rate < SLOW
    todo = "close other programs; take --draft-len 8 and short texts" if slow else None
    found = f"{len(run.tokens)} tokens, {rate:.0f} a second: {text}"
    yield Finding("generation", "note" if slow else "ok", found, todo, False, figures)


def _exact_law(patient: Patient) -> Iterator[Finding]:
    """The decoder's law, every random choice enumerated, against the target's, on models of three tokens."""
    target, draft = (_miniature(seed) for seed in (1, 2))
    with measures.one_thread():
        law = exact_law(
            lambda rng: tuple(speculate(target, draft, [0], max_new_tokens=3, draft_len=2, rng=rng, stop=()).tokens)
        )
    distance = total_variation(law, target_law(target, [0], 3))
    good = distance < EXACT
    found = f"output law = target's law within {distance:.0e} (all {len(law)} outcomes enumerated)"
    todo = None if good else "this torch computes wrongly here: install another version or build, then ask again"
    yield Finding("exactness", "ok" if good else "fail", found, todo, True, {"total_variation": distance})


def _miniature(seed: int) -> GPT:
    generator = torch.Generator("cpu").manual_seed(seed)
    model = GPT(GPTConfig(3, 8, 1, 2, 8)).double()
    for parameter in model.parameters():
        weights = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
        parameter.data = weights * 0.7  # large enough that laws differ and depend on what came before
    return model.eval().requires_grad_(False)


def _bandwidth(patient: Patient) -> Iterator[Finding]:
    rate = read_bandwidth(torch.device(patient.device)) / 1e9
    figures = {"gigabytes_per_second": measures.short(rate)}
    yield Finding("memory", "ok", f"{rate:.1f} GB/s, by a plain read of {BUFFER >> 20} MB", figures=figures)


def _speed(patient: Patient) -> Iterator[Finding]:
    if patient.pair is None:
        yield Finding("speed", "skipped", "not measured without generation")
        return
    prompts = _prompts(patient)
    speed = Speed.measure(patient.pair, prompts)
    costs = speed.costs
    yield Finding(
        "passes",
        "ok",
        f"target {1e3 * costs.check(1):.1f} ms, over 6 tokens {costs.check(6) / costs.check(1):.2f} times that; "
        f"draft step {1e3 * costs.draft_step:.2f} ms",
        figures={
            "target_ms": measures.short(1e3 * costs.check(1)),
            "draft_step_ms": measures.short(1e3 * costs.draft_step),
            "check_6": measures.short(costs.check(6) / costs.check(1)),
        },
    )
    length, gain = speed.best
    figures = {"draft_len": length, "speed_up": measures.short(gain), "acceptance": measures.short(speed.acceptance)}
    found = f"best draft length {length}, predicted speed-up {gain:.2f} (acceptance {speed.acceptance:.2f})"
    todo = None if length else "plain decoding is faster here: a check costs too much; look at minispec bench"
    yield Finding("speculation", "ok" if length else "note", found, todo, False, figures)


def _prompts(patient: Patient) -> list[list[int]]:
    assert patient.pair is not None
    lines = (weights_folder() / "prompts.txt").read_text(encoding="utf-8").splitlines()[:4]
    return [patient.pair.tokenizer.encode(line) for line in lines]


def _extras(patient: Patient) -> Iterator[Finding]:
    missing = [name for name in EXTRAS if find_spec(name) is None]
    there = [name for name in EXTRAS if name not in missing]
    extras = ",".join(dict.fromkeys(EXTRAS[name] for name in missing))
    todo = f'for tests, training or notebooks: pip install ".[{extras}]"' if missing else None
    found = f"{', '.join(there) or 'none'}" + (f"; not here: {', '.join(missing)}" if missing else "")
    yield Finding("extras", "note" if missing else "ok", found, todo, figures={"missing": missing})


EXAMINATIONS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    _python,
    _torch,
    _threads,
    _device,
    _cache_folder,
    _weights,
    _generation,
    _exact_law,
    _bandwidth,
    _speed,
    _extras,
)
