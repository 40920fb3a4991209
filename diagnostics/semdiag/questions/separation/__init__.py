"""How far apart are kept and dropped keys, and which keys are relied on?"""

from typing import TYPE_CHECKING

from semdiag.presenting.question import Question, percentile_command

if TYPE_CHECKING:
    from semdiag.measuring.findings.findings import Findings, Summary


def _summary(findings: "Findings") -> "Summary":
    from semdiag.questions.separation.answer import separation_summary

    return findings(separation_summary)


separation = percentile_command(
    "separation",
    """Measure semantic separation Δ and key load: how clear-cut is the mask, and which keys are used?

    Δ is a query's smallest kept score minus its largest dropped one (paper, Def. 3). The larger Δ is, the more the
    input may change before the mask does. Δ is undefined for full attention, which drops nothing. It can be
    negative for bottom-k and for masks that ignore the scores. The load of a key is the number of queries that
    attend to it.

    [bold]semdiag separation checkpoints/even-pairs-topk-5-seed-153476998[/]
    """,
    _summary,
)


QUESTION = Question(
    "separation",
    __name__,
    summarised_by="answer:separation_summary",
    shown_by="figures:SECTION",
    asked_by=":separation",
)
