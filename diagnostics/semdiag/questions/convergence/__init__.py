"""Which attention learned faster, and what goes with it?"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Question, Shared, command

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Run folders, folders of runs, or checkpoints (.pt) of semdiag train. Default: every run in "
        "./checkpoints, or in $SEMDIAG_CHECKPOINTS if that is set.",
        show_default=False,
        autocompletion=options.models,
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
    *,
    shared: Shared,
) -> None:
    """Compare how fast runs learn: epochs to 95% training accuracy, and speed-up over full attention.

    Each run is compared with the full-attention run of the same seed that differs in nothing else. A run that
    never reaches the target gives a bound, and is not dropped. Over several seeds medians are shown, with the
    confidence that so many seeds allow. Also shown: held-out accuracy, generalisation gap, and speed-up against
    δ_h/δ_s.

    [bold]semdiag convergence --target 0.9[/]
    """
    from semdiag.questions.convergence.measure import ConvergencePlan, convergence_survey
    from semdiag.questions.convergence.words import print_convergence

    conditions = shared.conditions()
    survey = partial(convergence_survey, plan=ConvergencePlan(**options.targets(target or [])))
    findings = shared.measured(runs, conditions, survey)
    shared.deliver("convergence", findings, print_convergence)


QUESTION = Question(
    "convergence",
    __name__,
    summarised_by="answer:convergence_summary",
    shown_by="figures:SECTION",
    asked_by=":convergence",
)
