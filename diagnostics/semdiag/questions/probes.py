"""All probes, in the order in which they are measured. A new one is a file beside these and a line here."""

from semdiag.measuring.probe import Probe
from semdiag.questions.bounds.measure.probe import BOUNDS
from semdiag.questions.k_sweep.measure.probe import K_SWEEP
from semdiag.questions.landscape.measure import LOSS_SURFACE
from semdiag.questions.lipschitz.measure.probe import LIPSCHITZ
from semdiag.questions.mask_stability.measure.probe import MASK_STABILITY
from semdiag.questions.stability.measure.probe import SOFTMAX_SECANTS
from semdiag.questions.overlap.measure import MASK_OVERLAP

_ORDER = (SOFTMAX_SECANTS, BOUNDS, MASK_STABILITY, K_SWEEP, MASK_OVERLAP, LOSS_SURFACE, LIPSCHITZ)
PROBES: dict[type, Probe] = {probe.plan: probe for probe in _ORDER}
