"""Within one dense model: its quantities as if each query kept its k largest scores, as boxes per layer."""

import pandas as pd
from matplotlib.axes import Axes

from semdiag.capturing.attention_kinds import DENSE
from semdiag.findings.counterfactuals import counterfactual_ks
from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import pooled_table
from semdiag.presentation.drawing.letter_values import draw_letter_values, legend_entry
from semdiag.presentation.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presentation.drawing.style import AttentionStyle, attention_style, lightened
from semdiag.presentation.sections.dispersion.dispersion_by_layer import label_layers

_MARKERS = "sPXv<>*h"
Tables = dict[tuple[str, str], pd.DataFrame]  # percentiles per layer, by model and column


def dense_panels(findings: Findings, quantity: str = "dispersion") -> tuple[list[Panel], list[int]]:
    """Panels of the models that select no keys, and the k they were measured with.

    Args:
        findings: of any number of models.
        quantity: dispersion, separation or mass; older measurements have no mass.

    Returns:
        The panels and the numbers of heavy hitters, smallest first, for which the quantity is known.

    Raises:
        NothingToDrawError: if no such model was measured with a k.
    """
    measurements = findings.measurements
    dense = measurements.models[measurements.models["attention"].isin(DENSE)]
    ks = sorted(counterfactual_ks(measurements.queries[measurements.queries["model"].isin(dense["model"])]))
    ks = [k for k in ks if f"{quantity}_k{k}" in measurements.queries]
    if not ks:
        raise NothingToDrawError("No full-attention model was measured with a counterfactual k.")
    return panels_of(dense), ks


def layer_tables(findings: Findings, panels: list[Panel], columns: list[str]) -> Tables:
    """Percentiles per layer, heads pooled.

    Args:
        findings: of the panels' models.
        panels: whose models are wanted.
        columns: of the table of queries.
    """
    wanted = {series.model for panel in panels for series in panel.series}
    return {
        (str(model), column): pooled_table(rows, column, by="layer").sort_values("layer")
        for model, rows in findings.measurements.queries.groupby("model", sort=False)
        if model in wanted
        for column in columns
    }


def k_style(ks: list[int], k: int) -> AttentionStyle:
    """Heavy hitters' colour, paler with growing k.

    Args:
        ks: all that are shown.
        k: one of them.
    """
    place, topk = ks.index(k), attention_style("topk")
    shade = lightened(topk.color, 0.6 * place / max(len(ks) - 1, 1))
    color = "#" + "".join(f"{round(255 * part):02x}" for part in shade)
    return AttentionStyle(topk.name, color, _MARKERS[place % len(_MARKERS)], topk.line, topk.width)


def draw_boxes(
    ax: Axes,
    panel: Panel,
    columns: dict[str, tuple[str, AttentionStyle]],
    tables: Tables,
    extreme: str = "p100",
) -> None:
    """Draw one group of boxes per layer, a box per column of the table of queries.

    Args:
        ax: with its scale set.
        panel: of models.
        columns: label and style by column.
        tables: from :func:`layer_tables`.
        extreme: the percentile marked as a point.
    """
    boxes = [(series, name) for series in panel.series for name in columns]
    width = 0.84 / len(boxes)
    for place, (series, name) in enumerate(boxes):
        label, style = columns[name]
        legend_entry(ax, label, style)
        shift = (place - (len(boxes) - 1) / 2) * width
        for row in tables[series.model, name].to_dict("records"):
            draw_letter_values(ax, row["layer"] + shift, 0.85 * width, row, style, extreme)
    first = next(iter(columns))
    label_layers(ax, panel, {series.model: tables[series.model, first] for series in panel.series})
