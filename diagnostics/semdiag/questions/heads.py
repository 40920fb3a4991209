"""What does each head do? Dispersion, entropy and weight on the first key of every head."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from semdiag.measuring.findings.estimates import counterfactual_ks
from semdiag.measuring.findings.findings import Findings, modules_by_layer, records
from semdiag.measuring.metrics import METRICS, NATS, SHARE, Metric
from semdiag.measuring.words import counted, layer_name, number
from semdiag.presenting.answer import Answer, Glance, Outcome, heading, with_facts
from semdiag.presenting.drawing.panels import NothingToDrawError, heat_map, name_cells, short_labels
from semdiag.presenting.drawing.style import drawing, note_below, page_width, panel_grid

_PLACE = ["model", "layer", "head"]
_EXTREMES = (  # column, whether the largest or the smallest, in words
    ("dispersion", True, "scores furthest apart (median δ {:.3g} nats)"),
    ("dispersion", False, "scores closest together (median δ {:.2g} nats)"),
    ("first_weight", True, "most weight on the first key ({:.0%})"),
    ("entropy", False, "most focused (entropy {:.2g} nats)"),
    ("entropy", True, "most even (entropy {:.3g} nats)"),
)


def head_table(findings: Findings) -> pd.DataFrame:
    """Return one row per model, layer and head; layers and heads count from 0."""
    measurements = findings.measurements
    queries = measurements.queries
    finite = queries[queries["dispersion"].abs() < float("inf")]
    table = finite.groupby(_PLACE, sort=False)["dispersion"].median().rename("dispersion").to_frame()
    if "largest_weight" in queries:
        table["largest_weight"] = queries.groupby(_PLACE, sort=False)["largest_weight"].median()
    k = first_k(findings)
    sums = queries.groupby(_PLACE, sort=False)[["kept", "keys"]].sum()
    keeps_all = sums["kept"] == sums["keys"]
    heads = measurements.heads.set_index(_PLACE)
    keeps_first = heads.reindex(index=table.index, columns=["keeps_first", f"keeps_first_k{k}"]).astype("float64")
    table["keeps_first"] = keeps_first["keeps_first"].mask(keeps_all).fillna(keeps_first[f"keeps_first_k{k}"])
    if k is not None and f"weight_kept_k{k}" in queries:
        table["weight_kept"] = queries.groupby(_PLACE, sort=False)[f"weight_kept_k{k}"].median()
    table = table.join(heads[["entropy", "first_weight"]]) if len(heads) else table
    return table.reset_index()


def heads_glance(findings: Findings) -> Glance:
    """Return how much of its weight a head puts on the first key: the mean, and the largest."""
    table = findings(head_table)
    measured = table.dropna(subset=["first_weight"]) if "first_weight" in table else table.iloc[:0]
    if measured.empty:
        return Glance(Outcome.MEASURED, counted(len(table), "head"), "measured")
    means = measured.groupby("model")["first_weight"].mean()
    if len(means) > 1:
        return Glance(
            Outcome.MEASURED, f"{100 * means.min():.0f} to {100 * means.max():.0f}%",
            f"of a head's weight is on the first key, mean over the heads of each of {len(means)} models",
        )  # fmt: skip
    most = records(measured.sort_values("first_weight"))[-1]
    layer = layer_name(most["layer"], findings(modules_by_layer, most["model"]))
    return Glance(
        Outcome.MEASURED, f"{100 * measured['first_weight'].mean():.0f}%",
        f"of a head's weight is on the first key, mean over {counted(len(measured), 'head')}; the most is "
        f"{100 * most['first_weight']:.0f}%, head {most['head']} of layer {layer}",
    )  # fmt: skip


def answer(findings: Findings) -> Answer:
    """Return what each head does."""
    return Answer(heads_glance(findings), tables={"heads": with_facts(findings, findings(head_table))})


_MOST_CELLS = 4000  # heads of a map in the page: about 150 bytes each
_MAPPED = "first_weight", "entropy", "dispersion"


class HeadMap(NamedTuple):
    """A map of heads in a page, as that of ``semdiag look``: a row for each layer, a column for each head."""

    quantity: str  # what colour says, by its metric
    title: str  # that in words
    middle: str  # what a cell of half the colour stands for
    largest: str  # what the strongest cell stands for
    heads: list[int]
    rows: list[tuple[int, list[tuple[int, float | None, str]]]]  # layer; by head the colour's share, and words


def head_cells(findings: Findings) -> HeadMap | None:
    """Return the map of one model's heads; None for several models, one head, or too many for a page."""
    table = findings(head_table)
    quantity = next((name for name in _MAPPED if name in table and table[name].notna().any()), None)
    if len(findings.measurements.models) != 1 or quantity is None or not 1 < len(table) <= _MOST_CELLS:
        return None
    metric = METRICS[quantity]
    largest = 1.0 if metric.unit == SHARE else float(table[quantity].max()) or 1.0
    heads = sorted(int(head) for head in table["head"].unique())
    modules = findings(modules_by_layer, table["model"].iloc[0])
    cells = {(row["layer"], row["head"]): row for row in records(table)}
    rows = []
    for layer in sorted(int(layer) for layer in table["layer"].unique()):
        line = []
        for head in heads:
            row = cells.get((layer, head), {})
            words = f"Layer {layer_name(layer, modules)}, head {head}: {_cell_words(row)}"
            line.append((head, colour_share(quantity, row.get(quantity, math.nan), largest), words))
        rows.append((layer, line))
    middle = largest / (4 if quantity == "dispersion" else 2)
    return HeadMap(quantity, _map_title(metric), metric.text(middle), metric.text(largest), heads, rows)


