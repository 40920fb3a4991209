"""How steep is the loss, measured from below?"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from semdiag.measuring.plan import Plan, ReportOptions
from semdiag.presenting.options import check_least, option_field, shared_field
from semdiag.presenting.question import Question

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject
    from semdiag.measuring.table import Table

FEWEST_DRAWS = 5


@dataclass(frozen=True)
class LipschitzPlan(Plan):
    """What is drawn."""

    name: ClassVar[str] = "Lipschitz estimates"

    samples: int = shared_field(100)  # inputs behind every loss
    planes: int = option_field(
        8, "Random planes in which secants are taken. Intervals resample the planes.", rare=True
    )
    directions: int = option_field(8, "Points on each circle in a plane, one per direction.")
    draws: int = option_field(120, "Random parameters at which gradients are taken.", rare=True)
    radius: float = option_field(
        1.0, "Largest radius, relative to each tensor's norm. Six smaller ones follow, each half of the last.",
        rare=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        from semdiag_files import InputError

        check_least(self, samples=1, planes=2, directions=2, draws=FEWEST_DRAWS)
        if not 0 < self.radius < math.inf:
            raise InputError(f"radius must be a positive number, like 1. Got {self.radius}.")

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.questions.lipschitz.measure import JACOBIANS, LOSS_GRADIENTS, LOSS_SECANTS

        return LOSS_SECANTS, LOSS_GRADIENTS, JACOBIANS

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.lipschitz.measure import measure_lipschitz

        return measure_lipschitz(subject, self)

    def steps(self) -> int:
        """Return the number of steps of one encoder."""
        from semdiag.questions.lipschitz.measure import points

        return points(self)

    def provenance(self, samples: int, probe_samples: int) -> dict[str, Any]:
        """Return what to record."""
        return {"lipschitz_samples": min(self.samples, samples)}

    @classmethod
    def for_report(cls, options: ReportOptions) -> "LipschitzPlan | None":
        """Return the plan of a report."""
        return cls() if options.thorough else None


QUESTION = Question(
    "lipschitz",
    __name__,
    """Estimate how steep the loss is in the parameters. Every estimate is a lower one, beside an upper bound.

    Measured: secants in random planes and on lines, gradient norms at random parameters, and
    how much each block stretches its input. Full attention is compared with top-k,
    with intervals. Runs in float64; about two minutes per model on one core.

    [bold]semdiag lipschitz checkpoints/even-pairs-full-seed-153476998
    checkpoints/even-pairs-topk-5-seed-153476998[/]
    """,
    LipschitzPlan,
    takes=("against", "every"),
    leave_out=("dtype", "min_keys", "per_query", "head"),
    defaults={"samples": 100},
    conditions={"dtype": "float64", "encoders_only": True},
    needs=("loss_gradients",),
    external=False,
    place="theory",
)
