"""What does each head do?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "heads",
    __name__,
    shown_by="figures:SECTION",
)
