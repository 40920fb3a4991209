"""Semantic dispersion in every layer, all attention kinds side by side."""

import pandas as pd
from matplotlib.figure import Figure

from semdiag.measuring.findings.distributions import layer_percentiles
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.letter_values import READING, layer_boxes, logarithmic_limits, positive_range
from semdiag.presenting.drawing.panels import panels_of
from semdiag.presenting.drawing.style import finished, panel_grid, paper_style


@paper_style
def dispersion_by_layer(findings: Findings) -> Figure:
    """Draw the distribution of δ over queries per layer, heads pooled, on a logarithmic axis.

    Args:
        findings: of any number of models.

    Returns:
        One panel per task, seed, size, setting and snapshot.

    Raises:
        NothingToDrawError: if no query has a finite positive dispersion.
    """
    panels = panels_of(findings.measurements.models)
    tables = findings(layer_percentiles, "dispersion")
    shown = pd.concat(tables.values()) if tables else pd.DataFrame()
    low, high = positive_range(shown, "p1", "p100")
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        logarithmic_limits(ax, low, high)
        layer_boxes(ax, [(s.label, s.style, tables[s.model]) for s in panel.series if s.model in tables])
        ax.set_title(panel.title)
    axes[0].set_ylabel("semantic dispersion δ (nats)")
    return finished(figure, f"{READING}; marker: maximum")
