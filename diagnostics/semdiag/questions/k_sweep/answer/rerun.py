"""Results of running models with real masks: the changes with intervals, and budgets."""

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pandas as pd
import scipy

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.resampling import FEWEST, Interval, sum_ratio_interval
from semdiag.measuring.findings.strict_json import records
from semdiag.measuring.table import ALL
from semdiag.questions.k_sweep.measure.kinds import TOP_K
from semdiag.questions.k_sweep.measure.passes import NO_MASK
from semdiag.questions.k_sweep.measure.rerun import HARM, MOST_HARMED, TOLERANCES, measure_of

_OF_THE_SWEEP = ("share", "mass", "mass_without_first", "head_change", "stream_change")


def change_table(findings: Findings) -> pd.DataFrame:
    """Return the changes by each mask of each rerun, with 95% intervals over samples.

    Args:
        findings: with reruns.

    Returns:
        model, mask, k, samples, measure, classes (of the output's distribution); before (the loss without a
        mask, per target); change, low, high of the measure (no interval where all samples change alike); harmed:
        the share of samples that change by more than HARM times the tolerance, harmed_high: the exact binomial
        upper end of that share at 95%, worst: the largest change of a sample; change, low and high of divergence
        (nats per position) and changed (share of predictions); accuracy; kept: the share of all keys that stays;
        share, mass, mass_without_first, head_change and stream_change (means of the sweep, of queries with more
        than k keys; of top-k).
    """
    rows: list[dict[str, Any]] = []
    sweep = findings.measurements.sweep
    for model, again in findings.measurements.rerun.groupby("model", sort=False):
        means = sweep[(sweep["model"] == model) & (sweep["layer"] == ALL)].set_index(["quantity", "k"])["mean"]
        base = again[again["mask"] == NO_MASK].set_index("sample")
        measure = measure_of(again)
        limit = tolerance_of(findings, measure)
        for place, rows_of_mask in again.groupby(["mask", "k"], sort=False):
            (mask, k), own = cast("tuple[str, int]", place), rows_of_mask.set_index("sample")
            before = base.loc[own.index]
            row: dict[str, Any] = {
                "model": model,
                "mask": mask,
                "k": int(k),
                "samples": len(own),
                "measure": measure,
            }
            row["classes"] = int(own["classes"].max())
            row["before"] = _ratio(before["loss"], before["targets"])
            change = _change(measure, own, before)
            row |= {"change": change.estimate, "low": change.low, "high": change.high}
            row |= harm(*_sums(measure, own, before), HARM * limit)
            row |= _over(own["divergence"], own["predictions"]).columns("divergence")
            row |= _over(own["changed"], own["predictions"]).columns("changed")
            row["accuracy"] = _ratio(own["correct"], own["targets"])
            for name in _OF_THE_SWEEP:
                known = mask == TOP_K and (name, k) in means.index
                row[name] = float(means[name, k]) if known else math.nan
            row["kept"] = _ratio(own["kept"], own["keys"])
            rows.append(row)
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["model", "mask", "k"])


def _change(measure: str, own: pd.DataFrame, before: pd.DataFrame) -> Interval:
    """Return the mean change; without an interval if all samples change alike, as they show no variation."""
    return _over(*_sums(measure, own, before)).if_varied()


def _sums(measure: str, own: pd.DataFrame, before: pd.DataFrame) -> "tuple[pd.Series[Any], pd.Series[Any]]":
    """Return the summed change of each sample, and the number of its units."""
    if measure == "output_change":
        return own[measure], own[measure].notna()
    return own[measure] - before[measure], own["targets" if measure == "loss" else "predictions"]


def harm(sums: "pd.Series[Any]", counts: "pd.Series[Any]", limit: float) -> dict[str, float]:
    """Return the share of samples that change by more than a limit, with its interval for unseen inputs.

    harmed_high = the share p at which so few harmed samples, or fewer, have probability 0.05.

    Source: Clopper and Pearson 1934, one-sided. Deviation: none.

    Args:
        sums: changes of samples.
        counts: the number of terms of each sum; samples with 0 are left out.
        limit: of the change of one sample.

    Returns:
        harmed, harmed_high, worst; NaN without samples. A NaN change counts as harm.

    Example:
        >>> {name: round(x, 4) for name, x in harm(pd.Series([0.0] * 500), pd.Series([1] * 500), 0.1).items()}
        {'harmed': 0.0, 'harmed_high': 0.006, 'worst': 0.0}
    """
    some = counts.to_numpy(np.float64) > 0
    changes = sums.to_numpy(np.float64)[some] / counts.to_numpy(np.float64)[some]
    n, above = len(changes), int((~(changes <= limit)).sum())
    if not n:
        return dict.fromkeys(("harmed", "harmed_high", "worst"), math.nan)
    high = 1.0 if above == n else float(scipy.stats.beta.ppf(0.95, above + 1, n - above))
    return {"harmed": above / n, "harmed_high": high, "worst": float(changes.max())}


