"""What masks of one family have in common, and what that does to the intervals of the study of speed.

    python experiments/families.py reports/speed    # tables of read_speed.py --out reports/speed

The 15 masks are four families: top-k, random, local, full. Within each task outcome and candidate are ranked over
the masks and standardised; a mask's effect is the mean over its tasks. The share of families is the intraclass
correlation of these effects, by one-way analysis of variance with unequal groups:

    (B - W) / (B + (n0 - 1) W),   n0 = (N - Σ n_f² / N) / (F - 1),   0 where it is negative,

with B and W the mean squares between and within families. How much of the variance is that of masks, of cells
(task × mask) and of seeds is estimated from the ranks of the same runs, by two-way analysis of variance. Studies
with these shares and missing cells are then simulated without any correlation (experiments/rank_tests.py): how
often p is at most 5%, how often the interval holds 0, and by which factor to stretch it so that 95% do.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import rank_tests
from joint_permutation import complete_cells, joint_rank_tests
from numpy.typing import NDArray
from predictors import blocks

CANDIDATES = ("dispersion", "xi_sound", "lambda_sound")
STAGE, OUTCOME = "initialisation", "loss_area"
SEEDS = 3


def family_of(mask: str) -> str:
    """The family of a mask, by its label.

    Example:
        >>> family_of("topk-5-times-2"), family_of("block-5-global-1"), family_of("random-3"), family_of("full")
        ('top-k', 'local', 'random', 'full')
    """
    kind = mask.split("-")[0]
    return {"topk": "top-k", "banded": "local", "block": "local"}.get(kind, kind)


def standard_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks over the masks of each task, of mean 0 and standard deviation 1.

    Args:
        values: (T, M), NaN where unknown.
    """
    ranked = pd.DataFrame(values).rank(axis=1)
    standard = ranked.sub(ranked.mean(axis=1), axis=0).div(ranked.std(axis=1), axis=0)
    return standard.to_numpy(np.float64)


def effects(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over tasks of a mask's standardised rank; NaN of a mask without a task.

    Args:
        values: (T, M), NaN where unknown.
    """
    return np.asarray(np.nanmean(standard_ranks(values), axis=0))


def family_share(values: NDArray[np.float64], families: list[str]) -> float:
    """The intraclass correlation of effects within families."""
    groups = [values[np.array(families) == name] for name in dict.fromkeys(families)]
    sizes = np.array([len(group) for group in groups])
    total, count = sizes.sum(), len(groups)
    between = sum(len(g) * (g.mean() - values.mean()) ** 2 for g in groups) / (count - 1)
    within = sum(((g - g.mean()) ** 2).sum() for g in groups) / (total - count)
    n0 = (total - (sizes**2).sum() / total) / (count - 1)
    return float(max(0.0, (between - within) / (between + (n0 - 1) * within)))


def parts(cells: NDArray[np.float64], of_seeds: float = 0.0) -> tuple[float, float]:
    """Variances of masks' effects and of cells, by two-way analysis of variance; 0 where they are negative.

    Args:
        cells: (T, M), means over seeds, of variance 1 over the runs of a task; NaN where unknown.
        of_seeds: variance of such a mean over seeds.
    """
    centred = cells - np.nanmean(cells, axis=1, keepdims=True)
    masks = np.nanmean(centred, axis=0)
    known = ~np.isnan(centred)
    rest = float(np.nansum((centred - masks) ** 2)) / (known.sum() - known.any(1).sum() - known.any(0).sum() + 1)
    of_masks = float(np.var(masks, ddof=1)) - rest * float((1 / known.sum(0)).mean())
    return max(0.0, of_masks), max(0.0, rest - of_seeds)


def shares_of_outcome(runs: pd.DataFrame, tasks: list[str], masks: list[str]) -> tuple[float, float]:
    """Shares of masks and of cells in the variance of the outcome over the runs of a task.

    Args:
        runs: a row per run: group, attention, loss_area.
        tasks: rows of the cells.
        masks: columns.
    """
    own = runs[runs["group"].isin(tasks) & runs["attention"].isin(masks)]
    own = own.assign(rank=own.groupby("group")[OUTCOME].rank())
    of_task = own.groupby("group")["rank"]
    own = own.assign(z=(own["rank"] - of_task.transform("mean")) / of_task.transform("std"))
    groups = own.groupby(["group", "attention"])["z"]
    of_seeds = float(groups.var(ddof=1).mean())
    of_masks, of_cells = parts(groups.mean().unstack().to_numpy(np.float64), of_seeds / SEEDS)
    whole = of_masks + of_cells + of_seeds
    return of_masks / whole, of_cells / whole


def share_of_masks(values: NDArray[np.float64]) -> float:
    """Share of masks in the variance of a candidate over the cells of a task."""
    of_masks, of_cells = parts(standard_ranks(values))
    return of_masks / (of_masks + of_cells)


def stretched(rho: float, low: float, high: float, factor: float) -> tuple[float, float]:
    """An interval of ρ with both halves multiplied on the scale of arctanh ρ."""
    at, *ends = np.arctanh([rho, low, high])
    below, above = np.tanh([at + factor * (end - at) for end in ends])
    return float(below), float(above)


def analysed(cells: pd.DataFrame, runs: pd.DataFrame, repeats: int) -> pd.DataFrame:
    """Per candidate: ρ, its interval, shares of families, what the null does, and the stretched interval."""
    cells = cells[(cells["stage"] == STAGE) & cells["candidate"].isin(CANDIDATES)]
    laid_out = blocks(cells, OUTCOME)
    known = complete_cells(laid_out.outcome, laid_out.candidates)
    used = known.any(0)
    masks = [mask for mask, own in zip(laid_out.masks, used, strict=True) if own]
    families = [family_of(mask) for mask in masks]
    of_masks, of_cells = shares_of_outcome(runs, laid_out.tasks, masks)
    outcome = np.where(known, laid_out.outcome, np.nan)[:, used]
    of_outcome = family_share(effects(outcome), families)
    sizes = tuple(families.count(name) for name in dict.fromkeys(families))
    found = joint_rank_tests(laid_out.outcome, laid_out.candidates, draws=9999, resamples=2000, seed=0)
    rows = []
    for at, (_, candidate) in enumerate(laid_out.names):
        values = np.where(known, laid_out.candidates[at], np.nan)[:, used]
        share = family_share(effects(values), families)
        own = share_of_masks(values)
        study = rank_tests.Study(len(laid_out.tasks), len(families), SEEDS, 1, of_masks, of_cells, own)
        missing = float(1 - known[:, used].mean())
        study = replace(study, missing=missing, families=sizes, outcome_family=of_outcome, value_family=share)
        alarms, held, factor = rank_tests.stretch(study, repeats, 500)
        rho, low, high = (float(x[at]) for x in (found.correlation, found.low, found.high))
        wide = stretched(rho, low, high, factor)
        rows.append(
            {
                "candidate": candidate, "rho": rho, "low": low, "high": high, "masks": of_masks,
                "cells": of_cells, "masks_value": own, "share_outcome": of_outcome, "share_value": share,
                "false_alarms": alarms, "coverage": held, "stretch": factor,
                "family_low": wide[0], "family_high": wide[1],
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="folder of cells.csv and outcomes.csv")
    parser.add_argument("--repeats", type=int, default=4000)
    options = parser.parse_args()
    cells, runs = (pd.read_csv(options.tables / f"{name}.csv") for name in ("cells", "outcomes"))
    table = analysed(cells, runs, options.repeats)
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
