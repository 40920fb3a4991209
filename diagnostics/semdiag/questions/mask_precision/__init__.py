"""Do masks survive a number format: certified, observed?"""

from semdiag.presenting.question import Question

QUESTION = Question("mask-precision", __name__, needs=("rounded_masks",))
