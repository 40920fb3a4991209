"""What the constants predict about learning, beside what was observed."""

import math

import pandas as pd

from semdiag.mathematics.learning import gap_ratio
from semdiag.measuring.findings.finding import Finding, Verdict
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import Pair, attention_word, differences
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.tables import OUT_OF_REACH_CODE
from semdiag.questions.convergence.answer.epochs import epochs_to

LEARNING = "the smaller Lipschitz constant learns faster and generalises better"
SMOOTHNESS = (0.0, 1.0, 9.0)  # stated γc; 0 gives the convex case's power 2


def consequence_findings(findings: Findings, pair: Pair) -> list[Finding]:
    """Return the ratios of Lipschitz constants and of the resulting generalisation bounds, beside observed gaps.

    Always marked "assumption not met": training breaks the step sizes of Hardt, Recht and Singer, and the
    smoothness γ is not measured.

    Source: docs/theory.md#learning. Deviation: none.

    Args:
        findings: with the table constants; histories where they are known.
        pair: full model and counterpart.

    Returns:
        One finding per form; fewer where a constant is not known.
    """
    measurements = findings.measurements
    rows = measurements.constants
    network = rows[rows["quantity"] == "network"].set_index(["model", "form"])["ln_value"]
    results, observed = [], _observed(measurements, pair)
    for form in ("sound", "paper"):
        keys = [(pair.other, form), (pair.full, form)]
        if not all(key in network.index for key in keys):
            continue
        other, full = (float(network[key]) for key in keys)
        numbers = {"ln λ_L other over reference": other - full if math.isfinite(full) else math.nan}
        for gamma in SMOOTHNESS if math.isfinite(other - full) else ():
            numbers[f"ln gap ratio, γc = {gamma:g}"] = gap_ratio(other, full, gamma).log_value.item()
        words = _leaning(numbers, observed, _names(measurements, pair), _out_of_reach(measurements, pair))
        note = "; ".join([words, *differences(measurements.models, pair)])
        results.append(Finding(pair.label, LEARNING, form, "all", Verdict.NOT_MET, numbers | observed, note))
    return results


def _leaning(
    numbers: dict[str, float], observed: dict[str, float], names: tuple[str, str], out_of_reach: bool
) -> str:
    """Return in words which attention has the smaller constant, and which learned sooner."""
    ratio, speed = numbers["ln λ_L other over reference"], observed["speed-up of the other"]
    reference, other = names
    smaller = other if ratio < 0 else reference if ratio > 0 else "neither"
    if not math.isfinite(ratio):  # no guarantee is no claim to be slow
        smaller = "neither (a constant is infinite)"
    arrived = [not math.isnan(observed[f"epochs to 95%, {name}"]) for name in ("reference", "other")]
    sooner = other if speed > 1 else reference if speed < 1 else "neither"
    if arrived[0] != arrived[1]:
        sooner = reference if arrived[0] else other
    if out_of_reach:
        sooner = "neither (a mask that cannot represent the task says nothing about speed)"
    words = f"other: {other}, reference: {reference}; smaller constant: {smaller}; learned sooner: {sooner}"
    return f"{words}; steps and smoothness are not as assumed"


def _out_of_reach(measurements: Measurements, pair: Pair) -> bool:
    """Return whether a mask of the pair cannot represent its task."""
    remarks = measurements.remarks
    return bool((remarks["model"].isin((pair.full, pair.other)) & (remarks["code"] == OUT_OF_REACH_CODE)).any())


def _names(measurements: Measurements, pair: Pair) -> tuple[str, str]:
    """Return the attention of the reference and of the other model: ``full``, ``topk-5``."""
    rows = {row["model"]: row for row in measurements.models.to_dict("records")}
    reference, other = (attention_word(rows[path]) for path in (pair.full, pair.other))
    return (reference, other) if reference != other else ("the reference", "the other")


def _observed(measurements: Measurements, pair: Pair) -> dict[str, float]:
    """Return epochs to 95% training accuracy and train − holdout gaps of both runs; NaN where unknown."""
    epochs, numbers = {}, {}
    for name, model in (("other", pair.other), ("reference", pair.full)):
        history = measurements.history[measurements.history["model"] == model].sort_values("epoch")
        arrival = epochs_to(history)
        epochs[name] = math.nan if arrival is None else float(arrival)
        numbers[f"epochs to 95%, {name}"] = epochs[name]
        numbers[f"train − holdout accuracy, {name}"] = _gap(history, "train_accuracy", "holdout_accuracy")
        numbers[f"holdout − train loss, {name}"] = _gap(history, "holdout_loss", "train_loss")
    return numbers | {"speed-up of the other": epochs["reference"] / epochs["other"]}


def _gap(history: pd.DataFrame, above: str, below: str) -> float:
    """Return the difference of two columns in the last epoch."""
    if history.empty or not {above, below} <= set(history):
        return math.nan
    return float(history[above].iloc[-1] - history[below].iloc[-1])
