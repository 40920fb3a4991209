"""How fast each run learned, and outcomes and candidates of every task × mask, averaged over seeds."""

import json
import math
from typing import Any

import numpy as np
import pandas as pd

from semdiag.mathematics.joint_permutation import Matrix
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.runs.training_runs import FINISHED, STOPPED
from semdiag.questions.convergence.answer.epochs import arrivals, epochs_to
from semdiag_models import InputError
from semdiag_models.tasks import ListOps, find_task
from semdiag_models.tasks.shortcuts import shortcut

STAGES = ("initialisation", "matched loss")
# The first is the primary one: every run has it. For both, a larger number means slower learning.
OUTCOMES = {
    "loss_area": "log area under the training-loss curve",
    "epochs": "epochs to 90% of the way from the shortcut to 100%",
}
WAY = 0.9  # from the shortcut's accuracy to 1
UNSHARED = "of a seed that another mask of the task lacks"
_RUN = ["group", "task", "attention", "kind", "seed", "model"]


def run_outcomes(findings: Findings) -> pd.DataFrame:
    """Return how fast every run learned, and when it reached the loss at which its task's runs are compared.

    loss_area = ln((1/E) Σ_e loss(e)) over the first E epochs, E being the fewest that a run of the task was
    trained. The matched loss of a task is the lowest training loss that every run of it reached.

    Returns:
        One row per run that is finished or stopped at --until, copies left out: group, task, attention, kind,
        seed, model, common_epochs (E), loss_area, target (training accuracy 90% of the way from the task's
        shortcut to 1; NaN if the task is not one of semdiag's), epochs (to the target; +inf if it was never
        reached, NaN if unknown: no target, or the run was stopped before), matched_loss and matched_epoch (where
        the loss falls to it, linear between epochs, at the earliest 1).
    """
    table = findings(arrivals)
    table = table[table["state"].isin((FINISHED, STOPPED))]
    histories = {
        str(model): rows.dropna(subset=["epoch"]).sort_values("epoch")
        for model, rows in findings.measurements.history.groupby("model", sort=False)
    }
    rows: list[dict[str, Any]] = []
    for _, runs in table.groupby("group", sort=False):
        of_group = [histories[model] for model in runs["model"]]
        common = min(len(history) for history in of_group)
        level = max(float(history["train_loss"].min()) for history in of_group)
        target = _target(json.loads(runs["setting"].iloc[0]))
        for run, history in zip(runs.to_dict("records"), of_group, strict=True):
            loss = history["train_loss"].to_numpy(float)
            arrival = epochs_to(history, target) if target < 1 else None
            censored = math.nan if math.isnan(target) or run["state"] == STOPPED else math.inf
            rows.append(
                {
                    **{name: run[name] for name in _RUN}, "common_epochs": common,
                    "loss_area": math.log(loss[:common].mean()), "target": target,
                    "epochs": censored if arrival is None else float(arrival),
                    "matched_loss": level, "matched_epoch": _crossing(loss, level),
                }
            )  # fmt: skip
    columns = [*_RUN, "common_epochs", "loss_area", "target", "epochs", "matched_loss", "matched_epoch"]
    return pd.DataFrame(rows, columns=columns)


def _target(setting: dict[str, Any]) -> float:
    """Return the accuracy 90% of the way from the shortcut to 1; NaN if the task is not one of semdiag's."""
    trees = setting.get("listops")
    try:
        task = ListOps(**trees) if trees else find_task(setting["task"])
        level = shortcut(task, setting["length"]).accuracy
    except (InputError, KeyError):
        return math.nan
    return level + WAY * (1 - level)


def _crossing(loss: Matrix, level: float) -> float:
    """Return epoch, counted from 1, at which the loss first falls to the level."""
    at = int(np.argmax(loss <= level))
    if at == 0:
        return 1.0
    return at + float((loss[at - 1] - level) / (loss[at - 1] - loss[at]))


