"""How far apart are the scores that a query mixes?"""

from typing import TYPE_CHECKING

from semdiag.presenting.question import Question, percentile_command

if TYPE_CHECKING:
    from semdiag.measuring.findings.findings import Findings, Summary


def _summary(findings: "Findings") -> "Summary":
    from semdiag.questions.dispersion.answer import dispersion_summary

    return findings(dispersion_summary)


dispersion = percentile_command(
    "dispersion",
    """Measure semantic dispersion δ: how far apart the scores of a query are.

    δ is a query's largest score minus its smallest, over all keys for full attention and over the kept keys for
    sparse attention (paper, eq. 19). A small δ means a stable softmax. Shown per layer and head, as percentiles
    over queries, in nats.

    [bold]semdiag dispersion checkpoints/even-pairs-full-seed-153476998 --k 5[/]
    """,
    _summary,
)


QUESTION = Question(
    "dispersion",
    __name__,
    measured_by="measure:INITIALISATION_PROBE",
    summarised_by="answer:dispersion_summary",
    shown_by="figures:SECTION",
    asked_by=":dispersion",
)
