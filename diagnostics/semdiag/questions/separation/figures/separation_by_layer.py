"""Semantic separation in every layer: how far the last kept key stands above the first dropped one."""

from collections.abc import Hashable, Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.distributions import Percentiles, layer_percentiles, pooled_percentiles
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.letter_values import READING, layer_boxes, logarithmic_limits, positive_range
from semdiag.presenting.drawing.panels import NothingToDrawError, panels_of
from semdiag.presenting.drawing.style import finished, panel_grid, paper_style


@paper_style
def separation_by_layer(findings: Findings) -> Figure:
    """Draw the distribution of Δ over queries per layer on a logarithmic axis, and at its foot the share ≤ 0."""
    tables, pooled = findings(layer_percentiles, "separation"), findings(pooled_percentiles, "separation")
    panels = [
        p for p in panels_of(findings.measurements.models) if any(_defined(pooled.get(s.model)) for s in p.series)
    ]
    if not panels:
        raise NothingToDrawError("No model drops a key, so the separation is undefined everywhere.")
    low, high = positive_range(pd.concat(tables.values()), "p1", "p100")
    figure, axes = panel_grid(len(panels), height=3.0)
    for ax, panel in zip(axes, panels, strict=True):
        logarithmic_limits(ax, low, high)
        shown = [series for series in panel.series if _defined(pooled.get(series.model))]
        drawn = layer_boxes(ax, [(series.label, series.style, tables[series.model]) for series in shown])
        for x, row, style in drawn:
            _write_share(ax, x, row, style.color)
        ax.set_title(panel.title)
    axes[0].set_ylabel("semantic separation Δ (nats)")
    return finished(
        figure,
        f"{READING}; marker: maximum.\nAt the foot: share of the queries with Δ ≤ 0, which a logarithmic axis "
        "cannot show; percentiles count them.",
    )


def _defined(table: Percentiles | None) -> bool:
    return table is not None and table["undefined"] < table["queries"]


def _write_share(ax: Axes, x: float, row: Mapping[Hashable, float], color: str) -> None:
    """Write the share of the queries of a layer that have Δ ≤ 0 at the foot of its box, if there is any."""
    queries = row["queries"] - row["undefined"]
    if queries and row["not_positive"]:
        share = row["not_positive"] / queries
        words = f"{share:.0%}" if 0.01 <= share <= 0.99 or share == 1 else "< 1%" if share < 0.01 else "> 99%"
        ax.annotate(
            f"≤ 0: {words}", (x, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=6, color=color,
            ha="center", va="bottom",
        )  # fmt: skip
