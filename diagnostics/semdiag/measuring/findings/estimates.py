"""Percentiles of measured queries, and estimates from drawn ones, with intervals; what needs every query."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from semdiag.capturing.attention_call import DENSE
from semdiag.mathematics.sampled_intervals import TARGETS, sampled_estimates
from semdiag.measuring.encoders.traces import fitting
from semdiag.measuring.findings.findings import Findings, Place, Summary, broken_places, json_ready, records
from semdiag.measuring.metrics import METRICS, in_table, metric_columns, metric_of
from semdiag.measuring.percentiles import percentile_rows, percentiles
from semdiag.measuring.table import ALL, RESIDUALS, rows_of_model
from semdiag.measuring.words import interval
from semdiag_files import InputError


def counterfactual_ks(queries: pd.DataFrame) -> list[int]:
    """Return the numbers of heavy hitters for which a model's table has counterfactual columns."""
    ks = []
    for column in queries:
        metric, k = metric_of(str(column)) or (None, None)
        if metric is METRICS["dispersion"] and k is not None and queries[column].notna().any():
            ks.append(k)
    return ks


Percentiles = dict[str, float | int]


def _rows(findings: Findings, quantity: str) -> pd.DataFrame:
    metric_and_k = metric_of(quantity)
    of_keys = metric_and_k is not None and metric_and_k[0].per == "key"
    return findings.measurements.loads if of_keys else findings.measurements.queries


def places_of(rows: pd.DataFrame) -> list[tuple[Place, NDArray[np.intp]]]:
    """Return the layers and heads of a table, sorted, each with the positions of its rows."""
    indices: dict[Any, Any] = rows.groupby(["layer", "head"]).indices
    return [((int(layer), int(head)), indices[layer, head]) for layer, head in sorted(indices)]


def place_percentiles(findings: Findings, model: str, quantity: str) -> dict[Place, Percentiles]:
    """Return percentiles of a quantity of one model for every layer and head, and pooled: ``(ALL, ALL)``."""
    sketches = findings.measurements.sketches
    sketched = sketches[(sketches["model"] == model) & (sketches["quantity"] == quantity)]
    table: dict[Place, Percentiles]
    if len(sketched):
        places = {place: sketched.iloc[at[0]] for place, at in places_of(sketched)}
        ordered = sorted(places, key=lambda place: (place[0] == ALL, place[0], place[1] == ALL, place[1]))
        table = {place: places[place][list(percentiles([]))].to_dict() for place in ordered}
    else:
        rows = rows_of_model(_rows(findings, quantity), model)
        values = rows[quantity].to_numpy(np.float64)
        table = {place: percentiles(values[at]) for place, at in places_of(rows)}
        table[ALL, ALL] = percentiles(values)
    broken = broken_places(findings, model)
    return {place: _unknown(row) if place in broken else row for place, row in table.items()}


def known_rows(findings: Findings, model: str, quantity: str, layer: int = ALL) -> pd.DataFrame:
    """Return the rows behind percentiles, intervals and verdicts on a model, or on one of its layers."""
    rows = rows_of_model(_rows(findings, quantity), model)
    rows = rows.loc[slice(None) if layer == ALL else rows["layer"] == layer, ["sample", quantity]]
    return rows.assign(**{quantity: np.nan}) if (layer, ALL) in broken_places(findings, model) else rows


def _unknown(row: Percentiles) -> Percentiles:
    return {**percentiles([]), "queries": row["queries"], "undefined": row["queries"]}


def pooled_percentiles(findings: Findings, quantity: str) -> dict[str, Percentiles]:
    """Return percentiles of a quantity over all layers and heads."""
    models = _rows(findings, quantity)["model"].unique()
    return {str(model): findings(place_percentiles, str(model), quantity)[ALL, ALL] for model in models}


