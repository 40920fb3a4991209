"""How the dispersion grows with the number of keys: a range over more scores is wider to begin with."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.presentation.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presentation.drawing.style import (
    AttentionStyle,
    legend_on_top,
    lightened,
    note_below,
    panel_grid,
    paper_style,
    plain_numbers,
    title_with_facts,
)

_BINS = 24
_FEWEST = 10  # queries of a bin that is drawn


@paper_style
def dispersion_by_keys(findings: Findings) -> Figure:
    """Draw percentiles of δ against the number of keys n_i a query may attend to, layers and heads pooled.

    Args:
        findings: of models whose queries differ in their number of keys: causal ones, or inputs of several
            lengths.

    Returns:
        One panel per task, seed, size and snapshot, or per external model.

    Raises:
        NothingToDrawError: if every query has the same number of keys.
    """
    curves = {
        str(model): _binned(rows) for model, rows in findings.measurements.queries.groupby("model", sort=False)
    }
    panels = [
        p for p in panels_of(findings.measurements.models) if any(len(curves[s.model]) > 1 for s in p.series)
    ]
    if not panels:
        raise NothingToDrawError("Every query has the same number of keys.")
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel, curves)
    axes[0].set_ylabel("semantic dispersion δ (nats)")
    legend_on_top(figure, axes)
    note_below(
        figure,
        "line: median; dark band: 25–75 %, light band: 5–95 % of the queries with about this many keys "
        f"(at least {_FEWEST}). A query with one key has δ = 0.",
    )
    return figure


def _binned(rows: pd.DataFrame) -> pd.DataFrame:
    """Percentiles of δ by number of keys, in bins of equal ratio."""
    finite = rows[np.isfinite(rows["dispersion"]) & (rows["keys"] > 1)]
    if finite.empty:
        return pd.DataFrame()
    keys = finite["keys"].to_numpy(float)
    edges = np.unique(np.round(np.geomspace(2, keys.max() + 1, _BINS + 1)))
    bins = np.digitize(keys, edges)
    groups = finite.assign(bin=bins).groupby("bin")
    table = groups["dispersion"].quantile([0.05, 0.25, 0.5, 0.75, 0.95]).unstack()
    table["keys"], table["queries"] = groups["keys"].mean(), groups.size()
    shown: pd.DataFrame = table[table["queries"] >= _FEWEST]
    return shown


def _draw(ax: Axes, panel: Panel, curves: dict[str, pd.DataFrame]) -> None:
    ax.set_xscale("log", base=2)
    plain_numbers(ax.xaxis)
    facts = []
    for series in panel.series:
        table, style = curves[series.model], series.style
        if len(table) < 2:
            continue
        _band(ax, table, (0.05, 0.95), style, 0.75)
        _band(ax, table, (0.25, 0.75), style, 0.45)
        ax.plot(table["keys"], table[0.5], color=style.color, linewidth=style.width, marker=style.marker,
                markersize=3, label=series.label)  # fmt: skip
        facts.append(f"{series.label}: {int(table['queries'].sum()):,} queries")
    title_with_facts(ax, panel.title, facts)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("keys a query may attend to (count)")


def _band(ax: Axes, table: pd.DataFrame, ends: tuple[float, float], style: AttentionStyle, white: float) -> None:
    low, high = ends
    ax.fill_between(table["keys"], table[low], table[high], color=lightened(style.color, white), linewidth=0)
