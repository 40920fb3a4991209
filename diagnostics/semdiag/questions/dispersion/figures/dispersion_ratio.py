"""How much smaller the dispersion is than full attention's, layer by layer, with an interval."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presenting.drawing.style import (
    FAINT,
    finished,
    lightened,
    number_layers,
    panel_grid,
    paper_style,
    plain_numbers,
)
from semdiag.questions.dispersion.answer.comparisons import RATIO_PERCENTILES, layer_ratios


@paper_style
def dispersion_ratio(findings: Findings) -> Figure:
    """Draw δ_h/δ_s per layer for every pair, with 95% intervals from resampled sequences."""
    ratios = findings(layer_ratios)
    if not ratios["ratio"].notna().any():
        raise NothingToDrawError(
            "No sparse model has a full-attention counterpart of the same task, seed, size, setting and snapshot."
        )
    compared = set(ratios["model"])
    panels = [p for p in panels_of(findings.measurements.models) if any(s.model in compared for s in p.series)]
    figure, axes = panel_grid(len(RATIO_PERCENTILES) * len(panels), columns=len(RATIO_PERCENTILES))
    low, high = ratios[["ratio", "low"]].min().min(), ratios[["ratio", "high"]].max().max()
    places = [(panel, percentile) for panel in panels for percentile in RATIO_PERCENTILES]
    for ax, (panel, percentile) in zip(axes, places, strict=True):
        _scale(ax, min(low, 0.5), max(high, 2.0))
        _draw(ax, panel, ratios[ratios["percentile"] == percentile])
        which = "median" if percentile == 50 else f"p{percentile}"
        ax.set_title(f"{panel.title}: {which}")
        if percentile == RATIO_PERCENTILES[0]:
            ax.set_ylabel("δ of sparse / δ of full attention")
    return finished(
        figure, "bars: 95% intervals, whole sequences resampled; below 1 = more focused than full attention"
    )


def _scale(ax: Axes, low: float, high: float) -> None:
    ax.set_yscale("log", base=2)
    if 0 < low < high < float("inf"):  # of a diverged model neither need hold
        ax.set_ylim(low / 1.1, high * 1.1)
    plain_numbers(ax.yaxis)
    ax.axhline(1.0, color=FAINT, linewidth=1.0, linestyle=(0, (4, 2)))


def _draw(ax: Axes, panel: Panel, ratios: pd.DataFrame) -> None:
    sparse = [series for series in panel.series if series.attention != "full"]
    for place, series in enumerate(sparse):
        rows = ratios[ratios["model"] == series.model].dropna(subset=["ratio"])
        control = series.attention != "topk"
        color = lightened(series.style.color, 0.35) if control else series.style.color
        ax.errorbar(
            rows["layer"] + (place - (len(sparse) - 1) / 2) * 0.12,
            rows["ratio"],
            yerr=np.stack([rows["ratio"] - rows["low"], rows["high"] - rows["ratio"]]).clip(min=0),
            color=color,
            marker=series.style.marker,
            markersize=4 if control else 5.5,
            linestyle=series.style.line,
            linewidth=0.7 if control else 1.1,
            elinewidth=1.0,
            capsize=2,
            label=series.label + (", control" if control else ""),
        )
    number_layers(ax, sorted(ratios["layer"].unique()))
