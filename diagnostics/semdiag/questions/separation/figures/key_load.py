"""How many queries keep the same key: the load of the keys, and its sinks."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.distributions import Percentiles
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.curves import exceedance_curve
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presenting.drawing.style import (
    FAINT,
    AttentionStyle,
    finished,
    panel_grid,
    paper_style,
    plain_numbers,
)


@paper_style
def key_load(findings: Findings) -> Figure:
    """Draw the share of keys that at least x queries keep, raw counts, layers and heads pooled."""
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
        ax.set_title(panel.title)
        ax.set_xlabel("load: queries that keep the key (count)")
    axes[0].set_ylabel("share of keys with at least this load")
    return finished(
        figure,
        "marker: the largest load; dashed: k, the mean load where every query keeps k keys and all were looked at",
    )


def _draw(ax: Axes, panel: Panel, loads: dict[str, "pd.Series[int]"]) -> None:
    for k in sorted({series.k for series in panel.series if series.k is not None}):
        ax.axvline(k, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)))
        ax.annotate(
            f"k = {k}", (k, 0), xycoords=("data", "axes fraction"), xytext=(3, 3), textcoords="offset points",
            fontsize=7, color=FAINT,
        )  # fmt: skip
    for series in panel.series:
        draw_loads(ax, loads.get(series.model, pd.Series(dtype=float)), series.style, series.label)
    ax.set_xlim(left=0)
    ax.margins(y=0.12)


def draw_loads(ax: Axes, loads: "pd.Series[Any]", style: AttentionStyle, label: str) -> None:
    """Draw the share of keys with at least a load, and mark the largest load."""
    x, y = exceedance_curve(loads)
    line: dict[str, Any] = {"color": style.color, "linestyle": style.line}
    ax.plot([], [], markersize=4, marker=style.marker, label=label, **line)
    if len(x):
        start = [0.0, *x], [1.0, *y]  # every key has a load of at least 0
        ax.step(*start, where="pre", linewidth=style.width, **line)
        ax.plot(x[-1], y[-1], marker=style.marker, color=style.color, markersize=5, linestyle="none")


def load_fact(label: str, *tables: Percentiles) -> str:
    """Return unused keys and largest load in words, of one or several models together."""
    unused = sum(table["not_positive"] for table in tables) / max(sum(table["queries"] for table in tables), 1)
    return f"{label}: largest load {max(table['p100'] for table in tables):g}; {unused:.0%} of keys never kept"
