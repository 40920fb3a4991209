"""How much of the attention was captured, in sentences."""

from semdiag.findings.findings import Findings
from semdiag.findings.gate.invariants import RESIDUAL

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
    worst = models["residual"].max(skipna=False)
    said = [
        f"Captured: {captured} of {found} attention modules; the largest residual, attention recomputed from "
        f"what was captured against what the model computed, is {worst:.1g}."
    ]
    for row in models.to_dict("records"):
        skipped = measurements.skipped[measurements.skipped["model"] == row["model"]]
        reasons = [f"{s['module'] or 'the model'}: {s['reason']}" for s in skipped.to_dict("records")]
        if row["attention_captured"] < row["attention_found"] or reasons:
            listed = "; ".join(reasons[:3]) + ("; …" if len(reasons) > 3 else "")
            said.append(f"Warning: not every attention layer was captured of {row['model']}. {listed}".rstrip())
        if not row["residual"] < max(_MISSED, RESIDUAL.get(str(measurements.provenance.get("dtype")), 0)):
            said.append(
                f"Warning: the residual of {row['model']} is {row['residual']:.1g}. Something of its attention "
                f"was not captured, and its numbers may mean nothing; the last section says in which layer."
            )
    return said


def warnings(findings: Findings) -> list[str]:
    """What makes the numbers doubtful."""
    said = []
    bad = findings.measurements.non_finite
    for model, rows in bad.groupby("model", sort=False):
        said.append(
            f"Diverged: {int(rows['scores'].sum()):,} attention scores of {model} are NaN or infinite, so what is "
            "said of it means nothing, and of probes nothing was measured. Train it again with a smaller "
            "--learning-rate or --gradient-clip; the last section says where they are."
        )
    return said
