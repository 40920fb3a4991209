"""What goes with faster learning? Rank correlations of candidates with learning, the mask as the unit."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from semdiag.findings.convergence import arrivals, epochs_to
from semdiag.findings.findings import Findings
from semdiag.mathematics.joint_permutation import FEWEST_MASKS, Matrix, complete_cells, joint_rank_tests, spearman
from semdiag.measurement.runs.predictors import CANDIDATES
from semdiag.measurement.runs.training_runs import FINISHED, STOPPED
from semdiag_models import InputError
from semdiag_models.tasks import ListOps, find_task
from semdiag_models.tasks.shortcuts import shortcut

SIGNIFICANCE = 0.05
STAGES = ("initialisation", "matched loss")
# The first is the primary one: it is known of every run. Of both a larger number is slower learning.
OUTCOMES = {
    "loss_area": "log area under the training-loss curve",
    "epochs": "epochs to 90 % of the way from the shortcut to 100 %",
}
WAY = 0.9  # from the shortcut's accuracy to 1
UNSHARED = "of a seed that another mask of the task lacks"
_RUN = ["group", "task", "attention", "kind", "seed", "model"]
_NAMES = ["stage", "candidate"]


def run_outcomes(findings: Findings) -> pd.DataFrame:
    """How fast every run learned, and when it had the loss at which the runs of its task are compared.

    loss_area = ln((1/E) Σ_e loss(e)) over the first E epochs, E being the fewest that a run of the task was
    trained. The matched loss of a task is the lowest training loss that every run of it reached.

    Args:
        findings: with runs and their histories.

    Returns:
        One row per run that is finished or stopped at --until, copies left out: group, task, attention, kind,
        seed, model, common_epochs (E), loss_area, target (training accuracy 90 % of the way from the task's
        shortcut to 1; NaN where the task is none of ours), epochs (to the target; +inf if it was never reached,
        NaN if unknown: no target, or the run was stopped before), matched_loss and matched_epoch (where the
        loss falls to it, linear between epochs, at the earliest 1).
    """
    found = findings(arrivals)
    found = found[found["state"].isin((FINISHED, STOPPED))]
    histories = {
        str(model): rows.dropna(subset=["epoch"]).sort_values("epoch")
        for model, rows in findings.measurements.history.groupby("model", sort=False)
    }
    rows: list[dict[str, Any]] = []
    for _, runs in found.groupby("group", sort=False):
        own = [histories[model] for model in runs["model"]]
        common = min(len(history) for history in own)
        level = max(float(history["train_loss"].min()) for history in own)
        target = _target(json.loads(runs["setting"].iloc[0]))
        for run, history in zip(runs.to_dict("records"), own, strict=True):
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
    """Accuracy 90 % of the way from the shortcut to 1; NaN for a task that is none of ours."""
    trees = setting.get("listops")
    try:
        task = ListOps(**trees) if trees else find_task(setting["task"])
        level = shortcut(task, setting["length"]).accuracy
    except (InputError, KeyError):
        return math.nan
    return level + WAY * (1 - level)


def _crossing(loss: Matrix, level: float) -> float:
    """Epoch, counted from 1, at which the loss first falls to the level."""
    at = int(np.argmax(loss <= level))
    if at == 0:
        return 1.0
    return at + float((loss[at - 1] - level) / (loss[at - 1] - loss[at]))


def mask_cells(findings: Findings) -> pd.DataFrame:
    """Outcomes and candidates of every task × mask, averaged over the seeds that all masks of the task have.

    So a mask of which a seed's run is missing is not compared with masks that keep theirs. A candidate
    at the matched loss is interpolated between the snapshots before and after that epoch, linearly in epochs.

    Args:
        findings: with runs and predictors.

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
        own = snapshots.get(run["model"], values.iloc[:0])
        for candidate, rows in own.sort_values("epoch").groupby("candidate", sort=False):
            epochs, numbers = rows["epoch"].to_numpy(float), rows["ln_value"].to_numpy(float)
            for stage, epoch in zip(STAGES, (0.0, run["matched_epoch"]), strict=True):
                value = _between(epochs, numbers, epoch)
                parts.append({**run, "stage": stage, "candidate": candidate, "ln_value": value})
    names = ["group", "attention", "kind", *_NAMES]
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
    """Which runs have a seed that every mask of their task has, among those with an outcome."""
    masks = outcomes.groupby(["group", "seed"])["attention"].transform("nunique")
    return masks == outcomes.groupby("group")["attention"].transform("nunique")


