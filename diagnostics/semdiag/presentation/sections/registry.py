"""All sections of a report, in their order. A new one is a folder beside these and a line here."""

from semdiag.presentation.section import Section
from semdiag.presentation.sections.along.section import ALONG
from semdiag.presentation.sections.bounds.section import BOUNDS
from semdiag.presentation.sections.convergence.section import CONVERGENCE
from semdiag.presentation.sections.dispersion.section import DISPERSION
from semdiag.presentation.sections.heads.section import HEADS
from semdiag.presentation.sections.k_sweep.section import K_SWEEP
from semdiag.presentation.sections.landscape.section import LANDSCAPE
from semdiag.presentation.sections.learning.section import LEARNING
from semdiag.presentation.sections.lengths.section import LENGTHS
from semdiag.presentation.sections.lipschitz.section import LIPSCHITZ
from semdiag.presentation.sections.mask_stability.section import MASK_STABILITY
from semdiag.presentation.sections.overlap.section import OVERLAP
from semdiag.presentation.sections.predictors.section import PREDICTORS
from semdiag.presentation.sections.separation.section import SEPARATION
from semdiag.presentation.sections.stability.section import STABILITY
from semdiag.presentation.sections.within.section import WITHIN

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
