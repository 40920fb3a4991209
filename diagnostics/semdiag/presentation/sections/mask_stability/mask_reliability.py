"""Does Δ tell which masks change? Predicted against observed survival, in bins of equal counts."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.findings.mask_stability import RESAMPLES
from semdiag.findings.resampling import mean_interval
from semdiag.presentation.drawing.style import FAINT, legend_on_top, note_below, panel_grid, paper_style
from semdiag.presentation.sections.mask_stability.panels import judged_models, mask_facts, noise_words, shades

_BINS = 10
_MARKERS = "osD^vP*Xh<>"


@paper_style
def mask_reliability(findings: Findings) -> Figure:
    """Draw the observed share of unchanged masks against the predicted one, one curve per noise level.

    Args:
        findings: with masks.

    Returns:
        One panel per model, ten bins of equal counts of Δ/sd each.

    Raises:
        NothingToDrawError: if no mask was judged.
    """
    models = judged_models(findings)
    groups = dict(iter(findings.measurements.masks.groupby(["model", "level"], sort=True)))
    levels = sorted({float(str(level)) for _, level in groups})
    binned = {key: _binned(rows) for key, rows in groups.items()}
    lowest = min(0.5, *(float(table["low"].min()) for table in binned.values()))
    figure, axes = panel_grid(len(models), height=2.9)
    for ax, (model, title) in zip(axes, models, strict=True):
        ax.plot([0.5, 1], [0.5, 1], color=FAINT, linestyle="--", linewidth=0.9, label="as predicted")
        for place, (level, color) in enumerate(zip(levels, shades(len(levels)), strict=True)):
            if (model, level) in binned:
                marker = _MARKERS[place % len(_MARKERS)]
                name = f"noise {noise_words(findings, level)}"
                _draw(ax, binned[model, level], color, marker, name)
        ax.set_xlim(0.48, 1.02)
        ax.set_ylim(lowest - 0.03, 1.03)
        ax.set_xlabel("predicted P = Φ(Δ / sd)")
        ax.set_title(title, fontsize=8)
    axes[0].set_ylabel("observed share with S′ = S")
    legend_on_top(figure, axes)
    note_below(
        figure,
        f"{mask_facts(findings)}.\nTen bins of equal counts of Δ/sd, sd of dz₍ₖ₎ − dz₍ₖ₊₁₎ per layer and "
        "head; bars: 95 % intervals from resampled sequences. The prediction is about the boundary pair only.",
    )
    return figure


def _binned(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean prediction and observed share, with its interval, in bins of equal counts of Δ/sd."""
    spread = rows["swing_sd"].astype(np.float64)
    order = (rows["separation"] / spread.where(spread > 0, np.nan)).fillna(np.inf).rank(method="first")
    bins = np.minimum((order - 1) * _BINS // len(rows), _BINS - 1)
    table = []
    for _, part in rows.groupby(bins):
        found = mean_interval(part, "exact", RESAMPLES)
        predicted = float(part["predicted"].mean())
        table.append({"predicted": predicted, "exact": found.estimate, "low": found.low, "high": found.high})
    return pd.DataFrame(table)


def _draw(ax: Axes, table: pd.DataFrame, color: str, marker: str, label: str) -> None:
    ends = np.abs(np.stack([table["exact"] - table["low"], table["high"] - table["exact"]]))
    ax.errorbar(
        table["predicted"], table["exact"], yerr=ends, color=color, marker=marker, markersize=4, linewidth=1.1,
        capsize=2, label=label,
    )  # fmt: skip
