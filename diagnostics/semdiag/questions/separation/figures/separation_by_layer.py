"""Semantic separation in every layer: how far the last kept key stands above the first dropped one."""

import pandas as pd
from matplotlib.figure import Figure

from semdiag.measuring.findings.distributions import Percentiles, layer_percentiles, pooled_percentiles
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.letter_values import READING, layer_boxes, logarithmic_limits, positive_range
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presenting.drawing.style import finished, panel_grid, paper_style, title_with_facts


@paper_style
def separation_by_layer(findings: Findings) -> Figure:
    """Draw the distribution of Δ over queries per layer on a logarithmic axis, and state the share ≤ 0.

    Full attention drops no key, so its Δ is undefined: the panel says so and shows nothing.

    Args:
        findings: of any number of models.

    Returns:
        One panel per task, seed, size, setting and snapshot.

    Raises:
        NothingToDrawError: if no query has a finite positive separation.
    """
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
        layer_boxes(ax, [(series.label, series.style, tables[series.model]) for series in shown])
        title_with_facts(ax, panel.title, _facts(panel, pooled))
    axes[0].set_ylabel("semantic separation Δ (nats)")
    return finished(
        figure, f"{READING}; marker: maximum.\nPercentiles count separations ≤ 0, too, which lie below the axis."
    )


def _defined(table: Percentiles | None) -> bool:
    return table is not None and table["undefined"] < table["queries"]


def _facts(panel: Panel, pooled: dict[str, Percentiles]) -> list[str]:
    """What share of queries has a separation of at most 0, in words."""
    lines = []
    for series in panel.series:
        table = pooled.get(series.model)
        if table is None or not _defined(table):
            lines.append(f"{series.label}: Δ undefined, no key is dropped")
        else:
            count, queries = int(table["not_positive"]), int(table["queries"] - table["undefined"])
            share = f" ({count / queries:.2%})" if count >= queries / 1000 else ""
            lines.append(f"{series.label}: Δ ≤ 0 for {count:,} of {queries:,} queries{share}")
    return lines
