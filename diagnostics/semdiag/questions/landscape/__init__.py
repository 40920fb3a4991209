"""What does the loss surface look like?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "landscape",
    __name__,
    measured_by="measure:LOSS_SURFACE",
    summarised_by="answer:landscape_summary",
    shown_by="page:SECTION",
    asked_by="command:landscape",
)
