"""Does ξ bound what softmax rows do? Sound and paper form against measured secants and local constants."""

import math

import numpy as np
import pandas as pd
import torch

from semdiag.capturing.attention_kinds import BOUNDED
from semdiag.findings.finding import Finding, Verdict, of_rows, verdicts_of
from semdiag.findings.findings import Findings
from semdiag.findings.pairing import compared_pairs
from semdiag.findings.resampling import ratio_interval
from semdiag.findings.strict_json import MODEL_FACTS, Summary, json_object
from semdiag.mathematics.softmax_stability import fixed_mask_stability
from semdiag.measurement.percentiles import percentiles
from semdiag.measurement.probes.noise.softmax_bounds import local_stability, with_bounds

RESAMPLES = 300
_LOG_HALF = math.log(0.5)
_SLACK = 1e-9  # relative, of quantities in float64
_TOLERANCE = {"float32": 1e-3, "float64": 1e-9}  # relative, of ξ_loc against ξ* from rounded scores

_HALF = 1e-2  # of models in half precision


def stability_findings(findings: Findings) -> list[Finding]:
    """Judge every form of ξ on every measured model.

    Source: docs/theory.md#secants. Deviation: none.

    Args:
        findings: with secants, or without: then only the local constants are judged.

    Returns:
        Findings per model. A violated ``sound`` form is a bug of semdiag; a violated ``paper`` form is not.
    """
    measurements = findings.measurements
    tolerance = _TOLERANCE.get(measurements.provenance.get("dtype", "float32"), _HALF)
    found = []
    for row in measurements.models.to_dict("records"):
        own = measurements.of(row["model"])
        found.append(_local(row["model"], own.queries, tolerance))
        if own.secants.empty:
            continue
        if row["attention"] not in BOUNDED:
            note = f"no ξ is known for {row['attention']} attention; secants and response are still given"
            found.append(
                Finding(row["model"], "ξ bounds the measured secants", "", "all", Verdict.NOT_MET, {}, note)
            )
            continue
        rows = with_bounds(own.secants, row["attention"])
        distances = (("sound", "ln_sound", "score_change"), ("paper", "ln_paper", "score_change"))
        found += [_secants(row["model"], rows, *names) for names in distances]
        found.append(_secants(row["model"], rows, "sound, row form", "ln_row", "score_change_max"))
    return found


def _secants(model: str, rows: pd.DataFrame, form: str, bound: str, distance: str) -> Finding:
    """Judge one form of ξ on the measured pairs of rows."""
    log_bound, moved = rows[bound].to_numpy(), rows[distance].to_numpy()
    change = rows["weight_change"].to_numpy()
    fixed = rows["fixed_set"].to_numpy(bool)
    not_met = ~(log_bound < math.inf) | (~fixed & ~(rows["separation"].to_numpy() > 0))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        promised = np.exp(log_bound) * moved
        violated = ~not_met & (change > promised * (1 + _SLACK) + 1e-13)
        factor = change / promised
    trivial = np.full(len(rows), False)
    if distance == "score_change":  # where the set is fixed, ½ holds for any row
        trivial = (log_bound >= _LOG_HALF - 1e-12) & fixed & ~violated & ~not_met
    counts = {
        "holds": int((~violated & ~trivial & ~not_met).sum()),
        "violated": int(violated.sum()),
        "vacuous": int(trivial.sum()),
        "not_met": int(not_met.sum()),
    }
    numbers = {
        **counts,
        "largest measured over bound": float(np.nanmax(factor[~not_met], initial=0.0)),
        "promises no less than 2": int((~not_met & (promised >= 2)).sum()),
    }
    if form == "paper":
        numbers["below the sound form"] = int((rows["ln_paper"] < rows["ln_sound"] - 1e-12).sum())
    words = {"score_change": "‖p − p'‖₁ ≤ ξ ‖z − z'‖₁ on the measured pairs"}
    claim = words.get(distance, "‖p − p'‖₁ ≤ row constant · ‖z − z'‖_∞ on the measured pairs")
    return Finding(model, claim, form, "all", of_rows(**counts), numbers, _note(rows, counts["not_met"]))


def _note(rows: pd.DataFrame, not_met: int) -> str:
    if not not_met:
        return ""
    tied = int((rows["separation"] == 0).sum())
    return f"no ξ_h for {not_met} rows: Δ ≤ 0 ({tied} ties within rounding), or not finite"


