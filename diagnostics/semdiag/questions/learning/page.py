"""The section ``learning`` of a report."""

from semdiag.presenting.section import Heading, Section, Shown
from semdiag.questions.learning.answer import learning_glance, learning_in_short
from semdiag.questions.learning.figures import training_curves

_HEADINGS = (
    Heading(
        "learning",
        "Did it learn faster?",
        (
            Shown(
                training_curves,
                "Training and held-out accuracy and training loss against epochs, first epoch with 95% training "
                "accuracy marked: {shown}.",
                "Compare where the curves of the first panel cross the dashed line: the first epoch with 95% "
                "training accuracy. How far a curve of the second panel stays below that of the first is what was "
                "memorised instead of learned.",
            ),
        ),
        (
            "One run per curve: a different seed can shift the arrival by many epochs. A smaller dispersion "
            "and faster learning seen together in one pair do not show that one causes the other.",
            "Epochs are counted, not seconds: an epoch does not cost the same for every attention.",
        ),
    ),
)


SECTION = Section(
    name="learning",
    needs=(),
    headings=_HEADINGS,
    external=(),
    glance=learning_glance,
    in_short=learning_in_short,
)
