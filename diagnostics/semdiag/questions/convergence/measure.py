"""Measure training runs at their last checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from semdiag.capturing.loading import load_all
from semdiag.measuring.measure import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.survey import survey
from semdiag.measuring.training_runs import TARGET, run_table
from semdiag_models import InputError
from semdiag_models.reading import unknown_name
from semdiag_models.training import find_device


@dataclass(frozen=True)
class ConvergencePlan:
    """What is measured of training runs."""

    target: float = TARGET  # training accuracy that counts as having learned
    targets: Mapping[str, float] = field(default_factory=dict)  # for single tasks, instead of the target

    def __post_init__(self) -> None:
        for target in (self.target, *self.targets.values()):
            if not 0 < target <= 1:
                raise InputError(f"--target is a training accuracy in (0, 1], like 0.95. Got {target}.")


def convergence_survey(
    models: Sequence[Path],
    conditions: Conditions,
    announce: Callable[[str, int], None] = lambda model, steps: None,
    after_step: Callable[[int], None] = lambda steps: None,
    *,
    plan: ConvergencePlan,
) -> Measurements:
    """Measure the last checkpoints of runs, and add the table of runs."""
    loaded = load_all(models, conditions.config)
    runs = run_table(loaded)
    left_out = [model.path for model in loaded if model.path not in set(runs["model"])]
    if runs.empty:
        raise InputError(
            f"{left_out[0]} has no training history: convergence compares runs of semdiag train. Make one with: "
            "semdiag train even-pairs --attention topk --k 5 --epochs 5"
        )
    loaded = [model for model in loaded if model.path not in left_out]
    tasks = dict(zip(runs["model"], runs["task"], strict=True))
    for task in plan.targets:
        if task not in tasks.values():
            raise unknown_name("task of --target", task, [*runs["task"].unique()])
    device = find_device(conditions.device)
    conditions = conditions.decided(loaded, device)
    measured = survey(loaded, conditions, announce, after_step)
    measured.provenance.update(target=plan.target, **({"left_out": left_out} if left_out else {}))
    measured.provenance.update({"targets": dict(plan.targets)} if plan.targets else {})
    return measured.replace(runs=runs)