def left_out_runs(findings: Findings) -> pd.DataFrame:
    """The runs that the cells are not averaged over.

    Args:
        findings: with runs and predictors.

    Returns:
        One row per run: group, task, attention, kind, seed, model, why (its state where it has no outcome, like
        ``unfinished``, as one that diverged is, or ``not begun``; else :data:`UNSHARED`). Empty where no
        predictors were asked for.
    """
    runs, outcomes = findings(arrivals), findings(run_outcomes)
    if not len(findings.measurements.predictors):
        return pd.DataFrame(columns=[*_RUN, "why"])
    unshared = set(outcomes.loc[~_of_shared_seeds(outcomes), "model"])
    why = runs["state"].mask(runs["model"].isin(unshared), UNSHARED)
    return runs.assign(why=why).loc[~runs["model"].isin(set(outcomes["model"]) - unshared), [*_RUN, "why"]]


def _between(epochs: Matrix, numbers: Matrix, epoch: float) -> float:
    """A number at an epoch, linear between the snapshots around it; NaN outside of them."""
    if not epochs[0] <= epoch <= epochs[-1]:
        return math.nan
    after = int(np.searchsorted(epochs, epoch))
    if epochs[after] == epoch:
        return float(numbers[after])
    low, high = numbers[after - 1 : after + 1]
    share = (epoch - epochs[after - 1]) / (epochs[after] - epochs[after - 1])
    return -math.inf if -math.inf in (low, high) else float(low + share * (high - low))


def _median(epochs: Matrix) -> float:
    """The median, +inf where a middle one is censored; NaN where a seed is unknown."""
    return math.nan if np.isnan(epochs).any() else float(np.median(epochs))


@dataclass(frozen=True, eq=False)
class Blocks:
    """Tasks × masks as matrices.

    Attributes:
        tasks: T of them.
        masks: M of them.
        names: stage and candidate, C of them; those of which nothing is known anywhere are left out.
        outcome: (T, M).
        candidates: (C, T, M).
    """

    tasks: list[str]
    masks: list[str]
    names: list[tuple[str, str]]
    outcome: Matrix
    candidates: Matrix

    @property
    def runs(self) -> int:
        """Cells of which the outcome is known."""
        return int((~np.isnan(self.outcome)).sum())


def blocks(cells: pd.DataFrame, outcome: str) -> Blocks:
    """Lay task × mask cells out as matrices.

    Args:
        cells: from :func:`mask_cells`, or any table with its columns.
        outcome: a key of :data:`OUTCOMES`, or another column.
    """
    tasks, masks = ([*cells[name].unique()] for name in ("group", "attention"))
    known = cells[cells["ln_value"].notna()]
    names = [*known[_NAMES].drop_duplicates().itertuples(index=False, name=None)]

    def laid_out(rows: pd.DataFrame, column: str) -> Matrix:
        rows = rows.drop_duplicates(["group", "attention"])
        wide = rows.pivot(index="group", columns="attention", values=column)
        return wide.reindex(index=tasks, columns=masks).to_numpy(float)

    of_names = dict([*cells.groupby(_NAMES, sort=False)])
    shape = len(tasks), len(masks)
    candidates = [laid_out(of_names[name], "ln_value") for name in names]
    return Blocks(tasks, masks, names, laid_out(cells, outcome), np.array(candidates).reshape(len(names), *shape))


def too_few_masks(findings: Findings, outcome: str) -> bool:
    """Whether no task has five masks of which everything is known, be they different or not."""
    laid_out = blocks(findings(mask_cells), outcome)
    known = complete_cells(laid_out.outcome, laid_out.candidates).sum(1)
    return not laid_out.names or bool((known < FEWEST_MASKS).all())


def predictor_table(findings: Findings, seed: int = 0, draws: int = 9999, resamples: int = 2000) -> pd.DataFrame:
    """Rank correlation of each candidate at each stage with learning, tested by :func:`joint_rank_tests`.

    Args:
        findings: with runs and predictors.
        seed: of relabellings and resamples.
        draws: relabellings, where there are too many to try all.
        resamples: behind the intervals.

    Returns:
        The rows of :func:`rank_candidates` for every outcome.
    """
    cells = findings(mask_cells)
    parts = [rank_candidates(cells, outcome, seed, draws, resamples) for outcome in OUTCOMES]
    return pd.concat(parts, ignore_index=True)


