"""``semdiag landscape``."""

from typing import Annotated

import typer

from semdiag.commands import options

_PANEL = "What is measured"


def landscape(
    models: options.Models = None,
    planes: Annotated[
        int, typer.Option(help="Random planes through each checkpoint.", rich_help_panel=_PANEL)
    ] = 1,
    radius: Annotated[
        float,
        typer.Option(
            help="Half the side of a random plane. 1: each tensor is moved by up to its own norm, along each of "
            "two directions.",
            rich_help_panel=_PANEL,
        ),
    ] = 1.0,
    grid: Annotated[int, typer.Option(help="Cells per side, odd.", rich_help_panel=_PANEL)] = 25,
    through: Annotated[
        str,
        typer.Option(
            metavar="FILE,FILE",
            help="Instead of random planes the one through the checkpoint and two other snapshots, like "
            "epoch-0.pt and best.pt of the same run.",
            rich_help_panel=_PANEL,
        ),
    ] = "",
    metrics: Annotated[
        str,
        typer.Option(
            help="loss (with accuracy), dispersion (δ, Δ and key load over 50 samples), or both: loss,dispersion.",
            rich_help_panel=_PANEL,
        ),
    ] = "loss",
    inputs: options.Inputs = None,
    samples: options.Samples = 500,
    batch_size: options.BatchSize = 100,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    seed: options.Seed = 0,
    config: options.Config = None,
    out: options.Out = None,
    as_json: options.Json = False,
    figures: options.Figures = "png,svg",
    quiet: options.Quiet = False,
) -> None:
    """Evaluate the loss on planes through each checkpoint: cells, surface, cuts.

    Every cell is a model that was run; nothing is interpolated. 25 × 25 cells over 500 samples take about two
    minutes per model on one core: fewer samples or a coarser grid are quick looks.

    [bold]semdiag landscape checkpoints/even-pairs-topk-5-seed-153476998 --grid 11 --samples 100[/]
    """
    from semdiag.commands import measuring, probe_printing
    from semdiag.measurement.landscape import LandscapePlan
    from semdiag.measurement.probe_summaries import landscape_summary
    from semdiag.measurement.survey import Conditions

    conditions = Conditions(
        inputs=inputs,
        samples=samples,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        seed=seed,
        config=measuring.read_config(config),
        encoders_only=True,
        landscape=LandscapePlan(
            planes=planes,
            radius=radius,
            grid=grid,
            through=measuring.paths(through),
            metrics=measuring.names(metrics),
        ),
    )
    formats = measuring.figure_formats(figures)
    found = measuring.measured(models, conditions, quiet)
    measuring.deliver(
        "landscape", found, landscape_summary(found), probe_printing.print_landscape,
        out=out, formats=formats, as_json=as_json, quiet=quiet,
    )  # fmt: skip
