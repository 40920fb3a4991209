"""Which k would qualify, in sentences."""

from semdiag.findings.findings import Findings
from semdiag.findings.k_sweep import recommendation
from semdiag.presentation.drawing.panels import model_labels


def sweep_sentences(findings: Findings) -> list[str]:
    """Each model's recommendation.

    Args:
        findings: with a sweep.
    """
    labels = model_labels(findings.measurements.models)
    return [f"{label}: {recommendation(findings, model).words}" for model, label in labels.items()]
