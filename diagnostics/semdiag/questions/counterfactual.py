"""What would a top-k mask leave of a model that keeps every key?"""

from semdiag.capturing.attention_call import DENSE, external
from semdiag.measuring.findings.estimates import (
    all_by_name,
    counterfactual_ks,
    in_part,
    pooled_percentiles,
    what_k_keeps,
    within_table,
)
from semdiag.measuring.findings.findings import Findings, diverged, modules_by_layer
from semdiag.measuring.words import counted, layer_name, percent_span, whole_percent
from semdiag.presenting.answer import Answer, Glance, Heading, Outcome
from semdiag.questions.dispersion.answer import span_sentence

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


HEADINGS = (
    Heading(
        "within",
        "How much attention would a top-k mask keep?",
        (),
        (
            "A counterfactual within one model, on its own scores, which training with such a mask would move. "
            "Queries with at most k keys lose none.",
        ),
    ),
)
