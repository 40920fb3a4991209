"""How much do weights move when scores move, and do the bounds hold?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "stability",
    __name__,
    measured_by="measure.probe:SOFTMAX_SECANTS",
    summarised_by="answer:stability_summary",
    shown_by="page:SECTION",
    asked_by="command:stability",
)
