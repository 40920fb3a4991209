"""How fast the models learned, in sentences."""

from semdiag.findings.findings import Findings
from semdiag.presentation.sections.learning.learning_speed import training_runs


def learning_in_short(findings: Findings) -> list[str]:
    """Epochs to 95 % training accuracy, panel by panel."""
    said = []
    for panel, runs in training_runs(findings):
        parts = [
            f"{run.series.label} after {run.arrival} epoch{'s' * (run.arrival != 1)}"
            if run.arrival
            else f"{run.series.label} not within its {run.epochs} epochs"
            for run in runs
        ]
        said.append(f"{panel.title}, 95 % training accuracy: {', '.join(parts)}.")
    return said or ["Nothing is known of the training: no model brings its history."]
