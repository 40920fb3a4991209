"""How many queries keep the same key: the load of the keys, and its sinks."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import percentiles
from semdiag.presentation.drawing.curves import exceedance_curve
from semdiag.presentation.drawing.panels import NothingToDrawError, Panel, Series, panels_of
from semdiag.presentation.drawing.style import (
    FAINT,
    legend_on_top,
    note_below,
    panel_grid,
    paper_style,
    plain_numbers,
    title_with_facts,
)


@paper_style
def key_load(findings: Findings) -> Figure:
    """Draw the share of keys that at least x queries keep, raw counts, layers and heads pooled.

    Args:
        findings: of any number of models.

    Returns:
        One panel per task, seed, size and snapshot, with k and the largest load marked.

    Raises:
        NothingToDrawError: if no load was measured.
    """
    loads = {
        str(model): column for model, column in findings.measurements.loads.groupby("model", sort=False)["load"]
    }
    if not loads:
        raise NothingToDrawError("No key load was measured.")
    panels = panels_of(findings.measurements.models)
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_yscale("log")
        plain_numbers(ax.yaxis)
        _draw(ax, panel, loads)
        title_with_facts(ax, panel.title, [_fact(s, loads) for s in panel.series if s.model in loads])
        ax.set_xlabel("load: queries that keep the key (count)")
    axes[0].set_ylabel("share of keys with at least this load")
    legend_on_top(figure, axes)
    note_below(
        figure, "marker: the largest load; dashed: k, which is the mean load where every query keeps k keys"
    )
    return figure


def _draw(ax: Axes, panel: Panel, loads: dict[str, "pd.Series[int]"]) -> None:
    for k in sorted({series.k for series in panel.series if series.k is not None}):
        ax.axvline(k, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)))
        ax.annotate(
            f"k = {k}", (k, 0), xycoords=("data", "axes fraction"), xytext=(3, 3), textcoords="offset points",
            fontsize=7, color=FAINT,
        )  # fmt: skip
    for series in panel.series:
        x, y = exceedance_curve(loads.get(series.model, pd.Series(dtype=float)))
        style = series.style
        handle: dict[str, Any] = {
            "color": style.color,
            "linestyle": style.line,
            "marker": style.marker,
            "label": series.label,
        }
        ax.plot([], [], markersize=4, **handle)
        if not len(x):
            continue
        start = [0.0, *x], [1.0, *y]  # every key has a load of at least 0
        ax.step(*start, where="pre", color=style.color, linestyle=style.line, linewidth=style.width)
        ax.plot(x[-1], y[-1], marker=style.marker, color=style.color, markersize=5, linestyle="none")
    ax.set_xlim(left=0)
    ax.margins(y=0.12)


def _fact(series: Series, loads: dict[str, "pd.Series[int]"]) -> str:
    """Unused keys and largest load in words."""
    table = percentiles(loads[series.model])
    unused = table["not_positive"] / max(table["queries"], 1)
    return f"{series.label}: largest load {table['p100']:g}; {unused:.0%} of keys never kept"
