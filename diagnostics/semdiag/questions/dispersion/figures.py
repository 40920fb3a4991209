"""Dispersion over all queries, layer by layer, and of sparse models against full attention, in figures."""

from collections.abc import Mapping, Sequence

import numpy as np
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
    FAINT,
    draw_band,
    drawing,
    finished,
    lightened,
    number_layers,
    panel_grid,
    plain_numbers,
)
from semdiag.questions.dispersion.answer import RATIO_PERCENTILES, layer_ratios


@drawing(
    "Ratio of the dispersion of sparse models to that of full attention per layer, median and 95th percentile, "
    "with 95% intervals and a line at 1: {shown}.",
    "Points below the dashed line at 1 are layers in which the sparse model has the smaller δ. If a bar, a 95% "
    "interval from resampling whole sequences, crosses 1, the layer is inconclusive.",
)
def dispersion_ratio(findings: Findings) -> Figure:
    """Draw δ_h/δ_s per layer for every pair, with 95% intervals from resampled sequences."""
    ratios = findings(layer_ratios)
    if not ratios["ratio"].notna().any():
        raise NothingToDrawError(
            "No sparse model has a full-attention counterpart of the same task, seed, size, setting and snapshot."
        )
    compared = set(ratios["model"])
    panels = [p for p in panels_of(findings.measurements.models) if any(s.model in compared for s in p.series)]
    figure, axes = panel_grid(len(RATIO_PERCENTILES) * len(panels), columns=len(RATIO_PERCENTILES))
    low = ratios[["ratio", "low"]].min().min()
    high = ratios[["ratio", "high"]].max().max()
    places = [(panel, percentile) for panel in panels for percentile in RATIO_PERCENTILES]
    for ax, (panel, percentile) in zip(axes, places, strict=True):
        ax.set_yscale("log", base=2)
        ends = min(low, 0.5), max(high, 2.0)
        if 0 < ends[0] < ends[1] < float("inf"):  # of a diverged model neither need hold
            ax.set_ylim(ends[0] / 1.1, ends[1] * 1.1)
        plain_numbers(ax.yaxis)
        ax.axhline(1.0, color=FAINT, linewidth=1.0, linestyle=(0, (4, 2)))
        which = "median" if percentile == 50 else f"p{percentile}"
        layers_below = _draw(ax, panel, ratios[ratios["percentile"] == percentile])
        ax.set_title(f"{panel.title}, {which}: below 1 in {layers_below}")
        if percentile == RATIO_PERCENTILES[0]:
            ax.set_ylabel("δ of sparse / δ of full attention")
    return finished(
        figure,
        "bars: 95% intervals, whole sequences resampled; a layer counts if its whole bar is below 1: more focused "
        "than full attention",
    )


def _draw(ax: Axes, panel: Panel, ratios: pd.DataFrame) -> str:
    """Draw the ratios of a panel's sparse models; return in how many layers each is surely below 1."""
    sparse = [series for series in panel.series if series.model in set(ratios["model"])]
    below = []
    for place, series in enumerate(sparse):
        rows = ratios[ratios["model"] == series.model].dropna(subset=["ratio"])
        below.append(rows["high"].fillna(rows["ratio"]) < 1)
        control = series.attention != "topk"
        color = lightened(series.style.color, 0.35) if control else series.style.color
        ax.errorbar(
            rows["layer"] + (place - (len(sparse) - 1) / 2) * 0.12,
            rows["ratio"], yerr=np.stack([rows["ratio"] - rows["low"], rows["high"] - rows["ratio"]]).clip(min=0),
            color=color, marker=series.style.marker, markersize=4 if control else 5.5, linestyle="none",
            elinewidth=1.0, capsize=2,
            label=series.label + (", control" if control else ""),
        )  # fmt: skip
    number_layers(ax, sorted(ratios["layer"].unique()))
    return layers_with(sparse, below)


MARKED = (50, 75, 90, 95)


@drawing(
    "Cumulative distribution of the semantic dispersion δ in nats, logarithmic axis, one curve per model, "
    "percentiles 50, 75, 90 and 95 marked: {shown}.",
    "A curve further left has the smaller dispersion δ, the range (largest minus smallest) of the scores that a "
    "query's softmax mixes. With a small δ no kept key can take more than e^δ/(e^δ + k − 1) of the weight; the "
    "paper's bounds grow with e^δ, and so it ties a small δ to fast learning.",
)
def dispersion_ecdf(findings: Findings) -> Figure:
    """Draw the share of queries whose δ is at most x, layers and heads pooled, with percentiles marked."""
    panels = panels_of(findings.measurements.models)
    models = findings.measurements.queries["model"].unique()
    values = {str(model): known_rows(findings, str(model), "dispersion")["dispersion"] for model in models}
    if not any(len(cumulative_curve(column)[0]) for column in values.values()):
        raise NothingToDrawError("No query has a finite dispersion above 0.")
    figure, axes = panel_grid(len(panels), sharex=True)
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_xscale("log")
        plain_numbers(ax.xaxis)
        _draw_ecdf(ax, panel, values, findings(pooled_percentiles, "dispersion"))
        ax.set_title(panel.title)
        ax.set_xlabel("semantic dispersion δ (nats)")
    axes[0].set_ylabel("share of queries with δ ≤ x")
    return finished(figure, "markers: 50th, 75th, 90th and 95th percentile; further left = more focused")


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


HEADINGS = (
    *heading(
        "focus", "Do the scores of the sparse model span less?", (dispersion_ecdf, dispersion_by_layer),
        "Two models are compared, each trained with its own attention and measured on its own scores. Nothing "
        "here says what one of them would do with the other's mask.",
        "Percentiles pool the queries of all layers and heads. The maximum (p100) is one single query: shown, not "
        "judged.",
        "A range over a few keys is never larger than that over all keys of the row: the controls with a fixed "
        "mask show how much that alone can make.",
    ),
    *heading(
        "ratio", "How much smaller, layer by layer?", (dispersion_ratio,),
        "The intervals are about other inputs of the same kind, not about other training runs. Layers are matched "
        "by their position; nothing says that they do the same work.",
    ),
)  # fmt: skip
EXTERNAL = heading(
    "spread", "How far apart are the scores?", (dispersion_by_layer,),
    "Percentiles pool the queries of all heads of a layer; layers are numbered as they first ran. The maximum "
    "(p100) is one single query.",
    "In causal models the first queries see few keys, and a range over fewer scores is smaller: they pull every "
    "percentile down (--min-keys leaves them out).",
)  # fmt: skip
