"""What the doctor measures: the processor, a folder, a file, the passes' times."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minispec.decode import generate, speculate
from minispec.files import sha256
from minispec.pair import Pair
from minispec.planner import Costs
from minispec.sampling import Sampling
from minispec.stopwatch import measure

SIZES = (1, 2, 4, 6, 8, 12)
BUDGET = 2.5  # seconds for the passes, and for the runs


def short(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float | None:
    """Processes that want a core, on average over the last minute; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows
        return None


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for tiny models, which many only hinder."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def unwritable(folder: Path) -> str | None:
    """Why no file can be written there, or None. Leaves nothing behind: neither file nor folder."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]  # the deepest first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"minispec")
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for path in made:
            try:
                path.rmdir()
            except OSError:
                break
    return None


def damage(path: Path, wanted: str | None) -> str | None:
    """What is wrong with a file that should have the SHA-256 `wanted`, or None."""
    if wanted is None:
        return "config.json has no checksum for it"
    if not path.is_file():
        return "no such file"
    try:
        found = sha256(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if found == wanted else f"damaged: SHA-256 is {found[:12]}..., should be {wanted[:12]}..."


@dataclass(frozen=True)
class Speed:
    """Measured costs of a pair and the acceptance rate of its draft under the command's default sampling."""

    costs: Costs
    acceptance: float

    @property
    def best(self) -> tuple[int, float]:
        """The chain that pays most, and its predicted speed-up."""
        return self.costs.best_chain(self.acceptance)

    @staticmethod
    def measure(pair: Pair, prompts: Sequence[Sequence[int]], draft_len: int = 4) -> Speed:
        """Time the passes, then plain and speculative runs for what a step costs besides; fewer on a slow machine."""
        quick = measure(pair.target, pair.draft, context=32, sizes=(1,), repeats=1).check(1)
        repeats = min(max(int(BUDGET / (len(SIZES) * quick)) - 2, 1), 5)  # the first two rounds warm up
        costs = measure(pair.target, pair.draft, context=32, sizes=SIZES, repeats=repeats)
        plain: list[float] = []
        fast: list[float] = []
        tested = accepted = 0
        start = time.perf_counter()
        for seed, prompt in enumerate(prompts):
            if fast and time.perf_counter() - start > BUDGET:
                break
            whole: dict[str, Any] = {"sampling": Sampling(0.8), "seed": seed, "stop": ()}
            one = generate(pair.target, prompt, max_new_tokens=8, **whole)
            two = speculate(pair.target, pair.draft, prompt, draft_len=draft_len, max_new_tokens=40, **whole)
            plain.append(one.stats.seconds / one.stats.target_passes)
            fast.append(two.stats.seconds / two.stats.target_passes)
            tested, accepted = tested + two.stats.tested, accepted + two.stats.accepted
        passes = costs.check(draft_len + 1) + draft_len * costs.draft_step
        costs = replace(
            costs,
            overhead=max(statistics.median(fast) - passes, 0.0),
            plain_overhead=max(statistics.median(plain) - costs.check(1), 0.0),
        )
        return Speed(costs, accepted / max(tested, 1))
