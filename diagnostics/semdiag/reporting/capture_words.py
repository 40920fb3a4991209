"""How much of the attention was captured, in sentences."""

import math

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.findings.completeness import Completeness, completeness
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import number_words
from semdiag.measuring.findings.strict_json import records


def capture_sentences(findings: Findings) -> list[str]:
    """Return how much of the attention was captured, and whether each capture is complete."""
    measurements = findings.measurements
    models = measurements.models
    layers, captured = int(models["attention_found"].sum()), int(models["attention_captured"].sum())
    diverged = models["model"].isin(measurements.non_finite["model"])
    worst = models.loc[~diverged, "residual"].max(skipna=False)
    sentences = [
        f"Captured: {captured} of {layers} attention modules; "
        + (
            "the residual (how far attention recomputed from the capture deviates) is unknown, because scores are "
            "not numbers."
            if diverged.all()
            else "the largest residual (how far attention recomputed from the capture deviates from what the "
            f"model computed) is {number_words(worst, '{:.1g}'.format)}."
        )
    ]
    for row in records(models.assign(diverged=diverged)):
        skipped = measurements.skipped[measurements.skipped["model"] == row["model"]]
        reasons = [f"{s['module'] or 'the model'}: {s['reason']}" for s in skipped.to_dict("records")]
        if row["attention_captured"] < row["attention_found"] or reasons:
            listed = "; ".join(reasons[:3]) + ("; …" if len(reasons) > 3 else "")
            sentences.append(
                f"Warning: not every attention layer was captured of {row['model']}. {listed}".rstrip()
            )
        answer, residual = completeness(row), number_words(row["residual"], "{:.1g}".format)
        if answer is Completeness.BLIND and not row["diverged"]:
            sentences.append(
                f"Outputs of {row['model']} may be off by rounding, which is so coarse at this precision "
                f"(residual {residual}) that nothing tells whether all attention was captured; float32 would."
            )
        elif not row["diverged"] and answer is not Completeness.COMPLETE:
            times = row["residual_over_rounding"]
            more = "" if math.isnan(times) else f", {times:.2g} times what rounding can do"
            sentences.append(
                f"Warning: the residual of {row['model']} is {residual}{more}. Part of its attention was not "
                "captured, so its numbers may mean nothing; the last section says in which layer."
            )
    return sentences


def diverged_sentences(findings: Findings) -> list[str]:
    """Return a warning for each model that has scores which are NaN or infinite."""
    sentences = []
    bad, models = findings.measurements.non_finite, findings.measurements.models
    others = set(models.loc[external(models), "model"])
    for model, rows in bad.groupby("model", sort=False):
        first = rows.sort_values(["layer", "head"]).iloc[0]
        advice = (
            "Look for NaN or infinite numbers in its weights and inputs"
            if model in others
            else "If it was trained so, train it again with a smaller --learning-rate or --gradient-clip"
        )
        sentences.append(
            f"Diverged: {int(rows['scores'].sum()):,} attention scores of {model} are NaN or infinite, first in "
            f"layer {first['layer']}, head {first['head']}, so what is reported of it means nothing, and no probe "
            f"was run on it. {advice}."
        )
    return sentences


def weights_sentences(findings: Findings) -> list[str]:
    """Return a warning for each model that was built without some of its weights: random ones mean nothing."""
    remarks = findings.measurements.remarks
    lost = remarks[remarks["code"] == "weights-not-loaded"]
    return [f"Warning: of {row['model']}, {row['text']}." for row in records(lost)]
