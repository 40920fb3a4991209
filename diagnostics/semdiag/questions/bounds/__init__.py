"""What do Theorems 2, 4, 5 and Corollary 1 guarantee?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from semdiag.measuring.plan import Plan, ReportOptions
from semdiag.presenting.question import Question

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject
    from semdiag.measuring.table import Table

SAMPLES = 100  # inputs on which the bounds are computed, at most


@dataclass(frozen=True)
class BoundsPlan(Plan):
    """What is measured of the theory."""

    name: ClassVar[str] = "bounds"

    tensor_secants: bool = True  # whether to measure secants in each tensor and bounds at the point: takes time

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.questions.bounds.measure import CONSTANTS, PARAMETERS

        return CONSTANTS, PARAMETERS

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.bounds.measure import measure_bounds

        return measure_bounds(subject, self)

    def provenance(self, samples: int, probe_samples: int) -> dict[str, Any]:
        """Return what to record."""
        return {"bound_samples": min(SAMPLES, samples)}

    @classmethod
    def for_report(cls, options: ReportOptions) -> "BoundsPlan":
        """Return the plan of a report."""
        return cls()


QUESTION = Question(
    "bounds",
    __name__,
    """Compute the Lipschitz bounds of Theorems 2, 4 and 5 and the conditions of Corollary 1.

    Each in the paper's form and in a sound (proved) one. Shown: norms, the constant of every block and parameter
    tensor, measured slopes of the loss beside them, and for every pair of full and sparse models whether the
    sparse one has the better guarantee. The bounds hold for the measured inputs (100 of them) and this
    checkpoint.

    [bold]semdiag bounds checkpoints/even-pairs-topk-5-seed-153476998 --against
    checkpoints/even-pairs-full-seed-153476998[/]
    """,
    BoundsPlan,
    takes=("against", "every"),
    leave_out=("per_query", "head"),
    defaults={"dtype": "float64"},
    conditions={"encoders_only": True},
    needs=("constants", "parameters"),
    external=False,
    tile_anchor="corollary",
    place="theory",
)
