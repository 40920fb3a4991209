"""``semdiag k-sweep``."""

from typing import Annotated

import typer

from semdiag.commands import options
from semdiag.commands.shared import Shared, with_options

_MEASURE = "What is measured"


@with_options(leave_out=("min_keys", "per_query"))
def k_sweep(
    models: options.Models = None,
    max_k: Annotated[
        int | None,
        typer.Option(
            help="Largest k. Default: 48, or one less than the length of the inputs.", rich_help_panel=_MEASURE
        ),
    ] = None,
    rerun: Annotated[
        bool,
        typer.Option(
            "--rerun",
            help="Also run the model with top-k attention for every k: accuracy.",
            rich_help_panel=_MEASURE,
        ),
    ] = False,
    *,
    shared: Shared,
) -> None:
    """Ask, within one model and for every k at once, what a top-k mask would leave of its attention.

    For every k: dispersion δ_h(k) against δ_s, separation Δ_h(k), attention mass kept, key load, the paper's
    conditions; and which k qualifies. Says nothing about a model trained with that k.

    [bold]semdiag k-sweep checkpoints/even-pairs-full-seed-153476998 --rerun[/]
    """
    from semdiag.commands.printing.k_sweep import print_sweep
    from semdiag.measurement.probes.k_sweep import SweepPlan

    conditions = shared.conditions(plans=(SweepPlan(max_k, rerun),))
    findings = shared.measured(models, conditions)
    shared.deliver("k-sweep", findings, print_sweep)
