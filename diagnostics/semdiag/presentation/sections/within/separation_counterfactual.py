"""Within one full-attention model: how well its k largest scores stand apart from the rest."""

import pandas as pd
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.presentation.drawing.letter_values import READING, logarithmic_limits
from semdiag.presentation.drawing.style import legend_on_top, note_below, panel_grid, paper_style
from semdiag.presentation.sections.dispersion.dispersion_by_layer import positive_range
from semdiag.presentation.sections.within.boxes import dense_panels, draw_boxes, k_style, layer_tables


@paper_style
def separation_counterfactual(findings: Findings) -> Figure:
    """Draw Δ_h(k) = z(k) − z(k+1) of each query's scores, per layer of each full model.

    Args:
        findings: with columns ``separation_kK`` for full models.

    Returns:
        One panel per task, seed, size and snapshot, or per external model.

    Raises:
        NothingToDrawError: if no full model was measured with counterfactual k, or no query drops a key.
    """
    panels, ks = dense_panels(findings)
    columns = {f"separation_k{k}": (f"Δₕ({k})", k_style(ks, k)) for k in ks}
    tables = layer_tables(findings, panels, list(columns))
    low, high = positive_range(pd.concat(tables.values()), "p1", "p100")
    figure, axes = panel_grid(len(panels), height=3.0)
    for ax, panel in zip(axes, panels, strict=True):
        logarithmic_limits(ax, low, high)
        draw_boxes(ax, panel, columns, tables)
        ax.set_title(f"{panel.title}: within the full model")
    axes[0].set_ylabel("separation Δₕ(k) (nats)")
    legend_on_top(figure, axes)
    note_below(
        figure, f"{READING}; marker: maximum.\nQueries with at most k keys drop none: they have no separation."
    )
    return figure
