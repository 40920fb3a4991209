"""Rank correlations of candidates with the speed of learning; the mask is the unit."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from semdiag.mathematics.joint_permutation import FEWEST_MASKS, Matrix, complete_cells, joint_rank_tests, spearman
from semdiag.measuring.findings.findings import Findings
from semdiag.questions.predictors.answer.mask_cells import OUTCOMES, mask_cells
from semdiag.questions.predictors.measure import CANDIDATES

SIGNIFICANCE = 0.05
_NAMES = ["stage", "candidate"]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Tasks × masks as matrices.

    Attributes:
        tasks: T of them.
        masks: M of them.
        names: stage and candidate, C of them; those that are unknown everywhere are left out.
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
        """Return the number of cells with a known outcome."""
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
    """Return whether no task has five completely known masks, whether or not they differ."""
    laid_out = blocks(findings(mask_cells), outcome)
    known = complete_cells(laid_out.outcome, laid_out.candidates).sum(1)
    return not laid_out.names or bool((known < FEWEST_MASKS).all())


def predictor_table(findings: Findings, seed: int = 0, draws: int = 9999, resamples: int = 2000) -> pd.DataFrame:
    """Return rank correlations of candidates with learning, by stage, tested by :func:`joint_rank_tests`.

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
        number, the slower), low and high (95%, masks resampled), p, p_corrected (for all candidates and stages),
        held_out (mean over tasks of ρ with the sign that it has on the other tasks: 1 is a perfect prediction of
        each task's order, 0 none), tasks, cells (task × mask) and left_out (cells with an outcome that lack a
        candidate or enough masks), relabellings (that differ; no p is below 1 over it), tried.
    """
    columns = ["outcome", *_NAMES, "rho", "low", "high", "p", "p_corrected", "held_out", "tasks", "cells",
               "left_out", "relabellings", "tried"]  # fmt: skip
    laid_out = blocks(cells, outcome)
    if not laid_out.names:
        return pd.DataFrame(columns=columns)
    tests = joint_rank_tests(laid_out.outcome, laid_out.candidates, draws=draws, resamples=resamples, seed=seed)
    table = pd.DataFrame(laid_out.names, columns=_NAMES).assign(
        outcome=outcome, rho=tests.correlation, low=tests.low, high=tests.high, p=tests.p,
        p_corrected=tests.p_family, held_out=[*map(_held_out, tests.by_task)], tasks=tests.tasks,
        cells=tests.cells, left_out=laid_out.runs - tests.cells, relabellings=float(tests.relabellings),
        tried=tests.tried,
    )  # fmt: skip
    return table[columns]


def _held_out(by_task: Matrix) -> float:
    """Return the mean over tasks of ρ times the sign of the others' mean ρ; NaN for fewer than two tasks."""
    known = by_task[~np.isnan(by_task)]
    if len(known) < 2:
        return math.nan
    return float((known * np.sign(known.sum() - known)).mean())


def held_out_tasks(findings: Findings) -> pd.DataFrame:
    """Predict the order of masks on each task from the others.

    Returns:
        One row per outcome, task and choice: outcome, group, choice, stage, candidate, rho_others, rho. Choices:
        ``strongest elsewhere`` (the candidate with the largest |ρ| over the other tasks, with its sign there) and
        ``the mask itself`` (its mean rank on the other tasks: a candidate that does no better only tells masks
        apart). rho is Spearman's correlation of the prediction with the outcome, over the task's masks that
        another task has, too: NaN for fewer than five or if all learned alike, 0 if all are predicted alike. Empty
        with fewer than two tasks.
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
    """Return the mean rank, in 0 … 1, of every mask over tasks (T, M)."""
    return pd.DataFrame(np.where(known, outcome, math.nan)).rank(axis=1, pct=True).mean().to_numpy()


def _agreement(predicted: Matrix, learned: Matrix) -> float:
    if len(learned) < FEWEST_MASKS or (learned == learned[0]).all():
        return math.nan
    return 0.0 if (predicted == predicted[0]).all() else spearman(predicted, learned)


def quantity(candidate: str) -> str:
    """Return a candidate's name in words; its plain name if it is not in :data:`CANDIDATES`."""
    return CANDIDATES.get(candidate, candidate)
