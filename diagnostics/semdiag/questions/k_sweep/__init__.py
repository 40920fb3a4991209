"""Is sparse attention enough, and with which k?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "k-sweep",
    __name__,
    measured_by="measure.probe:K_SWEEP",
    summarised_by="answer.summary:k_sweep_summary",
    shown_by="page:SECTION",
    asked_by="command:k_sweep",
)
