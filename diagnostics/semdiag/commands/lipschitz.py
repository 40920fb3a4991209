"""``semdiag lipschitz``."""

from typing import Annotated

import typer

from semdiag.commands import options
from semdiag.commands.shared import Shared, with_options

_PANEL = "What is measured"


@with_options(leave_out=("dtype", "min_keys", "per_query"), samples=100)
def lipschitz(
    models: options.Models = None,
    against: options.Against = None,
    planes: Annotated[
        int,
        typer.Option(help="Random planes for the secants; the intervals resample them.", rich_help_panel=_PANEL),
    ] = 8,
    directions: Annotated[int, typer.Option(help="Points on each circle in a plane.", rich_help_panel=_PANEL)] = 8,
    draws: Annotated[
        int, typer.Option(help="Random parameters at which gradients are taken.", rich_help_panel=_PANEL)
    ] = 120,
    radius: Annotated[
        float,
        typer.Option(
            help="The largest, relative to each tensor's norm; six smaller ones halve it.", rich_help_panel=_PANEL
        ),
    ] = 1.0,
    *,
    shared: Shared,
) -> None:
    """Estimate from below how steep the loss is in the parameters, beside the bounds that hold.

    Secants in random planes and on lines, gradient norms at random parameters with an extreme-value estimate
    (refused where its fit is bad), and how much each block stretches its input; full against top-k with intervals.
    In float64, about two minutes per model on one core.

    [bold]semdiag lipschitz checkpoints/even-pairs-full-seed-153476998
    checkpoints/even-pairs-topk-5-seed-153476998[/]
    """
    from semdiag.commands.printing.probes import print_lipschitz
    from semdiag.measurement.probes.loss.lipschitz import LipschitzPlan

    conditions = shared.conditions(
        dtype="float64",
        encoders_only=True,
        plans=(LipschitzPlan(shared.values["samples"], planes, directions, draws, radius),),
    )
    shared.deliver("lipschitz", shared.measured(models, conditions, against=against), print_lipschitz)
