"""What does the loss surface look like?"""

from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Question, Shared, command


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
    *,
    shared: Shared,
) -> None:
    """Evaluate the loss on planes through each checkpoint in parameter space: cells and cuts.

    Every cell is a model that was run; nothing is interpolated. 25 × 25 cells over 500 samples take about two
    minutes per model on one core. For a quick look take fewer samples or a coarser grid.

    [bold]semdiag landscape checkpoints/even-pairs-topk-5-seed-153476998 --grid 11 --samples 100[/]
    """
    from semdiag.questions.landscape.answer import print_landscape
    from semdiag.questions.landscape.measure import LandscapePlan

    conditions = shared.conditions(
        encoders_only=True, plans=(LandscapePlan(planes=planes, radius=radius, grid=grid),)
    )
    findings = shared.measured(models, conditions)
    shared.deliver("landscape", findings, print_landscape)


QUESTION = Question(
    "landscape",
    __name__,
    measured_by="measure:LOSS_SURFACE",
    summarised_by="answer:landscape_summary",
    shown_by="figures:SECTION",
    asked_by=":landscape",
)
