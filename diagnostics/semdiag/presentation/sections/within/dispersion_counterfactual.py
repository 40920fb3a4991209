"""Within one full-attention model: what its dispersion would be over its k largest scores only."""

import pandas as pd
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.presentation.drawing.letter_values import READING, logarithmic_limits
from semdiag.presentation.drawing.style import attention_style, legend_on_top, note_below, panel_grid, paper_style
from semdiag.presentation.sections.dispersion.dispersion_by_layer import positive_range
from semdiag.presentation.sections.within.boxes import dense_panels, draw_boxes, k_style, layer_tables


@paper_style
def dispersion_counterfactual(findings: Findings) -> Figure:
    """Draw δ_s and δ_h(k) = z(1) − z(k) of the same rows of scores, per layer of each full model.

    This is the within-model comparison: no sparse model is involved.

    Args:
        findings: with columns ``dispersion_kK`` for full models.

    Returns:
        One panel per task, seed, size and snapshot.

    Raises:
        NothingToDrawError: if no full model was measured with counterfactual k.
    """
    panels, ks = dense_panels(findings)
    columns = {"dispersion": ("δₛ, all keys", attention_style("full"))}
    columns |= {f"dispersion_k{k}": (f"δₕ({k}), largest scores only", k_style(ks, k)) for k in ks}
    tables = layer_tables(findings, panels, list(columns))
    low, high = positive_range(pd.concat(tables.values()), "p1", "p100")
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        logarithmic_limits(ax, low, high)
        draw_boxes(ax, panel, columns, tables)
        ax.set_title(f"{panel.title}: within the full model")
    axes[0].set_ylabel("dispersion (nats)")
    legend_on_top(figure, axes)
    note_below(
        figure, f"{READING}; marker: maximum.\nWithin one model: all boxes of a layer come from the same scores."
    )
    return figure
