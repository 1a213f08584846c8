"""`minispec curves`: how the models of a pair were trained, as a picture (extra `tutorials`: matplotlib)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from minispec.files import CONFIG, read_config
from minispec.pair import weights_folder

LABELS = {"bits_per_byte": "bits per byte, held-out text", "acceptance": "acceptance, held-out text (T = 1)"}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    curves = commands.add_parser("curves", help="plot how the models of a pair were trained")
    curves.add_argument("out", type=Path, metavar="FILE", help="picture to write, by its ending (PNG, SVG, PDF)")
    curves.add_argument("--pair", type=Path, metavar="DIR", help="folder of another pair than the shipped one")
    curves.set_defaults(run=run_curves)


def stages(config: dict[str, Any]) -> list[tuple[str, list[dict[str, float]]]]:
    """(model and stage, curve) for every stage that `config.json` tells of."""
    found = []
    for name, section in config.items():
        for stage in section.get("training", {}).get("stages", []) if isinstance(section, dict) else []:
            found.append((f"{name}: {stage['name']}", stage["curve"]))
    return found


def run_curves(args: argparse.Namespace) -> None:
    folder = args.pair or weights_folder()
    found = stages(read_config(folder))
    if not found:
        raise ValueError(f"{folder / CONFIG}: tells of no training stages; nothing to plot")
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("plotting needs matplotlib: pip install 'minispec[tutorials]'") from None
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for axis, (key, label) in zip(axes, LABELS.items(), strict=True):
        for name, curve in found:
            points = [(point["seconds"] / 60, point[key]) for point in curve if key in point]
            if points:
                axis.plot(*zip(*points, strict=True), marker=".", label=name)
        axis.set(xlabel="minutes of training time", ylabel=label)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(args.out, dpi=120)
    print(f"{args.out}: {len(found)} stages")