def _map_title(metric: Metric) -> str:
    if metric.unit == SHARE:
        return f"Share of each head's {metric.label}"
    return f"{metric.label.capitalize()} of each head"


def colour_share(quantity: str, value: float, largest: float) -> float | None:
    """Return how strongly a cell is coloured: δ by its root, so that one outlier does not hide the rest."""
    if math.isnan(value) or not largest:
        return None
    share = max(value, 0.0) / largest
    return math.sqrt(share) if quantity == "dispersion" else share


def _cell_words(row: Mapping[str, Any]) -> str:
    """Return what was measured of a head in words."""
    values = {METRICS[name]: row.get(name, math.nan) for name in _MAPPED}
    texts = [f"{metric.label} {metric.text(value)}" for metric, value in values.items() if not math.isnan(value)]
    return ", ".join(texts) or "not measured"


def outlying_heads(findings: Findings) -> list[tuple[int, int, str]]:
    """Return the heads with extreme δ, weight on the first key and entropy; none for several models."""
    table = findings(head_table)
    if len(findings.measurements.models) != 1 or len(table) < 2:
        return []
    words_of: dict[tuple[int, int], list[str]] = {}
    for column, largest, words in _EXTREMES:
        rows = table.dropna(subset=[column]) if column in table else table.iloc[:0]
        if len(rows):
            row = records(rows.sort_values(column, kind="stable"))[-1 if largest else 0]
            words_of.setdefault((int(row["layer"]), int(row["head"])), []).append(words.format(row[column]))
    return [(layer, head, ", ".join(words)) for (layer, head), words in words_of.items()]


def first_k(findings: Findings) -> int | None:
    """Return the smallest k measured within models that keep every key; None if there is none."""
    return min(counterfactual_ks(findings.measurements.queries), default=None)


_FAR = 10  # ratio of the largest to the smallest δ above which colours are logarithmic
_TALL = 60  # with more heads of all models together, their rows get lower
_WRITTEN = 8  # with more layers, numbers in the cells would be illegible
_TITLES = {
    "dispersion": "dispersion δ: {low} to {high} nats, the most in layer {most}",
    "entropy": "entropy of the weights: {low} to {high} nats, the least in layer {least}",
    "first_weight": "weight on the first key: {before}at least half in {half:,} of {heads:,} heads",
    "largest_weight": "largest weight of a query: at least half in {half:,} of {heads:,} heads",
    "weight_kept": "weight kept by the {k} largest scores: at least half in {half:,} of {heads:,} heads",
}


@drawing(
    "Coloured cells, layers by heads: median dispersion in nats, entropy of the attention weights, "
    "weight on the first key, weight kept by the k largest scores: {shown}.",
    "Look for a head unlike its neighbours. A large δ with a small entropy means a head that picks single keys; "
    "an entropy near the logarithm of the number of keys means one that averages. Much weight on the first key "
    "may be a sink, where queries put weight that they have no use for, or a token that the task needs.",
)
def heads_map(findings: Findings) -> Figure:
    """Draw δ, the entropy of the weights, the weight on the first key and the weight kept of every head."""
    table = findings(head_table)
    if not table["dispersion"].notna().any():
        raise NothingToDrawError("No query has a dispersion.")
    k = first_k(findings)
    unused = "largest_weight" if "first_weight" in table else "first_weight"
    quantities = [name for name in _TITLES if name != unused and name in table and table[name].notna().any()]
    rows = _rows_of_heads(findings, table)
    count = sum(len(heads) + rows.above for heads in rows.heads.values())
    figure, axes = panel_grid(
        len(quantities), height=0.6 + 0.22 * min(max(count, 4), _TALL), sharey=False, columns=2
    )
    layers = sorted(table["layer"].unique())
    for place, (ax, name) in enumerate(zip(axes, quantities, strict=True)):
        _draw(ax, _cells(table, name, rows, layers), name)
        ax.set_title(_finding(table.dropna(subset=[name]), name, k))
        ax.set_xlabel("layer")
        name_cells(ax.xaxis, layers)
        _name_rows(ax, rows, in_first_column=place % 2 == 0)
    means = "; of entropy and the first key's weight the mean" if "first_weight" in quantities else ""
    note_below(
        figure,
        f"A cell is a head of a layer: the median over its queries{means}. Hatched: not measured or undefined.",
    )
    return figure


