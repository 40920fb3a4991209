"""Do layers and heads keep the same keys?"""

from dataclasses import dataclass

from semdiag.presenting.options import check_least, chosen
from semdiag.presenting.question import Question


@dataclass(frozen=True)
class OverlapPlan:
    """Which masks are compared."""

    k: int = chosen(5, "Full-attention models have no masks: compare those that top-k would choose, with this k.")

    def __post_init__(self) -> None:
        check_least(self, k=1)


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
