"""Do masks survive noise: certified, predicted, observed?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "mask-stability",
    __name__,
    measured_by="measure.probe:MASK_STABILITY",
    summarised_by="answer:mask_summary",
    shown_by="page:SECTION",
    asked_by="command:mask_stability",
)
