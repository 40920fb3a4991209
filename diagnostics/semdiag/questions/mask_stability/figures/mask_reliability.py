"""Does Δ tell which masks change? Predicted and observed survival against Δ, in bins of equal counts."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import FAINT, finished, panel_grid, paper_style
from semdiag.questions.mask_stability.answer import foreseen_margin, reliability_tables
from semdiag.questions.mask_stability.figures.panels import MARKERS, judged_models, mask_facts, noise_words, shades

_LAST = 1.1  # where the last bin stands, in units of the axis before it


@paper_style
def mask_reliability(findings: Findings) -> Figure:
    """Draw the share of unchanged masks, observed and predicted, against Δ/sd, one curve per noise level."""
    binned = findings(reliability_tables)
    known = {model for model, _ in binned}
    models = [(model, title) for model, title in judged_models(findings) if model in known]
    if not models:
        raise NothingToDrawError("no prediction is known for masks that the scores alone do not determine")
    levels = sorted({level for _, level in binned})
    lowest = min(0.5, *(float(table["low"].min()) for table in binned.values()))
    highest = findings(foreseen_margin) or 1.0
    figure, axes = panel_grid(len(models), height=2.9)
    for ax, (model, title) in zip(axes, models, strict=True):
        shares = []
        for place, (level, color) in enumerate(zip(levels, shades(len(levels)), strict=True)):
            if (model, level) in binned:
                table, marker = binned[model, level], MARKERS[place % len(MARKERS)]
                _draw(ax, table, highest, color, marker, f"noise {noise_words(findings, level)}")
                shares.append(float(table.loc[table["above"], "share"].sum()))
        _label_axis(ax, highest, shares)
        ax.set_ylim(lowest - 0.03, 1.03)
        ax.set_title(title, fontsize=8)
    axes[0].set_ylabel("share of masks with S′ = S")
    return finished(
        figure,
        f"{mask_facts(findings)}.\nTen bins of equal counts, at their median Δ/sd; sd of dz₍ₖ₎ − dz₍ₖ₊₁₎ per "
        "layer and head. One more bin, hollow, of all queries with a larger Δ/sd: of them the prediction foresees "
        "less than one changed mask in all draws. Bars: 95% intervals from resampled sequences. The prediction "
        "is about the boundary pair only.",
    )


def _draw(ax: Axes, table: pd.DataFrame, highest: float, color: str, marker: str, label: str) -> None:
    for above, part in table.groupby("above"):
        places = np.full(len(part), _LAST * highest) if above else part["margin"]
        ends = np.abs(np.stack([part["exact"] - part["low"], part["high"] - part["exact"]]))
        ax.errorbar(
            places, part["exact"], yerr=ends, color=color, marker=marker, markersize=4, linewidth=1.1, capsize=2,
            markerfacecolor="white" if above else color, label=None if above else label,
        )  # fmt: skip
        if not above:
            ax.plot(places, part["predicted"], "--", color=FAINT, linewidth=0.9, label="predicted, Φ(Δ/sd)")


def _label_axis(ax: Axes, highest: float, shares: list[float]) -> None:
    """Number the axis up to the last bin, and name the share of the queries in it."""
    ax.set_xlim(-0.03 * highest, (_LAST + 0.08) * highest)
    ticks = [at for at in ax.get_xticks() if 0 <= at < 0.95 * highest]
    most = f"{min(shares):.0%}" + (f" to {max(shares):.0%}" if max(shares) - min(shares) >= 0.005 else "")
    ax.set_xticks([*ticks, _LAST * highest], [*(f"{at:g}" for at in ticks), f"> {highest:.2g}"])
    ax.set_xlabel(f"Δ / sd (> {highest:.2g}: {most} of the queries)")
