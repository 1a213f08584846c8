"""The benchmark's figures as tables and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from minispec.bench.machine import Shares
from minispec.bench.timing import Row
from minispec.planner import Costs


def describe(costs: Costs, weights: int, held: int, passes: Sequence[float], reads: Sequence[float]) -> str:
    """The measured costs in three lines.

    weights, held: bytes of the weights that a pass reads, and of the copies that it reads for them; then seconds of
    passes and of plain reads of the former.
    """
    checks = " ".join(f"t({n}) {costs.check(n) / costs.check(1):.2f}" for n in (2, 4, 6, 8, 12, 16, 32))
    one, read = statistics.median(passes), statistics.median(reads)
    share = 100 * read / one
    halves = f"; as held, {held / 1e6:.0f} MB in half precision, {share * held / weights:.0f} %"
    return (
        f"target pass {1e3 * costs.check(1):.2f} ms; relative to it: {checks}\n"
        f"draft step {1e3 * costs.draft_step:.2f} ms, c = {costs.cost_ratio:.3f}\n"
        f"a target pass goes through {weights / 1e6:.0f} MB of weights at {weights / one / 1e9:.1f} GB/s, "
        f"{share:.0f} % of a plain read ({weights / read / 1e9:.1f} GB/s), in turn{halves if held < weights else ''}"
    )


def figures(rows: Sequence[Row], title: str) -> Table:
    """Every setup's figures."""
    table = Table(title=title)
    names = ("T", "nodes", "tokens", "tokens/pass", "acceptance", "tokens/s", "ratio to plain", "predicted")
    for name in ("rule, shape", *names):
        table.add_column(name, justify="left" if name == "rule, shape" else "right")
    for row in rows:
        rate = "n/a" if row.acceptance_rate is None else f"{row.acceptance_rate:.3f}"
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f} ± {(row.spread or 0) / 2:.2f}"
        per_pass = "" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}"
        cells = (f"{row.temperature:g}", str(row.nodes), f"{row.new_tokens:,}", per_pass, rate)
        table.add_row(row.setup, *cells, speed, ratio, "" if row.predicted is None else f"{row.predicted:.2f}")
    return table


def where(found: dict[str, Shares]) -> Table:
    """Shares of a step's time."""
    table = Table(title="where a step's time goes")
    for name in ("rule, shape", "step (ms)", "target", "draft", "verify", "other", "all but the passes"):
        table.add_column(name, justify="left" if name == "rule, shape" else "right")
    for name, s in found.items():
        parts = (s.target, s.draft, s.verify, s.other, s.overhead)
        table.add_row(name, f"{1e3 * s.step:.2f}", *(f"{100 * part:.0f} %" for part in parts))
    return table


def growth_table(rows: Sequence[dict[str, float]], title: str) -> Table:
    """Time a token by context and batch."""
    table = Table(title=title)
    for name in ("context", "batch", "plain (ms a token)", "speculative (ms a token)", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (f"{row['plain_ms']:.2f}", f"{row['fast_ms']:.2f}", f"{row['ratio']:.2f}")
        table.add_row(f"{row['context']:.0f}", f"{row['batch']:.0f}", *figures)
    return table


def plot(rows: Sequence[Row], path: Path) -> None:
    """Measured ratios, with their spread, beside predicted ones. Needs matplotlib (extra `tutorials`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError('--plot needs matplotlib: pip install "minispec[tutorials]"') from None
    timed = [row for row in rows if row.ratio is not None]
    figure = Figure(figsize=(9, 0.32 * len(timed) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(timed))
    errors = [(row.spread or 0) / 2 for row in timed]
    axes.barh(places, [row.ratio or 0 for row in timed], xerr=errors, color="#4878a8", label="measured")
    known = [(place, row.predicted) for place, row in zip(places, timed, strict=True) if row.predicted is not None]
    axes.plot([gain for _, gain in known], [place for place, _ in known], "D", color="#d1603d", label="predicted")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(list(places), [f"T = {row.temperature:g}: {row.setup}" for row in timed])
    axes.invert_yaxis()
    axes.set_xlabel("tokens a second, relative to plain decoding")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
