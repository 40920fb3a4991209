"""``semdiag k-sweep``."""

from typing import Annotated

import typer

from semdiag.commands import options

_MEASURE = "What is measured"


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
    """Ask, within one model and for every k at once, what a top-k mask would leave of its attention.

    For every k: dispersion δ_h(k) against δ_s, separation Δ_h(k), attention mass kept, key load, the paper's
    conditions; and which k qualifies. Says nothing about a model trained with that k.

    [bold]semdiag k-sweep checkpoints/even-pairs-full-seed-153476998 --rerun[/]
    """
    from semdiag.commands import k_sweep_printing, measuring
    from semdiag.measurement.k_sweep import SweepPlan
    from semdiag.measurement.k_sweep_summaries import sweep_summary
    from semdiag.measurement.survey import Conditions

    conditions = Conditions(
        inputs=inputs,
        samples=samples,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        seed=seed,
        config=measuring.read_config(config),
        sweep=SweepPlan(max_k, rerun),
    )
    formats = measuring.figure_formats(figures)
    found = measuring.measured(models, conditions, quiet)
    measuring.deliver(
        "k-sweep", found, sweep_summary(found), k_sweep_printing.print_sweep,
        out=out, formats=formats, as_json=as_json, quiet=quiet,
    )  # fmt: skip
