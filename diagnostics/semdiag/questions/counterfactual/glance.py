"""The answer at one glance."""

from semdiag.capturing.attention_kinds import DENSE
from semdiag.measuring.counted import counted
from semdiag.measuring.findings.counterfactuals import counterfactual_ks, what_k_keeps
from semdiag.measuring.findings.estimates import in_part
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import percent
from semdiag.presenting.glance import Answer, Glance, span_words


def within_glance(findings: Findings) -> Glance:
    """Return the share of attention weight that the smallest requested k would keep in full-attention models."""
    measurements = findings.measurements
    queries = measurements.queries
    ks = [k for k in counterfactual_ks(queries) if f"mass_k{k}" in queries]
    if not ks:
        return Glance(Answer.OPEN, "0 models", "were measured for the weight on their largest scores")
    k = min(ks)
    dense = measurements.models[measurements.models["attention"].isin(DENSE)]["model"]
    kept = {model: numbers for model in dense if (numbers := findings(what_k_keeps, model, k))}
    if not kept:
        return Glance(Answer.OPEN, "0 queries", f"have more than {counted(k, 'key')} and finite scores")
    count = int(((queries["keys"] > k) & queries["model"].isin(kept)).sum())
    words = f"of the weight of the median query is on its {k} largest scores"
    words += f" ({count:,} queries{' drawn or kept' * in_part(findings)} of {counted(len(kept), 'model')})"
    return Glance(Answer.MEASURED, f"{span_words([each['mass'] for each in kept.values()], percent)}%", words)
