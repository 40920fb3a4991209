"""Do masks survive a number format: certified, observed?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "mask-precision",
    __name__,
    measured_by="measure.probe:MASK_PRECISION",
    shown_by="page:SECTION",
)
