"""Do masks survive a number format: certified, observed?"""

from semdiag.presenting.question import Question

QUESTION = Question(
    "mask-precision",
    __name__,
    measured_by="measure:MASK_PRECISION",
    shown_by="figures:SECTION",
)