def mask_cells(findings: Findings) -> pd.DataFrame:
    """Return outcomes and candidates by task × mask, averaged over the seeds common to all masks of the task.

    So no mask is compared on fewer seeds than another. A candidate at the matched loss is interpolated between the
    snapshots before and after that epoch, linearly in epochs.

    Returns:
        One row per task (group), attention (the mask), stage and candidate: seeds, loss_area (mean), epochs
        (median; +inf where half of the seeds or more never arrive), ln_value (mean; NaN where a seed's is
        unknown).
    """
    outcomes = findings(run_outcomes)
    outcomes = outcomes[_of_shared_seeds(outcomes)]
    values = findings.measurements.predictors
    snapshots = {str(model): rows for model, rows in values.groupby("model", sort=False)}
    parts: list[dict[Any, Any]] = []
    for run in outcomes.to_dict("records"):
        numbers_of_run = snapshots.get(run["model"], values.iloc[:0])
        for candidate, rows in numbers_of_run.sort_values("epoch").groupby("candidate", sort=False):
            epochs, numbers = rows["epoch"].to_numpy(float), rows["ln_value"].to_numpy(float)
            for stage, epoch in zip(STAGES, (0.0, run["matched_epoch"]), strict=True):
                value = _between(epochs, numbers, epoch)
                parts.append({**run, "stage": stage, "candidate": candidate, "ln_value": value})
    names = ["group", "attention", "kind", "stage", "candidate"]
    columns = [*names, "seeds", *OUTCOMES, "ln_value"]
    if not parts:
        return pd.DataFrame(columns=columns)
    averaged = [
        {
            **dict(zip(names, name, strict=True)), "seeds": len(cell), "loss_area": cell["loss_area"].mean(),
            "epochs": _median(cell["epochs"].to_numpy(float)), "ln_value": cell["ln_value"].mean(skipna=False),
        }
        for name, cell in pd.DataFrame(parts).groupby(names, sort=False)
    ]  # fmt: skip
    return pd.DataFrame(averaged)[columns]


def _of_shared_seeds(outcomes: pd.DataFrame) -> "pd.Series[bool]":
    """Return which runs with an outcome have a seed that every mask of their task has."""
    masks = outcomes.groupby(["group", "seed"])["attention"].transform("nunique")
    return masks == outcomes.groupby("group")["attention"].transform("nunique")


def left_out_runs(findings: Findings) -> pd.DataFrame:
    """Return the runs that are left out of the cells.

    Returns:
        One row per run: group, task, attention, kind, seed, model, why (its state if it has no outcome:
        ``unfinished``, also if it diverged, or ``not begun``; else :data:`UNSHARED`). Empty without predictors.
    """
    runs, outcomes = findings(arrivals), findings(run_outcomes)
    if not len(findings.measurements.predictors):
        return pd.DataFrame(columns=[*_RUN, "why"])
    unshared = set(outcomes.loc[~_of_shared_seeds(outcomes), "model"])
    why = runs["state"].mask(runs["model"].isin(unshared), UNSHARED)
    return runs.assign(why=why).loc[~runs["model"].isin(set(outcomes["model"]) - unshared), [*_RUN, "why"]]


def _between(epochs: Matrix, numbers: Matrix, epoch: float) -> float:
    """Return a number at an epoch, linear between the snapshots around it; NaN outside of them."""
    if not epochs[0] <= epoch <= epochs[-1]:
        return math.nan
    after = int(np.searchsorted(epochs, epoch))
    if epochs[after] == epoch:
        return float(numbers[after])
    low, high = numbers[after - 1 : after + 1]
    share = (epoch - epochs[after - 1]) / (epochs[after] - epochs[after - 1])
    return -math.inf if -math.inf in (low, high) else float(low + share * (high - low))


def _median(epochs: Matrix) -> float:
    """Return the median, +inf if a middle value is censored; NaN if a seed is unknown."""
    return math.nan if np.isnan(epochs).any() else float(np.median(epochs))
