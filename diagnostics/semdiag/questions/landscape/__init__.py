"""What does the loss surface look like?"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from semdiag.measuring.plan import Plan, ReportOptions
from semdiag.presenting.options import check_least, option_field
from semdiag.presenting.question import Question

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject
    from semdiag.measuring.table import Table


@dataclass(frozen=True)
class LandscapePlan(Plan):
    """Which points are evaluated."""

    name: ClassVar[str] = "loss surface"

    planes: int = option_field(1, "Random planes through each checkpoint.", rare=True)
    radius: float = option_field(
        1.0, "Half the side of a random plane. 1: each tensor moves by up to its own norm along each of the two "
        "directions.", rare=True,
    )  # fmt: skip
    grid: int = option_field(25, "Cells per side; an odd number.", rare=True)  # so that the checkpoint is a cell

    def __post_init__(self) -> None:
        from semdiag_files import InputError

        check_least(self, planes=1)
        if not 0 < self.radius < math.inf:
            raise InputError(f"radius must be a positive number, like 1. Got {self.radius}.")
        if self.grid < 3 or self.grid % 2 == 0:
            raise InputError(
                f"grid must be an odd number of at least 3, so that the checkpoint is a cell. Got {self.grid}."
            )

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.questions.landscape.measure import LANDSCAPE

        return (LANDSCAPE,)

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.landscape.measure import measure_landscape

        return measure_landscape(subject, self)

    def steps(self) -> int:
        """Return the number of evaluated points of one encoder."""
        return self.planes * (self.grid**2 + 1)

    @classmethod
    def for_report(cls, options: ReportOptions) -> "LandscapePlan | None":
        """Return the plan of a report."""
        return cls() if options.thorough else None


QUESTION = Question(
    "landscape",
    __name__,
    """Evaluate the loss on planes through each checkpoint in parameter space.

    Every cell is a model that was run; nothing is interpolated. 25 × 25 cells over 500 samples take about two
    minutes per model on one core. For a quick look take fewer samples or a coarser grid.

    [bold]semdiag landscape checkpoints/even-pairs-topk-5-seed-153476998 --grid 11 --samples 100[/]
    """,
    LandscapePlan,
    leave_out=("min_keys", "per_query", "head"),
    conditions={"encoders_only": True},
    needs=("landscape",),
    external=False,
)
