"""``semdiag lipschitz``."""

from typing import Annotated

import typer

from semdiag.commands import options

_PANEL = "What is measured"


def lipschitz(
    models: options.Models = None,
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
    inputs: options.Inputs = None,
    samples: options.Samples = 100,
    batch_size: options.BatchSize = 100,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    config: options.Config = None,
    out: options.Out = None,
    as_json: options.Json = False,
    figures: options.Figures = "png,svg",
    quiet: options.Quiet = False,
) -> None:
    """Estimate from below how steep the loss is in the parameters, beside the bounds that hold.

    Secants in random planes and on lines, gradient norms at random parameters with an extreme-value estimate
    (refused where its fit is bad), and how much each block stretches its input; full against top-k with intervals.
    In float64, about two minutes per model on one core.

    [bold]semdiag lipschitz checkpoints/even-pairs-full-seed-153476998
    checkpoints/even-pairs-topk-5-seed-153476998[/]
    """
    from semdiag.commands import measuring, probe_printing
    from semdiag.measurement.probes.loss.lipschitz import LipschitzPlan
    from semdiag.measurement.survey import Conditions

    conditions = Conditions(
        inputs=inputs,
        samples=samples,
        batch_size=batch_size,
        device=device,
        dtype="float64",
        seed=seed,
        config=measuring.read_config(config),
        encoders_only=True,
        lipschitz=LipschitzPlan(samples, planes, directions, draws, radius),
    )
    formats = measuring.figure_formats(figures)
    findings = measuring.measured(models, conditions, quiet)
    measuring.deliver(
        "lipschitz", findings, probe_printing.print_lipschitz,
        out=out, formats=formats, as_json=as_json, quiet=quiet,
    )  # fmt: skip
