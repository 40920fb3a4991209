"""How far apart are kept and dropped keys, and which keys are relied on?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "separation",
    __name__,
    summarised_by="answer:separation_summary",
    shown_by="page:SECTION",
    asked_by="command:separation",
)
