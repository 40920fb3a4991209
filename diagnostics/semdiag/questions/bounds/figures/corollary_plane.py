"""Where the paper's conditions for the better guarantee hold, and where trained models lie."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.mathematics.bounds.corollary import paper_input_condition, paper_weight_condition
from semdiag.measuring.findings.finding import Verdict
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import compared_pairs
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import (
    ATTENTION_STYLES,
    FAINT,
    finished,
    panel_grid,
    paper_style,
    title_with_facts,
)
from semdiag.questions.bounds.answer.corollary import HEURISTIC, JUDGED_PERCENTILES, corollary_table
from semdiag.questions.bounds.answer.published import published_table

DISPERSIONS = (3.0, 10.0, 30.0)  # δ_s of the regions, in nats
LOADS = (1.0, 8.0)  # β of the regions; the condition in W does not know β
_SHADES = ("#c6dbef", "#6baed6", "#2171b5")
_LINES = ("-", (0, (1, 1.5)))
_MARKERS = {"ListOps": "p", "Parity": "h", "Even pairs": "*", "Missing duplicates": "X"}
_GREY = "#777777"


@paper_style
def corollary_plane(findings: Findings) -> Figure:
    """Draw the plane of δ_h/δ_s and Δ_h/δ_s with the boundary of each condition, and pairs as points.

    Args:
        findings: of full models and their top-k counterparts.

    Returns:
        Two panels: the paper's condition in the parameters (W) and in the inputs (X).

    Raises:
        NothingToDrawError: if no top-k model has a full counterpart.
    """
    table = _points(findings)
    points = table[(table["y"] > 0) & np.isfinite(table["y"])]  # a tie has no place on a logarithmic axis
    published = _published()
    if points.empty:
        raise NothingToDrawError("No top-k model is compared with a full one, with δ and Δ above 0.")
    everything = pd.concat([points, published])
    low, high = everything["y"].min() / 3, max(everything["y"].max() * 3, 1.0)
    figure, axes = panel_grid(2, height=4.4)
    for ax, parameter in zip(axes, ("W", "X"), strict=True):
        _draw_boundaries(ax, parameter, np.geomspace(low, high, 300))
        _draw_pairs(ax, published[published["parameter"] == parameter], measured=False)
        _draw_pairs(ax, points[points["parameter"] == parameter], measured=True)
        ax.set(yscale="log", ylim=(low, high), xlim=(0, max(1.1, 1.05 * everything["x"].max())))
        ax.set_xlabel("δₕ / δₛ")
        equation = "eq. 304" if parameter == "W" else "eq. 305, 2ΓΞ² = δₛ"
        title_with_facts(ax, f"Condition in {parameter} ({equation})", _facts(table, points, parameter))
    axes[0].set_ylabel("Δₕ / δₛ")
    return finished(
        figure,
        "A condition holds left of the curve of the point's own δₛ (and β): filled = holds, hollow = does not. "
        "Lines join percentiles 75, 90, 95, 100 (separation 25, 10, 5, 0), 100 is ringed; grey: the paper's "
        f"numbers, k = 5. {HEURISTIC[0].upper()}{HEURISTIC[1:]}.",
    )


def _points(findings: Findings) -> pd.DataFrame:
    """Measured pairs in the plane."""
    topk = set(findings.measurements.models.loc[findings.measurements.models["attention"] == "topk", "model"])
    pairs = [pair for pair in findings(compared_pairs) if pair.other in topk]
    table = corollary_table(findings, pairs)
    table = table[(table["form"] == "paper") & (table["full_dispersion"] > 0) & np.isfinite(table["dispersion"])]
    table = table[np.isfinite(table["full_dispersion"])]
    placed: pd.DataFrame = table.assign(
        name=table["pair"],
        x=table["dispersion"] / table["full_dispersion"],
        y=table["separation"] / table["full_dispersion"],
        met=table["verdict"] == Verdict.HOLDS.value,
    )
    return placed


def _published() -> pd.DataFrame:
    table = published_table()
    x, y = table["dispersion"] / table["full_dispersion"], table["separation"] / table["full_dispersion"]
    sides = {"W": "weight_left_side", "X": "input_left_side"}
    placed = table.assign(name=table["task"], x=x, y=y)
    return pd.concat([placed.assign(parameter=name, met=table[side] < 1) for name, side in sides.items()])


def _draw_boundaries(ax: Axes, parameter: str, y: np.ndarray) -> None:
    """Curves on which the left side is 1: it grows with δ_h/δ_s at slope 1, so 1 − (left side at δ_h = 0)."""
    for delta_s, color in zip(DISPERSIONS, _SHADES, strict=True):
        full, gap = torch.full((len(y),), delta_s, dtype=torch.float64), torch.tensor(y * delta_s)
        for beta, line in zip(LOADS if parameter == "X" else LOADS[:1], _LINES, strict=False):
            nothing = torch.zeros_like(full)
            condition = (
                paper_weight_condition(full, nothing, gap)
                if parameter == "W"
                else paper_input_condition(full, nothing, gap, torch.full_like(full, beta))
            )
            edge = 1 - condition.left_side.numpy()
            named = f"boundary, δₛ = {delta_s:g}" + (f", β = {beta:g}" if beta != LOADS[0] else "")
            ax.plot(edge, y, color=color, linestyle=line, linewidth=1.4, label=named, zorder=1)
            if beta == LOADS[0]:
                ax.fill_betweenx(y, 0, np.maximum(edge, 0), color=color, alpha=0.1, linewidth=0, zorder=0)


def _draw_pairs(ax: Axes, points: pd.DataFrame, *, measured: bool) -> None:
    styles = list(ATTENTION_STYLES.values())
    for place, (name, rows) in enumerate(points.groupby("name", sort=False)):
        path = rows.sort_values("percentile")
        style = styles[(place + 1) % len(styles)]
        color = style.color if measured else _GREY
        marker, size = (style.marker, 6.5) if measured else (_MARKERS[str(name)], 6.0)
        ax.plot(path["x"], path["y"], color=color, linewidth=1.2 if measured else 0.6, zorder=2)
        for row in path.to_dict("records"):
            ax.plot(
                row["x"], row["y"], marker=marker, markersize=size, color=color, linestyle="none",
                markerfacecolor=color if row["met"] else "white", zorder=3,
            )  # fmt: skip
            if row["percentile"] == 100:
                ring: dict[str, Any] = {"marker": "o", "markersize": 11, "fillstyle": "none"}
                ax.plot(row["x"], row["y"], color=FAINT, linestyle="none", markeredgewidth=0.6, **ring)
        label = str(name) if measured else f"paper: {name}"
        ax.plot([], [], color=color, marker=marker, markersize=5, linewidth=1, label=label)


def _facts(table: pd.DataFrame, points: pd.DataFrame, parameter: str) -> list[str]:
    """At how many percentiles of measured pairs the condition holds, and their δ_s."""
    own = points[points["parameter"] == parameter]
    hidden = int((table["parameter"] == parameter).sum()) - len(own)
    judged = own[own["percentile"].isin(JUDGED_PERCENTILES)]
    said = f"measured: holds at {int(judged['met'].sum())} of {len(judged)} shown below p100"
    said += f"; {hidden} with Δₕ ≤ 0 or a tie not shown" if hidden else ""
    if own["name"].nunique() > 1:
        return [said]
    dispersions = (f"{row['full_dispersion']:.3g} (p{row['percentile']})" for row in own.to_dict("records"))
    return [said, f"measured δₛ: {', '.join(dispersions)}"]
