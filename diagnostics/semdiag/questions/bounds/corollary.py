"""Corollary 1 on measured pairs: does a mask have the better guarantee than full attention?"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from semdiag.capturing.attention_call import BOUNDED, HEAVY_HITTERS, rows_of_kind
from semdiag.mathematics.bounds.attention_bounds import HeadNorms, attention_map_bound_from_load
from semdiag.mathematics.bounds.corollary import (
    Condition,
    paper_fixed_mask_control,
    paper_input_condition,
    paper_weight_condition,
    sound_input_margin,
    sound_weight_margin,
)
from semdiag.mathematics.score_strips import AttentionRows, fixed_mask_rows
from semdiag.measuring.findings.estimates import require_every_query
from semdiag.measuring.findings.findings import Finding, Findings, Pair, Verdict, agreed, differences, diverged
from semdiag.measuring.measurements import Measurements
from semdiag.questions.bounds.measure import CONSTANTS
from semdiag_models.kinds import LOCAL

# Read from the other end where small values are the bad ones: the paper's table of separations.
PAPER_PERCENTILES = (75, 90, 95, 100)
JUDGED_PERCENTILES = PAPER_PERCENTILES[:-1]  # the maximum is one query, or one key: shown, never judged
HEURISTIC = "percentiles of different queries are combined, as the paper does: a heuristic"
ONE_K = "one k stands for rows of {} to {} keys: this is not a bound, but the comparison of layers is"
CLAIM = "the mask has the better guarantee in {}"
DIVERGED = "attention scores of the pair are NaN or infinite, so their percentiles are unknown"
CLAIMS = {CLAIM.format(name): name for name in ("W", "X")}  # to the parameters of a condition
NOT_COMPARABLE = CLAIM.format("W and X")
LEFT_SIDES = {"paper": ("left side", 1.0), "sound": ("ln margin", 0.0)}  # name and threshold, by form


@dataclass(frozen=True)
class PairPercentiles:
    """Pooled quantities of a pair at the paper's percentiles; separations at the mirrored ones."""

    full_dispersion: np.ndarray  # δ_s
    dispersion: np.ndarray  # δ of the masked model
    separation: np.ndarray  # Δ of the masked model, at 100 − p; 0 within rounding of a tie
    load: np.ndarray  # raw key loads of the masked model
    keys: int  # n, keys that a query of the full model has, at most
    rounding: float  # a separation up to this is a tie


def corollary_findings(findings: Findings, pair: Pair) -> list[Finding]:
    """Judge both conditions of Corollary 1, in both forms, at every percentile, for a pair."""
    measurements = findings.measurements
    models = {row["model"]: row for row in measurements.models.to_dict("records")}
    full = models[pair.full]
    masked = models[pair.counterpart]
    comparable = full["attention"] == "full" and masked["attention"] in BOUNDED and masked["attention"] != "full"
    if not comparable or pd.isna(masked["k"]):
        kinds = f"{full['attention']} and {masked['attention']}"
        reasons = [f"Corollary 1 compares full attention with a mask it covers; these are {kinds}"]
        reasons += differences(measurements.models, pair)
        return [Finding(pair.label, NOT_COMPARABLE, "", "all", Verdict.NOTHING, {}, "; ".join(reasons))]
    if any(diverged(findings, model) for model in (pair.full, pair.counterpart)):
        return [Finding(pair.label, NOT_COMPARABLE, "", "all", Verdict.NOTHING, {}, DIVERGED)]
    results = []
    table = pair_percentiles(findings, pair)
    note = "; ".join([HEURISTIC, *differences(measurements.models, pair)])
    for form, parameter, condition, reason in _conditions(measurements, pair, table):
        results += _judged(pair.label, form, parameter, condition, "; ".join(filter(None, [note, reason])), table)
    return results + _by_layer(measurements, pair)


def pair_percentiles(findings: Findings, pair: Pair) -> PairPercentiles:
    """Read δ_s, δ_h, Δ_h and loads of a pair at percentiles 75, 90, 95, 100 of the pooled queries."""
    require_every_query(findings, "Corollary 1")
    measurements = findings.measurements
    full = measurements.of(pair.full)
    masked = measurements.of(pair.counterpart)
    rounding = separation_rounding(
        measurements, pair.counterpart, _finite(masked.queries["dispersion"]).max(initial=0.0)
    )
    gap = _percentiles(masked.queries["separation"], [100 - p for p in PAPER_PERCENTILES])
    return PairPercentiles(
        full_dispersion=_percentiles(full.queries["dispersion"], PAPER_PERCENTILES),
        dispersion=_percentiles(masked.queries["dispersion"], PAPER_PERCENTILES),
        separation=np.where(np.abs(gap) <= rounding, 0.0, gap),
        load=_percentiles(masked.loads["load"], PAPER_PERCENTILES),
        keys=int(full.queries["keys"].max()),
        rounding=rounding,
    )


