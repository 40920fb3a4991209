"""What every command prints with ``--json``: one question each."""

from collections.abc import Callable

from semdiag.findings.convergence_summary import convergence_summary
from semdiag.findings.dispersion import dispersion_summary
from semdiag.findings.findings import Findings
from semdiag.findings.k_sweep import k_sweep_summary
from semdiag.findings.landscape import landscape_summary
from semdiag.findings.mask_stability import mask_summary
from semdiag.findings.overlap import overlap_summary
from semdiag.findings.separation import separation_summary
from semdiag.findings.strict_json import Summary
from semdiag.findings.theory.bounds import bounds_summary
from semdiag.findings.theory.lipschitz import lipschitz_summary
from semdiag.findings.theory.stability import stability_summary

SUMMARIES: dict[str, Callable[[Findings], Summary]] = {
    "dispersion": dispersion_summary,
    "separation": separation_summary,
    "stability": stability_summary,
    "bounds": bounds_summary,
    "mask-stability": mask_summary,
    "k-sweep": k_sweep_summary,
    "overlap": overlap_summary,
    "lipschitz": lipschitz_summary,
    "landscape": landscape_summary,
    "convergence": convergence_summary,
}
