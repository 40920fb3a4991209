"""What did fine-tuning, quantising or pruning change of a model's attention?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "compare",
    __name__,
    measured_by="measure.probe:COMPARISON",
    summarised_by="answer:compare_summary",
    shown_by="page:SECTION",
    asked_by="command:compare",
)
