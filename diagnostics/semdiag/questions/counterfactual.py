"""What would a top-k mask leave of a model that keeps every key?"""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.capturing.attention_call import DENSE, external
from semdiag.measuring.findings.estimates import (
    all_by_name,
    counterfactual_ks,
    in_part,
    layer_percentiles,
    pooled_percentiles,
    what_k_keeps,
    within_table,
)
from semdiag.measuring.findings.findings import Findings, diverged, modules_by_layer
from semdiag.measuring.words import counted, layer_name, percent_span, whole_percent
from semdiag.presenting.answer import Answer, Glance, Heading, Outcome
from semdiag.presenting.drawing.panels import (
    READING,
    NothingToDrawError,
    Panel,
    layer_boxes,
    panels_of,
)
from semdiag.presenting.drawing.style import (
    AttentionStyle,
    attention_style,
    drawing,
    finished,
    lightened,
    panel_grid,
    plain_numbers,
    title_with_facts,
)
from semdiag.questions.dispersion.answer import span_sentence
from semdiag.questions.separation.figures import draw_loads, load_fact

_NEARLY_ALL = 0.95


def within_sentences(findings: Findings) -> list[str]:
    """Return what a top-k mask would leave of models of which only the attention is known."""
    measurements = findings.measurements
    sentences = []
    for model in measurements.models[external(measurements.models)]["model"]:
        queries = measurements.queries[measurements.queries["model"] == model]
        sentences.append(span_sentence(findings, model))
        ks = [k for k in counterfactual_ks(queries) if f"weight_kept_k{k}" in queries]
        sentences += [_one_k(findings, model, k) for k in ks]
        sentences += ["This is a counterfactual within the model, on its own scores."] if ks else []
    return sentences


def _one_k(findings: Findings, model: str, k: int) -> str:
    """Return sentences on what the k largest scores would keep, for queries with more keys."""
    numbers, keys = findings(what_k_keeps, model, k), findings(pooled_percentiles, "keys")[model]
    k_keys = counted(k, "key")
    if not numbers and diverged(findings, model):
        return f"What a top-{k} mask would keep is unknown: some of the model's scores are NaN or infinite."
    if not numbers and keys["p100"] > k:
        return f"What a top-{k} mask would keep is not known: no query of the sample has more than {k_keys}."
    if not numbers:
        return f"No query has more than {k_keys}: a top-{k} mask would change nothing."
    verb = "keeps" if numbers["weight_kept"] >= _NEARLY_ALL else "would keep"
    mass, low, lowest, highest, share = (
        whole_percent(numbers[name]) for name in ("weight_kept", "weight_kept_p5", "lowest", "highest", "share")
    )
    sample = f", from a random sample of {numbers['sampled']:,}" if numbers["sampled"] else ""
    modules = findings(modules_by_layer, model)
    first, last = (layer_name(int(numbers[name]), modules) for name in ("lowest_layer", "highest_layer"))
    ends = f"{lowest} in layer {first} to {highest} in layer {last}"
    by_layer = f"; by layer, medians from {ends}" if lowest != highest else f"; {mass} in every layer"
    by_layer = by_layer if numbers["lowest_layer"] != numbers["highest_layer"] else ""
    return (
        f"Would sparse attention help? Of the queries with more than {k_keys} ({share} of all{sample}) a "
        f"top-{k} mask {verb} {mass} of the attention weight at the median ({low} at the 5th "
        f"percentile{by_layer}), with a median dispersion of {numbers['dispersion']:.3g} instead of "
        f"{numbers['whole']:.3g} nats and a median separation of {numbers['separation']:.2g} nats."
    )


