"""How do δ and Δ change while a model is trained?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "along",
    __name__,
    shown_by="page:SECTION",
)
