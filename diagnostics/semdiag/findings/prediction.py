"""What goes with faster learning? Rank correlations of candidates with speed-up, corrected for their number."""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from semdiag.findings.convergence import arrivals, speed_ups
from semdiag.findings.findings import Findings
from semdiag.findings.speed_and_dispersion import FEWEST_TASKS
from semdiag.mathematics.censored import certain_order
from semdiag.measurement.runs.predictors import CANDIDATES, STAGES

SIGNIFICANCE = 0.05
_CELL = ["group", "attention", "seed"]
Matrix = NDArray[np.float64]


def prediction_cells(findings: Findings) -> pd.DataFrame:
    """Every candidate of every run against full attention's, beside the speed-up.

    Args:
        findings: with runs and predictors.

    Returns:
        One row per run with a full-attention run of the same setting and seed and a speed-up that is at least
        bounded, stage and candidate: the columns of :func:`~semdiag.findings.convergence.speed_ups`, stage,
        candidate, and ln_ratio, the logarithm of the run's number over that of full attention at the same stage;
        NaN where one is unknown. Full attention itself is among them, with a speed-up of 1 and ratios of 1.
    """
    pairs = speed_ups(findings(arrivals))
    pairs = pairs[pairs["known"] != "unknown"]
    full = pairs.drop_duplicates("full").assign(attention="full", kind="full", low=1.0, high=1.0, known="exactly")
    itself = full.assign(arrival=full["full_arrival"], epochs=full["full_epochs"], model=full["full"])
    pairs = pd.concat([itself, pairs], ignore_index=True)
    values = {
        model: rows.set_index(["stage", "candidate"])["ln_value"]
        for model, rows in findings.measurements.predictors.groupby("model", sort=False)
    }
    names = pd.MultiIndex.from_product([STAGES, CANDIDATES], names=["stage", "candidate"])
    parts = [
        pd.DataFrame(
            {**pair, "ln_ratio": values[pair["model"]].reindex(names) - values[pair["full"]].reindex(names)}
        )
        for pair in pairs.to_dict("records")
        if pair["model"] in values and pair["full"] in values
    ]
    columns = [*pairs, "stage", "candidate", "ln_ratio"]
    return pd.concat(parts).reset_index()[columns] if parts else pd.DataFrame(columns=columns)


@dataclass(frozen=True, eq=False)
class _Cells:
    """Runs as matrices: n of them, c candidates at all stages.

    Attributes:
        facts: group, attention and seed of each run.
        names: stage and candidate.
        order: (n, n) certain order of the speed-ups.
        signs: (c, n, n) order of the candidates' ratios; NaN where one is unknown.
    """

    facts: pd.DataFrame
    names: list[tuple[str, str]]
    order: Matrix
    signs: Matrix

    @property
    def codes(self) -> tuple[NDArray[np.int64], ...]:
        """Group, attention and seed of each run as numbers from 0."""
        return tuple(pd.factorize(self.facts[name])[0] for name in _CELL)

    def correlations(self, order: Matrix) -> tuple[Matrix, Matrix]:
        """τ of every candidate with an order (n, n), and its number of comparable pairs: (c,)."""
        flat = order.ravel()
        agreeing = np.nan_to_num(self.signs).reshape(len(self.signs), -1) @ flat
        comparable = (~np.isnan(self.signs)).reshape(len(self.signs), -1) @ np.abs(flat)
        with np.errstate(invalid="ignore"):
            return agreeing / comparable, comparable / 2


def _cells(table: pd.DataFrame) -> _Cells:
    wide = table.set_index([*_CELL, "low", "high", "stage", "candidate"])["ln_ratio"].unstack(
        ["stage", "candidate"]
    )
    wide = wide[[(stage, name) for stage in STAGES for name in CANDIDATES if (stage, name) in wide]]
    facts = wide.index.to_frame(index=False)
    order = certain_order(facts["low"].tolist(), facts["high"].tolist()).astype(float)
    values = wide.to_numpy(float).T
    return _Cells(facts, [*wide.columns], order, np.sign(values[:, :, None] - values[:, None, :]))


