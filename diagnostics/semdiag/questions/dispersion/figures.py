"""Dispersion over all queries, layer by layer, and of sparse models against full attention, in figures."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.capturing.attention_call import DENSE, external
from semdiag.measuring.findings.estimates import Percentiles, known_rows, layer_percentiles, pooled_percentiles
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.answer import heading
from semdiag.presenting.drawing.panels import (
    READING,
    NothingToDrawError,
    Panel,
    Series,
    cumulative_curve,
    layer_boxes,
    layers_span,
    layers_with,
    logarithmic_limits,
    panels_of,
    positive_range,
)
from semdiag.presenting.drawing.style import (
    draw_band,
    drawing,
    finished,
    panel_grid,
    plain_numbers,
)
from semdiag.questions.dispersion.measure import INITIALISATION

MARKED = (50, 75, 90, 95)


@drawing(
    "Cumulative distribution of the semantic dispersion δ in nats, logarithmic axis, one curve per model, "
    "percentiles 50, 75, 90 and 95 marked, and the median before training where it is known: {shown}.",
    "A curve further left has the smaller dispersion δ, the range (largest minus smallest) of the scores that a "
    "query's softmax mixes. The paper's bounds grow with e^δ, and so it ties a small δ to fast learning.",
)
def dispersion_ecdf(findings: Findings) -> Figure:
    """Draw the share of queries whose δ is at most x, layers and heads pooled, with percentiles marked."""
    panels = panels_of(findings.measurements.models)
    models = findings.measurements.queries["model"].unique()
    values = {str(model): known_rows(findings, str(model), "dispersion")["dispersion"] for model in models}
    if not any(len(cumulative_curve(column)[0]) for column in values.values()):
        raise NothingToDrawError("No query has a finite dispersion above 0.")
    table = findings.measurements[INITIALISATION]
    initial = dict(zip(table["model"], table["dispersion"], strict=True))
    figure, axes = panel_grid(len(panels), sharex=True)
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_xscale("log")
        plain_numbers(ax.xaxis)
        _draw_ecdf(ax, panel, values, findings(pooled_percentiles, "dispersion"))
        _mark_initialisation(ax, panel, initial)
        ax.set_title(panel.title)
        ax.set_xlabel("semantic dispersion δ (nats)")
    axes[0].set_ylabel("share of queries with δ ≤ x")
    before = "; hollow: median before training" if initial else ""
    return finished(figure, f"markers: 50th, 75th, 90th and 95th percentile{before}; further left = more focused")


def _mark_initialisation(ax: Axes, panel: Panel, medians: Mapping[str, float]) -> None:
    """Mark the median δ that each model of a panel had before it was trained, where that is known."""
    for series in panel.series:
        median = medians.get(series.model, 0.0)
        if median > 0:
            style = series.style
            ax.plot(
                median, 0.5, color=style.color, marker=style.marker, markerfacecolor="white", markersize=6,
                linestyle="none", clip_on=False,
            )  # fmt: skip


def _draw_ecdf(
    ax: Axes, panel: Panel, values: dict[str, "pd.Series[float]"], pooled: dict[str, Percentiles]
) -> None:
    ax.set_ylim(0, 1.02)
    for share in MARKED:
        ax.axhline(share / 100, color="#e4e4e4", linewidth=0.6, zorder=0)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 0.95])  # that of 90% would touch the last
    ax.grid(visible=False)
    for series in panel.series:
        column = values.get(series.model, pd.Series(dtype=float))
        x, y = cumulative_curve(column)
        style = series.style
        symbol = "δₛ" if series.attention in DENSE else "δₕ"
        label = f"{symbol}, {series.label}"
        ax.plot([], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=4, label=label)
        if not len(x):
            continue
        ax.plot(x, y, color=style.color, linestyle=style.line, linewidth=style.width)
        marks = [pooled[series.model][f"p{share}"] for share in MARKED]
        heights = [share / 100 for share in MARKED]
        ax.plot(marks, heights, color=style.color, marker=style.marker, linestyle="none", markersize=4)


@drawing(
    "Distribution of the semantic dispersion δ in nats per layer, as nested boxes on a logarithmic axis: {shown}.",
    "δ is the range, largest minus smallest, of the scores that a query's softmax mixes: of all keys with full "
    "attention, of the kept ones with sparse. A small δ means that these keys compete on nearly equal terms: none "
    "of n can take more than e^δ/(e^δ + n − 1) of the weight. The paper's bounds on learning grow with e^δ.",
)
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
        series = [each for each in panel.series if each.model in tables]
        layer_boxes(ax, [(each.label, each.style, tables[each.model]) for each in series])
        if elsewhere:
            draw_band(ax, "dispersion", tables)
        ax.set_title(f"{panel.title}: {_layers_found(series, tables)}")
    axes[0].set_ylabel("semantic dispersion δ (nats)")
    grey = ". Grey: median δ of 90% of the heads of other trained models" if elsewhere else ""
    return finished(figure, f"{READING}; marker: maximum{grey}")


def _layers_found(series: Sequence[Series], tables: Mapping[str, pd.DataFrame]) -> str:
    """Return in how many layers sparse models have the smaller median δ; without full attention, its span."""
    medians = [tables[each.model].set_index("layer")["p50"] for each in series]
    if len(series) < 2 or [each.attention for each in series].count("full") != 1:
        return layers_span("δ", [tables[each.model] for each in series])
    below = [(of_model - medians[0]).dropna() < 0 for of_model in medians[1:]]  # full attention is the first
    return f"median δ below full attention's in {layers_with(series[1:], below)}"


HEADINGS = heading(
    "focus", "Do the scores of the sparse model span less?", (dispersion_ecdf, dispersion_by_layer),
    "Two models are compared, each trained with its own attention and measured on its own scores. Nothing here "
    "says what one of them would do with the other's mask.",
    "Percentiles pool the queries of all layers and heads. The maximum (p100) is one single query: shown, not "
    "judged.",
    "A range over a few keys is never larger than that over all keys of the row: the controls with a fixed mask "
    "show how much that alone can make.",
    "The intervals are about other inputs of the same kind, not about other training runs. Layers are matched by "
    "their position; nothing says that they do the same work.",
)  # fmt: skip
EXTERNAL = heading(
    "spread", "How far apart are the scores?", (dispersion_by_layer,),
    "Percentiles pool the queries of all heads of a layer; layers are numbered as they first ran. The maximum "
    "(p100) is one single query.",
    "In causal models the first queries see few keys, and a range over fewer scores is smaller: they pull every "
    "percentile down (--min-keys leaves them out).",
)  # fmt: skip
