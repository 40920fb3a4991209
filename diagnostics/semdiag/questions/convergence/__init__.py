"""Which attention learned faster, and what goes with it?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Asked, Question


@dataclass(frozen=True)
class ConvergencePlan:
    """What is measured of training runs."""

    target: float = 0.95  # training accuracy that counts as having learned
    targets: Mapping[str, float] = field(default_factory=dict)  # for single tasks, instead of the target

    def __post_init__(self) -> None:
        from semdiag_models.reading import InputError

        for target in (self.target, *self.targets.values()):
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


def _ask(
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
    shared: Asked,
) -> None:
    from semdiag.questions.convergence.measure import convergence_survey

    plan = ConvergencePlan(**options.targets(target or []))
    findings, _ = shared.measured(runs, shared.conditions(), partial(convergence_survey, plan=plan))
    shared.deliver(findings)


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
    ask=_ask,
    leave_out=("min_keys", "config", "per_query", "head", "jobs", "ray"),
    needs=("runs",),
    external=False,
)
