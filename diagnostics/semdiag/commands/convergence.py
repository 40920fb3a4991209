"""``semdiag convergence``."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from semdiag.commands import options

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Run folders, folders of runs, or checkpoints (.pt) of semdiag train. None: every run in "
        "./checkpoints or in $SEMDIAG_CHECKPOINTS.",
        show_default=False,
    ),
]


def convergence(
    runs: Runs = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLOAT|TASK=FLOAT",
            help="Training accuracy that counts as having learned; TASK=0.35 for one task, as often as needed.",
            show_default="0.95",
        ),
    ] = None,
    along: Annotated[
        bool,
        typer.Option(
            "--along",
            help="Measure every snapshot in the runs' folders: δ, Δ, ξ, response, Γ and the gradient's share in "
            "queries and keys against epochs. About a second per snapshot. Keep more of them with: semdiag train "
            "--snapshots 1,2,5,10,20.",
        ),
    ] = False,
    predictors: Annotated[
        bool,
        typer.Option(
            "--predictors",
            help="Ask what goes with faster learning: measure candidates (δ, ξ, λ, response, entropy, …) at the "
            "initialisation, on the plateau and at the end of every run, and correlate their ratio to full "
            "attention's with the speed-up, corrected for their number. About a second per snapshot.",
        ),
    ] = False,
    lengths: Annotated[
        str,
        typer.Option(
            help="Evaluate the last checkpoints on fresh inputs of these lengths, like 40,60,80: accuracy, δ, Δ."
        ),
    ] = "",
    inputs: options.Inputs = None,
    samples: options.Samples = 500,
    batch_size: options.BatchSize = 100,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    seed: options.Seed = 0,
    out: options.Out = None,
    as_json: options.Json = False,
    figures: options.Figures = "png,svg",
    quiet: options.Quiet = False,
) -> None:
    """Compare how fast runs learn: epochs to 95 % training accuracy, and speed-up over full attention.

    Runs are compared with the full-attention run of the same seed that differs in nothing else. A run that never
    arrives gives a bound, and is not dropped. Over several seeds: medians, with the confidence that so many
    seeds allow. Also held-out accuracy, generalisation gap, and speed-up against δ_h/δ_s.

    [bold]semdiag convergence --lengths 40,60,80[/]
    """
    from semdiag.commands import convergence_printing, measuring
    from semdiag.measurement.convergence_summaries import convergence_summary
    from semdiag.measurement.convergence_survey import ConvergencePlan, convergence_survey
    from semdiag.measurement.survey import Conditions

    conditions = Conditions(
        inputs=inputs, samples=samples, batch_size=batch_size, device=device, dtype=dtype, seed=seed
    )
    plan = ConvergencePlan(
        **measuring.targets(target or []), along=along, predictors=predictors,
        lengths=measuring.whole_numbers(lengths, "--lengths"),
    )  # fmt: skip
    formats = measuring.figure_formats(figures)
    found = measuring.measured(runs, conditions, quiet, run=partial(convergence_survey, plan=plan))
    measuring.deliver(
        "convergence", found, convergence_summary(found), lambda _: convergence_printing.print_convergence(found),
        out=out, formats=formats, as_json=as_json, quiet=quiet,
        sections=[
            "convergence", *["along"] * along, *["predictors"] * predictors, *["lengths"] * bool(plan.lengths),
        ],
    )  # fmt: skip
