"""Ranges of δ, entropy and weight on the first key in trained models, for orientation."""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes

_BAND = "#8a8f94"
_MODELS = "MiniLM", "SmolLM2"  # trained on language, unlike the small reference encoders


class Range(NamedTuple):
    """The 5th to 95th percentile, over a model's heads, of each head's median over queries."""

    model: str
    low: float
    high: float


@cache
def reference_ranges(quantity: str) -> tuple[Range, ...]:
    """Return the ranges of trained language models."""
    with files("semdiag.presenting.drawing").joinpath("reference_ranges.csv").open(encoding="utf-8") as file:
        table = pd.read_csv(file)
    rows = table[(table["quantity"] == quantity) & table["model"].isin(_MODELS)].to_dict("records")
    return tuple(Range(str(row["model"]), float(row["p5"]), float(row["p95"])) for row in rows)


def draw_band(ax: Axes, quantity: str) -> None:
    """Shade the range of these models behind a panel."""
    ranges = reference_ranges(quantity)
    low, high = min(each.low for each in ranges), max(each.high for each in ranges)
    label = f"heads of {' and '.join(_MODELS)}"
    ax.axhspan(low, high, color=_BAND, alpha=0.16, linewidth=0, zorder=0, label=label)


def reference_words(quantity: str) -> str:
    """Return the ranges in words, like ``2–6.1 (MiniLM), 5.8–16 (SmolLM2)``."""
    return ", ".join(f"{each.low:g}–{each.high:g} ({each.model})" for each in reference_ranges(quantity))
