"""How steep is the loss, measured from below?"""

from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Question, Shared, command


@command(leave_out=("dtype", "min_keys", "per_query", "head"), samples=100)
def lipschitz(
    models: options.Models = None,
    against: options.Against = None,
    planes: Annotated[
        int,
        typer.Option(
            help="Random planes in which secants are taken. Intervals resample the planes.",
            rich_help_panel=options.MEASURE,
        ),
    ] = 8,
    directions: Annotated[
        int,
        typer.Option(help="Points on each circle in a plane, one per direction.", rich_help_panel=options.MEASURE),
    ] = 8,
    draws: Annotated[
        int, typer.Option(help="Random parameters at which gradients are taken.", rich_help_panel=options.MEASURE)
    ] = 120,
    radius: Annotated[
        float,
        typer.Option(
            help="Largest radius, relative to each tensor's norm. Six smaller ones follow, each half of the last.",
            rich_help_panel=options.MEASURE,
        ),
    ] = 1.0,
    *,
    shared: Shared,
) -> None:
    """Estimate how steep the loss is in the parameters. Every estimate is a lower one, beside an upper bound.

    Measured: secants in random planes and on lines, gradient norms at random parameters, and
    how much each block stretches its input. Full attention is compared with top-k,
    with intervals. Runs in float64; about two minutes per model on one core.

    [bold]semdiag lipschitz checkpoints/even-pairs-full-seed-153476998
    checkpoints/even-pairs-topk-5-seed-153476998[/]
    """
    from semdiag.questions.lipschitz.answer import print_lipschitz
    from semdiag.questions.lipschitz.measure import LipschitzPlan

    conditions = shared.conditions(
        dtype="float64",
        encoders_only=True,
        plans=(LipschitzPlan(shared.values["samples"], planes, directions, draws, radius),),
    )
    shared.deliver("lipschitz", shared.measured(models, conditions, against=against), print_lipschitz)


QUESTION = Question(
    "lipschitz",
    __name__,
    measured_by="measure:LIPSCHITZ",
    summarised_by="answer:lipschitz_summary",
    shown_by="figures:SECTION",
    asked_by=":lipschitz",
)