def layer_percentiles(findings: Findings, quantity: str) -> dict[str, pd.DataFrame]:
    """Return percentiles of a quantity in every layer, heads pooled."""
    tables = {}
    for model, rows in _rows(findings, quantity).groupby("model", sort=False):
        places = findings(place_percentiles, str(model), quantity).items()
        sketched = [{"layer": layer, **row} for (layer, head), row in places if head == ALL != layer]
        table = pd.DataFrame(sketched) if sketched else percentile_rows(rows, quantity, "layer")
        broken = {layer for layer, head in broken_places(findings, str(model)) if head == ALL}
        layers = records(table.sort_values("layer"))
        tables[str(model)] = pd.DataFrame({**r, **_unknown(r)} if r["layer"] in broken else r for r in layers)
    return tables


def percentile_table(findings: Findings, quantity: str) -> pd.DataFrame:
    """Return percentiles of a quantity per layer and head, and pooled, of every model."""
    models = map(str, findings.measurements.models["model"])
    return pd.DataFrame(row for model in models for row in _places(findings, {"model": model}, quantity))


def within_table(findings: Findings) -> pd.DataFrame:
    """Return percentiles of what every counterfactual k would keep, by layer and head and pooled, by model."""
    table: list[dict[Any, Any]] = []
    for model in map(str, findings.measurements.models["model"]):
        for k in counterfactual_ks(findings.measurements.of(model).queries):
            for metric in (*in_table("queries"), *in_table("loads")):
                column = f"{metric.name}_k{k}"
                if metric.takes(k) and column in _rows(findings, column):
                    table += _places(findings, {"model": model, "quantity": metric.name, "k": k}, column)
    return pd.DataFrame(table)


def _places(findings: Findings, facts: dict[str, Any], column: str) -> list[dict[Any, Any]]:
    """Return facts with the percentiles of each layer and head, then those of all together."""
    places = findings(place_percentiles, facts["model"], column).items()
    shown = [(at, row) for at, row in places if (at[0] == ALL) == (at[1] == ALL)]
    return [{**facts, "layer": at[0], "head": at[1], **row} for at, row in shown]


def all_by_name(table: pd.DataFrame) -> pd.DataFrame:
    """Replace ALL by ``all`` in the columns layer and head, for readers."""
    named = {name: table[name].astype(object).mask(table[name] == ALL, "all") for name in ("layer", "head")}
    return table.assign(**named)


COLUMNS = ["model", "layer", "head", "quantity", "statistic", "estimate", "low", "high", "target"]
SAMPLED = "over sampled queries"


def sampled_models(findings: Findings) -> list[str]:
    """Return the models whose queries were drawn, about which statements are estimates."""
    models = findings.measurements.models
    return [str(m) for m in models["model"][models["share"] < 1]]


def in_part(findings: Findings, *models: str) -> bool:
    """Return whether a table of queries has only some of a model's queries: drawn, or a sample of too many."""
    table = findings.measurements.models
    of_models = table[table["model"].isin(models)] if models else table
    return bool((of_models["share"] * of_models["share_kept"] < 1).any())


def require_every_query(findings: Findings, statement: str) -> None:
    """Refuse what rests on extremes or on every query if only some queries were drawn or kept."""
    if in_part(findings):
        raise InputError(
            f"{statement} needs every query, but only some were drawn or kept: measure without --queries, and "
            "with at most --max-queries queries."
        )


