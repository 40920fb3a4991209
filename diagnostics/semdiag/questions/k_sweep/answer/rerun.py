"""What became of models that were run with real masks: what each changed, with intervals, and budgets."""

import math
from typing import Any, cast

import numpy as np
import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.resampling import Interval, sum_ratio_interval
from semdiag.measuring.findings.strict_json import records
from semdiag.measuring.table import ALL
from semdiag.questions.k_sweep.measure.rerun import NO_MASK, TOLERANCES, TOP_K, measure_of


def change_table(findings: Findings) -> pd.DataFrame:
    """What each mask of each rerun changes, with 95 % intervals over samples.

    Args:
        findings: with reruns.

    Returns:
        model, mask, k, samples, measure, classes (of the output's distribution); before (the loss without a
        mask, per target); change, low, high of the measure; the same three of divergence (nats per position) and
        changed (share of predictions); accuracy; share and mass (means of the sweep; of top-k); by_mass: the
        change at this k if it were proportional to the weight dropped, with the factor of the smallest k run.
    """
    rows: list[dict[str, Any]] = []
    sweep = findings.measurements.sweep
    for model, again in findings.measurements.rerun.groupby("model", sort=False):
        means = sweep[(sweep["model"] == model) & (sweep["layer"] == ALL)].set_index(["quantity", "k"])["mean"]
        base = again[again["mask"] == NO_MASK].set_index("sample")
        measure = measure_of(again)
        first: tuple[float, float] | None = None
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
            row |= _named("", _change(measure, own, before))
            row |= _named("divergence_", _over(own["divergence"], own["predictions"]))
            row |= _named("changed_", _over(own["changed"], own["predictions"]))
            row["accuracy"] = _ratio(own["correct"], own["targets"])
            known = mask == TOP_K and ("mass", k) in means.index
            row["share"], row["mass"] = (
                (float(means["share", k]), float(means["mass", k])) if known else (math.nan,) * 2
            )
            if known and first is None:
                first = row["change"], 1 - row["mass"]
            row["by_mass"] = (
                first[0] * (1 - row["mass"]) / first[1] if known and first and first[1] > 0 else math.nan
            )
            rows.append(row)
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["model", "mask", "k"])


def _change(measure: str, own: pd.DataFrame, before: pd.DataFrame) -> Interval:
    if measure == "output_change":
        return _over(own[measure], own[measure].notna())
    return _over(own[measure] - before[measure], own["targets" if measure == "loss" else "predictions"])


def _over(sums: "pd.Series[Any]", counts: "pd.Series[Any]") -> Interval:
    return sum_ratio_interval(sums.to_numpy(np.float64), counts.to_numpy(np.float64))


def _ratio(sums: "pd.Series[Any]", counts: "pd.Series[Any]") -> float:
    return float(sums.sum() / counts.sum()) if counts.sum() else math.nan


def _named(prefix: str, interval: Interval) -> dict[str, float]:
    name = prefix.removesuffix("_") or "change"
    return {name: interval.estimate, f"{prefix}low": interval.low, f"{prefix}high": interval.high}


def budget_content(findings: Findings, model: str) -> dict[str, Any]:
    """The budgets of a model as a file holds them: docs/commands/k-sweep.md.

    Args:
        findings: with budgets.
        model: a model's path.
    """
    measurements = findings.measurements
    own = measurements.budgets[measurements.budgets["model"] == model]
    again = findings(change_table)
    again = again[again["model"] == model]
    facts = next(row for row in measurements.models.to_dict("records") if row["model"] == model)
    asked = measurements.provenance.get("tolerance")
    limit = TOLERANCES[again["measure"].iloc[0]] if asked is None and len(again) else asked
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
                "holds": bool(tested["high"] <= limit),
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


def _layers(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The places of a budget, k of each by head."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in records(rows.sort_values(["layer", "head"])):
        names = {name: row[name] for name in ("layer", "module", "occurrence")}
        found.setdefault((row["module"], row["occurrence"]), {**names, "k": []})["k"].append(row["k"])
    return list(found.values())
