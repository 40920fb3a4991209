"""What is known before training that predicts its speed?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "predictors",
    __name__,
    shown_by="page:SECTION",
)
