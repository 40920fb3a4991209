"""``semdiag bounds``."""

from semdiag.presenting import options
from semdiag.presenting.question import Shared, command


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
    from semdiag.questions.bounds.measure.probe import BoundsPlan
    from semdiag.questions.bounds.terminal import print_bounds
    from semdiag.questions.bounds.words import corollary_in_short

    conditions = shared.conditions(
        plans=(BoundsPlan(),),
        encoders_only=True,
    )
    findings = shared.measured(models, conditions, against=against)
    shared.deliver("bounds", findings, print_bounds, answered=not corollary_in_short(findings))
