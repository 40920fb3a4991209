"""Do layers and heads keep the same keys?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from semdiag.measuring.plan import Plan
from semdiag.presenting.options import check_least, option_field
from semdiag.presenting.question import Question

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject
    from semdiag.measuring.table import Table


@dataclass(frozen=True)
class OverlapPlan(Plan):
    """Which masks are compared."""

    name: ClassVar[str] = "overlap"

    k: int = option_field(
        5, "Full-attention models have no masks: compare those that top-k would choose, with this k."
    )

    def __post_init__(self) -> None:
        check_least(self, k=1)

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.questions.overlap.measure import OVERLAP

        return (OVERLAP,)

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.overlap.measure import measure_overlap

        return measure_overlap(subject, self)

    def provenance(self, samples: int, probe_samples: int) -> dict[str, Any]:
        """Return what to record."""
        return {"overlap_k": self.k, "probe_samples": probe_samples}


QUESTION = Question(
    "overlap",
    __name__,
    """Test whether layers, heads and successive queries keep the same keys, and so could share one selection.

    Shown: the Jaccard index of the sets of kept keys, for every two layers and heads at the same query, and for
    each query and the one before it. Beside it stands the index of sets drawn at random.

    [bold]semdiag overlap checkpoints/even-pairs-topk-5-seed-153476998[/]
    """,
    OverlapPlan,
    leave_out=("min_keys", "per_query"),
    defaults={"samples": 50},
    needs=("overlap",),
)
