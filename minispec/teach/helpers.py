"""What the cells of the tutorials need besides the package itself."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minispec.model import LanguageModel
from minispec.pair import Pair, weights_folder
from minispec.sampling import Randomness, Rng, Sampling

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: colour-blind safe


def device() -> str:
    """The device on which a small pair runs best: CUDA where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def style() -> None:
    """Set matplotlib up for a projector: large type, strong lines, colours that everyone can tell apart."""
    try:
        from cycler import cycler
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("the tutorials plot with matplotlib: pip install 'minispec[tutorials]'") from None
    pyplot.rcParams.update(
        {
            "figure.figsize": (8, 3.8),
            "figure.dpi": 80,
            "figure.constrained_layout.use": True,
            "font.size": 13,
            "axes.prop_cycle": cycler(color=COLOURS),
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.alpha": 0.3,
            "lines.linewidth": 2.5,
            "lines.markersize": 8,
            "legend.fontsize": 12,
        }
    )


@dataclass(frozen=True)
class Source:
    """Source text that a notebook shows in colour."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def source(thing: Any, *, docstring: bool = True) -> Source:
    """The source of a function or class of the package, with or without its docstring."""
    text = textwrap.dedent(inspect.getsource(thing)).strip()
    doc = inspect.getsource(thing).split('"""')
    if not docstring and len(doc) > 2:
        text = textwrap.dedent(doc[0].rstrip() + '"""'.join(doc[2:])).strip()
    return Source(text)


def compare(question: str, guess: Any, measured: float, unit: str = "") -> None:
    """Print a prediction beside what was measured; a guess that was not made is no matter."""
    if guess is ... or guess is None:
        text = "no guess"
    else:
        text = f"your guess {guess:g}{unit}" if isinstance(guess, (int, float)) else f"your guess {guess}"
    print(f"{question}: {text}, measured {measured:.3g}{unit}")


def prompts(pair: Pair, count: int | None = None) -> list[list[int]]:
    """Token ids of the openings that come with the package, the first `count` of them."""
    lines = (weights_folder() / "prompts.txt").read_text(encoding="utf-8").splitlines()
    return [pair.tokenizer.encode(line) for line in lines if line.strip()][:count]


@torch.no_grad()
def laws(model: LanguageModel, tokens: Sequence[int], sampling: Sampling | None = None) -> Tensor:
    """The law of the next token after each of `tokens` (T), by one uncached pass: (T, V)."""
    ids = torch.tensor([list(tokens)], device=model.device)  # (1, T)
    return (Sampling() if sampling is None else sampling).probs(model(ids))[0]


class Dice:
    """`flip` and `pick` for one coin and one law at a time: what `Randomness` does for tensors of rows.

    seed: an integer, or any `rng` of the package (an `Enumerator` rolls every outcome in turn).
    """

    def __init__(self, seed: int | Rng) -> None:
        self._rng = Randomness(seed) if isinstance(seed, int) else seed

    def flip(self, prob: float | Tensor) -> bool:
        """True with that probability (0 never, 1 or more always). ValueError for NaN."""
        if math.isnan(float(prob)):
            raise ValueError("flip: the probability is not a number")
        return bool(self._rng.flip(torch.tensor([float(prob)], dtype=torch.float64))[0])

    def pick(self, weights: Tensor | Sequence[float]) -> int:
        """An index, drawn in proportion to weights (V,) that need not sum to 1. ValueError for other weights."""
        w = torch.as_tensor(weights).detach().cpu()
        if w.ndim != 1 or not bool(torch.isfinite(w).all() and (w >= 0).all() and (w > 0).any()):
            raise ValueError(f"pick: weights must be (V,), finite, >= 0 and not all 0, got {w}")
        return int(self._rng.pick(w[None])[0])
