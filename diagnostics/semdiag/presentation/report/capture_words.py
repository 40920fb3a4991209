"""How much of the attention was captured, in sentences."""

from semdiag.findings.findings import Findings

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
        if not row["residual"] < _MISSED:
            said.append(
                f"Warning: the residual of {row['model']} is {row['residual']:.1g}. Something of its attention "
                f"was not captured, and its numbers may mean nothing; the last section says in which layer."
            )
    return said


def warnings(findings: Findings) -> list[str]:
    """What makes the numbers doubtful."""
    said = []
    if len(findings.measurements.non_finite):
        count = int(findings.measurements.non_finite["scores"].sum())
        said.append(f"Warning: {count:,} attention scores were NaN or infinite; see the last section.")
    return said
