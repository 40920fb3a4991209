"""How far attention weights move under input noise, layer by layer: full attention against its counterparts."""

import pandas as pd
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.letter_values import READING, layer_boxes, logarithmic_limits, positive_range
from semdiag.presenting.drawing.noise import noise_facts, percent
from semdiag.presenting.drawing.panels import NothingToDrawError, panels_of
from semdiag.presenting.drawing.style import finished, panel_grid, paper_style
from semdiag.questions.stability.answer import response_by_layer

_DECADES = 1e6  # from the largest response down: what lies below is no response


@paper_style
def attention_response(findings: Findings) -> Figure:
    """Draw the distribution of ‖p − p'‖₁ under input noise per layer, heads pooled, with its mean."""
    secants = findings.measurements.secants
    if secants.empty:
        raise NothingToDrawError("No input was perturbed: no response was measured.")
    tables = findings(response_by_layer)
    low, high = positive_range(pd.concat(tables.values()), "p1", "p99")
    low = max(low, high / _DECADES)
    levels = sorted({level for level, _ in tables})
    measured = set(secants["model"])
    panels = [p for p in panels_of(findings.measurements.models) if any(s.model in measured for s in p.series)]
    places = [(panel, level) for panel in panels for level in levels]
    figure, axes = panel_grid(len(places), height=3.0)
    for ax, (panel, level) in zip(axes, places, strict=True):
        logarithmic_limits(ax, low, high)
        boxes = [(s.label, s.style, tables[level, s.model]) for s in panel.series if (level, s.model) in tables]
        layer_boxes(ax, boxes, extreme="mean")
        named = f"{panel.title}, noise {percent(level)}"
        ax.set_title(named)
    cut = " Boxes that reach further down are cut at the axis." if low == high / _DECADES else ""
    axes[0].set_ylabel("response ‖p − p′‖₁ (at most 2)")
    return finished(figure, f"{noise_facts(findings, secants)}.\n{READING}; marker: mean.{cut}")
