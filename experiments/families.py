"""What masks of one family have in common, and what that does to the intervals of the study of speed.

    python experiments/read_speed.py --out reports/speed      # writes cells.csv, two minutes
    python experiments/families.py reports/speed/cells.csv

The 15 masks are four families: top-k, random, local, full. Within each task outcome and candidate are ranked
over the masks and standardised; a mask's effect is the mean over its tasks. The share of families is the
intraclass correlation of these effects, by one-way analysis of variance with unequal groups:

    (B - W) / (B + (n0 - 1) W),   n0 = (N - Σ n_f² / N) / (F - 1),   0 where it is negative,

with B and W the mean squares between and within families. Studies with these shares are then simulated without any
correlation (benchmarks/rank_tests.py families): how often p is at most 5 %, how often the interval holds 0, and by
which factor it must be stretched so that 95 % do.
"""

import argparse
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from semdiag.mathematics.joint_permutation import complete_cells, joint_rank_tests
from semdiag.questions.predictors.answer.prediction import blocks

HERE = Path(__file__).parent
CANDIDATES = ("dispersion", "xi_sound", "lambda_sound")
STAGE, OUTCOME = "initialisation", "loss_area"
SEEDS, MASK_SHARE, CELL_SHARE, VALUE_SHARE = 3, 0.5, 0.3, 0.98  # of the pilot: docs/study.md


def family_of(mask: str) -> str:
    """The family of a mask, by its label.

    Example:
        >>> family_of("topk-5-times-2"), family_of("block-5-global-1"), family_of("random-3"), family_of("full")
        ('top-k', 'local', 'random', 'full')
    """
    kind = mask.split("-")[0]
    return {"topk": "top-k", "banded": "local", "block": "local"}.get(kind, kind)


def effects(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over tasks of a mask's standardised rank; NaN of a mask without a task.

    Args:
        values: (T, M), NaN where unknown.
    """
    ranked = pd.DataFrame(values).rank(axis=1)
    standard = ranked.sub(ranked.mean(axis=1), axis=0).div(ranked.std(axis=1), axis=0)
    return standard.mean(axis=0).to_numpy(np.float64)


def family_share(values: NDArray[np.float64], families: list[str]) -> float:
    """The intraclass correlation of effects within families."""
    groups = [values[np.array(families) == name] for name in dict.fromkeys(families)]
    sizes = np.array([len(group) for group in groups])
    total, count = sizes.sum(), len(groups)
    between = sum(len(g) * (g.mean() - values.mean()) ** 2 for g in groups) / (count - 1)
    within = sum(((g - g.mean()) ** 2).sum() for g in groups) / (total - count)
    n0 = (total - (sizes**2).sum() / total) / (count - 1)
    return float(max(0.0, (between - within) / (between + (n0 - 1) * within)))


def stretched(rho: float, low: float, high: float, factor: float) -> tuple[float, float]:
    """An interval of ρ with both halves multiplied on the scale of arctanh ρ."""
    at, *ends = np.arctanh([rho, low, high])
    below, above = np.tanh([at + factor * (end - at) for end in ends])
    return float(below), float(above)


def _simulation() -> Any:
    spec = importlib.util.spec_from_file_location("rank_tests", HERE.parent / "benchmarks" / "rank_tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_tests"] = module
    spec.loader.exec_module(module)
    return module


def analysed(cells: pd.DataFrame, repeats: int) -> pd.DataFrame:
    """Per candidate: ρ, its interval, shares of families, what the null does, and the stretched interval."""
    cells = cells[(cells["stage"] == STAGE) & cells["candidate"].isin(CANDIDATES)]
    laid_out = blocks(cells, OUTCOME)
    known = complete_cells(laid_out.outcome, laid_out.candidates)
    used = known.any(0)
    families = [family_of(mask) for mask, own in zip(laid_out.masks, used, strict=True) if own]
    outcome = np.where(known, laid_out.outcome, np.nan)[:, used]
    of_outcome = family_share(effects(outcome), families)
    program = _simulation()
    sizes = tuple(families.count(name) for name in dict.fromkeys(families))
    found = joint_rank_tests(laid_out.outcome, laid_out.candidates, draws=9999, resamples=2000, seed=0)
    rows = []
    for at, (_, candidate) in enumerate(laid_out.names):
        values = np.where(known, laid_out.candidates[at], np.nan)[:, used]
        share = family_share(effects(values), families)
        study = program.Study(len(laid_out.tasks), len(families), SEEDS, 1, MASK_SHARE, CELL_SHARE, VALUE_SHARE)
        study = replace(study, families=sizes, outcome_family=of_outcome, value_family=share)
        alarms, held, factor = program.stretch(study, repeats, 500)
        rho, low, high = (float(x[at]) for x in (found.correlation, found.low, found.high))
        wide = stretched(rho, low, high, factor)
        rows.append(
            {
                "candidate": candidate, "rho": rho, "low": low, "high": high, "share_outcome": of_outcome,
                "share_value": share, "false_alarms": alarms, "coverage": held, "stretch": factor,
                "family_low": wide[0], "family_high": wide[1],
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path)
    parser.add_argument("--repeats", type=int, default=4000)
    options = parser.parse_args()
    table = analysed(pd.read_csv(options.cells), options.repeats)
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
