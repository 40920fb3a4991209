"""What drawn queries say of all: estimates with intervals, and what is refused because it rests on every one."""

import numpy as np
import pandas as pd

from semdiag.findings.counterfactuals import counterfactual_ks
from semdiag.findings.distributions import places_of
from semdiag.findings.findings import Findings
from semdiag.findings.strict_json import Summary
from semdiag.mathematics.sampled_intervals import TARGETS, sampled_estimates
from semdiag.measurement.table import ALL
from semdiag_models import InputError

COLUMNS = ["model", "layer", "head", "quantity", "statistic", "estimate", "low", "high", "target"]
SAMPLED = "over sampled queries"


def drawn(findings: Findings) -> list[str]:
    """Models of which queries were drawn: what is said of them is estimated.

    Args:
        findings: of any number of models.
    """
    models = findings.measurements.models
    return [str(m) for m in models["model"][models["share"] < 1]] if "queries" in _known(findings) else []


def _known(findings: Findings) -> Summary:
    return findings.measurements.provenance


def in_part(findings: Findings, *models: str) -> bool:
    """Whether a table of single queries holds some of a model's only: drawn, or kept of more than fit.

    Args:
        findings: of the models.
        models: their paths; none: all.
    """
    table = findings.measurements.models
    own = table[table["model"].isin(models)] if models else table
    return bool((own["share"] < 1).any())


def require_every_query(findings: Findings, what: str) -> None:
    """Refuse what rests on extremes or on every query where some were drawn or kept only.

    Args:
        findings: of any number of models.
        what: is refused, the subject of a sentence.

    Raises:
        InputError: naming it.
    """
    if in_part(findings):
        raise InputError(
            f"{what} rests on every query, and of these only some were drawn or kept: measure without --queries, "
            "and with no more of them than --max-queries."
        )


def estimate_table(findings: Findings) -> pd.DataFrame:
    """Mean and percentiles of every quantity per layer and head, and pooled, of models whose queries were drawn.

    Source: :func:`~semdiag.mathematics.sampled_intervals.sampled_estimates`. Deviation: none.

    Args:
        findings: of any number of models.

    Returns:
        model, layer and head (ALL where pooled), quantity, statistic (mean, p1 … p99), estimate, low and high
        (95 %; missing where too few were drawn to say) and target, what the interval speaks about: a row for each
        of :data:`~semdiag.mathematics.sampled_intervals.TARGETS`.
    """
    rows: list[list[object]] = []
    for model in drawn(findings):
        own = findings.measurements.of(model)
        share = float(own.models["share"].iloc[0])
        queries = own.queries.sort_values(["layer", "head", "sample", "stratum"], ignore_index=True)
        place = queries[["layer", "head", "sample", "stratum"]].to_numpy()
        strata = np.cumsum(np.any(np.diff(place, axis=0, prepend=place[:1]) != 0, axis=1))
        samples, ks = queries["sample"].to_numpy(np.int64), counterfactual_ks(queries)
        names = [name for k in ks for name in (f"dispersion_k{k}", f"separation_k{k}", f"mass_k{k}")]
        parts = [*places_of(queries), ((ALL, ALL), np.arange(len(queries)))]
        for quantity in ("dispersion", "separation", *names):
            values = queries[quantity].to_numpy(np.float64)
            for (layer, head), at in parts:
                for found in sampled_estimates(values[at], samples[at], strata[at], share):
                    for target, ends in zip(TARGETS, (found.these, found.such), strict=True):
                        start = [model, layer, head, quantity, found.statistic, found.estimate]
                        rows.append([*start, *ends, target])
    return pd.DataFrame(rows, columns=COLUMNS)


def estimates_of(findings: Findings, model: str) -> Summary:
    """The part of a command's JSON that says what was drawn, and the pooled estimates; empty if nothing was.

    Args:
        findings: of the model.
        model: its path.
    """
    if model not in drawn(findings):
        return {}
    table = findings(estimate_table)
    pooled = table[(table["model"] == model) & (table["layer"] == ALL)].drop(columns=["model", "layer", "head"])
    return {"sampled": {**drawing(findings, model), "estimates": pooled.to_dict("records")}}


def drawing(findings: Findings, model: str) -> Summary:
    """How many queries of a model were drawn, which share, and what extremes and loads are over.

    Args:
        findings: of the model.
        model: its path.
    """
    models = findings.measurements.models
    share = float(models.loc[models["model"] == model, "share"].iloc[0])
    return {"queries": _known(findings)["queries"], "share": share, "extremes_and_loads": SAMPLED}


def sampling_sentences(findings: Findings) -> list[str]:
    """What was drawn and what that means, and which tables come from a sketch; nothing where all was looked at.

    Args:
        findings: of any number of models.
    """
    said = []
    for model in drawn(findings):
        words = drawing(findings, model)
        table = findings(estimate_table)
        pooled = table[(table["model"] == model) & (table["layer"] == ALL)]
        median = pooled[(pooled["quantity"] == "dispersion") & (pooled["statistic"] == "p50")]
        intervals = [
            f"{low:.3g} to {high:.3g} for {target}"
            for low, high, target in zip(median["low"], median["high"], median["target"], strict=True)
            if np.isfinite(low + high)
        ]
        said.append(
            f"Estimated: of {model} {words['share']:.2%} of the queries were drawn ({words['queries']} per sample "
            f"and head of the longest sequence). The median of δ is {median['estimate'].iloc[0]:.3g} nats (95 % "
            f"intervals: {'; '.join(intervals) or 'none, too few were drawn'}); extremes (p0, p100) and key loads "
            f"are {SAMPLED}. No bound, certificate or gate is judged on them."
        )
    sketches = findings.measurements.sketches
    for name, rows in sketches.groupby("model", sort=False):
        queries = int(rows.loc[rows["layer"] == ALL, "queries"].max())
        said.append(
            f"Sketched: {name} has {queries:,} queries or keys, more than are kept one by one. Numbers, means and "
            f"extremes in the tables are exact, percentiles those of a rank within {rows['rank_error'].max():.2%} "
            "(with 99 % confidence); figures, and sentences that say so, are of a random sample of the queries."
        )
    return said
