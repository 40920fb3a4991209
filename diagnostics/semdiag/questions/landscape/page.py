"""The section ``landscape`` of a report."""

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.glance import measured_glance
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import with_facts
from semdiag.questions.landscape.answer import landscape_facts
from semdiag.questions.landscape.figures.landscape_contour import landscape_contour
from semdiag.questions.landscape.figures.landscape_cuts import landscape_cuts
from semdiag.questions.landscape.words import landscape_sentences


def landscape_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return every evaluated cell, and a summary of each plane."""
    return {
        "landscape": with_facts(findings, findings.measurements.landscape),
        "landscape_planes": with_facts(findings, findings(landscape_facts)),
    }


_TWO_OF_MANY = (
    "A plane shows two of more than a hundred thousand directions. Random ones miss the steep directions: a flat "
    "picture does not mean a flat loss."
)
_HEADINGS = (
    Heading(
        "landscape",
        "What does the loss look like around the checkpoint?",
        (
            Shown(
                landscape_contour,
                "Coloured cells of cross-entropy and of accuracy on planes in parameter space through each "
                "checkpoint, contour lines over the loss, checkpoint marked: {shown}.",
                "Compare the size of the region around the cross in which the accuracy stays high. Every cell is "
                "a model that was run, and models of one figure share their colour scale.",
            ),
            Shown(
                landscape_cuts,
                "Cross-entropy and accuracy against the distance from the checkpoint, along both axes of each "
                "plane, attention kinds together: {shown}.",
                "The rows of cells through the checkpoint, exactly as evaluated. Where the curves of one model "
                "differ much from direction to direction, one plane says little about that model.",
            ),
        ),
        (
            _TWO_OF_MANY,
            "Distances are relative to the length ‖θ‖ of all parameters, and each tensor moves by its own length "
            "at distance 1. Models of different length walk different true distances; the tables hold both.",
            "One trained model per surface: how surfaces of other seeds look is not in these pictures.",
        ),
    ),
)


SECTION = Section(
    name="landscape",
    needs=("landscape",),
    glance=measured_glance("landscape"),
    headings=_HEADINGS,
    external=(),
    details=landscape_sentences,
    tables=landscape_tables,
)
