"""The section ``predictors`` of a report."""

from semdiag.presenting.glance import measured_glance
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.questions.predictors.figures.predictor_cells import predictor_cells
from semdiag.questions.predictors.figures.predictors import predictors
from semdiag.questions.predictors.tables import predictor_tables
from semdiag.questions.predictors.words import predictor_sentences, predictors_in_short

_HEADINGS = (
    Heading(
        "predictors",
        "What goes with faster learning?",
        (
            Shown(
                predictors,
                "Rank correlation of each candidate with the area under the training-loss curve, at the "
                "initialisation and at matched loss, with intervals and a line at 0: {shown}.",
                "A point right of 0 means: the larger the number, the slower the mask learns. Filled points are "
                "significant after correction for the number of candidates and stages tried; a bar shows what "
                "other masks could have given.",
            ),
            Shown(
                predictor_cells,
                "Rank of the area under the training-loss curve against the rank of each candidate at the "
                "initialisation, one panel per candidate: {shown}.",
                "A candidate that predicts slowness orders the points along the rising diagonal, one that "
                "predicts speed along the falling one. A candidate that only sets one kind of attention apart "
                "tells which mask it is, not how fast it learns.",
            ),
        ),
        (
            "A correlation over masks does not show what causes what: masks differ in many things at once.",
            "The mask is the unit: seeds are averaged within task and mask, ranks are taken within each task and "
            "correlations averaged over the tasks, and p-values relabel masks alike in all tasks, since what a "
            "mask does to speed it may do everywhere. With few masks only strong relations can be seen.",
            "The area is that of the first epochs, as many as every run of the task was trained. Matched loss: "
            "the lowest training loss that every run of the task reached; candidates are interpolated between the "
            "snapshots around it. The second outcome, epochs to 90% of the way from the task's shortcut (the "
            "best rule on one or two tokens) to 100% training accuracy, ranks what never arrives last, tied.",
        ),
    ),
)


SECTION = Section(
    name="predictors",
    needs=("predictors",),
    glance=measured_glance("predictors"),
    headings=_HEADINGS,
    external=(),
    in_short=predictors_in_short,
    details=predictor_sentences,
    tables=predictor_tables,
)
