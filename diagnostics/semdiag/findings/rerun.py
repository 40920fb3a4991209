"""What became of models that were run with real masks, and whether sparse attention would do."""

import math
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from semdiag.capturing.attention_kinds import SCORED
from semdiag.findings.findings import Findings
from semdiag.findings.resampling import Interval, sum_ratio_interval
from semdiag.findings.strict_json import records
from semdiag.measurement.probes.rerun import LEAST_SAMPLES, NO_MASK, RANDOM, TOLERANCES, TOP_K, measure_of
from semdiag.measurement.table import ALL

MASS = 0.95  # of the attention weight, where it is all that is known
NEAR_UNIFORM = 0.95  # entropy of half of the queries' weights, in that of uniform weights
MOST_KEYS = 0.5  # share of the keys above which a mask is hardly sparse
_CHANCE = 0.99  # of ln C: a loss above it is no better than that of C equally likely classes


@dataclass(frozen=True)
class SparseVerdict:
    """Whether top-k attention would do in a model as it is.

    Attributes:
        answer: ``plausible``, ``not without loss``, ``cannot tell``, ``not rerun`` or ``not applicable``.
        reason: why there is no answer, as a word: near_uniform, chance, control, few_samples, fixed_mask,
            not_measured; empty if there is one.
        k: what the answer is about: the smallest k from which on the loss stays, the largest that was run if there
            is none, or the smallest that keeps 95 % of the weight; None: none of these.
        share: k in the keys of its queries, mean.
        mass: mean attention weight that k keeps of queries with more than k keys.
        queries: such queries.
        left_out: queries with at most k keys, of which nothing is dropped.
        measure: what changes: loss (nats per target), divergence (nats per position) or output_change (relative);
            empty without a rerun.
        change: its change at k, and its interval over samples.
        low: end of the interval.
        high: end of the interval.
        before: the loss without a mask.
        tolerance: largest change that counts as none.
        samples: that were run.
    """

    answer: str
    reason: str = ""
    k: int | None = None
    share: float = math.nan
    mass: float = math.nan
    queries: int = 0
    left_out: int = 0
    measure: str = ""
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    before: float = math.nan
    tolerance: float = math.nan
    samples: int = 0


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


def sparse_verdict(findings: Findings, model: str) -> SparseVerdict:
    """Judge whether a model would do with the k largest scores of each query.

    Plausible: there is a k from which on, at every k that was run, the upper end of the change's interval is
    within the tolerance, and it is at most half of the keys. Not without loss: there is none, or only a larger. No
    answer: the loss is no better than chance; as many random keys do as little harm; there are fewer than 8
    samples; or the attention is near uniform and no loss says that its largest scores matter.

    Args:
        findings: with a sweep, and better with a rerun.
        model: a model's path.
    """
    measurements = findings.measurements
    facts = next(row for row in measurements.models.to_dict("records") if row["model"] == model)
    own = measurements.sweep[(measurements.sweep["model"] == model) & (measurements.sweep["layer"] == ALL)]
    if own.empty:
        return SparseVerdict("not applicable", "not_measured" if facts["attention"] in SCORED else "fixed_mask")
    pooled = own.set_index(["quantity", "k"])
    even = float(pooled["p50"].get(("evenness", 0), math.nan))
    again = findings(change_table)
    again = again[again["model"] == model]
    top = records(again[again["mask"] == TOP_K].sort_values("k"))
    ks = own[own["quantity"] == "mass"]
    mass = dict(zip(ks["k"].tolist(), ks["mean"].tolist(), strict=True))
    if not top:
        enough = [k for k, kept in mass.items() if kept >= MASS]
        found = SparseVerdict("not rerun", k=min(enough, default=None))
    else:
        found = _judged(top, again, measurements.provenance.get("tolerance"))
    if found.k is not None and found.k in mass:
        queries, left_out = (int(pooled[name]["mass", found.k]) for name in ("queries", "undefined"))
        share = float(pooled["mean"].get(("share", found.k), math.nan))
        counts = {"queries": queries - left_out, "left_out": left_out}
        found = SparseVerdict(**{**asdict(found), "share": share, "mass": mass[found.k], **counts})
    if found.answer == "plausible" and not found.share <= MOST_KEYS:
        found = SparseVerdict(**{**asdict(found), "answer": "not without loss"})
    # A loss that as many random keys destroy, and the largest do not, is an answer, however even the weights.
    if even >= NEAR_UNIFORM and (found.measure != "loss" or found.answer == "cannot tell"):
        return SparseVerdict(**{**asdict(found), "answer": "cannot tell", "reason": "near_uniform"})
    return found


def _judged(top: list[dict[str, Any]], again: pd.DataFrame, tolerance: float | None) -> SparseVerdict:
    """From the reruns alone, k in rising order."""
    measure = top[0]["measure"]
    limit = TOLERANCES[measure] if tolerance is None else tolerance
    at = len(top)
    while at and top[at - 1]["high"] <= limit:
        at -= 1
    row = top[min(at, len(top) - 1)]
    answer, reason = ("plausible" if at < len(top) else "not without loss"), ""
    control = again[(again["mask"] == RANDOM) & (again["k"] == row["k"])]
    classes = int(row["classes"])
    if row["samples"] < LEAST_SAMPLES:
        reason = "few_samples"
    elif measure == "loss" and classes > 1 and row["before"] >= _CHANCE * math.log(classes):
        reason = "chance"
    elif answer == "plausible" and len(control) and control["high"].iloc[0] <= limit:
        reason = "control"
    numbers: dict[str, Any] = {name: float(row[name]) for name in ("change", "low", "high", "before")}
    return SparseVerdict(
        "cannot tell" if reason else answer,
        reason,
        int(row["k"]),
        measure=measure,
        tolerance=limit,
        samples=int(row["samples"]),
        **numbers,
    )


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
        kept = np.minimum(rows["k"] * block, rows["mean_keys"])
        samples = measurements.rerun[(measurements.rerun["model"] == model) & (measurements.rerun["mask"] == name)]
        budgets[str(name)] = {
            "block": block,
            "total": int(rows["k"].sum()),
            "share": float(kept.sum() / rows["mean_keys"].sum()),
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