def separation_rounding(measurements: Measurements, model: str, dispersion: float) -> float:
    """Return the largest separation that rounding can make of a tie: 8 eps times the bound of the scores."""
    rows = measurements[CONSTANTS]
    reach = rows.loc[(rows["model"] == model) & (rows["quantity"] == "score_reach"), "ln_value"].max()
    eps = torch.finfo(getattr(torch, measurements.provenance.get("dtype", "float32"))).eps
    return 8 * eps * max(1.0, dispersion, 0.0 if pd.isna(reach) else math.exp(reach))


def _finite(values: "pd.Series[float]") -> np.ndarray:
    array = values.to_numpy(np.float64)
    return array[np.isfinite(array)]


def _percentiles(values: "pd.Series[float]", at: tuple[int, ...] | list[int]) -> np.ndarray:
    """Return percentiles of the finite values; +inf if none is finite (nothing is masked)."""
    finite = _finite(values)
    return np.percentile(finite, at) if finite.size else np.full(len(at), np.inf)


Row = tuple[str, str, Condition | None, str]  # form, parameters, condition (None: not known), note


def _conditions(measurements: Measurements, pair: Pair, table: PairPercentiles) -> list[Row]:
    kind, k = _kind(measurements, pair.counterpart)
    delta_s = torch.tensor(table.full_dispersion)
    delta = torch.tensor(table.dispersion)
    separation = torch.tensor(table.separation)
    beta = torch.tensor(table.load) / k
    if kind in HEAVY_HITTERS:
        weight = paper_weight_condition(delta_s, delta, separation)
        inputs = paper_input_condition(delta_s, delta, separation, beta)
    else:
        control = paper_fixed_mask_control(delta_s, delta, beta)
        weight = Condition(delta / delta_s, 1.0, control.assumptions, control.source)
        inputs = control
    keys_kept = torch.full_like(delta, min(k, table.keys))
    masked_rows = rows_of_kind(kind, delta[:, None], separation[:, None], keys_kept[:, None])
    full_rows = fixed_mask_rows(delta_s[:, None], torch.full_like(keys_kept, table.keys)[:, None])
    assert masked_rows is not None  # corollary_findings checks the kind
    margin = sound_weight_margin(masked_rows, full_rows)
    ragged = _ragged(measurements, pair)
    return [
        ("paper", "W", weight, ""),
        ("paper", "X", inputs, "2ΓΞ² is taken as δ_s"),
        ("sound", "W", margin, "; ".join(["norms taken as equal", *ragged])),
        _sound_inputs(measurements, pair, table, masked_rows, full_rows, ragged),
    ]


def _ragged(measurements: Measurements, pair: Pair) -> list[str]:
    """Return a note if the rows of a model of the pair differ in length; the mask's, where both do."""
    key_counts = [measurements.of(model).queries["kept"] for model in (pair.full, pair.counterpart)]
    lengths = [(int(rows.min()), int(rows.max())) for rows in key_counts]
    differing = [ONE_K.format(low, high) for low, high in lengths if low != high]
    return differing[-1:]


def _sound_inputs(
    measurements: Measurements,
    pair: Pair,
    table: PairPercentiles,
    masked_rows: AttentionRows,
    full_rows: AttentionRows,
    ragged: list[str],
) -> Row:
    """Compare the two λ_A, each with the largest Γ and Ξ of its model."""
    norms = [_largest_norms(measurements, model) for model in (pair.counterpart, pair.full)]
    if norms[0] is None or norms[1] is None:
        return ("sound", "X", None, "norms are not known: measure them with semdiag bounds")
    heavy = _kind(measurements, pair.counterpart)[0] in HEAVY_HITTERS
    masked = attention_map_bound_from_load(masked_rows, torch.tensor(table.load), norms[0], heavy_hitter=heavy)
    full = attention_map_bound_from_load(full_rows, table.keys, norms[1], heavy_hitter=False)
    note = "; ".join(["each with the largest Γ and Ξ of its layers", *ragged])
    return ("sound", "X", sound_input_margin(masked, full), note)


def _kind(measurements: Measurements, model: str) -> tuple[str, int]:
    """Return the attention, and the keys of an ordinary query, of a model with a mask."""
    row = next(row for row in measurements.models.to_dict("records") if row["model"] == model)
    cls_not_key = "cls_as_key False" in str(row["setting"])
    local_cls = row["pooling"] == "cls" and row["attention"] in LOCAL and not cls_not_key
    return str(row["attention"]), int(row["k"]) + int(row["global_tokens"]) + local_cls


