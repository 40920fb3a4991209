"""What drawn queries say about all: estimates with intervals; what needs every query is refused."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from semdiag.mathematics.sampled_intervals import TARGETS, sampled_estimates
from semdiag.measuring.findings.counterfactuals import counterfactual_ks
from semdiag.measuring.findings.distributions import places_of
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import Summary
from semdiag.measuring.table import ALL, rows_of
from semdiag_models import InputError

COLUMNS = ["model", "layer", "head", "quantity", "statistic", "estimate", "low", "high", "target"]
SAMPLED = "over sampled queries"
_SIGNS = {"dispersion": "δ", "separation": "Δ"}


def drawn(findings: Findings) -> list[str]:
    """Return the models whose queries were drawn: statements about them are estimates."""
    models = findings.measurements.models
    return [str(m) for m in models["model"][models["share"] < 1]]


def in_part(findings: Findings, *models: str) -> bool:
    """Return whether a table of queries has only some of a model's queries: drawn, or a sample of too many."""
    table = findings.measurements.models
    own = table[table["model"].isin(models)] if models else table
    return bool((own["share"] * own["share_kept"] < 1).any())


def require_every_query(findings: Findings, what: str) -> None:
    """Refuse what rests on extremes or on every query if only some were drawn or kept."""
    if in_part(findings):
        raise InputError(
            f"{what} needs every query, but only some were drawn or kept: measure without --queries, and with at "
            "most --max-queries queries."
        )


def estimate_table(findings: Findings) -> pd.DataFrame:
    """Return mean and percentiles per layer and head and pooled, for models whose queries were drawn."""
    rows: list[list[object]] = []
    for model in drawn(findings):
        own = findings.measurements.of(model)
        share = float(
            (own.models["share"] * own.models["share_kept"]).iloc[0]
        )  # probability of being in the table
        queries = own.queries.sort_values(["layer", "head", "sample", "stratum"], ignore_index=True)
        place = queries[["layer", "head", "sample", "stratum"]].to_numpy()
        strata = np.cumsum(np.any(np.diff(place, axis=0, prepend=place[:1]) != 0, axis=1))
        samples, ks = queries["sample"].to_numpy(np.int64), counterfactual_ks(queries)
        names = [name for k in ks for name in (f"dispersion_k{k}", f"separation_k{k}", f"mass_k{k}")]
        parts = [*places_of(queries), ((ALL, ALL), np.arange(len(queries)))]
        for quantity in ("dispersion", "separation", *names):
            values = queries[quantity].to_numpy(np.float64)
            for (layer, head), at in parts:
                for sampled in sampled_estimates(values[at], samples[at], strata[at], share):
                    for target, ends in zip(TARGETS, (sampled.these, sampled.such), strict=True):
                        start = [model, layer, head, quantity, sampled.statistic, sampled.estimate]
                        rows.append([*start, *ends, target])
    return pd.DataFrame(rows, columns=COLUMNS)


def estimates_of(findings: Findings, model: str) -> Summary:
    """Return a command's JSON on drawn queries, with the pooled estimates; empty if none were drawn."""
    if model not in drawn(findings):
        return {}
    table = findings(estimate_table)
    pooled = table[(table["model"] == model) & (table["layer"] == ALL)].drop(columns=["model", "layer", "head"])
    return {"sampled": {**drawing(findings, model), "estimates": pooled.to_dict("records")}}


def drawing(findings: Findings, model: str) -> Summary:
    """Return the number of drawn queries of a model, their share, the share kept, and what extremes are over."""
    row = rows_of(findings.measurements.models, model).iloc[0]
    shares = {"share": float(row["share"]), "share_kept": float(row["share_kept"])}
    return {"queries": int(row["drawn"]), **shares, "extremes_and_loads": SAMPLED}