def tolerance_of(findings: Findings, measure: str) -> float:
    """Return the largest change of a measure that counts as none: the user's limit, else the default.

    Args:
        findings: of any number of models.
        measure: loss, divergence or output_change.
    """
    return float(findings.measurements.provenance.get("tolerance") or TOLERANCES[measure])


def within(row: Mapping[str, Any], limit: float) -> bool:
    """Return whether a mean change's upper end (or the common change of identical samples) is within a limit.

    Args:
        row: of :func:`change_table`.
        limit: largest change that counts as none.
    """
    alike = math.isnan(row["high"]) and row["samples"] >= FEWEST and row["worst"] == row["change"]
    return bool(row["high"] <= limit or (alike and row["change"] <= limit))


def costs(row: Mapping[str, Any], limit: float) -> bool:
    """Return whether a mean change's lower end (or the common change of identical samples) is above a limit.

    Args:
        row: of :func:`change_table`.
        limit: largest change that counts as none.
    """
    alike = math.isnan(row["low"]) and row["samples"] >= FEWEST and row["worst"] == row["change"]
    return bool(row["low"] > limit or (alike and row["change"] > limit))


def _over(sums: "pd.Series[Any]", counts: "pd.Series[Any]") -> Interval:
    return sum_ratio_interval(sums.to_numpy(np.float64), counts.to_numpy(np.float64))


def _ratio(sums: "pd.Series[Any]", counts: "pd.Series[Any]") -> float:
    return float(sums.sum() / counts.sum()) if counts.sum() else math.nan


def budget_content(findings: Findings, model: str) -> dict[str, Any]:
    """Return a model's budgets in the form of a budget file: docs/commands/k-sweep.md.

    Args:
        findings: with budgets.
        model: a model's path.
    """
    measurements = findings.measurements
    own = measurements.budgets[measurements.budgets["model"] == model]
    again = findings(change_table)
    again = again[again["model"] == model]
    facts = next(row for row in measurements.models.to_dict("records") if row["model"] == model)
    limit = tolerance_of(findings, str(again["measure"].iloc[0])) if len(again) else None
    budgets = {}
    for name, rows in own.groupby("budget", sort=False):
        tested = records(again[again["mask"] == name])[0]
        block = int(rows["block"].iloc[0])
        samples = measurements.rerun[(measurements.rerun["model"] == model) & (measurements.rerun["mask"] == name)]
        budgets[str(name)] = {
            "block": block,
            "total": int(rows["k"].sum()),
            "share": _ratio(rows["kept_keys"], rows["all_keys"]),
            "chosen": {"samples": [0, int(samples["sample"].min()) - 1]},
            "tested": {
                "samples": [int(samples["sample"].min()), int(samples["sample"].max())],
                "measure": tested["measure"],
                "without_mask": float(tested["before"]),
                "change": float(tested["change"]),
                "interval": [float(tested["low"]), float(tested["high"])],
                "harmed": float(tested["harmed"]),
                "harmed_high": float(tested["harmed_high"]),
                "holds": _holds(tested, limit),
            },
            "layers": _layers(rows),
        }
    default = "loss" if "loss" in budgets else next(iter(budgets), None)
    return {
        "schema": "semdiag.budget/1",
        "model": model,
        "sha256": facts["sha256"],
        "inputs": facts["inputs"],
        "tolerance": limit,
        "default": default,
        "budgets": budgets,
    }


def _holds(tested: Mapping[str, Any], limit: float | None) -> bool | None:
    """Return whether a budget suffices; None if these samples do not decide."""
    if limit is None:
        return None
    if within(tested, limit) and tested["harmed_high"] <= MOST_HARMED:
        return True
    return False if costs(tested, limit) else None


def _layers(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the layers of a budget, each with k by head."""
    attentions: dict[tuple[str, int], dict[str, Any]] = {}
    for row in records(rows.sort_values(["layer", "head"])):
        names = {name: row[name] for name in ("layer", "module", "occurrence")}
        attentions.setdefault((row["module"], row["occurrence"]), {**names, "k": []})["k"].append(row["k"])
    return list(attentions.values())
