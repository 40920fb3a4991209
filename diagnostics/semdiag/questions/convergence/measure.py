"""Measure training runs at their last checkpoints."""

from collections.abc import Sequence
from pathlib import Path

from semdiag.capturing.loading import load_all
from semdiag.measuring.measure import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.progress import SurveyProgress
from semdiag.measuring.survey import survey
from semdiag.measuring.training_runs import TARGET, run_table
from semdiag.questions.convergence import ConvergencePlan
from semdiag_files import InputError, unknown_name
from semdiag_models.train import find_device


def convergence_survey(
    models: Sequence[Path],
    conditions: Conditions,
    progress: SurveyProgress | None = None,
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
    targets = {"": TARGET, **dict(plan.targets)}
    target = targets.pop("")
    for task in targets:
        if task not in tasks.values():
            raise unknown_name("task of --target", task, [*runs["task"].unique()])
    device = find_device(conditions.device)
    conditions = conditions.decided(loaded, device)
    measured = survey(loaded, conditions, progress)
    measured.provenance.update(target=target, **({"left_out": left_out} if left_out else {}))
    measured.provenance.update({"targets": targets} if targets else {})
    return measured.replace(runs=runs)
