"""How much of the attention was captured, in sentences."""

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import number_words
from semdiag.reporting.gate.invariants import RESIDUAL

_MISSED = 1e-3  # a larger residual says that a bias, a mask or the like was not captured


def capture_sentences(findings: Findings) -> list[str]:
    """Say how much of the attention was captured, and whether what was captured is all of it.

    Args:
        findings: of any number of models.

    Returns:
        One sentence for all models, then one per model that was not seen whole.
    """
    measurements = findings.measurements
    models = measurements.models
    found, captured = int(models["attention_found"].sum()), int(models["attention_captured"].sum())
    diverged = models["model"].isin(measurements.non_finite["model"])
    worst = models.loc[~diverged, "residual"].max(skipna=False)
    said = [
        f"Captured: {captured} of {found} attention modules; "
        + (
            "the residual (how far attention recomputed from the capture deviates) is unknown, because scores are "
            "not numbers."
            if diverged.all()
            else "the largest residual (how far attention recomputed from the capture deviates from what the "
            f"model computed) is {number_words(worst, '{:.1g}'.format)}."
        )
    ]
    limit = max(_MISSED, RESIDUAL.get(str(measurements.provenance.get("dtype")), 0))
    for row in models.assign(diverged=diverged).to_dict("records"):
        skipped = measurements.skipped[measurements.skipped["model"] == row["model"]]
        reasons = [f"{s['module'] or 'the model'}: {s['reason']}" for s in skipped.to_dict("records")]
        if row["attention_captured"] < row["attention_found"] or reasons:
            listed = "; ".join(reasons[:3]) + ("; …" if len(reasons) > 3 else "")
            said.append(f"Warning: not every attention layer was captured of {row['model']}. {listed}".rstrip())
        if not row["diverged"] and not row["residual"] < limit:
            said.append(
                f"Warning: the residual of {row['model']} is {number_words(row['residual'], '{:.1g}'.format)}. "
                "Part of its attention was not captured, so its numbers may mean nothing; the last section says "
                "in which layer."
            )
    return said


def diverged_sentences(findings: Findings) -> list[str]:
    """What makes the numbers doubtful, a sentence for each model whose scores are not all numbers."""
    said = []
    bad, models = findings.measurements.non_finite, findings.measurements.models
    others = set(models.loc[external(models), "model"])
    for model, rows in bad.groupby("model", sort=False):
        first = rows.sort_values(["layer", "head"]).iloc[0]
        advice = (
            "Look for NaN or infinite numbers in its weights and inputs"
            if model in others
            else "If it was trained so, train it again with a smaller --learning-rate or --gradient-clip"
        )
        said.append(
            f"Diverged: {int(rows['scores'].sum()):,} attention scores of {model} are NaN or infinite, first in "
            f"layer {first['layer']}, head {first['head']}, so what is reported of it means nothing, and no probe "
            f"was run on it. {advice}."
        )
    return said
