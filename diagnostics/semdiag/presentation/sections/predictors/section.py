"""The section ``predictors`` of a report."""

from semdiag.presentation.section import Question, Section, Shown
from semdiag.presentation.sections.predictors.predictor_cells import predictor_cells
from semdiag.presentation.sections.predictors.predictors import predictors
from semdiag.presentation.sections.predictors.sentences import predictor_sentences, predictors_in_short
from semdiag.presentation.sections.predictors.tables import predictor_tables

_QUESTIONS = (
    Question(
        "predictors",
        "What goes with faster learning?",
        (
            Shown(
                predictors,
                "Rank correlation of each candidate with speed-up, at the initialisation, on the plateau and at "
                "the end, with intervals and a line at 0: {models}.",
                "A point right of 0 says: the larger the number against full attention's, the faster the run. "
                "Filled points remain after correction for the number of candidates and stages tried; a bar is "
                "what other tasks and seeds could have given.",
            ),
            Shown(
                predictor_cells,
                "Speed-up against the ratio of each candidate to full attention's at the initialisation, one "
                "panel per candidate, arrows where only a bound is known: {models}.",
                "A candidate that predicts speed orders the points across attentions and tasks alike. One that "
                "only sets one kind of attention apart tells which mask it is, not how fast it learns.",
            ),
        ),
        (
            "A correlation over a handful of attentions on a handful of tasks does not show what causes what: "
            "whatever is peculiar to the attention that learns fastest correlates with speed.",
            "Seeds of one task and attention are not independent tests; p-values exchange attentions within "
            "tasks, for all seeds at once. With few tasks and attentions only strong relations can be seen.",
            "Every number is a ratio to full attention of the same task and seed at the same stage; full "
            "attention itself stands at 1 and 1. Plateau: the latest snapshot before half of the rise in "
            "training accuracy.",
        ),
    ),
)


PREDICTORS = Section(
    name="predictors",
    needs=("predictors",),
    questions=_QUESTIONS,
    external=(),
    in_short=predictors_in_short,
    details=predictor_sentences,
    tables=predictor_tables,
)
