"""What the measurements say about one dense model by itself, in sentences."""

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.findings.counterfactuals import counterfactual_ks, what_k_keeps
from semdiag.measuring.findings.distributions import pooled_percentiles
from semdiag.measuring.findings.divergence import diverged
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import keys_words, percent
from semdiag.questions.dispersion.words import span_sentence

_MOST = 0.95


def within_sentences(findings: Findings) -> list[str]:
    """Say what a top-k mask would leave of the attention of models whose attention alone is known.

    Args:
        findings: of any number of models.

    Returns:
        One sentence on the dispersion of each model, then one per k.
    """
    measurements = findings.measurements
    said = []
    for model in measurements.models[external(measurements.models)]["model"]:
        own = measurements.queries[measurements.queries["model"] == model]
        said.append(span_sentence(findings, model))
        ks = [k for k in counterfactual_ks(own) if f"mass_k{k}" in own]
        said += [_one_k(findings, model, k) for k in ks]
        said += ["This is a counterfactual within the model, on its own scores."] if ks else []
    return said


def _one_k(findings: Findings, model: str, k: int) -> str:
    """Return sentences on what the k largest scores would keep, for queries with more keys."""
    kept, whole = findings(what_k_keeps, model, k), findings(pooled_percentiles, "keys")[model]
    if not kept and diverged(findings, model):
        return f"What a top-{k} mask would keep is unknown: some of the model's scores are NaN or infinite."
    if not kept and whole["p100"] > k:
        return (
            f"What a top-{k} mask would keep is not known: no query of the sample has more than {keys_words(k)}."
        )
    if not kept:
        return f"No query has more than {keys_words(k)}: a top-{k} mask would change nothing."
    most = "keeps" if kept["mass"] >= _MOST else "would keep"
    mass, low, lowest, highest, share = (
        f"{percent(kept[name])}%" for name in ("mass", "mass_p5", "lowest", "highest", "share")
    )
    sample = f", from a random sample of {kept['sampled']:,}" if kept["sampled"] else ""
    ends = f"{lowest} in layer {kept['lowest_layer']} to {highest} in layer {kept['highest_layer']}"
    by_layer = f"; by layer, medians from {ends}" if kept["lowest_layer"] != kept["highest_layer"] else ""
    return (
        f"Would sparse attention help? Of the queries with more than {keys_words(k)} ({share} of all{sample}) a "
        f"top-{k} mask {most} {mass} of the attention weight at the median ({low} at the 5th "
        f"percentile{by_layer}), with a median dispersion of {kept['dispersion']:.3g} instead of "
        f"{kept['whole']:.3g} nats and a median separation of {kept['separation']:.2g} nats."
    )
