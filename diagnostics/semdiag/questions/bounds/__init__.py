"""What do Theorems 2, 4, 5 and Corollary 1 guarantee?"""

from semdiag.presenting import options
from semdiag.presenting.question import Question, Shared, command


@command(leave_out=("per_query", "head"), dtype="float64")
def bounds(
    models: options.Models = None,
    against: options.Against = None,
    *,
    shared: Shared,
) -> None:
    """Compute the Lipschitz bounds of Theorems 2, 4 and 5 and the conditions of Corollary 1.

    Each in the paper's form and in a sound (proved) one. Shown: norms, the constant of every block and parameter
    tensor, measured slopes of the loss beside them, and for every pair of full and sparse models whether the
    sparse one has the better guarantee. The bounds hold for the measured inputs (100 of them) and this
    checkpoint.

    [bold]semdiag bounds checkpoints/even-pairs-topk-5-seed-153476998 --against
    checkpoints/even-pairs-full-seed-153476998[/]
    """
    from semdiag.questions.bounds.measure import BoundsPlan
    from semdiag.questions.bounds.words import corollary_in_short, print_bounds

    conditions = shared.conditions(
        plans=(BoundsPlan(),),
        encoders_only=True,
    )
    findings = shared.measured(models, conditions, against=against)
    shared.deliver("bounds", findings, print_bounds, answered=not corollary_in_short(findings))


QUESTION = Question(
    "bounds",
    __name__,
    measured_by="measure:BOUNDS",
    summarised_by="answer:bounds_summary",
    shown_by="figures:SECTION",
    asked_by=":bounds",
)
