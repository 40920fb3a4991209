"""Semantic separation in every layer: how far the last kept key stands above the first dropped one."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import percentiles, pooled_table
from semdiag.presentation.drawing.letter_values import (
    READING,
    draw_letter_values,
    legend_entry,
    logarithmic_limits,
)
from semdiag.presentation.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presentation.drawing.style import legend_on_top, note_below, panel_grid, paper_style, title_with_facts
from semdiag.presentation.sections.dispersion.dispersion_by_layer import label_layers, positive_range


@paper_style
def separation_by_layer(findings: Findings) -> Figure:
    """Draw the distribution of Δ over queries per layer on a logarithmic axis, and state the share ≤ 0.

    Full attention drops no key, so its Δ is undefined: the panel says so and shows nothing.

    Args:
        findings: of any number of models.

    Returns:
        One panel per task, seed, size and snapshot.

    Raises:
        NothingToDrawError: if no query has a finite positive separation.
    """
    queries = findings.measurements.queries[["model", "layer", "separation"]]
    tables = {
        str(model): pooled_table(rows, "separation", by="layer").sort_values("layer")
        for model, rows in queries.groupby("model", sort=False)
    }
    pooled = {str(model): percentiles(rows) for model, rows in queries.groupby("model", sort=False)["separation"]}
    panels = [
        p for p in panels_of(findings.measurements.models) if any(_defined(pooled.get(s.model)) for s in p.series)
    ]
    if not panels:
        raise NothingToDrawError("No model drops a key, so the separation is undefined everywhere.")
    low, high = positive_range(pd.concat(tables.values()), "p1", "p100")
    figure, axes = panel_grid(len(panels), height=3.0)
    for ax, panel in zip(axes, panels, strict=True):
        logarithmic_limits(ax, low, high)
        _draw(ax, panel, tables, pooled)
    axes[0].set_ylabel("semantic separation Δ (nats)")
    legend_on_top(figure, axes)
    note_below(
        figure, f"{READING}; marker: maximum.\nPercentiles are of all queries: what is ≤ 0 lies below the axis."
    )
    return figure


def _defined(table: dict[str, float | int] | None) -> bool:
    return table is not None and table["undefined"] < table["queries"]


def _draw(
    ax: Axes, panel: Panel, tables: dict[str, pd.DataFrame], pooled: dict[str, dict[str, float | int]]
) -> None:
    shown = [series for series in panel.series if _defined(pooled.get(series.model))]
    width = 0.84 / len(shown)
    for place, series in enumerate(shown):
        legend_entry(ax, series.label, series.style)
        shift = (place - (len(shown) - 1) / 2) * width
        for row in tables[series.model].to_dict("records"):
            draw_letter_values(ax, row["layer"] + shift, 0.85 * width, row, series.style)
    label_layers(ax, panel, tables)
    title_with_facts(ax, panel.title, _facts(panel, pooled))


def _facts(panel: Panel, pooled: dict[str, dict[str, float | int]]) -> list[str]:
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