def sampling_sentences(findings: Findings, quantities: Sequence[str] = ("dispersion",)) -> list[str]:
    """Return sentences on what was drawn and which tables come from a sketch; none if all was measured."""
    sentences = []
    for model in drawn(findings):
        words = drawing(findings, model)
        medians = " ".join(_median(findings, model, quantity) for quantity in quantities)
        kept = ""
        if words["share_kept"] < 1:
            rows = len(findings.measurements.of(model).queries)
            kept = f" Medians and intervals here are of the {rows:,} that were kept one by one."
        sentences.append(
            f"Estimated: {words['share']:.2%} of the queries of {model} were drawn ({words['queries']} per sample "
            f"and head of the longest sequence).{kept} {medians} Extremes (p0, p100) and key loads are {SAMPLED}. "
            "No bound, certificate or gate is judged on them."
        )
    return sentences + _sample_sentences(findings)


def _median(findings: Findings, model: str, quantity: str) -> str:
    """Return a sentence on the estimated median of a quantity over all layers and heads, with its intervals."""
    table = findings(estimate_table)
    pooled = table[(table["model"] == model) & (table["layer"] == ALL)]
    median = pooled[(pooled["quantity"] == quantity) & (pooled["statistic"] == "p50")]
    estimate = float(median["estimate"].iloc[0])
    if not np.isfinite(estimate):
        return f"No drawn query has a finite {_SIGNS[quantity]}."
    intervals = [
        f"{low:.3g} to {high:.3g} for {target}"
        for low, high, target in zip(median["low"], median["high"], median["target"], strict=True)
        if np.isfinite(low + high)
    ]
    return (
        f"The median of {_SIGNS[quantity]} is {estimate:.3g} nats (95% intervals: "
        f"{'; '.join(intervals) or 'none, too few were drawn'})."
    )


def _sample_sentences(findings: Findings) -> list[str]:
    """Return sentences on models with more queries or keys than are kept one by one."""
    sentences = []
    for name, rows in findings.measurements.sketches.groupby("model", sort=False):
        of = "drawn " * (name in drawn(findings))
        counts = _counts(findings, str(name))
        many = " and ".join(
            f"{counts[quantity]:,} {what}"
            for quantity, what in (("dispersion", f"{of}queries"), ("load", "keys"))
            if quantity in counts
        )
        exact = "those of all drawn queries" if of else "exact"
        sentences.append(
            f"Sampled: {name} has {many}, more than are kept one by one. Counts, means and extremes in the "
            f"tables are {exact}; percentiles are within {rows['rank_error'].max():.2%} in rank (with 99% "
            f"confidence). Figures, and sentences that say so, use a random sample of the {of}queries."
        )
    return sentences


def _counts(findings: Findings, model: str) -> dict[str, int]:
    """Return the numbers of queries (dispersion) and keys (load) of a model, if more than are kept one by one."""
    rows = rows_of(findings.measurements.sketches, model)
    pooled = rows[(rows["layer"] == ALL) & rows["quantity"].isin(("dispersion", "load"))]
    return {str(name): int(count) for name, count in zip(pooled["quantity"], pooled["queries"], strict=True)}


def partial_sentences(findings: Findings) -> list[str]:
    """Return what the tables of queries and keys contain of each model of which they lack some."""
    sentences = []
    for model in map(str, findings.measurements.models["model"]):
        own, counts, words = findings.measurements.of(model), _counts(findings, model), drawing(findings, model)
        of = "drawn " * (words["share"] < 1)
        some = [f"{len(own.queries):,}{_out_of(counts, 'dispersion')} {of}queries"]
        some += [f"{len(own.loads):,}{_out_of(counts, 'load')} keys"]
        why = [f"{words['share']:.2%} of the queries were drawn"] * bool(of)
        why += ["of more than --max-queries a random sample is kept"] * bool(counts)
        sentences += [f"of {model} {' and '.join(some)}; {', and '.join(why)}"] * bool(why)
    return sentences


def _out_of(counts: dict[str, int], quantity: str) -> str:
    return f" of {counts[quantity]:,}" if quantity in counts else ""
