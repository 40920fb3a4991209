"""Do layers and heads keep the same keys?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "overlap",
    __name__,
    measured_by="measure:MASK_OVERLAP",
    summarised_by="answer:overlap_summary",
    shown_by="page:SECTION",
    asked_by="command:overlap",
)
