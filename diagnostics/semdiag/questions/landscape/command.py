"""``semdiag landscape``."""

from typing import Annotated

import typer

from semdiag.presenting import completion, options
from semdiag.presenting.question import Shared, command


@command(leave_out=("min_keys", "per_query", "head"))
def landscape(
    models: options.Models = None,
    planes: Annotated[
        int, typer.Option(help="Random planes through each checkpoint.", rich_help_panel=options.MEASURE)
    ] = 1,
    radius: Annotated[
        float,
        typer.Option(
            help="Half the side of a random plane. 1: each tensor moves by up to its own norm along each of the "
            "two directions.",
            rich_help_panel=options.MEASURE,
        ),
    ] = 1.0,
    grid: Annotated[
        int, typer.Option(help="Cells per side; an odd number.", rich_help_panel=options.MEASURE)
    ] = 25,
    through: Annotated[
        str,
        typer.Option(
            metavar="FILE,FILE",
            help="Instead of random planes, take the plane through the checkpoint and two other snapshots, like "
            "epoch-0.pt and best.pt of the same run.",
            rich_help_panel=options.MEASURE,
        ),
    ] = "",
    metrics: Annotated[
        str,
        typer.Option(
            metavar="PART,PART",
            help="What each cell shows: loss (with accuracy), dispersion (δ, Δ and key load over 50 samples), or "
            "both: loss,dispersion.",
            rich_help_panel=options.MEASURE,
            autocompletion=completion.names(completion.PARTS),
        ),
    ] = "loss",
    *,
    shared: Shared,
) -> None:
    """Evaluate the loss on planes through each checkpoint in parameter space: cells, surface, cuts.

    Every cell is a model that was run; nothing is interpolated. 25 × 25 cells over 500 samples take about two
    minutes per model on one core. For a quick look take fewer samples or a coarser grid.

    [bold]semdiag landscape checkpoints/even-pairs-topk-5-seed-153476998 --grid 11 --samples 100[/]
    """
    from semdiag.presenting import option_values
    from semdiag.questions.landscape.measure import LandscapePlan
    from semdiag.questions.landscape.terminal import print_landscape
    from semdiag_models import InputError

    if through and (unused := sorted({"planes", "radius"} & shared.typed)):
        raise InputError(f"--through replaces random planes: leave out --{' and --'.join(unused)}.")
    conditions = shared.conditions(
        encoders_only=True,
        plans=(
            LandscapePlan(
                planes=planes,
                radius=radius,
                grid=grid,
                through=option_values.paths(through),
                metrics=option_values.names(metrics),
            ),
        ),
    )
    findings = shared.measured(models, conditions)
    shared.deliver("landscape", findings, print_landscape)
