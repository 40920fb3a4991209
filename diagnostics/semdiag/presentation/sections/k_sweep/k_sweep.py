"""Within one model: mass, dispersion, separation and the paper's conditions against k."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.findings.k_sweep import MASS, condition_table, recommendation
from semdiag.presentation.drawing.panels import NothingToDrawError, panels_of
from semdiag.presentation.drawing.style import (
    FAINT,
    INK,
    attention_style,
    legend_on_top,
    note_below,
    panel_grid,
    paper_style,
    plain_numbers,
)
from semdiag.presentation.sections.mask_stability.panels import shades

_COLUMNS = 4
_HIGHEST = 5.0  # of the axis of left sides: far above 1 it does not matter how far
_LINES = {"W": "-", "X": (0, (4, 2))}


@paper_style
def k_sweep(findings: Findings) -> Figure:
    """Draw what k heavy hitters would leave of each model's attention.

    Args:
        findings: with a sweep.

    Returns:
        One row per model: attention mass kept (with accuracy, after a rerun), δ_h(k)/δ_s, Δ_h(k), and the
        left sides of the paper's conditions.

    Raises:
        NothingToDrawError: if no model was swept.
    """
    measurements = findings.measurements
    swept = set(measurements.sweep["model"])
    models = [
        (series.model, f"{panel.title}\n{series.label}")
        for panel in panels_of(measurements.models)
        for series in panel.series
        if series.model in swept
    ]
    if not models:
        raise NothingToDrawError("No model's scores were asked for every k.")
    conditions = findings(condition_table)
    figure, axes = panel_grid(_COLUMNS * len(models), height=2.2, sharey=False, columns=_COLUMNS)
    for place, (model, title) in enumerate(models):
        own = measurements.sweep[(measurements.sweep["model"] == model) & (measurements.sweep["layer"] == -1)]
        row = axes[_COLUMNS * place : _COLUMNS * (place + 1)]
        _mass(row[0], own)
        _band(row[1], own, "ratio", "δₕ(k)/δₛ")
        row[1].set_ylim(0, 1.03)
        _separation(row[2], own)
        _conditions(row[3], conditions[conditions["model"] == model])
        for ax, name in zip(row, (title, "dispersion", "separation", "conditions"), strict=True):
            ax.set_title(name, fontsize=8)
        found = recommendation(findings, model).k
        for ax in row:
            ax.set_xlabel("k")
            if found is not None:
                ax.axvline(found, color=INK, linewidth=0.9)
    legend_on_top(figure, axes)
    samples = measurements.provenance.get("probe_samples")
    note_below(
        figure,
        "Within each model: its own scores, layers, heads and queries pooled"
        f"{'' if samples is None else f', {samples} samples per model'}. Curve: median; band: 25th to 75th "
        "percentile; dotted: 5th (mass, Δ) or 95th (ratio). Conditions at matching percentiles of δ, Δ and "
        "load/k, met below 1; a vertical line marks a k that qualifies.",
    )
    return figure


def _mass(ax: Axes, own: pd.DataFrame) -> None:
    _band(ax, own, "mass", "attention mass kept", outer="p5")
    ax.axhline(MASS, color=FAINT, linestyle="--", linewidth=0.9, label=f"{MASS:.0%}")
    accuracy = own[(own["quantity"] == "accuracy") & (own["k"] > 0)]
    if len(accuracy):
        ax.plot(
            accuracy["k"],
            accuracy["mean"],
            color=INK,
            marker=".",
            markersize=4,
            linewidth=1,
            label="accuracy, rerun",
        )
    ax.set_ylim(0, 1.03)


def _band(ax: Axes, own: pd.DataFrame, quantity: str, label: str, outer: str = "p95") -> None:
    rows = own[(own["quantity"] == quantity) & (own["k"] > 0)]
    color = attention_style("topk").color
    ax.plot(rows["k"], rows["p50"], color=color, linewidth=1.6)
    ax.fill_between(rows["k"], rows["p25"], rows["p75"], color=color, alpha=0.25, linewidth=0)
    ax.plot(rows["k"], rows[outer], color=color, linestyle=":", linewidth=1.2)
    ax.set_ylabel(label)


def _separation(ax: Axes, own: pd.DataFrame) -> None:
    _band(ax, own, "separation", "Δₕ(k) (nats)", outer="p5")
    ax.set_yscale("log")
    plain_numbers(ax.yaxis)


def _conditions(ax: Axes, rows: pd.DataFrame) -> None:
    percentiles = sorted(rows["percentile"].unique())
    for parameter, line in _LINES.items():
        for percentile, color in zip(percentiles, shades(len(percentiles)), strict=True):
            own = rows[(rows["percentile"] == percentile) & (rows["parameter"] == parameter)]
            sides = own["left_side"].where(np.isfinite(own["left_side"]))
            ax.plot(
                own["k"], sides, color=color, linestyle=line, linewidth=1.2, label=f"{parameter}, p{percentile}"
            )
    ax.axhline(1, color=INK, linestyle="--", linewidth=0.9)
    ax.set_ylim(0, min(_HIGHEST, 1.05 * max(1.2, rows["left_side"].where(np.isfinite(rows["left_side"])).max())))
    ax.set_ylabel("left side, paper")
