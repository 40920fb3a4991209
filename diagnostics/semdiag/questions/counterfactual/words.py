"""Sentences on what a top-k mask would leave of a dense model."""

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.counted import counted
from semdiag.measuring.findings.counterfactuals import counterfactual_ks, what_k_keeps
from semdiag.measuring.findings.distributions import pooled_percentiles
from semdiag.measuring.findings.divergence import diverged
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import percent
from semdiag.questions.dispersion.words import span_sentence

_NEARLY_ALL = 0.95


def within_sentences(findings: Findings) -> list[str]:
    """Return what a top-k mask would leave of models of which only the attention is known."""
    measurements = findings.measurements
    sentences = []
    for model in measurements.models[external(measurements.models)]["model"]:
        queries = measurements.queries[measurements.queries["model"] == model]
        sentences.append(span_sentence(findings, model))
        ks = [k for k in counterfactual_ks(queries) if f"mass_k{k}" in queries]
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
    verb = "keeps" if numbers["mass"] >= _NEARLY_ALL else "would keep"
    mass, low, lowest, highest, share = (
        f"{percent(numbers[name])}%" for name in ("mass", "mass_p5", "lowest", "highest", "share")
    )
    sample = f", from a random sample of {numbers['sampled']:,}" if numbers["sampled"] else ""
    ends = f"{lowest} in layer {numbers['lowest_layer']} to {highest} in layer {numbers['highest_layer']}"
    by_layer = f"; by layer, medians from {ends}" if lowest != highest else f"; {mass} in every layer"
    by_layer = by_layer if numbers["lowest_layer"] != numbers["highest_layer"] else ""
    return (
        f"Would sparse attention help? Of the queries with more than {k_keys} ({share} of all{sample}) a "
        f"top-{k} mask {verb} {mass} of the attention weight at the median ({low} at the 5th "
        f"percentile{by_layer}), with a median dispersion of {numbers['dispersion']:.3g} instead of "
        f"{numbers['whole']:.3g} nats and a median separation of {numbers['separation']:.2g} nats."
    )
