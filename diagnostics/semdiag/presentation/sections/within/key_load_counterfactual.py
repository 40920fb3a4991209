"""Within one full-attention model: how many queries would keep the same key."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import percentiles
from semdiag.presentation.drawing.curves import exceedance_curve
from semdiag.presentation.drawing.panels import Panel
from semdiag.presentation.drawing.style import (
    legend_on_top,
    note_below,
    panel_grid,
    paper_style,
    plain_numbers,
    title_with_facts,
)
from semdiag.presentation.sections.within.boxes import dense_panels, k_style


@paper_style
def key_load_counterfactual(findings: Findings) -> Figure:
    """Draw the share of keys that at least x queries would keep among their k largest scores.

    Args:
        findings: with columns ``load_kK`` for full models.

    Returns:
        One panel per task, seed, size and snapshot, or per external model.

    Raises:
        NothingToDrawError: if no full model was measured with counterfactual k.
    """
    panels, ks = dense_panels(findings)
    loads = {str(model): rows for model, rows in findings.measurements.loads.groupby("model", sort=False)}
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_yscale("log")
        plain_numbers(ax.yaxis)
        facts = [_draw(ax, panel, loads, ks, k) for k in ks]
        title_with_facts(ax, f"{panel.title}: within the full model", facts)
        ax.set_xlabel("load: queries that would keep the key (count)")
        ax.set_xlim(left=0)
        ax.margins(y=0.12)
    axes[0].set_ylabel("share of keys with at least this load")
    legend_on_top(figure, axes)
    note_below(figure, "marker: the largest load; layers, heads and sequences pooled")
    return figure


def _draw(ax: Axes, panel: Panel, loads: dict[str, pd.DataFrame], ks: list[int], k: int) -> str:
    """Draw the curve of one k; return unused keys and largest load in words."""
    style, column = k_style(ks, k), f"load_k{k}"
    values = pd.concat([loads[series.model][column] for series in panel.series])
    x, y = exceedance_curve(values)
    ax.plot([], [], color=style.color, marker=style.marker, markersize=4, label=f"k = {k}")
    if len(x):
        ax.step([0.0, *x], [1.0, *y], where="pre", color=style.color, linewidth=1.6)
        ax.plot(x[-1], y[-1], marker=style.marker, color=style.color, markersize=5, linestyle="none")
    table = percentiles(values)
    unused = table["not_positive"] / max(table["queries"], 1)
    return f"k = {k}: largest load {table['p100']:g}; {unused:.0%} of keys never kept"