def rank_candidates(
    cells: pd.DataFrame, outcome: str = "loss_area", seed: int = 0, draws: int = 9999, resamples: int = 2000
) -> pd.DataFrame:
    """Test all candidates of a table of cells against one outcome, as one family on the same cells.

    Source: :func:`~semdiag.mathematics.joint_permutation.joint_rank_tests`. Deviation: none.

    Args:
        cells: from :func:`mask_cells`.
        outcome: its column.
        seed: of relabellings and resamples.
        draws: relabellings, where there are too many to try all.
        resamples: behind the intervals.

    Returns:
        One row per stage and candidate: outcome, stage, candidate, rho (mean over tasks; positive: the larger the
        number, the slower), low and high (95 %, masks resampled), p, p_corrected (for all candidates and stages),
        held_out (mean over tasks of ρ with the sign that it has on the other tasks: 1 is a perfect prediction of
        each task's order, 0 none), tasks, cells (task × mask) and left_out (of those with an outcome, for want of
        a candidate or of enough masks), relabellings (that differ; no p is below 1 over it), tried.
    """
    columns = ["outcome", *_NAMES, "rho", "low", "high", "p", "p_corrected", "held_out", "tasks", "cells",
               "left_out", "relabellings", "tried"]  # fmt: skip
    laid_out = blocks(cells, outcome)
    if not laid_out.names:
        return pd.DataFrame(columns=columns)
    found = joint_rank_tests(laid_out.outcome, laid_out.candidates, draws=draws, resamples=resamples, seed=seed)
    table = pd.DataFrame(laid_out.names, columns=_NAMES).assign(
        outcome=outcome, rho=found.correlation, low=found.low, high=found.high, p=found.p,
        p_corrected=found.p_family, held_out=[_held_out(own) for own in found.by_task], tasks=found.tasks,
        cells=found.cells, left_out=laid_out.runs - found.cells, relabellings=float(found.relabellings),
        tried=found.tried,
    )  # fmt: skip
    return table[columns]


def _held_out(by_task: Matrix) -> float:
    """Mean over tasks of ρ times the sign of the mean ρ of the others; NaN with fewer than two tasks."""
    known = by_task[~np.isnan(by_task)]
    if len(known) < 2:
        return math.nan
    return float((known * np.sign(known.sum() - known)).mean())


def held_out_tasks(findings: Findings) -> pd.DataFrame:
    """Predict the order of masks on each task from the others.

    Args:
        findings: with runs and predictors.

    Returns:
        One row per outcome, task and choice: outcome, group, choice, stage, candidate, rho_others, rho. Choices:
        ``strongest elsewhere`` (the candidate whose ρ over the other tasks is the largest in size, with its sign
        there) and ``the mask itself`` (its mean rank on the other tasks: what a candidate has to beat to say more
        than which mask it is). rho is Spearman's correlation of the prediction with the outcome, of both over the
        task's masks that another task knows, too: NaN of fewer than five, or if all learned alike; 0 if all are
        predicted alike. Empty with fewer than two tasks.
    """
    columns = ["outcome", "group", "choice", *_NAMES, "rho_others", "rho"]
    rows = []
    for outcome in OUTCOMES:
        laid_out = blocks(findings(mask_cells), outcome)
        if not laid_out.names:
            continue
        by_task = joint_rank_tests(laid_out.outcome, laid_out.candidates, draws=1, resamples=0).by_task
        known = complete_cells(laid_out.outcome, laid_out.candidates)
        usable = np.flatnonzero(~np.isnan(by_task).any(0))
        for t in usable if len(usable) > 1 else ():
            others = usable[usable != t]
            elsewhere = by_task[:, others].mean(1)
            best = int(np.abs(elsewhere).argmax())
            stage, candidate = laid_out.names[best]
            common = {"outcome": outcome, "group": laid_out.tasks[t]}
            seen = known[t] & known[others].any(0)
            learned = laid_out.outcome[t, seen]
            predicted = np.sign(elsewhere[best]) * laid_out.candidates[best, t, seen]
            rows.append(
                {
                    **common, "choice": "strongest elsewhere", "stage": stage, "candidate": candidate,
                    "rho_others": elsewhere[best], "rho": _agreement(predicted, learned),
                }
            )  # fmt: skip
            itself = _mean_ranks(laid_out.outcome[others], known[others])[seen]
            rows.append({**common, "choice": "the mask itself", "rho": _agreement(itself, learned)})
    return pd.DataFrame(rows, columns=columns)


def _mean_ranks(outcome: Matrix, known: NDArray[np.bool_]) -> Matrix:
    """The mean rank, in 0 … 1, of every mask over tasks (T, M)."""
    return pd.DataFrame(np.where(known, outcome, math.nan)).rank(axis=1, pct=True).mean().to_numpy()


def _agreement(predicted: Matrix, learned: Matrix) -> float:
    if len(learned) < FEWEST_MASKS or (learned == learned[0]).all():
        return math.nan
    return 0.0 if (predicted == predicted[0]).all() else spearman(predicted, learned)


def quantity(candidate: str) -> str:
    """A candidate's name in words; its own name where it is none of :data:`CANDIDATES`."""
    return CANDIDATES.get(candidate, candidate)
