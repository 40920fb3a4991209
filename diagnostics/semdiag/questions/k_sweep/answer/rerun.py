"""Results of running models with real masks: the changes with intervals, and budgets."""

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pandas as pd
import scipy
from numpy.typing import NDArray

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.resampling import FEWEST, Interval, sum_ratio_interval
from semdiag.measuring.findings.strict_json import records
from semdiag.measuring.table import ALL
from semdiag.questions.k_sweep.measure.kinds import TOP_K
from semdiag.questions.k_sweep.measure.passes import NO_MASK
from semdiag.questions.k_sweep.measure.rerun import HARM, MOST_HARMED, TOLERANCES, measure_of

ROUNDING = 5e-5  # anything smaller may be rounding: nats, or relative
SEEN = 0.1  # of the tolerance: a smaller change of a sample is as good as none
_OF_THE_SWEEP = ("mass", "mass_without_first", "head_change", "stream_change")


def change_table(findings: Findings) -> pd.DataFrame:
    """Return the changes by each mask of each rerun, with 95% intervals over samples, or chunks of few ones."""
    rows: list[dict[str, Any]] = []
    sweep = findings.measurements.sweep
    for model, again in findings.measurements.rerun.groupby("model", sort=False):
        means = sweep[(sweep["model"] == model) & (sweep["layer"] == ALL)].set_index(["quantity", "k"])["mean"]
        base = again[again["mask"] == NO_MASK].set_index(["sample", "part"])
        measure = measure_of(again)
        limit = tolerance_of(findings, measure)
        for place, rows_of_mask in again.groupby(["mask", "k"], sort=False):
            (mask, k), own = cast("tuple[str, int]", place), rows_of_mask.set_index(["sample", "part"])
            before = base.loc[own.index]
            samples, chunk = own.index.get_level_values(0).nunique(), int(own["chunk"].max())
            row: dict[str, Any] = {"model": model, "mask": mask, "k": int(k), "samples": samples}
            row |= {"units": len(own), "chunk": chunk, "measure": measure, "classes": int(own["classes"].max())}
            row["before"] = _ratio(before["loss"], before["targets"])
            sums, counts = _sums(measure, own, before)
            change = change_interval(sums, counts, limit)
            row |= {"change": change.estimate, "low": change.low, "high": change.high, "tolerance": limit}
            row |= _shares(sums, counts, limit)
            for name, share in (("divergence", False), ("changed", True)):
                values = own[name].to_numpy(np.float64), own["predictions"].to_numpy(np.float64)
                row |= sum_ratio_interval(*values, share=share).columns(name)
            row["accuracy"] = _ratio(own["correct"], own["targets"])
            for name in _OF_THE_SWEEP:
                known = mask == TOP_K and (name, k) in means.index
                row[name] = float(means[name, k]) if known else math.nan
            row["kept"] = _ratio(own["kept"], own["keys"])
            rows.append(row)
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["model", "mask", "k", "kept"])


def _sums(
    measure: str, own: pd.DataFrame, before: pd.DataFrame
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the summed change of each unit, and the number of its terms."""
    output = measure == "output_change"
    sums = own[measure] if output else own[measure] - before[measure]
    counts = own[measure].notna() if output else own["targets" if measure == "loss" else "predictions"]
    return sums.to_numpy(np.float64), counts.to_numpy(np.float64)


def change_interval(sums: NDArray[np.float64], counts: NDArray[np.float64], tolerance: float) -> Interval:
    """Return a mean change; without an interval where all units change alike, or none by a tenth of the tolerance."""
    interval = sum_ratio_interval(sums, counts).if_varied()
    seen = _seen(sums[counts > 0] / counts[counts > 0], tolerance).any()
    return interval if seen else Interval(interval.estimate, math.nan, math.nan)


def _seen(changes: NDArray[np.float64], tolerance: float) -> NDArray[np.bool_]:
    """Return which changes are seen; one that is no number is."""
    return ~(np.abs(changes) <= SEEN * tolerance)


def _shares(sums: NDArray[np.float64], counts: NDArray[np.float64], tolerance: float) -> dict[str, float]:
    """Return the shares of units that change, and that are harmed, with their limits; and the extreme changes."""
    changes = sums[counts > 0] / counts[counts > 0]
    some = {"seen": _seen(changes, tolerance), "harmed": ~(changes <= HARM * tolerance)}
    ends = {"least": float(changes.min()), "worst": float(changes.max())} if len(changes) else {}
    shares = {name: x for n, these in some.items() for name, x in share_below(n, these).items()}
    return shares | {"least": math.nan, "worst": math.nan} | ends


def share_below(name: str, some: NDArray[np.bool_]) -> dict[str, float]:
    """Return a share under a name, and as ``name_high`` its one-sided 95% limit for unseen inputs."""
    n, above = len(some), int(some.sum())
    if not n:
        return {name: math.nan, f"{name}_high": math.nan}
    high = 1.0 if above == n else float(scipy.stats.beta.ppf(0.95, above + 1, n - above))
    return {name: above / n, f"{name}_high": high}


def tolerance_of(findings: Findings, measure: str) -> float:
    """Return the largest change of a measure that counts as none: the user's limit, else the default."""
    return float(findings.measurements.provenance.get("tolerance") or TOLERANCES[measure])


def within(row: Mapping[str, Any], limit: float) -> bool:
    """Return whether a mean change's upper end is within a limit; without one, the change of every unit."""
    alone = math.isnan(row["high"]) and row["units"] >= FEWEST
    return bool(row["high"] <= limit or (alone and row["worst"] <= limit))


def costs(row: Mapping[str, Any], limit: float) -> bool:
    """Return whether a mean change's lower end is above a limit; without one, the change of every unit."""
    alone = math.isnan(row["low"]) and row["units"] >= FEWEST
    return bool(row["low"] > limit or (alone and row["least"] > limit))


def _ratio(sums: "pd.Series[Any]", counts: "pd.Series[Any]") -> float:
    return float(sums.sum() / counts.sum()) if counts.sum() else math.nan


def budget_content(findings: Findings, model: str) -> dict[str, Any]:
    """Return a model's budgets in the form of a budget file: docs/commands/k-sweep.md."""
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
