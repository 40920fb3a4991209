"""What moving the parameters showed, in sentences; the numbers come from the measurement layer."""

import math

from semdiag.measurement.landscape_facts import landscape_facts
from semdiag.measurement.measurements import Measurements
from semdiag.presentation.panels import panels_of


def model_labels(measurements: Measurements) -> dict[str, str]:
    """Each model in words, like ``even-pairs, top-k (k = 5)``.

    Args:
        measurements: of any number of models.
    """
    return {s.model: f"{panel.title}, {s.label}" for panel in panels_of(measurements.models) for s in panel.series}


def landscape_sentences(measurements: Measurements) -> list[str]:
    """Say for every plane how the loss rises and how far from the checkpoint the model still works.

    Args:
        measurements: with the table landscape.

    Returns:
        One sentence per model.
    """
    labels, said = model_labels(measurements), []
    for model, planes in landscape_facts(measurements).groupby("model", sort=False):
        first = planes.iloc[0]
        lowest, highest = planes["lowest_loss"].min(), planes["highest_loss"].max()
        kind = "the plane through two snapshots" if first["kind"] == "through" else f"{len(planes)} random planes"
        kind = kind.replace("1 random planes", "one random plane")
        ways = [f"{way:.2g}" for way in planes["working_distance"] if not math.isnan(way)]
        works = f"every cell up to {', '.join(ways)} ‖θ‖ away keeps 95 % accuracy" if ways else ""
        said.append(
            f"{labels[str(model)]}, {kind} ({first['cells']} cells, {first['samples']} samples): the loss is "
            f"{first['checkpoint_loss']:.2g} at the checkpoint and {lowest:.2g} to {highest:.2g} on the cells; "
            f"{works or 'the checkpoint itself has less than 95 % accuracy'}."
        )
    return said or ["The loss was evaluated on no plane."]