def _local(model: str, queries: pd.DataFrame, tolerance: float) -> Finding:
    """Judge ξ_loc ≤ ξ*(δ, k), query by query."""
    usable = queries[np.isfinite(queries["dispersion"]) & (queries["kept"] > 0)]
    delta, kept = (torch.tensor(usable[name].to_numpy(np.float64)) for name in ("dispersion", "kept"))
    bound = fixed_mask_stability(delta, kept).log_value.exp().numpy()
    local = local_stability(usable).to_numpy()
    violated = local > bound * (1 + tolerance) + tolerance * 1e-3
    trivial = ~violated & (bound >= 0.5)
    counts = {
        "holds": int((~violated & ~trivial).sum()),
        "violated": int(violated.sum()),
        "vacuous": int(trivial.sum()),
        "not_met": len(queries) - len(usable),
    }
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = local / bound
    numbers = {**counts, "largest measured over bound": float(np.nanmax(factor, initial=0.0))}
    return Finding(model, "local ξ_loc ≤ ξ*(δ, k)", "sound", "all", of_rows(**counts), numbers)


def response_table(findings: Findings) -> pd.DataFrame:
    """Whose attention weights move more under the same noise.

    Args:
        findings: with secants.

    Returns:
        One row per compared pair and noise level: pair, level, mean and full_mean (of ‖p − p'‖₁), ratio of the
        medians with its 95 % interval low … high (whole sequences resampled).
    """
    secants = findings.measurements.secants
    rows = dict(iter(secants.groupby(["model", "level"], sort=False)))
    found = []
    for pair in findings(compared_pairs):
        for level in sorted(secants["level"].unique()):
            if (pair.full, level) not in rows or (pair.other, level) not in rows:
                continue
            other, full = rows[pair.other, level], rows[pair.full, level]
            ratio = ratio_interval(other, full, "weight_change", resamples=RESAMPLES)
            found.append(
                {
                    "pair": pair.label, "level": level, "mean": percentiles(other["weight_change"])["mean"],
                    "full_mean": percentiles(full["weight_change"])["mean"], "ratio": ratio.estimate,
                    "low": ratio.low, "high": ratio.high,
                }
            )  # fmt: skip
    return pd.DataFrame(found, columns=["pair", "level", "mean", "full_mean", "ratio", "low", "high"])


def stability_summary(findings: Findings) -> Summary:
    """Percentiles of the local constant, secants, response and both forms of ξ, per layer and head and pooled.

    Args:
        findings: of one or more models, with secants.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.stability/1``; null where a number is undefined or infinite.
    """
    measurements = findings.measurements
    judged = findings(stability_findings)
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.of(row["model"])
        secants = with_bounds(own.secants, str(row["attention"]))
        layers = []
        for layer, head in sorted({*zip(own.queries["layer"], own.queries["head"], strict=True)}):
            parts = (t[(t["layer"] == layer) & (t["head"] == head)] for t in (own.queries, secants))
            layers.append({"layer": int(layer), "head": int(head), **_describe(*parts)})
        result = {key: row[key] for key in MODEL_FACTS} | {"unit": "per nat", "layers": layers}
        result |= {"all": _describe(own.queries, secants), "verdicts": verdicts_of(judged, row["model"])}
        results.append(result)
    return json_object("stability", findings, results=results)


def _describe(queries: pd.DataFrame, secants: pd.DataFrame) -> Summary:
    """Percentiles over the queries; bounds as natural logarithms."""
    described: Summary = {"local": _percentiles(local_stability(queries))}
    if secants.empty:
        return described
    described |= {
        "secant": _percentiles(secants["secant"]),
        "response": [
            {"noise": float(str(level)), **_percentiles(rows["weight_change"])}
            for level, rows in secants.groupby("level")
        ],
        "ln_sound": _percentiles(secants["ln_sound"]),
        "ln_paper": _percentiles(secants["ln_paper"]),
        "same_set": float(secants["same_set"].mean()),
    }
    return described


def _percentiles(values: "pd.Series[float]") -> Summary:
    table = percentiles(values.to_numpy(np.float64))
    return {key: value for key, value in table.items() if key != "not_positive"}
