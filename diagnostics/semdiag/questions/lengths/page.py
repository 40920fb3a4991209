"""The section ``lengths`` of a report."""

from semdiag.presenting.glance import measured_glance
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import quantities_of_runs
from semdiag.questions.lengths.figures.length_generalisation import length_generalisation
from semdiag.questions.lengths.words import length_sentences

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
    tables=quantities_of_runs("lengths"),
)
