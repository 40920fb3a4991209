"""Semantic dispersion in every layer, all attention kinds side by side."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import pooled_table
from semdiag.presentation.drawing.letter_values import (
    READING,
    draw_letter_values,
    legend_entry,
    logarithmic_limits,
)
from semdiag.presentation.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presentation.drawing.style import legend_on_top, note_below, panel_grid, paper_style


@paper_style
def dispersion_by_layer(findings: Findings) -> Figure:
    """Draw the distribution of δ over queries per layer, heads pooled, on a logarithmic axis.

    Args:
        findings: of any number of models.

    Returns:
        One panel per task, seed, size and snapshot.

    Raises:
        NothingToDrawError: if no query has a finite positive dispersion.
    """
    panels = panels_of(findings.measurements.models)
    tables = {
        str(model): pooled_table(rows, "dispersion", by="layer").sort_values("layer")
        for model, rows in findings.measurements.queries.groupby("model", sort=False)
    }
    shown = pd.concat(tables.values()) if tables else pd.DataFrame()
    low, high = positive_range(shown, "p1", "p100")
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        logarithmic_limits(ax, low, high)
        _draw(ax, panel, tables)
    axes[0].set_ylabel("semantic dispersion δ (nats)")
    legend_on_top(figure, axes)
    note_below(figure, f"{READING}; marker: maximum")
    return figure


def positive_range(tables: pd.DataFrame, low: str, high: str) -> tuple[float, float]:
    """Smallest and largest positive percentile, for a logarithmic axis.

    Args:
        tables: percentile tables, one below the other.
        low: column of the smallest values to be seen; a column further up is taken where none is positive.
        high: column of the largest.

    Returns:
        Two positive numbers.

    Raises:
        NothingToDrawError: if there are none.
    """
    nothing = "No query has a finite value above 0, so there is nothing to show on a logarithmic axis."
    tops = tables[high].to_numpy(float) if len(tables) else np.zeros(0)
    tops = tops[np.isfinite(tops) & (tops > 0)]
    if not tops.size:
        raise NothingToDrawError(nothing)
    for column in (low, "p5", "p25", "p50", "p95", high):
        bottoms = tables[column].to_numpy(float)
        bottoms = bottoms[np.isfinite(bottoms) & (bottoms > 0)]
        if bottoms.size:
            return float(bottoms.min()), float(tops.max())
    raise NothingToDrawError(nothing)


def _draw(ax: Axes, panel: Panel, tables: dict[str, pd.DataFrame]) -> None:
    width = 0.84 / len(panel.series)
    for place, series in enumerate(panel.series):
        legend_entry(ax, series.label, series.style)
        shift = (place - (len(panel.series) - 1) / 2) * width
        for row in tables.get(series.model, pd.DataFrame()).to_dict("records"):
            draw_letter_values(ax, row["layer"] + shift, 0.85 * width, row, series.style)
    label_layers(ax, panel, tables)


def label_layers(ax: Axes, panel: Panel, tables: dict[str, pd.DataFrame]) -> None:
    """Title a panel and number its layers from 0.

    Args:
        ax: the panel's axes.
        panel: its models.
        tables: one per model, with the column layer.
    """
    layers = sorted({int(n) for s in panel.series if s.model in tables for n in tables[s.model]["layer"]})
    ax.set_xticks(layers)
    ax.set_xlim(min(layers, default=0) - 0.6, max(layers, default=0) + 0.6)
    ax.set_xlabel("layer")
    ax.set_title(panel.title)
