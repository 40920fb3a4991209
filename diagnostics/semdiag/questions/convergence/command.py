"""``semdiag convergence``."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import completion
from semdiag.presenting.question import Shared, command

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Run folders, folders of runs, or checkpoints (.pt) of semdiag train. Default: every run in "
        "./checkpoints, or in $SEMDIAG_CHECKPOINTS if that is set.",
        show_default=False,
        autocompletion=completion.models,
    ),
]


@command(leave_out=("min_keys", "config", "per_query", "head", "jobs", "ray"))
def convergence(
    runs: Runs = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLOAT|TASK=FLOAT",
            help="Training accuracy that counts as having learned. TASK=0.35 sets it for one task; repeatable.",
            show_default="0.95",
        ),
    ] = None,
    along: Annotated[
        bool,
        typer.Option(
            "--along",
            help="Measure every snapshot in the runs' folders and plot against epochs: δ, Δ, ξ, response, Γ, and "
            "the share of the gradient in queries and keys. About a second per snapshot. To keep more snapshots: "
            "semdiag train --snapshots 1,2,5,10,20.",
        ),
    ] = False,
    predictors: Annotated[
        str,
        typer.Option(
            metavar="all|NAME,NAME",
            help="Ask what goes with faster learning. Measures candidates like dispersion,xi_sound,lambda_sound "
            "at every snapshot. Correlates each, at the initialisation and at matched loss, with the area under "
            "the loss curve, over the masks of each task; corrected for the number of candidates. About a second "
            "per snapshot.",
        ),
    ] = "",
    lengths: Annotated[
        str,
        typer.Option(
            metavar="LENGTH,LENGTH",
            help="Also measure accuracy, δ and Δ of the last checkpoints on fresh inputs of these lengths, like "
            "40,60,80.",
        ),
    ] = "",
    *,
    shared: Shared,
) -> None:
    """Compare how fast runs learn: epochs to 95% training accuracy, and speed-up over full attention.

    Each run is compared with the full-attention run of the same seed that differs in nothing else. A run that
    never reaches the target gives a bound, and is not dropped. Over several seeds medians are shown, with the
    confidence that so many seeds allow. Also shown: held-out accuracy, generalisation gap, and speed-up against
    δ_h/δ_s.

    [bold]semdiag convergence --lengths 40,60,80[/]
    """
    from semdiag.presenting import option_values
    from semdiag.questions.convergence.measure import ConvergencePlan, convergence_survey
    from semdiag.questions.convergence.terminal import print_convergence
    from semdiag.questions.predictors.measure import CANDIDATES

    conditions = shared.conditions()
    names = tuple(CANDIDATES) if predictors == "all" else tuple(filter(None, predictors.split(",")))
    plan = ConvergencePlan(
        **option_values.targets(target or []), along=along, predictors=names,
        lengths=option_values.whole_numbers(lengths, "--lengths"),
    )  # fmt: skip
    further_sections = {"along": along, "predictors": bool(names), "lengths": bool(plan.lengths)}
    survey = partial(convergence_survey, plan=plan)
    findings = shared.measured(runs, conditions, survey, more_stages=sum(further_sections.values()))
    sections = ["convergence", *(name for name, measured in further_sections.items() if measured)]
    shared.deliver("convergence", findings, print_convergence, sections)
