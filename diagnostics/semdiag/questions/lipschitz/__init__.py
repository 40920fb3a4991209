"""How steep is the loss, measured from below?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "lipschitz",
    __name__,
    measured_by="measure.probe:LIPSCHITZ",
    summarised_by="answer.summary:lipschitz_summary",
    shown_by="page:SECTION",
    asked_by="command:lipschitz",
)