def _largest_norms(measurements: Measurements, model: str) -> HeadNorms | None:
    rows = measurements[CONSTANTS]
    rows = rows[(rows["model"] == model) & (rows["form"] == "measured")]
    largest = rows.groupby("quantity")["ln_value"].max().to_dict()
    if not {"gamma", "upsilon", "token_norm", "query_norm"} <= set(largest):
        return None
    return HeadNorms(*(math.exp(largest[name]) for name in ("gamma", "upsilon", "token_norm", "query_norm")))


def _judged(
    label: str, form: str, parameter: str, condition: Condition | None, note: str, table: PairPercentiles
) -> list[Finding]:
    claim = CLAIM.format(parameter)
    if condition is None:
        return [Finding(label, claim, form, "all", Verdict.NOTHING, {}, note)]
    name, threshold = LEFT_SIDES[form]
    parts = []
    for at, p in enumerate(PAPER_PERCENTILES):
        left = float(condition.left_side[at])
        tie = table.separation[at] == 0 and left == math.inf
        verdict = Verdict.HOLDS if left < threshold else Verdict.VIOLATED
        reason = note
        if left == math.inf or math.isnan(left):
            verdict = Verdict.NOT_MET
            reason = f"Δ at most {table.rounding:.1g} is a tie within rounding" if tie else "Δ ≤ 0 or δ_s = 0"
        numbers = {name: left} | {key: getattr(table, column)[at] for column, key in _PAIRED.items()}
        parts.append(Finding(label, claim, form, f"p{p}", verdict, numbers, reason, percentile=p))
    sides = {f"{name} p{p}": f.numbers[name] for p, f in zip(PAPER_PERCENTILES, parts, strict=True)}
    overall = agreed(f.verdict for f in parts if f.percentile in JUDGED_PERCENTILES)
    return [Finding(label, claim, form, "all", overall, sides, note), *parts]


def _by_layer(measurements: Measurements, pair: Pair) -> list[Finding]:
    """Compare λ_A layer by layer, each with its own norms, loads and rows: no percentile, no heuristic."""
    rows = measurements[CONSTANTS]
    rows = rows[(rows["quantity"] == "attention_map") & (rows["form"] == "sound")]
    largest = rows.groupby(["model", "layer"])["ln_value"].max()
    reasons = rows[~rows["holds"]].groupby(["model", "layer"])["assumptions"].first()
    if not {pair.full, pair.counterpart} <= set(rows["model"]):
        return []
    results = []
    for layer in sorted(set(largest[pair.full].index) & set(largest[pair.counterpart].index)):
        ends = [float(largest[model, layer]) for model in (pair.counterpart, pair.full)]
        margin = ends[0] - ends[1]
        unmet = [str(reasons[m, layer]) for m in (pair.counterpart, pair.full) if (m, layer) in reasons.index]
        verdict = Verdict.HOLDS if margin < 0 else Verdict.VIOLATED
        if unmet or not math.isfinite(margin):
            verdict = Verdict.NOT_MET
        numbers = {"ln margin": margin, "ln λ_A mask": ends[0], "ln λ_A full": ends[1]}
        where = f"layer {layer}"
        results.append(Finding(pair.label, CLAIM.format("X"), "sound", where, verdict, numbers, "; ".join(unmet)))
    return results


_PAIRED = {"full_dispersion": "δ_s", "dispersion": "δ", "separation": "Δ", "load": "load"}
COROLLARY_COLUMNS = ["pair", "parameter", "form", "percentile", "value", "threshold", "verdict", *_PAIRED, "note"]


def corollary_table(findings: Findings, pairs: Iterable[Pair]) -> pd.DataFrame:
    """Return both conditions of Corollary 1 for every pair, form and percentile, as measured."""
    rows = []
    for finding in (finding for pair in pairs for finding in findings(corollary_findings, pair)):
        if finding.percentile is None:
            continue
        name, threshold = LEFT_SIDES[finding.form]
        row: dict[str, Any] = {"pair": finding.subject, "parameter": CLAIMS[finding.claim], "form": finding.form}
        row |= {"percentile": finding.percentile, "value": float(finding.numbers[name]), "threshold": threshold}
        row |= {column: float(finding.numbers[key]) for column, key in _PAIRED.items()}
        rows.append({**row, "verdict": finding.verdict.value, "note": finding.note})
    numbers = dict.fromkeys(["value", "threshold", *_PAIRED], "float64")
    return pd.DataFrame(rows, columns=COROLLARY_COLUMNS).astype(numbers)
