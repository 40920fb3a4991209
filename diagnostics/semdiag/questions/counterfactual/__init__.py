"""What would a top-k mask leave of a model that keeps every key?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "within",
    __name__,
    shown_by="figures:SECTION",
)
