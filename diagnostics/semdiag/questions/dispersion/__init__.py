"""How far apart are the scores that a query mixes?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from semdiag.measuring.plan import Plan, ReportOptions
from semdiag.presenting.question import SAMPLING, Question

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject
    from semdiag.measuring.table import Table


@dataclass(frozen=True)
class InitialisationPlan(Plan):
    """How far apart a run's scores were before it was trained; a part of every report."""

    name: ClassVar[str] = "the initialisation"
    takes_drawn_queries: ClassVar[bool] = True
    samples: int = 50  # inputs on which the initialisation is measured

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.questions.dispersion.measure import INITIALISATION

        return (INITIALISATION,)

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.dispersion.measure import measure_initialisation

        return measure_initialisation(subject, self)

    @classmethod
    def for_report(cls, options: ReportOptions) -> "InitialisationPlan":
        """Return the plan of a report."""
        return cls()


QUESTION = Question(
    "dispersion",
    __name__,
    """Measure semantic dispersion δ: how far apart the scores of a query are.

    δ is a query's largest score minus its smallest, over all keys for full attention and over the kept keys for
    sparse attention (paper, eq. 19). A small δ means a stable softmax. Shown per layer and head, as percentiles
    over queries, in nats.

    [bold]semdiag dispersion checkpoints/even-pairs-full-seed-153476998 --k 5[/]
    """,
    takes=("k", "every", *SAMPLING),
    leave_out=(),
    report_plan=InitialisationPlan,
    pictured=True,
    place="screen",
)
