"""Does Δ tell which masks change? Predicted and observed survival against Δ, in bins of equal counts."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import FAINT, finished, panel_grid, paper_style
from semdiag.questions.mask_stability.answer import reliability_tables
from semdiag.questions.mask_stability.figures.panels import judged_models, mask_facts, noise_words, shades

_MARKERS = "osD^vP*Xh<>"


@paper_style
def mask_reliability(findings: Findings) -> Figure:
    """Draw the share of unchanged masks, observed and predicted, against Δ/sd, one curve per noise level.

    Args:
        findings: with masks.

    Returns:
        One panel per model, ten bins of equal counts of Δ/sd each.

    Raises:
        NothingToDrawError: if no mask was judged, or for none of them there is a prediction.
    """
    binned = findings(reliability_tables)
    known = {model for model, _ in binned}
    models = [(model, title) for model, title in judged_models(findings) if model in known]
    if not models:
        raise NothingToDrawError("no prediction is known for masks that the scores alone do not determine")
    levels = sorted({level for _, level in binned})
    lowest = min(0.5, *(float(table["low"].min()) for table in binned.values()))
    figure, axes = panel_grid(len(models), height=2.9)
    for ax, (model, title) in zip(axes, models, strict=True):
        drawn = []
        for place, (level, color) in enumerate(zip(levels, shades(len(levels)), strict=True)):
            if (model, level) in binned:
                marker = _MARKERS[place % len(_MARKERS)]
                name = f"noise {noise_words(findings, level)}"
                _draw(ax, binned[model, level], color, marker, name)
                drawn.append(binned[model, level])
        curve = pd.concat(drawn).query("0 < margin < inf").sort_values("margin")
        ax.plot(curve["margin"], curve["predicted"], "--", color=FAINT, linewidth=0.9, label="predicted, Φ(Δ/sd)")
        if len(curve):
            ax.set_xscale("log")
        ax.set_ylim(lowest - 0.03, 1.03)
        ax.set_xlabel("Δ / sd")
        ax.set_title(title, fontsize=8)
    axes[0].set_ylabel("observed share with S′ = S")
    return finished(
        figure,
        f"{mask_facts(findings)}.\nTen bins of equal counts, at their median Δ/sd; sd of dz₍ₖ₎ − dz₍ₖ₊₁₎ per "
        "layer and head. Bars: 95% intervals from resampled sequences. The prediction is about the boundary pair "
        "only.",
    )


def _draw(ax: Axes, table: pd.DataFrame, color: str, marker: str, label: str) -> None:
    table = table[(table["margin"] > 0) & np.isfinite(table["margin"])]  # an axis of logarithms has no others
    ends = np.abs(np.stack([table["exact"] - table["low"], table["high"] - table["exact"]]))
    ax.errorbar(
        table["margin"], table["exact"], yerr=ends, color=color, marker=marker, markersize=4, linewidth=1.1,
        capsize=2, label=label,
    )  # fmt: skip
