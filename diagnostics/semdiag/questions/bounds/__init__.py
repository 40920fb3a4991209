"""What do Theorems 2, 4, 5 and Corollary 1 guarantee?"""

from dataclasses import dataclass

from semdiag.presenting.question import Question


@dataclass(frozen=True)
class BoundsPlan:
    """What is measured of the theory."""

    tensor_secants: bool = True  # whether to measure secants in each tensor and bounds at the point: takes time


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
    takes=("against",),
    leave_out=("per_query", "head"),
    defaults={"dtype": "float64"},
    conditions={"encoders_only": True},
    needs=("constants", "parameters"),
    external=False,
    glanced="corollary",
)
