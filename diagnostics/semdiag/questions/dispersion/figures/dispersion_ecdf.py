"""Pooled dispersion of full attention against that of heavy-hitter masks, as cumulative distributions."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.capturing.attention_kinds import DENSE
from semdiag.measuring.findings.distributions import Percentiles, known_rows, pooled_percentiles
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.curves import cumulative_curve
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presenting.drawing.style import finished, panel_grid, paper_style, plain_numbers

MARKED = (50, 75, 90, 95)


@paper_style
def dispersion_ecdf(findings: Findings) -> Figure:
    """Draw the share of queries whose δ is at most x, layers and heads pooled, with percentiles marked."""
    panels = panels_of(findings.measurements.models)
    models = findings.measurements.queries["model"].unique()
    values = {str(model): known_rows(findings, str(model), "dispersion")["dispersion"] for model in models}
    if not any(len(cumulative_curve(column)[0]) for column in values.values()):
        raise NothingToDrawError("No query has a finite dispersion above 0.")
    figure, axes = panel_grid(len(panels), sharex=True)
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_xscale("log")
        plain_numbers(ax.xaxis)
        _draw(ax, panel, values, findings(pooled_percentiles, "dispersion"))
        ax.set_title(panel.title)
        ax.set_xlabel("semantic dispersion δ (nats)")
    axes[0].set_ylabel("share of queries with δ ≤ x")
    return finished(figure, "markers: 50th, 75th, 90th and 95th percentile; further left = more focused")


def _draw(ax: Axes, panel: Panel, values: dict[str, "pd.Series[float]"], pooled: dict[str, Percentiles]) -> None:
    ax.set_ylim(0, 1.02)
    for share in MARKED:
        ax.axhline(share / 100, color="#e4e4e4", linewidth=0.6, zorder=0)
    ax.set_yticks([0, 0.25, *(share / 100 for share in MARKED)])
    ax.grid(visible=False)
    for series in panel.series:
        column = values.get(series.model, pd.Series(dtype=float))
        x, y = cumulative_curve(column)
        style = series.style
        symbol = "δₛ" if series.attention in DENSE else "δₕ"
        label = f"{symbol}, {series.label}"
        ax.plot([], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=4, label=label)
        if not len(x):
            continue
        ax.plot(x, y, color=style.color, linestyle=style.line, linewidth=style.width)
        marks = [pooled[series.model][f"p{share}"] for share in MARKED]
        heights = [share / 100 for share in MARKED]
        ax.plot(marks, heights, color=style.color, marker=style.marker, linestyle="none", markersize=4)
