"""How fast the models learned, in sentences."""

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.tables import OUT_OF_REACH, OUT_OF_REACH_CODE
from semdiag.presenting.drawing.panels import model_labels
from semdiag.questions.learning.figures.learning_speed import training_runs


def learning_in_short(findings: Findings) -> list[str]:
    """Return epochs to 95% training accuracy, by panel."""
    sentences = []
    for panel, runs in training_runs(findings):
        parts = [
            f"{run.series.label} after {counted(run.arrival, 'epoch')}"
            if run.arrival
            else f"{run.series.label} not within its {counted(run.epochs, 'epoch')}"
            for run in runs
        ]
        sentences.append(f"{panel.title}, 95% training accuracy: {', '.join(parts)}.")
    sentences = sentences or ["Nothing is known of the training: no model has a training history."]
    return [*sentences, *reach_sentences(findings)]


def reach_sentences(findings: Findings) -> list[str]:
    """Name the models whose masks cannot represent their tasks, and say what follows."""
    remarks = findings.measurements.remarks
    models = [*dict.fromkeys(remarks.loc[remarks["code"] == OUT_OF_REACH_CODE, "model"])]
    if not models:
        return []
    labels = model_labels(findings.measurements.models)
    names = "; ".join(labels[model] for model in models)
    return [
        f"Out of reach for {len(models)} of {len(labels)} models ({names}): {OUT_OF_REACH}. That they do not "
        "learn it says nothing about their speed; a global token removes this."
    ]
