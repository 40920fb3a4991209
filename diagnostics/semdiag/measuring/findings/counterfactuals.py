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
    """Return what a top-k mask would keep by one model's own scores, for queries with more than k keys."""
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
