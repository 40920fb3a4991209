"""What every command prints with ``--json``: one question each."""

from collections.abc import Callable

from semdiag.questions.convergence.answer.summary import convergence_summary
from semdiag.questions.dispersion.answer.comparisons import dispersion_summary
from semdiag.measuring.findings.findings import Findings
from semdiag.questions.k_sweep.answer.summary import k_sweep_summary
from semdiag.questions.landscape.answer import landscape_summary
from semdiag.questions.mask_stability.answer import mask_summary
from semdiag.questions.overlap.answer import overlap_summary
from semdiag.questions.separation.answer import separation_summary
from semdiag.measuring.findings.strict_json import Summary
from semdiag.questions.bounds.answer.summary import bounds_summary
from semdiag.questions.lipschitz.answer.summary import lipschitz_summary
from semdiag.questions.stability.answer import stability_summary

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
