"""Which attention learned faster, and what goes with it?"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.options import option_field
from semdiag.presenting.question import TRAINING, Question, Request


@dataclass(frozen=True)
class ConvergencePlan:
    """What is measured of training runs."""

    targets: tuple[tuple[str, float], ...] = option_field(  # by task; of an empty name: for all others
        (), "Training accuracy that counts as having learned. TASK=0.35 sets it for one task; repeatable.",
        "--target", metavar="FLOAT,TASK=FLOAT", show_default="0.95", read=options.targets,
    )  # fmt: skip

    def __post_init__(self) -> None:
        from semdiag_files import InputError

        for _, target in self.targets:
            if not 0 < target <= 1:
                raise InputError(f"--target is a training accuracy in (0, 1], like 0.95. Got {target}.")


Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN",
        help="Run folders, folders of runs, or checkpoints (.pt) of semdiag train. Default: every run in "
        "./checkpoints, or in $SEMDIAG_CHECKPOINTS if that is set.",
        show_default=False,
        autocompletion=options.models,
    ),
]


def _ask(runs: Runs = None, *, plan: ConvergencePlan, request: Request) -> None:
    from semdiag.questions.convergence.measure import convergence_survey

    findings, _ = request.measured(runs, request.conditions(), partial(convergence_survey, plan=plan))
    request.deliver(findings)


QUESTION = Question(
    "convergence",
    __name__,
    """Compare how fast runs learn: epochs to 95% training accuracy, and speed-up over full attention.

    Each run is compared with the full-attention run of the same seed that differs in nothing else. A run that
    never reaches the target gives a bound, and is not dropped. Over several seeds medians are shown, with the
    confidence that so many seeds allow. Also shown: held-out accuracy, generalisation gap, and speed-up against
    δ_h/δ_s.

    [bold]semdiag convergence --target 0.9[/]
    """,
    ConvergencePlan,
    _ask,
    leave_out=("min_keys", "config", "per_query", "head", "jobs", "ray"),
    needs=("runs",),
    external=False,
    place="screen",
    panel=TRAINING,
)
