"""Within each model: weight kept, dispersion, separation and the paper's conditions against k."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.drawing.panels import NothingToDrawError, short_labels
from semdiag.presenting.drawing.style import (
    FAINT,
    INK,
    finished,
    palette,
    panel_grid,
    paper_style,
    plain_numbers,
)
from semdiag.questions.bounds.answer.corollary import JUDGED_PERCENTILES
from semdiag.questions.k_sweep.answer.sparse_verdict import MASS
from semdiag.questions.k_sweep.answer.summary import condition_table

_HIGHEST = 5.0  # upper end of the axis of left sides: far above 1 the value does not matter
_FEW = 3  # with more models, a second line for each would hide the others
LINES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
_PANELS = {  # quantity: title, percentile of the second line
    "mass": ("attention weight kept", "p5"),
    "ratio": ("dispersion δₕ(k)/δₛ", "p95"),
    "separation": ("separation Δₕ(k) (nats)", "p5"),
}


@paper_style
def k_sweep(findings: Findings) -> Figure:
    """Draw what k heavy hitters would leave of each model's attention.

    Args:
        findings: with a sweep.

    Returns:
        Four panels with a line per model: attention weight kept, δ_h(k)/δ_s, Δ_h(k),
        and the larger left side of the paper's conditions, at its worst percentile.

    Raises:
        NothingToDrawError: if no model was swept.
    """
    measurements = findings.measurements
    swept = set(measurements.sweep["model"])
    labels = {model: label for model, label in short_labels(measurements.models).items() if model in swept}
    if not labels:
        raise NothingToDrawError("No model was measured for every k: semdiag k-sweep does.")
    pooled = measurements.sweep[(measurements.sweep["layer"] == ALL) & (measurements.sweep["k"] > 0)]
    conditions = findings(condition_table)
    figure, axes = panel_grid(len(_PANELS) + 1, height=2.6, sharey=False)
    colors = palette(len(labels))
    for place, (model, label) in enumerate(labels.items()):
        color, line = colors[place], LINES[place % len(LINES)]
        own = pooled[pooled["model"] == model]
        for ax, (quantity, (_, outer)) in zip(axes, _PANELS.items(), strict=False):
            rows = own[own["quantity"] == quantity]
            middle = "mean" if quantity == "mass" else "p50"  # as in the verdict
            ax.plot(rows["k"], rows[middle], color=color, linestyle=line, linewidth=1.6, label=label)
            if len(labels) <= _FEW:
                ax.plot(rows["k"], rows[outer], color=color, linestyle=":", linewidth=1.0)
        _conditions(axes[-1], conditions[conditions["model"] == model], color, line)
    for ax, (title, _) in zip(axes, _PANELS.values(), strict=False):
        ax.set_title(title)
    line_at(axes[0])
    axes[0].set_ylim(0, 1.06)
    axes[1].set_ylim(0, 1.06)
    if (pooled.loc[pooled["quantity"] == "separation", "p50"] > 0).any():  # not where all are ties
        axes[2].set_yscale("log")
    plain_numbers(axes[2].yaxis)
    axes[3].axhline(1, color=INK, linestyle="--", linewidth=0.9)
    axes[3].set_title("better guarantee by the paper: below 1")
    axes[3].set_ylim(0, float(np.clip(1.1 * axes[3].dataLim.ymax, 2.0, _HIGHEST)))
    if conditions.empty:
        axes[3].set_xlim(axes[0].get_xlim())
        axes[3].text(
            0.5, 0.5, "not judged:\nqueries were drawn", ha="center", va="center", transform=axes[3].transAxes
        )
    for ax in axes:
        ax.set_xlabel("k")
    samples = measurements.provenance.get("probe_samples")
    return finished(
        figure,
        "Within each model: its own scores, layers, heads and queries with more than k keys pooled"
        f"{'' if samples is None else f', {samples} samples per model'}; weight: means, others medians"
        f"{', thin: 5th percentile (ratio: 95th)' if len(labels) <= _FEW else ''}"
        ". Last panel: the larger left side of the two conditions of the paper's Corollary 1, over p75, p90 and "
        "p95 of δ and load/k with p25, p10 and p5 of Δ.",
    )


def line_at(ax: Axes) -> None:
    """Mark the share of the weight that counts as enough."""
    ax.axhline(MASS, color=FAINT, linestyle="--", linewidth=0.9)
    ax.annotate(
        f"{MASS:.0%}", (0, MASS), xycoords=("axes fraction", "data"), xytext=(2, 1), textcoords="offset points",
        fontsize=7, color=FAINT, ha="left", va="bottom",
    )  # fmt: skip


def _conditions(ax: Axes, rows: pd.DataFrame, color: str, line: object) -> None:
    rows = rows[rows["percentile"].isin(JUDGED_PERCENTILES)]
    sides = rows["left_side"].where(np.isfinite(rows["left_side"])).groupby(rows["k"]).max()
    ax.plot(sides.index, sides, color=color, linestyle=line, linewidth=1.4)
