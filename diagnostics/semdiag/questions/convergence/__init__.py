"""Which attention learned faster, and what goes with it?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "convergence",
    __name__,
    summarised_by="answer.summary:convergence_summary",
    shown_by="page:SECTION",
    asked_by="command:convergence",
)
