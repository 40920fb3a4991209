"""How the dispersion grows with the number of keys: a range over more scores is wider to begin with."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presenting.drawing.style import (
    AttentionStyle,
    finished,
    lightened,
    panel_grid,
    paper_style,
    plain_numbers,
    title_with_facts,
)
from semdiag.questions.dispersion.answer.comparisons import FEWEST, dispersion_by_number_of_keys


@paper_style
def dispersion_by_keys(findings: Findings) -> Figure:
    """Draw percentiles of δ against the number of keys n_i a query may attend to, layers and heads pooled."""
    curves = findings(dispersion_by_number_of_keys)
    panels = [
        p for p in panels_of(findings.measurements.models) if any(len(curves[s.model]) > 1 for s in p.series)
    ]
    if not panels:
        raise NothingToDrawError("Every query has the same number of keys.")
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel, curves)
    axes[0].set_ylabel("semantic dispersion δ (nats)")
    return finished(
        figure,
        "line: median; dark band: 25–75%, light band: 5–95% of the queries with about this many keys "
        f"(at least {FEWEST}). A query with one key has δ = 0.",
    )


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