def estimate_table(findings: Findings) -> pd.DataFrame:
    """Return mean and percentiles per layer and head and pooled, for models whose queries were drawn."""
    rows: list[list[object]] = []
    for model in sampled_models(findings):
        measurements = findings.measurements.of(model)
        model_row = measurements.models.iloc[0]
        probability = float(model_row["share"] * model_row["share_kept"])  # of a query to be in the table
        queries = measurements.queries.sort_values(["layer", "head", "sample", "stratum"], ignore_index=True)
        place = queries[["layer", "head", "sample", "stratum"]].to_numpy()
        strata = np.cumsum(np.any(np.diff(place, axis=0, prepend=place[:1]) != 0, axis=1))
        samples = queries["sample"].to_numpy(np.int64)
        ks = counterfactual_ks(queries)
        estimated = [metric for metric in in_table("queries") if metric.takes(1)]
        parts = [*places_of(queries), ((ALL, ALL), np.arange(len(queries)))]
        for quantity in metric_columns(estimated, ks):
            values = queries[quantity].to_numpy(np.float64)
            for (layer, head), at in parts:
                for sampled in sampled_estimates(values[at], samples[at], strata[at], probability):
                    for target, ends in zip(TARGETS, (sampled.these, sampled.such), strict=True):
                        start = [model, layer, head, quantity, sampled.statistic, sampled.estimate]
                        rows.append([*start, *ends, target])
    return pd.DataFrame(rows, columns=COLUMNS)


def _pooled(findings: Findings, model: str) -> pd.DataFrame:
    table = findings(estimate_table)
    return table[(table["model"] == model) & (table["layer"] == ALL)]


def sampling_facts(findings: Findings, model: str) -> Summary:
    """Return the number of drawn queries of a model, their share, the share kept, and what extremes cover."""
    row = rows_of_model(findings.measurements.models, model).iloc[0]
    shares = {"share": float(row["share"]), "share_kept": float(row["share_kept"])}
    return {"queries": int(row["drawn"]), **shares, "extremes_and_loads": SAMPLED}


def sampling_sentences(findings: Findings, quantities: Sequence[str] = ("dispersion",)) -> list[str]:
    """Return sentences on what was drawn and which tables come from a sketch; none if all was measured."""
    sentences = []
    for model in sampled_models(findings):
        words = sampling_facts(findings, model)
        medians = " ".join(_median(findings, model, quantity) for quantity in quantities)
        rows = len(rows_of_model(findings.measurements.queries, model))
        of_part = ""
        if words["share_kept"] < 1:
            of_part = f" Medians and intervals here are of the {rows:,} that were kept one by one."
        sentences.append(
            f"Estimated: {words['share']:.2%} of the queries of {model} were drawn ({words['queries']} per sample "
            f"and head of the longest sequence).{of_part} {medians} Extremes (p0, p100) and key loads are "
            f"{SAMPLED}. No bound, certificate or gate is judged on them."
        )
    return sentences + _sample_sentences(findings)


def _median(findings: Findings, model: str, quantity: str) -> str:
    """Return a sentence on the estimated median of a quantity over all layers and heads, with its intervals."""
    pooled = _pooled(findings, model)
    median = pooled[(pooled["quantity"] == quantity) & (pooled["statistic"] == "p50")]
    estimate = float(median["estimate"].iloc[0])
    metric = METRICS[quantity]
    if not np.isfinite(estimate):
        return f"No drawn query has a finite {metric.symbol}."
    intervals = [
        f"{interval(low, high, '{:.3g}'.format, between=' to ')} for {target}"
        for low, high, target in zip(median["low"], median["high"], median["target"], strict=True)
        if np.isfinite(low + high)
    ]
    return (
        f"The median of {metric.symbol} is {estimate:.3g} {metric.unit} (95% intervals: "
        f"{'; '.join(intervals) or 'none, too few were drawn'})."
    )


def _sample_sentences(findings: Findings) -> list[str]:
    sentences = []
    for name, rows in findings.measurements.sketches.groupby("model", sort=False):
        is_drawn = name in sampled_models(findings)
        queries = "drawn queries" if is_drawn else "queries"
        nouns = {"dispersion": queries, "load": "keys"}
        many = " and ".join(f"{n:,} {nouns[quantity]}" for quantity, n in _counts(findings, str(name)).items())
        exact = "those of all drawn queries" if is_drawn else "exact"
        sentences.append(
            f"Sampled: {name} has {many}, more than are kept one by one. Counts, means and extremes in the "
            f"tables are {exact}; percentiles are within {rows['rank_error'].max():.2%} in rank (with 99% "
            f"confidence). Figures, and sentences that say so, use a random sample of the {queries}."
        )
    return sentences


