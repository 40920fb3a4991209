"""Percentiles of the loss's secants against the radius: full attention against its counterparts."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presenting.drawing.style import finished, panel_grid, paper_style
from semdiag.questions.lipschitz.answer.secant_percentiles import PERCENTILES, RESAMPLES, secant_percentiles


@paper_style
def lipschitz_percentiles(findings: Findings) -> Figure:
    """Draw percentiles 50, 75, 95 and 99 of |f(θ) − f(θ')| / ‖θ − θ'‖ against the radius, with bands."""
    table = findings(secant_percentiles)
    table = table[table["estimate"] > 0]
    if table.empty:
        raise NothingToDrawError("No secant of the loss was measured in a plane.")
    measured = set(table["model"])
    panels = [p for p in panels_of(findings.measurements.models) if any(s.model in measured for s in p.series)]
    figure, axes = panel_grid(len(panels) * len(PERCENTILES), height=2.6, columns=len(PERCENTILES), sharey=True)
    places = [(panel, percentile) for panel in panels for percentile in PERCENTILES]
    for place, (ax, (panel, percentile)) in enumerate(zip(axes, places, strict=True)):
        _draw(ax, panel, table[table["percentile"] == percentile])
        first = place % len(PERCENTILES) == 0
        ax.set_title(f"{panel.title}: p{percentile}" if first else f"p{percentile}")
        ax.set_xlabel("radius, in ‖θ‖")
        if first:
            ax.set_ylabel("secant of the loss\n(nats per unit of θ)")
    return finished(figure, _note(findings, table))


def _draw(ax: Axes, panel: Panel, table: pd.DataFrame) -> None:
    for series in panel.series:
        rows = table[table["model"] == series.model].sort_values("radius")
        if rows.empty:
            continue
        style = series.style
        ax.fill_between(
            rows["radius"], rows["low"].clip(lower=rows["low"][rows["low"] > 0].min()), rows["high"],
            color=style.color, alpha=0.2, linewidth=0,
        )  # fmt: skip
        ax.plot(
            rows["radius"], rows["estimate"], color=style.color, linestyle=style.line, marker=style.marker,
            markersize=3.5, linewidth=style.width, label=series.label,
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")


def _note(findings: Findings, table: pd.DataFrame) -> str:
    planes, pairs = int(table["planes"].min()), int(table["pairs"].min())
    samples = findings.measurements.provenance.get("lipschitz_samples")
    seed = findings.measurements.provenance.get("seed")
    bands = (
        f"Bands: 95%, whole planes resampled {RESAMPLES} times; they are about other planes, not about other "
        "training runs."
        if table["low"].notna().any()
        else "No bands: these are too few for intervals."
    )
    return (
        f"{planes} random planes (seed {seed}), each tensor's direction as long as the tensor; per radius {pairs} "
        "pairs of the checkpoint and points on circles, each divided by the true distance of its parameters; loss "
        f"over {samples} samples.\n{bands} "
        "Where the loss is near 0, so are its secants."
    )
