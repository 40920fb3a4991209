"""All probes, in the order in which they are measured. A new one is a file beside these and a line here."""

from semdiag.measurement.probe import Probe
from semdiag.measurement.probes.bounds.probe import BOUNDS
from semdiag.measurement.probes.k_sweep import K_SWEEP
from semdiag.measurement.probes.loss.landscape import LOSS_SURFACE
from semdiag.measurement.probes.loss.lipschitz import LIPSCHITZ
from semdiag.measurement.probes.noise.masks import MASK_STABILITY
from semdiag.measurement.probes.noise.secants import SOFTMAX_SECANTS
from semdiag.measurement.probes.overlap import MASK_OVERLAP

_ORDER = (SOFTMAX_SECANTS, BOUNDS, MASK_STABILITY, K_SWEEP, MASK_OVERLAP, LOSS_SURFACE, LIPSCHITZ)
PROBES: dict[type, Probe] = {probe.plan: probe for probe in _ORDER}