def _counts(findings: Findings, model: str) -> dict[str, int]:
    rows = rows_of_model(findings.measurements.sketches, model)
    pooled = rows[(rows["layer"] == ALL) & rows["quantity"].isin(("dispersion", "load"))]
    return {str(name): int(count) for name, count in zip(pooled["quantity"], pooled["queries"], strict=True)}


def partial_sentences(findings: Findings) -> list[str]:
    """Return sentences on models whose tables of queries and keys are incomplete."""
    sentences = []
    for model in map(str, findings.measurements.models["model"]):
        measurements = findings.measurements.of(model)
        sketched = _counts(findings, model)
        words = sampling_facts(findings, model)
        of_all = {name: f" of {count:,}" for name, count in sketched.items()}
        queries = f"{len(measurements.queries):,}{of_all.get('dispersion', '')}"
        keys = f"{len(measurements.loads):,}{of_all.get('load', '')} keys"
        noun = "queries"
        reasons = []
        if words["share"] < 1:
            noun = "drawn queries"
            reasons.append(f"{words['share']:.2%} of the queries were drawn")
        if sketched:
            reasons.append("of more than --max-queries a random sample is kept")
        if reasons:
            sentences.append(f"of {model} {queries} {noun} and {keys}; {', and '.join(reasons)}")
    return sentences


Percentile = Callable[[str], Summary]  # from a column of the queries or loads, for one layer and head
Describe = Callable[[Percentile, str], Summary]


def by_layer(findings: Findings, describe: Describe) -> dict[str, Summary]:
    """Return the numbers of every model by layer and head and pooled, also for every counterfactual k."""
    measurements = findings.measurements
    results = {}
    for model in measurements.models["model"]:
        of_model = measurements.of(model)
        layers = partial(_layers, findings, model, describe)
        result = {"unit": "nats", **layers("")}
        if model in sampled_models(findings):
            estimates = _pooled(findings, model).drop(columns=["model", "layer", "head"]).to_dict("records")
            result["sampled"] = {**sampling_facts(findings, model), "estimates": estimates}
        row = of_model.models.iloc[0]
        result["capture"] = {"found": int(row["attention_found"]), "captured": int(row["attention_captured"])}
        result["capture"] |= {name: float(row[name]) for name in RESIDUALS}
        for name in ("skipped", "remarks"):
            result["capture"][name] = getattr(of_model, name).drop(columns="model").to_dict("records")
        within = [{"k": k, **layers(f"_k{k}")} for k in counterfactual_ks(of_model.queries)]
        results[str(model)] = json_ready(result | ({"within_model": within} if within else {}))
    return results


def _layers(findings: Findings, model: str, describe: Describe, suffix: str) -> Summary:
    def of(place: Place, column: str) -> Summary:
        return findings(place_percentiles, model, column)[place]

    places = [place for place in findings(place_percentiles, model, "dispersion") if ALL not in place]
    layers = [{"layer": at[0], "head": at[1], **describe(partial(of, at), suffix)} for at in places]
    return {"layers": layers, "all": describe(partial(of, (ALL, ALL)), suffix)}


def without(table: Summary, *names: str) -> Summary:
    """Return a table of numbers without some of them."""
    return {key: value for key, value in table.items() if key not in names}


def check_supposed_k(findings: Findings, k: int) -> None:
    """Refuse a k that would drop no key of a full-attention model, because no query has more keys."""
    kinds = findings.measurements.models.set_index("model")["attention"]
    for model, keys in findings(pooled_percentiles, "keys").items():
        if kinds[model] in DENSE and keys["p100"] < k:
            fitting((k,), int(keys["p100"]), "the largest number of keys")
