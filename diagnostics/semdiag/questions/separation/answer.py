"""How far apart kept and dropped scores are, in sentences."""

import math

import numpy as np

from semdiag.capturing.attention_call import DENSE
from semdiag.measuring.findings.estimates import SAMPLED, Percentile, by_layer, drawn, pooled_percentiles, without
from semdiag.measuring.findings.findings import Findings, Summary, diverged
from semdiag.measuring.words import counted, span_words
from semdiag.presenting.answer import Answer, Glance, Outcome, drawn_word, percentile_csv, top_words
from semdiag.presenting.drawing.panels import panels_of
from semdiag.questions.percentile_tables import percentile_tables


def separation_in_short(findings: Findings) -> list[str]:
    """Return the median and lower end of Δ of the top-k models; of all sparse ones if there is none."""
    models = findings.measurements.models
    models = models[~models["attention"].isin(DENSE)]
    models = models[models["snapshot"] == "last"] if (models["snapshot"] == "last").any() else models
    models = models[models["attention"] == "topk"] if (models["attention"] == "topk").any() else models
    sentences = []
    for panel in panels_of(models) if len(models) else []:
        for series in panel.series:
            sentences.append(f"{panel.title}, {series.label}: {_separation(findings, series.model)}")
    return sentences or ["No model drops a key: separation is undefined for full attention."]


def _separation(findings: Findings, model: str) -> str:
    """Return the median and lower end of one model's Δ and its busiest key, or why they are undefined."""
    if diverged(findings, model):
        return "the separation Δ and the key loads are unknown, because attention scores are NaN or infinite."
    table, loads = (findings(pooled_percentiles, name)[model] for name in ("separation", "load"))
    words = "no query drops a key, so the separation Δ is undefined"
    separated = table["queries"] - table["undefined"]  # the others drop no key
    if separated:
        ties = f"{table['not_positive']:,} of {separated:,} have none (Δ ≤ 0, a tie)"
        ties = f"and {ties}" if table["not_positive"] else "all have more than 0"
        words = (
            f"the separation Δ has the median {table['p50']:.2g} nats; 5% of the queries have less than "
            f"{table['p5']:.2g}, {ties}"
        )
    if math.isnan(loads["p100"]):
        return f"{words}."
    busiest = f"{loads['p100']:g} quer{'y' if loads['p100'] == 1 else 'ies'}"
    return f"{words}. The busiest key is kept by {busiest}{f', {SAMPLED}' if model in drawn(findings) else ''}."


def separation_glance(findings: Findings) -> Glance:
    """Return the smallest separation of models that keep their largest scores; Δ ≤ 0 is a tie."""
    models = findings.measurements.models
    diverged = models["model"].isin(findings.measurements.non_finite["model"])
    sparse = models[(models["attention"] == "topk") & ~diverged]["model"]
    percentiles = findings(pooled_percentiles, "separation")
    every = [
        percentiles[model] for model in models[models["attention"] == "topk"]["model"] if model in percentiles
    ]
    tables = [
        percentiles[model] for model in sparse if model in percentiles and np.isfinite(percentiles[model]["p5"])
    ]
    if not every:
        return Glance(Outcome.OPEN, "0 models", "keep the keys with the largest scores")
    if not tables:
        words = "that keep the keys with the largest scores have a finite separation Δ"
        return Glance(Outcome.OPEN, f"0 of {counted(len(every), 'model')}", words)
    bad, queries = (sum(int(table[name]) for table in tables) for name in ("not_positive", "queries"))
    words = (
        f"is the 5th percentile of the separation Δ of {counted(len(tables), 'model')} with {top_words(findings)} "
    )
    words += f"masks; {bad:,} of {counted(queries, 'query')}{drawn_word(findings)} have none (Δ ≤ 0, a tie)"
    words += f"; for {len(every) - len(tables)} more it is not a number" if len(tables) < len(every) else ""
    outcome = Outcome.DOES_NOT if bad and not drawn(findings) else Outcome.MEASURED
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
        separation_in_short(findings),
        tables={name: percentile_csv(findings, name) for name in ("separation", "load")},
        results=results,
        shown=percentile_tables(findings, "separation", results),
    )
