"""Semantic dispersion in every layer, all attention kinds side by side."""

import pandas as pd
from matplotlib.figure import Figure

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.findings.distributions import layer_percentiles
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.letter_values import READING, layer_boxes, logarithmic_limits, positive_range
from semdiag.presenting.drawing.panels import panels_of
from semdiag.presenting.drawing.reference_ranges import draw_band
from semdiag.presenting.drawing.style import finished, panel_grid, paper_style


@paper_style
def dispersion_by_layer(findings: Findings) -> Figure:
    """Draw the distribution of δ over queries per layer, heads pooled, on a logarithmic axis."""
    panels = panels_of(findings.measurements.models)
    tables = findings(layer_percentiles, "dispersion")
    shown = pd.concat(tables.values()) if tables else pd.DataFrame()
    low, high = positive_range(shown, "p1", "p100")
    elsewhere = external(findings.measurements.models).all()
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        logarithmic_limits(ax, low, high)
        layer_boxes(ax, [(s.label, s.style, tables[s.model]) for s in panel.series if s.model in tables])
        if elsewhere:
            draw_band(ax, "dispersion")
        ax.set_title(panel.title)
    axes[0].set_ylabel("semantic dispersion δ (nats)")
    grey = ". Grey: median δ of 90% of the heads of two trained language models" if elsewhere else ""
    return finished(figure, f"{READING}; marker: maximum{grey}")
