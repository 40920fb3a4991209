"""How far apart kept and dropped scores are, in sentences and figures; the load of the keys."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.capturing.attention_call import DENSE
from semdiag.measuring.findings.estimates import (
    SAMPLED,
    Percentile,
    Percentiles,
    by_layer,
    layer_percentiles,
    pooled_percentiles,
    sampled_models,
    without,
)
from semdiag.measuring.findings.findings import Findings, Summary, diverged, seed_names
from semdiag.measuring.words import counted, span_words
from semdiag.presenting.answer import (
    Answer,
    Claim,
    Glance,
    Outcome,
    heading,
    percentile_csvs,
    sampled_word,
    top_words,
)
from semdiag.presenting.drawing.panels import (
    READING,
    NothingToDrawError,
    Panel,
    Series,
    exceedance_curve,
    kinds_of,
    layer_boxes,
    layers_span,
    logarithmic_limits,
    panels_of,
    positive_range,
)
from semdiag.presenting.drawing.style import FAINT, drawing, finished, panel_grid, plain_numbers, title_with_facts
from semdiag.questions.percentile_tables import percentile_tables


def separation_claims(findings: Findings) -> list[Claim]:
    """Return the median and lower end of Δ of the top-k models; of all sparse ones if there is none."""
    models = findings.measurements.models
    models = models[~models["attention"].isin(DENSE)]
    for column, value in (("snapshot", "last"), ("attention", "topk")):
        if (models[column] == value).any():
            models = models[models[column] == value]
    claims = []
    for panel in panels_of(models, seeds=seed_names(findings.measurements.models)) if len(models) else []:
        for series in panel.series:
            claims.append(_separation_claim(findings, series.model, f"{panel.title}, {series.label}"))
    return claims or [Claim("separation", "No model drops a key: separation is undefined for full attention.")]


def _separation_claim(findings: Findings, model: str, label: str) -> Claim:
    if diverged(findings, model):
        unknown = "the separation Δ and the key loads are unknown, because attention scores are NaN or infinite."
        return Claim("separation", f"{label}: {unknown}", model)
    table = findings(pooled_percentiles, "separation")[model]
    words = f"{label}: {_separation_words(table)}."
    busiest = findings(pooled_percentiles, "load")[model]["p100"]
    if not math.isnan(busiest):
        words += f" The busiest key is kept by {busiest:g} quer{'y' if busiest == 1 else 'ies'}"
        if model in sampled_models(findings):
            words += f", {SAMPLED}"
        words += "."
    return Claim("separation", words, model, table["p50"], "nats")


def _separation_words(table: Percentiles) -> str:
    separated = table["queries"] - table["undefined"]  # the others drop no key
    if not separated:
        return "no query drops a key, so the separation Δ is undefined"
    ties = "all have more than 0"
    if table["not_positive"]:
        ties = f"and {table['not_positive']:,} of {separated:,} have none (Δ ≤ 0, a tie)"
    return (
        f"the separation Δ has the median {table['p50']:.2g} nats; 5% of the queries have less than "
        f"{table['p5']:.2g}, {ties}"
    )


def separation_glance(findings: Findings) -> Glance:
    """Return the smallest separation of models that keep their largest scores; Δ ≤ 0 is a tie."""
    models = findings.measurements.models
    topk = set(models.loc[models["attention"] == "topk", "model"])
    broken = set(findings.measurements.non_finite["model"])
    every = {m: table for m, table in findings(pooled_percentiles, "separation").items() if m in topk}
    tables = [table for m, table in every.items() if m not in broken and np.isfinite(table["p5"])]
    if not every:
        return Glance(Outcome.OPEN, "0 models", "keep the keys with the largest scores")
    if not tables:
        words = "that keep the keys with the largest scores have a finite separation Δ"
        return Glance(Outcome.OPEN, f"0 of {counted(len(every), 'model')}", words)
    ties = sum(int(table["not_positive"]) for table in tables)
    queries = counted(sum(int(table["queries"]) for table in tables), "query")
    words = (
        f"is the 5th percentile of the separation Δ of {counted(len(tables), 'model')} with {top_words(findings)} "
        f"masks; {ties:,} of {queries}{sampled_word(findings)} have none (Δ ≤ 0, a tie)"
    )
    if len(tables) < len(every):
        words += f"; for {len(every) - len(tables)} more it is not a number"
    outcome = Outcome.DOES_NOT if ties and not sampled_models(findings) else Outcome.MEASURED
    return Glance(outcome, f"{span_words([table['p5'] for table in tables], '{:.2g}')} nats", words)


def separation_results(findings: Findings) -> dict[str, Summary]:
    """Return percentiles of Δ and of the raw key loads per layer and head, and pooled."""

    def describe(of: Percentile, suffix: str) -> Summary:
        load = without(of("load" + suffix), "not_positive", "undefined")
        load["keys"] = load.pop("queries")
        return {"separation": of("separation" + suffix), "load": load}

    return by_layer(findings, describe)


def answer(findings: Findings) -> Answer:
    """Return how far apart kept and dropped keys are, and which keys are relied on."""
    results = findings(separation_results)
    return Answer(
        separation_glance(findings),
        separation_claims(findings),
        tables=percentile_csvs(findings, "separation"),
        results=results,
        shown=percentile_tables(findings, "separation", results),
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
    panels = panels_of(findings.measurements.models)
    pooled = findings(pooled_percentiles, "load")
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
        style = series.style
        x, y = exceedance_curve(loads.get(series.model, ()))
        line: dict[str, Any] = {"color": style.color, "linestyle": style.line}
        ax.plot([], [], markersize=4, marker=style.marker, label=series.label, **line)
        if len(x):  # every key has a load of at least 0
            ax.step([0.0, *x], [1.0, *y], where="pre", linewidth=style.width, **line)
            ax.plot(x[-1], y[-1], marker=style.marker, color=style.color, markersize=5, linestyle="none")
    ax.set_xlim(left=0)
    ax.margins(y=0.12)


@drawing(
    "Distribution of the semantic separation Δ in nats per layer, as nested boxes on a "
    "logarithmic axis, with the share of queries at or below 0 stated: {shown}.",
    "Δ is the lowest kept score minus the highest dropped one; the lower ends of the boxes are "
    "what matters. A tiny Δ means that a small change of the input can swap keys in and out of "
    "the mask, and the bounds of a heavy-hitter mask grow as 1/Δ.",
)
def separation_by_layer(findings: Findings) -> Figure:
    """Draw the distribution of Δ over queries per layer on a logarithmic axis, and say the share ≤ 0."""
    tables = findings(layer_percentiles, "separation")
    pooled = findings(pooled_percentiles, "separation")
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
        separated = [series for series in shown if pooled[series.model]["p50"] > 0] or shown
        span = layers_span("Δ", (tables[series.model] for series in separated))
        finding = f"{span} with {' and '.join(kinds_of(separated))}"
        title_with_facts(ax, f"{panel.title}: {finding}", _shares("Δ ≤ 0 of queries", shown, pooled))
    axes[0].set_ylabel("semantic separation Δ (nats)")
    return finished(
        figure,
        f"{READING}; marker: maximum.\nA logarithmic axis cannot show queries with Δ ≤ 0; percentiles count them.",
    )


def _defined(table: Percentiles | None) -> bool:
    return table is not None and table["undefined"] < table["queries"]


def _shares(words: str, series: Sequence[Series], pooled: Mapping[str, Percentiles]) -> list[str]:
    """Return in a line the share of each model's queries or keys that are not positive, where there are some."""
    parts = []
    for each in series:
        table = pooled[each.model]
        share = table["not_positive"] / max(table["queries"] - table["undefined"], 1)
        if share:
            parts.append(f"{each.style.name} {_coarse_percent(share)}")
    return [f"{words}: {', '.join(parts)}"] if parts else []


def _coarse_percent(share: float) -> str:
    if share < 0.01:
        return "< 1%"
    return f"{share:.0%}" if share <= 0.99 or share == 1 else "> 99%"


HEADINGS = heading(
    "separation", "Is the mask well separated?", (separation_by_layer,),
    "Full attention drops no key, so Δ is undefined there. Masks that ignore the scores, and bottom-k, drop "
    "larger ones than they keep: Δ ≤ 0. A tie has Δ = 0.",
) + heading(
    "load", "Which keys carry the load?", (key_load,),
    "Loads are raw counts within one sequence, layers and heads pooled. They count how often a key is kept, not "
    "the weight it gets.",
)  # fmt: skip
