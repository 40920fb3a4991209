"""Empirical estimates of the loss's Lipschitz constant, group by group, under the sound bound."""

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.finding import log10
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.presenting.drawing.panels import NothingToDrawError, Series, panels_of
from semdiag.presenting.drawing.style import FAINT, INK, finished, panel_grid, paper_style
from semdiag.questions.lipschitz.measure.secants import GROUPS

_POINT = "#3b5bb5"
_NAMES = {
    "all": "all", "qk": "W_qk", "value-output": "V", "mlp-in": "P", "mlp-out": "R", "embedding": "emb.",
    "head": "head",
}  # fmt: skip


@paper_style
def lipschitz_rungs(findings: Findings) -> Figure:
    """Draw log10 of the largest secant, the largest gradient and the bounds of each group."""
    measurements = findings.measurements
    measured = set(measurements.loss_gradients["model"])
    shown = [
        (panel, series) for panel in panels_of(measurements.models) for series in panel.series
        if series.model in measured
    ]  # fmt: skip
    if not shown:
        raise NothingToDrawError("No gradient of the loss was measured.")
    figure, axes = panel_grid(len(shown), height=2.9, columns=min(len(shown), 2))
    for ax, (panel, series) in zip(axes, shown, strict=True):
        _draw(ax, series, measurements.of(series.model))
        ax.set_title(f"{panel.title}, {series.label}")
    axes[0].set_ylabel("log10 of slope or bound")
    return finished(figure, _note(findings))


def _draw(ax: Axes, series: Series, measured: Measurements) -> None:
    groups = ["all", *GROUPS]
    tops = {
        "largest secant": _largest(measured.loss_secants, "slope", groups),
        "largest gradient": _largest(measured.loss_gradients, "slope", groups),
    }
    x = np.arange(len(groups))
    bounds = measured.loss_gradients.groupby("group")["ln_sound"].max()
    high = [log10(float(bounds[g])) if g in bounds and math.isfinite(bounds[g]) else math.nan for g in groups]
    dash: dict[str, Any] = {"marker": "_", "markersize": 14, "linestyle": "none"}
    ax.plot(x, high, color=INK, markeredgewidth=2, label="sound bound", **dash)
    at_point = measured.loss_gradients[measured.loss_gradients["ln_point"].notna()].set_index("group")
    places = [groups.index(str(group)) for group in at_point.index]
    ax.plot(
        places, at_point["ln_point"].map(log10), color=_POINT, markeredgewidth=2,
        label="bound at the checkpoint", **dash,
    )  # fmt: skip
    opened: dict[str, Any] = {"marker": "o", "markersize": 4, "markerfacecolor": "none", "linestyle": "none"}
    ax.plot([], [], color=FAINT, label="gradient there", **opened)
    ax.plot(places, at_point["slope"].map(_decades), color=series.style.color, **opened)
    ax.vlines(x, tops["largest gradient"], high, color="#cfcfcf", linewidth=0.9, zorder=1)
    for shift, (label, marker) in zip(
        (-0.18, 0.0), (("largest secant", "x"), ("largest gradient", "o")), strict=True
    ):
        ax.plot([], [], marker=marker, markersize=4, color=FAINT, linestyle="none", label=label)
        ax.plot(x + shift, tops[label], marker=marker, markersize=4, color=series.style.color, linestyle="none")
    ax.set_xticks(x, [_NAMES[g] for g in groups])
    ax.axhline(0, color=FAINT, linewidth=0.6)


def _decades(value: float) -> float:
    return math.log10(value) if value > 0 else math.nan


def _largest(table: pd.DataFrame, column: str, groups: list[str]) -> list[float]:
    tops = table.groupby("group")[column].max()
    return [_decades(tops[g]) if g in tops else math.nan for g in groups]


def _note(findings: Findings) -> str:
    measurements = findings.measurements
    draws = int(measurements.loss_gradients["draw"].max())
    samples, seed = (measurements.provenance.get(name) for name in ("lipschitz_samples", "seed"))
    radius = float(measurements.loss_gradients["radius"].max())
    return (
        f"Gradients at the checkpoint and {draws} random parameters up to {radius:.2g} of each tensor's norm away "
        f"(seed {seed}), {samples} samples; secants in planes (all) and on lines.\n"
        "Bound: the largest "
        "at the drawn parameters; it holds for them and these samples. Bound at the checkpoint: of queries and "
        "keys, from the gradients in the mixed values there. W_qk: queries and keys, V: values and "
        "outputs, P and R: the MLP's matrices."
    )
