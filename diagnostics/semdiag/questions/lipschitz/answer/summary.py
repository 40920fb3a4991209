"""Do the empirical Lipschitz estimates stay below the sound bounds, and has top-k the smaller ones?"""

import math

import numpy as np
import pandas as pd

from semdiag.measuring.findings.finding import Finding, Verdict, log10, of_rows, verdicts_of
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import Pair, compared_pairs
from semdiag.measuring.findings.resampling import FEWEST
from semdiag.measuring.findings.strict_json import MODEL_FACTS, Summary, json_object, records
from semdiag.measuring.percentiles import percentiles
from semdiag.questions.lipschitz.answer.secant_percentiles import PERCENTILES, secant_percentiles, secant_ratios

SCOPE = (
    "Every estimate is a lower one. Bounds hold for these samples at the drawn parameters, including the "
    "checkpoint."
)
GRADIENTS = "gradients of the loss are below the constants at the same parameters"
SECANTS = "secants of the loss are below the largest constant of the drawn parameters"
JACOBIANS = "block Jacobians are below λ_X of the same sample"
AT_POINT = "gradients of queries and keys, and block Jacobians, are below the bounds at the same point"
ORDERING = "the loss is less steep around this model than around the full one"
_SLACK = 1e-9


def estimate_findings(findings: Findings) -> list[Finding]:
    """Compare every empirical estimate with the sound bound."""
    results = []
    for model in findings.measurements.loss_gradients["model"].unique():
        measured = findings.measurements.of(model)
        gradients = measured.loss_gradients
        scored = gradients[gradients["ln_point"].notna()]
        slopes = pd.concat([scored["slope"], measured.jacobians["norm"]])
        near = pd.concat(
            [scored["ln_point"], measured.jacobians["ln_exact"].fillna(measured.jacobians["ln_point"])]
        )
        results.append(_judged(model, AT_POINT, slopes, near, near < math.inf))
        bounds = gradients.groupby("group")["ln_sound"].max()
        known = gradients.groupby("group")["holds"].all()
        results.append(_judged(model, GRADIENTS, gradients["slope"], gradients["ln_sound"], gradients["holds"]))
        groups = measured.loss_secants["group"]
        results.append(
            _judged(model, SECANTS, measured.loss_secants["slope"], groups.map(bounds), groups.map(known))
        )
        norms = measured.jacobians
        finite = norms["ln_sound"] < math.inf
        results.append(_judged(model, JACOBIANS, norms["norm"], norms["ln_sound"], finite))
    return results


def _judged(model: str, claim: str, measured: pd.Series, log_bound: pd.Series, holds: pd.Series) -> Finding:
    values, bounds = measured.to_numpy(float), log_bound.to_numpy(float)
    usable = holds.to_numpy(bool) & np.isfinite(values) & ~np.isnan(bounds) & (bounds < math.inf)
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(values, 0))
    violated = usable & (logs > bounds + _SLACK)
    counts = {
        "holds": int((usable & ~violated).sum()),
        "violated": int(violated.sum()),
        "not_met": int((~usable).sum()),
    }
    numbers: dict[str, float] = dict(counts)
    apart = usable & np.isfinite(bounds) & np.isfinite(logs)  # where neither is 0
    gaps = bounds[apart] - logs[apart]
    if usable.any():
        numbers["largest measured"] = float(values[usable].max())
    if gaps.size:
        numbers |= {"smallest log10 gap": log10(float(gaps.min())), "largest log10 gap": log10(float(gaps.max()))}
    note = f"{counts['not_met']} have no bound or are not finite" if counts["not_met"] else ""
    return Finding(model, claim, "sound", "all", of_rows(**counts, vacuous=0), numbers, note)


def ordering_findings(findings: Findings, pair: Pair) -> list[Finding]:
    """Judge whether the loss is less steep around a counterpart than around its full model (paper, Fig. 10)."""
    judged, ratios = [], findings(secant_ratios, pair)
    for percentile in PERCENTILES:
        rows = ratios[ratios["percentile"] == percentile]
        if rows.empty:
            continue
        lower, higher = int((rows["high"] < 1).sum()), int((rows["low"] > 1).sum())
        verdict = Verdict.NOTHING
        if lower == len(rows):
            verdict = Verdict.HOLDS
        elif higher == len(rows):
            verdict = Verdict.VIOLATED
        numbers = {"radii": len(rows), "lower": lower, "higher": higher, "planes": int(rows["planes"].min())}
        numbers |= {"smallest ratio": rows["estimate"].min(), "largest ratio": rows["estimate"].max()}
        few = numbers["planes"] < FEWEST
        note = f"random planes: {numbers['planes']}, too few for an interval" if few else ""
        judged.append(Finding(pair.label, ORDERING, "", f"p{percentile}", verdict, numbers, note, percentile))
    return judged


def lipschitz_findings(findings: Findings) -> list[Finding]:
    """Return sentences on the estimates of every model, then on the paper's ordering of every pair."""
    pairs = findings(compared_pairs)
    return [*findings(estimate_findings), *(f for pair in pairs for f in findings(ordering_findings, pair))]


def lipschitz_summary(findings: Findings) -> Summary:
    """Return secants by radius, gradients and Jacobians beside their bounds, and the steeper loss."""
    measurements = findings.measurements
    judged, curves = findings(estimate_findings), findings(secant_percentiles)
    results = []
    for row in measurements.models.to_dict("records"):
        measured = measurements.of(row["model"])
        gradients = measured.loss_gradients.groupby("group", sort=False)
        groups = [
            {
                "group": group,
                "gradient": percentiles(rows["slope"]),
                "at_checkpoint": float(rows.loc[rows["draw"] == 0, "slope"].iloc[0]),
                "largest_secant": measured.loss_secants.loc[
                    measured.loss_secants["group"] == group, "slope"
                ].max(),
                "ln_sound": rows["ln_sound"].max(),
                "ln_point": rows["ln_point"].max(),
            }
            for group, rows in gradients
        ]
        result = {key: row[key] for key in MODEL_FACTS} | {
            "unit": "nats per unit of the parameters",
            "groups": groups,
        }
        result["secants"] = records(curves[curves["model"] == row["model"]].drop(columns="model"))
        result["blocks"] = [
            {"layer": layer, "stretch": percentiles(rows["norm"])}
            | {name: rows[name].max() for name in ("ln_sound", "ln_point", "ln_exact")}
            for layer, rows in measured.jacobians.groupby("layer", sort=True)
        ]
        results.append(result | {"verdicts": verdicts_of(judged, row["model"])})
    pairs = [
        {
            "label": pair.label,
            "reference": pair.full,
            "other": pair.other,
            "ratios": findings(secant_ratios, pair).to_dict("records"),
            "verdicts": verdicts_of(findings(ordering_findings, pair), pair.label),
        }
        for pair in findings(compared_pairs)
    ]
    return json_object("lipschitz", findings, scope=SCOPE, results=results, pairs=pairs)
