"""Boxes per layer of one dense model's quantities, as if each query kept its k largest scores."""

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.capturing.attention_kinds import DENSE
from semdiag.measuring.findings.counterfactuals import counterfactual_ks
from semdiag.measuring.findings.distributions import layer_percentiles
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.letter_values import READING, layer_boxes
from semdiag.presenting.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presenting.drawing.style import AttentionStyle, attention_style, finished, lightened, panel_grid

_MARKERS = "sPXv<>*h"
Tables = dict[tuple[str, str], pd.DataFrame]  # percentiles per layer, by model and column


def dense_panels(findings: Findings, quantity: str = "dispersion") -> tuple[list[Panel], list[int]]:
    """Return panels of models that keep every key, and the k with which they were measured."""
    measurements = findings.measurements
    dense = measurements.models[measurements.models["attention"].isin(DENSE)]
    ks = sorted(counterfactual_ks(measurements.queries[measurements.queries["model"].isin(dense["model"])]))
    ks = [k for k in ks if f"{quantity}_k{k}" in measurements.queries]
    if not ks:
        raise NothingToDrawError("No full-attention model was measured with a counterfactual k.")
    return panels_of(dense), ks


def layer_tables(findings: Findings, panels: list[Panel], columns: list[str]) -> Tables:
    """Return percentiles per layer, heads pooled."""
    models = {series.model for panel in panels for series in panel.series}
    return {
        (model, column): table
        for column in columns
        for model, table in findings(layer_percentiles, column).items()
        if model in models
    }


def k_style(ks: list[int], k: int) -> AttentionStyle:
    """Return the style of the k largest scores: paler with growing k."""
    place, topk = ks.index(k), attention_style("topk")
    shade = lightened(topk.color, 0.6 * place / max(len(ks) - 1, 1))
    color = "#" + "".join(f"{round(255 * part):02x}" for part in shade)
    return AttentionStyle(topk.name, color, _MARKERS[place % len(_MARKERS)], "-", 1.6)


def within_boxes(
    panels: list[Panel],
    columns: dict[str, tuple[str, AttentionStyle]],
    tables: Tables,
    scale: Callable[[Axes], None],
    ylabel: str,
    note: str,
    *,
    extreme: str = "p100",
    height: float = 2.7,
) -> Figure:
    """Draw one group of boxes per layer of each model, a box per column of the table of queries."""
    figure, axes = panel_grid(len(panels), height=height)
    for ax, panel in zip(axes, panels, strict=True):
        scale(ax)
        boxes = [(*columns[name], tables[series.model, name]) for series in panel.series for name in columns]
        layer_boxes(ax, boxes, extreme)
        ax.set_title(panel.title)
    axes[0].set_ylabel(ylabel)
    return finished(figure, f"Within each model; {READING}; {note}")
