"""Does what was learned hold at other lengths?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "lengths",
    __name__,
    shown_by="page:SECTION",
)
