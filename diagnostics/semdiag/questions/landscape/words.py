"""How the loss rises around a checkpoint, in sentences."""

import math
from collections.abc import Sequence

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import number_words
from semdiag.presenting.drawing.panels import model_labels
from semdiag.questions.landscape.answer import landscape_facts


def landscape_sentences(findings: Findings) -> list[str]:
    """Say for every plane how the loss rises and how far from the checkpoint the model still works.

    Args:
        findings: with the table landscape.

    Returns:
        One sentence per model.
    """
    labels, said = model_labels(findings.measurements.models), []
    for model, planes in findings(landscape_facts).groupby("model", sort=False):
        first = planes.iloc[0]
        lowest, highest = planes["lowest_loss"].min(), planes["highest_loss"].max()
        kind = "the plane through two snapshots" if first["kind"] == "through" else f"{len(planes)} random planes"
        kind = kind.replace("1 random planes", "one random plane")
        at, low, high = (number_words(v, "{:.2g}".format) for v in (first["checkpoint_loss"], lowest, highest))
        cells = low if math.isnan(lowest) else f"{low} to {high}"
        works = _working([float(way) for way in planes["working_distance"]])
        said.append(
            f"{labels[str(model)]}, {kind} ({first['cells']} cells, {first['samples']} samples): the loss is "
            f"{at} at the checkpoint and {cells} on the cells; {works}."
        )
    return said or ["The loss was evaluated on no plane."]


def _working(ways: Sequence[float]) -> str:
    """Return how far from the checkpoint the model still works, by plane."""
    if all(math.isnan(way) for way in ways):
        return "the checkpoint itself has less than 95% accuracy"
    ways = [way for way in ways if not math.isnan(way)]
    if max(ways) == 0:
        return "no other cell near the checkpoint keeps 95% accuracy"
    return f"every cell up to {', '.join(f'{way:.2g}' for way in ways)} ‖θ‖ away keeps 95% accuracy"