def within_glance(findings: Findings) -> Glance:
    """Return the share of attention weight that the smallest requested k would keep in full-attention models."""
    measurements = findings.measurements
    queries = measurements.queries
    ks = [k for k in counterfactual_ks(queries) if f"weight_kept_k{k}" in queries]
    if not ks:
        return Glance(Outcome.OPEN, "0 models", "were measured for the weight on their largest scores")
    k = min(ks)
    dense = measurements.models[measurements.models["attention"].isin(DENSE)]["model"]
    kept = {model: numbers for model in dense if (numbers := findings(what_k_keeps, model, k))}
    if not kept:
        return Glance(Outcome.OPEN, "0 queries", f"have more than {counted(k, 'key')} and finite scores")
    count = int(((queries["keys"] > k) & queries["model"].isin(kept)).sum())
    words = f"of the weight of the median query is on its {k} largest scores"
    words += f" ({counted(count, 'query')}{' drawn or kept' * in_part(findings)} of {counted(len(kept), 'model')})"
    return Glance(Outcome.MEASURED, percent_span([each["weight_kept"] for each in kept.values()]), words)


def answer(findings: Findings) -> Answer | None:
    """Return what every counterfactual k would keep; None if none was measured."""
    if not counterfactual_ks(findings.measurements.queries):
        return None
    table = findings(within_table)
    tables = {"within": table if table.empty else all_by_name(table)}
    return Answer(within_glance(findings), within_sentences(findings), tables=tables)


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


@drawing(
    "Within full-attention models: share of keys that at least x queries would keep, logarithmic axis: {shown}.",
    "Which keys a top-k mask would rely on: a curve that falls near k spreads the queries evenly, a "
    "long tail means sinks that nearly every query would keep.",
)
def key_load_counterfactual(findings: Findings) -> Figure:
    """Draw the share of keys that at least x queries would keep among their k largest scores."""
    panels, ks = dense_panels(findings)
    loads = {str(model): rows for model, rows in findings.measurements.loads.groupby("model", sort=False)}
    figure, axes = panel_grid(len(panels))
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_yscale("log")
        plain_numbers(ax.yaxis)
        facts = []
        for k in ks:
            values = pd.concat([loads[series.model][f"load_k{k}"] for series in panel.series])
            draw_loads(ax, values, k_style(ks, k), f"k = {k}")
            tables = [findings(pooled_percentiles, f"load_k{k}")[series.model] for series in panel.series]
            facts.append(load_fact(f"k = {k}", *tables))
        title_with_facts(ax, f"{panel.title}: within the {panel.series[0].label} model", facts)
        ax.set_xlabel("load: queries that would keep the key (count)")
        ax.set_xlim(left=0)
        ax.margins(y=0.12)
    axes[0].set_ylabel("share of keys with at least this load")
    return finished(figure, "marker: the largest load; layers, heads and sequences pooled")


@drawing(
    "Within full-attention models: the weight kept on the k largest scores, per layer: {shown}.",
    "How much of the attention a top-k mask would keep. Layers whose boxes touch 1 already attend to k keys and "
    "would hardly notice the mask; where the boxes are low, the mask would throw away what the model uses.",
)
def weight_kept(findings: Findings) -> Figure:
    """Draw the share of each query's attention weight on its k largest scores, per layer of each full model."""
    panels, ks = dense_panels(findings, "weight_kept")
    columns = {f"weight_kept_k{k}": (f"the {k} largest", k_style(ks, k)) for k in ks}
    tables = layer_tables(findings, panels, list(columns))
    if not any(np.isfinite(table["p50"]).any() for table in tables.values()):
        raise NothingToDrawError("No query has a finite attention weight.")

    def scale(ax: Axes) -> None:
        ax.set_ylim(0, 1.03)

    return within_boxes(
        panels, columns, tables, scale, "weight kept",
        "marker: minimum.\n1 minus this is what dropping all other keys would throw away.", extreme="p0",
    )  # fmt: skip


HEADINGS = (
    Heading(
        "within",
        "How much attention would a top-k mask keep?",
        (weight_kept, key_load_counterfactual),
        (
            "A counterfactual within one model, on its own scores. Training with such a mask "
            "would move its scores; how far, only training can tell.",
            "Queries with at most k keys lose none: their δₕ(k) is δₛ, they keep all weight and have no "
            "separation.",
        ),
    ),
)
