"""What do Theorems 2, 4, 5 and Corollary 1 guarantee?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "bounds",
    __name__,
    measured_by="measure.probe:BOUNDS",
    summarised_by="answer.summary:bounds_summary",
    shown_by="page:SECTION",
    asked_by="command:bounds",
)
