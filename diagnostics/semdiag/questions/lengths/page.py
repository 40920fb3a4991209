"""The section ``lengths`` of a report."""

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.glance import measured_glance
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import a_column_each, with_run_facts
from semdiag.questions.lengths.figures.length_generalisation import length_generalisation
from semdiag.questions.lengths.words import length_sentences


def length_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return every model on every length, with a column per quantity and statistic."""
    return {"lengths": with_run_facts(findings, a_column_each(findings.measurements.lengths))}


_HEADINGS = (
    Heading(
        "lengths",
        "Does it hold on other lengths?",
        (
            Shown(
                length_generalisation,
                "Accuracy, dispersion and separation against the length of the inputs, the trained length marked: "
                "{shown}.",
                "Compare the points right of the dotted line, the trained length, with those on it. Accuracy at "
                "the level of guessing means that what was learned is tied to the length.",
            ),
        ),
        (
            "Inputs are fresh samples of the task, without padding, from a generator that training never used.",
            "Longer inputs use sinusoidal positions that did not occur in training; global tokens move behind the "
            "longest input, as the encoder places them. k stays the same.",
        ),
    ),
)


SECTION = Section(
    name="lengths",
    needs=("lengths",),
    glance=measured_glance("lengths"),
    headings=_HEADINGS,
    external=(),
    details=length_sentences,
    tables=length_tables,
)
