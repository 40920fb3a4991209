"""What the measurements say about one dense model by itself, in sentences."""

import pandas as pd

from semdiag.capturing.attention_kinds import external
from semdiag.findings.counterfactuals import counterfactual_ks
from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import percentiles
from semdiag.presentation.sections.dispersion.sentences import span_sentence

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
        said += [_one_k(own, k) for k in ks]
        said += ["This is a counterfactual within the model: nobody trained it with a mask."] if ks else []
    return said


def _one_k(queries: pd.DataFrame, k: int) -> str:
    """What keeping the k largest scores would leave, of the queries that have more."""
    dropping = queries[queries["keys"] > k]
    if dropping.empty:
        return f"No query has more than {k} keys: a top-{k} mask would change nothing."
    mass, gap = dropping[f"mass_k{k}"], percentiles(dropping[f"separation_k{k}"])
    delta, whole = (percentiles(dropping[name])["p50"] for name in (f"dispersion_k{k}", "dispersion"))
    layers = dropping.groupby("layer")[f"mass_k{k}"].median()
    most = "keeps" if mass.median() >= _MOST else "would keep"
    return (
        f"Would sparse attention help? A top-{k} mask {most} {mass.median():.0%} of the attention weight at the "
        f"median query ({mass.quantile(0.05):.0%} at the 5th percentile; by layer, medians from "
        f"{layers.min():.0%} in layer {layers.idxmin()} to {layers.max():.0%} in layer {layers.idxmax()}), with "
        f"a median dispersion of {delta:.3g} instead of {whole:.3g} nats and a median separation of "
        f"{gap['p50']:.2g} nats ({len(dropping) / len(queries):.0%} of the queries have more than {k} keys)."
    )
