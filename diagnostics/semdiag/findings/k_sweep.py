"""What a k-sweep says: the paper's conditions for every k, and which k qualifies."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from semdiag.capturing.attention_kinds import SCORED
from semdiag.findings.findings import Findings
from semdiag.findings.strict_json import MODEL_FACTS, Summary, json_object
from semdiag.mathematics.corollary import paper_input_condition, paper_weight_condition
from semdiag.measurement.percentiles import PAPER_PERCENTILES

MASS = 0.95  # of the attention weight, to be kept for half of the queries
SCOPE = (
    "Within one model: its own scores, had each query kept its k largest. A model trained with that k has other "
    "scores; nothing here is the comparison of trained models."
)


def condition_table(findings: Findings) -> pd.DataFrame:
    """Both conditions of Corollary 1 within each model, for every k, at matching percentiles.

    δ_s and δ_h(k) at percentiles 75, 90, 95 and 100 of the pooled queries, Δ_h(k) at the mirrored ones, and
    β = load/k.

    Source: docs/theory.md#k-sweep, paper, eq. 304 and 305. Deviation: within one model, where the paper
    compares two trained ones; percentiles of different queries are combined, as the paper does.

    Args:
        findings: with a sweep.

    Returns:
        model, k, percentile, parameter (W or X), left_side (+inf where Δ ≤ 0), met.
    """
    rows = []
    for model, own in findings.measurements.sweep.groupby("model", sort=False):
        pooled = own[own["layer"] == -1].set_index(["quantity", "k"])
        if ("dispersion", 0) not in pooled.index:
            continue
        full = _cuts(pooled, "dispersion", 0)
        for k in sorted(own.loc[own["quantity"] == "separation", "k"].unique()):
            delta, load = _cuts(pooled, "dispersion", k), _cuts(pooled, "load", k) / int(k)
            gap = _cuts(pooled, "separation", k, mirrored=True)
            gap = torch.where(gap.isnan(), torch.inf, gap)
            sides = {
                "W": paper_weight_condition(full, delta, gap),
                "X": paper_input_condition(full, delta, gap, load),
            }
            for parameter, condition in sides.items():
                for at, percentile in enumerate(PAPER_PERCENTILES):
                    left = float(condition.left_side[at])
                    row = {"model": model, "k": int(k), "percentile": percentile, "parameter": parameter}
                    rows.append({**row, "left_side": left, "met": bool(condition.met[at])})
    return pd.DataFrame(rows, columns=["model", "k", "percentile", "parameter", "left_side", "met"])


def _cuts(pooled: pd.DataFrame, quantity: str, k: int, mirrored: bool = False) -> torch.Tensor:
    names = [f"p{100 - p if mirrored else p}" for p in PAPER_PERCENTILES]
    return torch.from_numpy(pooled.loc[[(quantity, k)]][names].to_numpy(np.float64)[0].copy())


@dataclass(frozen=True)
class Recommendation:
    """Which k a sweep recommends for one model.

    Attributes:
        verdict: ``k = 7``, ``none``, ``nothing conclusive`` or ``not applicable``.
        k: the recommended k; None without one.
        k_for_mass: smallest k that keeps 95 % of the mass for half of the queries; None without one.
        k_for_conditions: smallest k that meets both of the paper's conditions at all four percentiles.
        words: the recommendation in a sentence or two.
    """

    verdict: str
    k: int | None
    k_for_mass: int | None
    k_for_conditions: int | None
    words: str


def recommendation(findings: Findings, model: str) -> Recommendation:
    """Judge a model's sweep.

    A k qualifies if it keeps 95 % of the attention mass for half of the queries, and meets both of the
    paper's conditions (in W and in X) at all four percentiles.

    Args:
        findings: with a sweep.
        model: a model's path.
    """
    measurements = findings.measurements
    row = next(row for row in measurements.models.to_dict("records") if row["model"] == model)
    own = measurements.sweep[(measurements.sweep["model"] == model) & (measurements.sweep["layer"] == -1)]
    if own.empty:
        known = row["attention"] in SCORED
        reason = "it was not measured" if known else f"the mask of {row['attention']} attention ranks no scores"
        return Recommendation("not applicable", None, None, None, f"Not applicable: {reason}.")
    mass = _by_k(own, "mass", "p50")
    largest = max(mass)
    enough = [k for k, kept in mass.items() if kept >= MASS]
    conditions = findings(condition_table)
    conditions = conditions[conditions["model"] == model]
    counts = conditions.groupby("k")["met"].sum()
    met = dict(zip(counts.index.to_list(), counts.to_list(), strict=True))
    every = 2 * len(PAPER_PERCENTILES)
    good = [k for k, count in met.items() if count == every]
    best = max(met, key=lambda k: met[k])
    both = sorted(set(enough) & set(good))
    first, condition = (min(found, default=None) for found in (enough, good))
    if both:
        verdict, k = f"k = {both[0]}", both[0]
        words = (
            f"k = {k} is the smallest that keeps 95 % of the attention mass for half of the queries and meets "
            f"both of the paper's conditions at all four percentiles."
        )
    elif first is None:
        verdict, k = "nothing conclusive", None
        words = (
            f"Nothing conclusive: no k up to {largest} keeps 95 % of the mass for half of the queries (k = "
            f"{largest} keeps {mass[largest]:.0%}){_conditions_words(condition, best, int(met[best]), every)}."
        )
    else:
        verdict, k = "none", None
        words = (
            f"None does: k = {first} is the smallest that keeps 95 % of the mass for half of the queries, but it "
            f"meets the paper's conditions in {int(met[first])} of {every} cases"
            f"{_conditions_words(condition, best, int(met[best]), every)}."
        )
    if row["attention"] != "full":
        words = f"Trained with k = {row['k']}, so these are the scores of a top-k model. {words}"
    return Recommendation(verdict, k, first, condition, words + _rerun_words(own, k or first))


def _conditions_words(condition: int | None, best: int, count: int, every: int) -> str:
    if condition is not None:
        return f"; from k = {condition} on some k meets all of the paper's conditions"
    if count == 0:
        return "; no k meets any of the paper's conditions"
    return f"; no k meets all of the paper's conditions (most: k = {best}, {count} of {every})"


def _rerun_words(own: pd.DataFrame, k: int | None) -> str:
    """What became of the accuracy when the model was run with its k largest scores only."""
    accuracy = _by_k(own, "accuracy", "mean")
    if not accuracy:
        return ""
    before, samples = accuracy[0], int(_by_k(own, "accuracy", "queries")[0])
    margin = 1.96 * math.sqrt(2 * max(before * (1 - before), 1 / samples) / samples)
    enough = [k for k, mean in accuracy.items() if k and mean >= before - margin]
    said = f" Run again on {samples} samples (accuracy as it is {before:.1%}):"
    if k is not None:
        said += f" {accuracy[k]:.1%} with k = {k};"
    return f"{said} as accurate, within the error of these samples, at {_ranges(enough)}."


def _by_k(own: pd.DataFrame, quantity: str, column: str) -> dict[int, float]:
    """One number of a quantity for every k."""
    rows = own[own["quantity"] == quantity]
    return dict(zip(rows["k"].to_list(), rows[column].to_list(), strict=True))


def _ranges(numbers: list[int]) -> str:
    """Whole numbers in words: ``k = 2 to 5, 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"k = {', '.join(said)}" if said else "no k"


def sweep_summary(findings: Findings) -> Summary:
    """Everything a sweep found, and its recommendation, for every model.

    Args:
        findings: of one or more models, with a sweep.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.k-sweep/1``; null where a number is undefined or infinite.
    """
    measurements = findings.measurements
    conditions = findings(condition_table)
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.sweep[measurements.sweep["model"] == row["model"]]
        found = recommendation(findings, row["model"])
        result = {key: row[key] for key in MODEL_FACTS} | {"unit": "nats", "verdict": found.verdict}
        result |= {"recommended_k": found.k, "k_for_mass": found.k_for_mass}
        result |= {"k_for_conditions": found.k_for_conditions, "words": found.words}
        result["conditions"] = (
            conditions[conditions["model"] == row["model"]].drop(columns="model").to_dict("records")
        )
        result["sweep"] = own.drop(columns="model").to_dict("records")
        results.append(result)
    return json_object("k-sweep", findings, scope=SCOPE, results=results)