def predictor_table(
    findings: Findings, seed: int = 0, permutations: int = 4000, resamples: int = 1000
) -> pd.DataFrame:
    """Rank correlation of each candidate at each stage with speed-up, with interval and corrected p-value.

    τ (:func:`~semdiag.mathematics.censored.rank_agreement`) is taken over all pairs of task × attention × seed
    cells. Its interval resamples tasks, then seeds of each. Its p-value permutes the sparse attentions' speed-ups
    within each task, the same way for all of a task's seeds, which do not count as independent; the corrected one
    compares with the largest |τ| of all candidates and stages in the same permutation.

    Source: Westfall and Young, Resampling-Based Multiple Testing (1993), single-step max-T. Deviation: none.

    Args:
        findings: with runs and predictors.
        seed: of resampling and permutations.
        permutations: behind the p-values.
        resamples: behind the intervals.

    Returns:
        One row per stage and candidate: tau, low, high (95 %; NaN with fewer than 4 tasks), comparable (pairs of
        cells), cells, p, p_corrected; NaN where nothing is comparable.
    """
    columns = ["stage", "candidate", "tau", "low", "high", "comparable", "cells", "p", "p_corrected"]
    table = findings(prediction_cells)
    if table.empty:
        return pd.DataFrame(columns=columns)
    cells, rng = _cells(table), np.random.default_rng(seed)
    tau, comparable = cells.correlations(cells.order)
    drawn = np.stack([cells.correlations(_permuted(cells, rng))[0] for _ in range(permutations)])
    sizes = np.abs(np.nan_to_num(drawn))
    low, high = _interval(cells, rng, resamples)
    counts = table[table["ln_ratio"].notna()].groupby(["stage", "candidate"]).size()
    found = pd.DataFrame(cells.names, columns=["stage", "candidate"]).assign(
        tau=tau, low=low, high=high, comparable=comparable.astype(int),
        cells=[int(counts.get(name, 0)) for name in cells.names],
        p=[_p(own, value) for own, value in zip(sizes.T, tau, strict=True)],
        p_corrected=[_p(sizes.max(1), value) for value in tau],
    )  # fmt: skip
    return found[columns]


def _p(drawn: Matrix, value: float) -> float:
    """Share of draws at least as strong, the observation counted among them."""
    return math.nan if math.isnan(value) else float((1 + (drawn >= abs(value) - 1e-12).sum()) / (1 + len(drawn)))


def _permuted(cells: _Cells, rng: np.random.Generator) -> Matrix:
    """The order of the speed-ups with attentions exchanged within tasks; 0 where a cell has no counterpart.

    Full attention stays: all numbers of a task are ratios to its, so that it is not one like the others.
    """
    task, kind, seed = cells.codes
    full = (cells.facts["attention"] == "full").to_numpy()
    where = np.full(1 + np.array([task.max(), kind.max(), seed.max()]), -1)
    where[task, kind, seed] = np.arange(len(task))
    exchanged = np.zeros(where.shape[:2], int)
    for at in range(len(where)):
        kinds = np.unique(kind[task == at])
        sparse = np.setdiff1d(kinds, kind[full])
        exchanged[at, kinds] = kinds
        exchanged[at, sparse] = rng.permutation(sparse)
    source = where[task, exchanged[task, kind], seed]
    order: Matrix = cells.order[np.ix_(source, source)]
    order[source < 0], order[:, source < 0] = 0, 0
    return order


def _interval(cells: _Cells, rng: np.random.Generator, resamples: int) -> tuple[Matrix, Matrix]:
    """Ends of the 95 % intervals of all τ: tasks and, of each, seeds drawn with replacement."""
    task, _, seed = cells.codes
    tasks = task.max() + 1
    if tasks < FEWEST_TASKS:
        nothing = np.full(len(cells.names), math.nan)
        return nothing, nothing
    drawn = []
    for _ in range(resamples):
        times = np.zeros(len(task))
        for at in rng.integers(tasks, size=tasks):
            seeds = np.unique(seed[task == at])
            for chosen in rng.choice(seeds, len(seeds)):
                times += (task == at) & (seed == chosen)
        drawn.append(cells.correlations(cells.order * times[:, None] * times)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a candidate that is nowhere known has no interval
        low, high = np.nanpercentile(np.stack(drawn), [2.5, 97.5], axis=0)
    return low, high


def held_out_tasks(findings: Findings) -> pd.DataFrame:
    """Predict each task from the others: the strongest candidate there, applied here with its sign.

    Args:
        findings: with runs and predictors.

    Returns:
        One row per task and choice (``any stage``, and ``initialisation`` alone): group, choice, stage and
        candidate with the largest |τ| over the other tasks, tau_others, and tau, that candidate's rank correlation
        over the pairs of cells within the task, times the sign it had elsewhere: 1 is a perfect prediction, 0
        none; comparable (pairs). Empty with fewer than two tasks.
    """
    columns = ["group", "choice", "stage", "candidate", "tau_others", "tau", "comparable"]
    table = findings(prediction_cells)
    tasks = table["group"].unique()
    rows = []
    for group in tasks if len(tasks) > 1 else ():
        for choice in ("any stage", "initialisation"):
            asked = table if choice == "any stage" else table[table["stage"] == choice]
            others, own = _cells(asked[asked["group"] != group]), _cells(asked[asked["group"] == group])
            elsewhere = others.correlations(others.order)[0]
            if np.isnan(elsewhere).all():
                continue
            best = int(np.nanargmax(np.abs(elsewhere)))
            here, comparable = own.correlations(own.order)
            at = own.names.index(others.names[best])
            rows.append(
                {
                    "group": group, "choice": choice, "stage": others.names[best][0],
                    "candidate": others.names[best][1], "tau_others": elsewhere[best],
                    "tau": here[at] * np.sign(elsewhere[best]), "comparable": int(comparable[at]),
                }
            )  # fmt: skip
    return pd.DataFrame(rows, columns=columns)
