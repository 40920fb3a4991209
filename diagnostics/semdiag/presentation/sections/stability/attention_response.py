"""How far attention weights move under input noise, layer by layer: full attention against its counterparts."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import percentiles, pooled_table
from semdiag.presentation.drawing.letter_values import (
    READING,
    draw_letter_values,
    legend_entry,
    logarithmic_limits,
)
from semdiag.presentation.drawing.noise import noise_facts, percent
from semdiag.presentation.drawing.panels import NothingToDrawError, Panel, panels_of
from semdiag.presentation.drawing.style import legend_on_top, note_below, panel_grid, paper_style, title_with_facts
from semdiag.presentation.sections.dispersion.dispersion_by_layer import label_layers, positive_range


@paper_style
def attention_response(findings: Findings) -> Figure:
    """Draw the distribution of ‖p − p'‖₁ under input noise per layer, heads pooled, with its mean.

    Args:
        findings: with secants.

    Returns:
        One panel per noise level and per task, seed, size and snapshot.

    Raises:
        NothingToDrawError: if nothing was perturbed, or nothing moved.
    """
    secants = findings.measurements.secants
    if secants.empty:
        raise NothingToDrawError("No input was perturbed: no response was measured.")
    tables = {
        (float(str(level)), str(model)): pooled_table(rows, "weight_change", by="layer").sort_values("layer")
        for (level, model), rows in secants.groupby(["level", "model"], sort=True)
    }
    means = {
        (float(str(level)), str(model)): percentiles(rows)["mean"]
        for (level, model), rows in secants.groupby(["level", "model"])["weight_change"]
    }
    low, high = positive_range(pd.concat(tables.values()), "p1", "p99")
    levels = sorted({level for level, _ in tables})
    measured = set(secants["model"])
    panels = [p for p in panels_of(findings.measurements.models) if any(s.model in measured for s in p.series)]
    places = [(panel, level) for panel in panels for level in levels]
    figure, axes = panel_grid(len(places), height=3.0)
    for ax, (panel, level) in zip(axes, places, strict=True):
        logarithmic_limits(ax, low, high)
        _draw(ax, panel, {model: table for (at, model), table in tables.items() if at == level})
        named = f"{panel.title}, noise {percent(level)}"
        facts = [f"{s.label}: mean {means[level, s.model]:.3g}" for s in panel.series if (level, s.model) in means]
        title_with_facts(ax, named, facts)
    axes[0].set_ylabel("response ‖p − p′‖₁ (at most 2)")
    legend_on_top(figure, axes)
    note_below(figure, f"{noise_facts(findings, secants)}.\n{READING}; marker: mean")
    return figure


def _draw(ax: Axes, panel: Panel, tables: dict[str, pd.DataFrame]) -> None:
    shown = [series for series in panel.series if series.model in tables]
    width = 0.84 / max(len(shown), 1)
    for place, series in enumerate(shown):
        legend_entry(ax, series.label, series.style)
        shift = (place - (len(shown) - 1) / 2) * width
        for row in tables[series.model].to_dict("records"):
            draw_letter_values(ax, row["layer"] + shift, 0.85 * width, row, series.style, extreme="mean")
            ax.plot(
                row["layer"] + shift, row["mean"], marker=series.style.marker, color=series.style.color,
                markersize=5, markeredgecolor="white", markeredgewidth=0.8, linestyle="none", zorder=4,
            )  # fmt: skip
    label_layers(ax, panel, tables)