class _Rows(NamedTuple):
    """The rows of a map of heads, the models one below the other."""

    heads: dict[str, list[int]]  # by model
    labels: dict[str, str]  # of the models
    above: int  # rows above each model's heads, for its name


def _rows_of_heads(findings: Findings, table: pd.DataFrame) -> _Rows:
    labels = short_labels(findings.measurements.models)
    measured = set(table["model"])
    heads = {
        model: sorted(table.loc[table["model"] == model, "head"].unique()) for model in labels if model in measured
    }
    narrow = len(heads) > 1 and page_width() < 5  # on a telephone a model's name stands above its rows
    short = {model: labels[model].partition(" (")[0] for model in heads}
    if narrow and len(set(short.values())) == len(heads):
        labels = short  # k is in the tables
    return _Rows(heads, labels, int(narrow))


def _name_rows(ax: Axes, rows: _Rows, in_first_column: bool) -> None:
    """Name the heads of one model, or several models beside their rows or above them."""
    edges = np.cumsum([0, *(len(heads) + rows.above for heads in rows.heads.values())])
    for edge in edges[1:-1]:
        ax.axhline(edge - 0.5, color="white", linewidth=2)
    if len(rows.heads) == 1:
        ax.set_ylabel("head")
        name_cells(ax.yaxis, [head for heads in rows.heads.values() for head in heads])
        return
    ax.set_yticks([])
    if rows.above:
        for edge, model in zip(edges, rows.heads, strict=False):
            ax.axhspan(edge - 0.5, edge + 0.5, color="white", linewidth=0)
            ax.text(-0.5, edge, rows.labels[model], fontsize=9, va="center", in_layout=False)
    elif in_first_column:
        names = [rows.labels[model] for model in rows.heads]
        ax.set_yticks((edges[:-1] + edges[1:] - 1) / 2, names, fontsize=9)


def _finding(measured: pd.DataFrame, name: str, k: int | None) -> str:
    values = measured[name]
    layers = measured["layer"]
    low, high = (number(end, 2) for end in (values.min(), values.max()))
    ends = {
        "low": low,
        "high": high,
        "before": _without_sinks(measured, name),
        "most": layers.iloc[values.argmax()],
        "least": layers.iloc[values.argmin()],
    }
    return _TITLES[name].format(k=k, half=(values >= 0.5).sum(), heads=len(values), **ends)


_LITTLE = 0.1  # of a head's weight: no sink


def _without_sinks(measured: pd.DataFrame, name: str) -> str:
    """Return before which layer no head of any model has a tenth of its weight there; empty if there is none."""
    largest = measured.groupby("layer")[name].max().sort_index()
    at_least = largest.index[largest >= _LITTLE]
    if not len(at_least) or at_least[0] == largest.index[0]:
        return ""
    return f"below {_LITTLE:.0%} before layer {at_least[0]}, "


def _cells(table: pd.DataFrame, name: str, rows: _Rows, layers: list[int]) -> np.ndarray:
    """Return (heads of all models, layers), the models one below the other, with empty rows above each."""
    parts = []
    for model, heads in rows.heads.items():
        by_place = table[table["model"] == model].pivot(index="head", columns="layer", values=name)
        parts.append(np.full((rows.above, len(layers)), np.nan))
        parts.append(by_place.reindex(index=heads, columns=layers).to_numpy(float))
    return np.concatenate(parts)


def _draw(ax: Axes, cells: np.ndarray, name: str) -> None:
    positive = cells[np.isfinite(cells) & (cells > 0)]
    scale = Normalize(0, 1)
    in_nats = METRICS[name].unit == NATS
    if in_nats:
        low, high = (positive.min(), positive.max()) if len(positive) else (0.0, 1.0)
        far = name == "dispersion" and high > _FAR * low
        scale = LogNorm(low, high) if low and far else Normalize(0, high)
    text = ("{:.2g}" if in_nats else "{:.0%}").format
    heat_map(ax, cells, scale, text if cells.shape[1] <= _WRITTEN else None)


HEADINGS = heading(
    "heads", "What does each head do?", (heads_map,),
    "The first key is the first that is not padding. A sink elsewhere, such as a separator, does not show. A "
    "learnt logit in the softmax's denominator is not a key, but is part of the entropy.",
)  # fmt: skip
