"""How the loss rises around a checkpoint, in sentences."""

import math
from collections.abc import Sequence

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import number_words
from semdiag.presenting.drawing.panels import model_labels
from semdiag.questions.landscape.answer import landscape_facts


def landscape_sentences(findings: Findings) -> list[str]:
    """Say for every plane how the loss rises and how far from the checkpoint the model still works."""
    labels, sentences = model_labels(findings.measurements.models), []
    for model, planes in findings(landscape_facts).groupby("model", sort=False):
        first = planes.iloc[0]
        lowest, highest = planes["lowest_loss"].min(), planes["highest_loss"].max()
        kind = f"{len(planes)} random planes" if len(planes) > 1 else "one random plane"
        at, low, high = (number_words(v, "{:.2g}".format) for v in (first["checkpoint_loss"], lowest, highest))
        cells = low if math.isnan(lowest) else f"{low} to {high}"
        works = _working([float(distance) for distance in planes["working_distance"]])
        sentences.append(
            f"{labels[str(model)]}, {kind} ({first['cells']} cells, {first['samples']} samples): the loss is "
            f"{at} at the checkpoint and {cells} on the cells; {works}."
        )
    return sentences or ["The loss was evaluated on no plane."]


def _working(distances: Sequence[float]) -> str:
    """Return how far from the checkpoint the model still works, by plane."""
    if all(math.isnan(distance) for distance in distances):
        return "the checkpoint itself has less than 95% accuracy"
    distances = [distance for distance in distances if not math.isnan(distance)]
    if max(distances) == 0:
        return "no other cell near the checkpoint keeps 95% accuracy"
    return f"every cell up to {', '.join(f'{distance:.2g}' for distance in distances)} ‖θ‖ away keeps 95% accuracy"
