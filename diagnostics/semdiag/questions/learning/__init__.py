"""Did the sparse model learn faster?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "learning",
    __name__,
    shown_by="figures:SECTION",
)
