"""All sections of a report, in their order. A new one is a folder beside these and a line here."""

from semdiag.presenting.section import Section
from semdiag.questions.over_training.page import ALONG
from semdiag.questions.bounds.page import BOUNDS
from semdiag.questions.convergence.page import CONVERGENCE
from semdiag.questions.dispersion.page import DISPERSION
from semdiag.questions.heads.page import HEADS
from semdiag.questions.k_sweep.page import K_SWEEP
from semdiag.questions.landscape.page import LANDSCAPE
from semdiag.questions.learning.page import LEARNING
from semdiag.questions.lengths.page import LENGTHS
from semdiag.questions.lipschitz.page import LIPSCHITZ
from semdiag.questions.mask_stability.page import MASK_STABILITY
from semdiag.questions.overlap.page import OVERLAP
from semdiag.questions.predictors.page import PREDICTORS
from semdiag.questions.separation.page import SEPARATION
from semdiag.questions.stability.page import STABILITY
from semdiag.questions.counterfactual.page import WITHIN

_ORDER = (
    DISPERSION,
    HEADS,
    WITHIN,
    SEPARATION,
    LEARNING,
    STABILITY,
    BOUNDS,
    MASK_STABILITY,
    K_SWEEP,
    OVERLAP,
    LIPSCHITZ,
    LANDSCAPE,
    CONVERGENCE,
    ALONG,
    PREDICTORS,
    LENGTHS,
)

SECTIONS: dict[str, Section] = {section.name: section for section in _ORDER}
FIGURES = {
    shown.figure: shown.draw
    for section in _ORDER
    for question in (*section.questions, *section.external)
    for shown in question.figures
}
