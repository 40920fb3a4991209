"""The k measured on full-attention models, and what a mask of that size would keep."""

import pandas as pd

from semdiag.measuring.findings.divergence import diverged
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.percentiles import percentiles
from semdiag.measuring.table import ALL


def counterfactual_ks(queries: pd.DataFrame) -> list[int]:
    """Return the numbers of heavy hitters for which a model's table has counterfactual columns."""
    prefix = "dispersion_k"
    named = [str(column) for column in queries if str(column).startswith(prefix)]
    return [int(name.removeprefix(prefix)) for name in named if queries[name].notna().any()]


def what_k_keeps(findings: Findings, model: str, k: int) -> dict[str, float]:
    """Return what a top-k mask would keep by one model's own scores, for queries with more than k keys.

    Args:
        findings: with counterfactual columns for k.
        model: a value of the column ``model``.
        k: keys kept.

    Returns:
        share (fraction of all measured queries with more than k keys), mass and mass_p5 (attention weight kept,
        median and 5th percentile), lowest and highest (median mass of a layer), lowest_layer and highest_layer,
        and medians: dispersion, whole (δ over all keys), separation. sampled: number of queries behind all but the
        share, if only a sample is kept; else 0. Empty if no query has more keys, or scores are not finite.
    """
    if diverged(findings, model):
        return {}
    queries = findings.measurements.queries[findings.measurements.queries["model"] == model]
    dropping = queries[queries["keys"] > k]
    mass, layers = dropping[f"mass_k{k}"], dropping.groupby("layer")[f"mass_k{k}"].median()
    if mass.isna().all():
        return {}
    sketches = findings.measurements.sketches
    sketched = sketches[(sketches["model"] == model) & (sketches["quantity"] == f"separation_k{k}")]
    pooled = sketched[sketched["layer"] == ALL]  # without dropped keys, separation is undefined
    share = 1 - (pooled["undefined"] / pooled["queries"]).sum() if len(pooled) else len(dropping) / len(queries)
    medians = {"dispersion": f"dispersion_k{k}", "whole": "dispersion", "separation": f"separation_k{k}"}
    return {
        "share": float(share), "sampled": len(dropping) if len(pooled) else 0,
        "mass": mass.median(), "mass_p5": mass.quantile(0.05),
        "lowest": layers.min(), "lowest_layer": layers.idxmin(),
        "highest": layers.max(), "highest_layer": layers.idxmax(),
        **{name: percentiles(dropping[column])["p50"] for name, column in medians.items()},
    }  # fmt: skip
