"""Figures: separation by layer, and the load of the keys."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.estimates import Percentiles, layer_percentiles, pooled_percentiles
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import (
    READING,
    NothingToDrawError,
    Panel,
    Series,
    exceedance_curve,
    layer_boxes,
    logarithmic_limits,
    panels_of,
    positive_range,
)
from semdiag.presenting.drawing.style import (
    FAINT,
    AttentionStyle,
    drawing,
    finished,
    panel_grid,
    plain_numbers,
    title_with_facts,
)


@drawing(
    "Share of keys that at least x queries keep, logarithmic axis, with k and the largest load marked: {shown}.",
    "Read a curve from left to right: how many keys are kept by at least that many queries. A curve "
    "that falls at k keeps every key about as often; a long tail means sinks, a few keys that many "
    "queries rely on, beside keys that no query keeps.",
)
def key_load(findings: Findings) -> Figure:
    """Draw the share of keys that at least x queries keep, raw counts, layers and heads pooled."""
    loads = {
        str(model): column for model, column in findings.measurements.loads.groupby("model", sort=False)["load"]
    }
    if not loads:
        raise NothingToDrawError("No key load was measured.")
    panels, pooled = panels_of(findings.measurements.models), findings(pooled_percentiles, "load")
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_yscale("log")
        plain_numbers(ax.yaxis)
        _draw(ax, panel, loads)
        shown = [series for series in panel.series if series.attention != "full" and series.model in pooled]
        title_with_facts(ax, panel.title, _shares("keys never kept", shown, pooled))
        ax.set_xlabel("load: queries that keep the key (count)")
    axes[0].set_ylabel("share of keys with at least this load")
    return finished(
        figure,
        "marker: the largest load; dashed: k, the mean load where every query keeps k keys and all were looked at",
    )


def _draw(ax: Axes, panel: Panel, loads: dict[str, "pd.Series[int]"]) -> None:
    for k in sorted({series.k for series in panel.series if series.k is not None}):
        ax.axvline(k, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)))
        ax.annotate(
            f"k = {k}", (k, 0), xycoords=("data", "axes fraction"), xytext=(3, 3), textcoords="offset points",
            fontsize=9, color=FAINT,
        )  # fmt: skip
    for series in panel.series:
        draw_loads(ax, loads.get(series.model, pd.Series(dtype=float)), series.style, series.label)
    ax.set_xlim(left=0)
    ax.margins(y=0.12)


def draw_loads(ax: Axes, loads: "pd.Series[Any]", style: AttentionStyle, label: str) -> None:
    """Draw the share of keys with at least a load, and mark the largest load."""
    x, y = exceedance_curve(loads)
    line: dict[str, Any] = {"color": style.color, "linestyle": style.line}
    ax.plot([], [], markersize=4, marker=style.marker, label=label, **line)
    if len(x):
        start = [0.0, *x], [1.0, *y]  # every key has a load of at least 0
        ax.step(*start, where="pre", linewidth=style.width, **line)
        ax.plot(x[-1], y[-1], marker=style.marker, color=style.color, markersize=5, linestyle="none")


def load_fact(label: str, *tables: Percentiles) -> str:
    """Return unused keys and largest load in words, of one or several models together."""
    unused = sum(table["not_positive"] for table in tables) / max(sum(table["queries"] for table in tables), 1)
    return f"{label}: largest load {max(table['p100'] for table in tables):g}; {unused:.0%} of keys never kept"


@drawing(
    "Distribution of the semantic separation Δ in nats per layer, as nested boxes on a "
    "logarithmic axis, with the share of queries at or below 0 stated: {shown}.",
    "Δ is the lowest kept score minus the highest dropped one; the lower ends of the boxes are "
    "what matters. A tiny Δ means that a small change of the input can swap keys in and out of "
    "the mask, and the bounds of a heavy-hitter mask grow as 1/Δ.",
)
def separation_by_layer(findings: Findings) -> Figure:
    """Draw the distribution of Δ over queries per layer on a logarithmic axis, and say the share ≤ 0."""
    tables, pooled = findings(layer_percentiles, "separation"), findings(pooled_percentiles, "separation")
    panels = [
        p for p in panels_of(findings.measurements.models) if any(_defined(pooled.get(s.model)) for s in p.series)
    ]
    if not panels:
        raise NothingToDrawError("No model drops a key, so the separation is undefined everywhere.")
    low, high = positive_range(pd.concat(tables.values()), "p1", "p100")
    figure, axes = panel_grid(len(panels), height=3.0)
    for ax, panel in zip(axes, panels, strict=True):
        logarithmic_limits(ax, low, high)
        shown = [series for series in panel.series if _defined(pooled.get(series.model))]
        layer_boxes(ax, [(series.label, series.style, tables[series.model]) for series in shown])
        title_with_facts(ax, panel.title, _shares("Δ ≤ 0 of queries", shown, pooled))
    axes[0].set_ylabel("semantic separation Δ (nats)")
    return finished(
        figure,
        f"{READING}; marker: maximum.\nA logarithmic axis cannot show queries with Δ ≤ 0; percentiles count them.",
    )


def _defined(table: Percentiles | None) -> bool:
    return table is not None and table["undefined"] < table["queries"]


def _shares(words: str, series: Sequence[Series], pooled: Mapping[str, Percentiles]) -> list[str]:
    """Return in a line the share of each model's queries or keys that are not positive, where there are some."""
    said = []
    for each in series:
        table = pooled[each.model]
        share = table["not_positive"] / max(table["queries"] - table["undefined"], 1)
        number = f"{share:.0%}" if 0.01 <= share <= 0.99 or share == 1 else "< 1%" if share < 0.01 else "> 99%"
        said += [f"{each.style.name} {number}"] if share else []
    return [f"{words}: {', '.join(said)}"] if said else []


HEADINGS = (
    Heading(
        "separation",
        "Is the mask well separated?",
        (separation_by_layer,),
        (
            "Full attention drops no key, so Δ is undefined there. Masks that ignore the input (banded, "
            "local blocks, random) drop larger scores than they keep for most queries, and bottom-k does for all: "
            "Δ ≤ 0, which lies below a logarithmic axis.",
            "A tie between the last kept and the first dropped key has Δ = 0 and counts as not positive.",
        ),
    ),
    Heading(
        "load",
        "Which keys carry the load?",
        (key_load,),
        (
            "Loads are raw counts within one sequence, layers and heads pooled; they cannot exceed its "
            "length. They count how often a key is kept, not the weight it gets.",
        ),
    ),
)
