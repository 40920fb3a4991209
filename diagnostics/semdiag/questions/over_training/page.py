"""The section ``along`` of a report."""

from semdiag.presenting.glance import measured_glance
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import quantities_of_runs
from semdiag.questions.over_training.figures.along_training import along_training
from semdiag.questions.over_training.words import along_sentences

_HEADINGS = (
    Heading(
        "along",
        "How do the numbers move while the model learns?",
        (
            Shown(
                along_training,
                "Dispersion, response and the share of the gradient in queries and keys against epochs, "
                "for each run: {shown}.",
                "Each point is a snapshot, measured on the same inputs. A difference between attentions that is "
                "there at epoch 0 comes from the mask; one that opens later was learned.",
            ),
        ),
        (
            "Between snapshots nothing was measured; lines only guide the eye. Runs keep the initialisation, "
            "the last epoch and the epochs named by --snapshots.",
            "At most 50 held-out samples; gradients are of the mean loss on them, not on training batches.",
        ),
    ),
)


SECTION = Section(
    name="along",
    needs=("along",),
    glance=measured_glance("along"),
    headings=_HEADINGS,
    external=(),
    details=along_sentences,
    tables=quantities_of_runs("along"),
)
