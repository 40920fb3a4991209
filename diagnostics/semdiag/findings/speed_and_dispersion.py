"""Whether runs with the smaller dispersion learn faster: speed-up beside δ_h/δ_s, and their rank correlation."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from semdiag.findings.convergence import arrivals, over_seeds, speed_ups
from semdiag.findings.findings import Findings
from semdiag.findings.resampling import ratio_interval
from semdiag.mathematics.censored import rank_agreement

FEWEST_TASKS = 4  # below which resampling tasks says nothing about other tasks
_RESAMPLES_OF_SEQUENCES, _RESAMPLES_OF_TASKS = 200, 1000


@dataclass(frozen=True)
class SpeedDispersion:
    """Rank correlation of speed-up and δ_h/δ_s over pairs of runs.

    Attributes:
        tau: Kendall's τ over the comparable pairs; negative where the more focused model learns faster.
        low: end of the 95 % interval from resampled tasks, and within them seeds; NaN with fewer than 4 tasks.
        high: other end.
        comparable: how many pairs of points have a certain order.
        points: pairs of runs with a speed-up that is at least bounded.
        tasks: among them.
    """

    tau: float
    low: float
    high: float
    comparable: int
    points: int
    tasks: int

    @property
    def sentence(self) -> str:
        """The correlation in a sentence, with its interval or why there is none."""
        start = f"Rank correlation (Kendall's τ) of speed-up with δₕ/δₛ over {self.points} pairs of runs"
        if math.isnan(self.tau):
            return f"{start}: undefined, no two of them have a certain order."
        start += f" of {self.tasks} task{'s' * (self.tasks != 1)}: {self.tau:.2f}"
        if math.isnan(self.low):
            return (
                f"{start}, from {self.comparable} comparable pairs of points; no interval, since with fewer than "
                f"{FEWEST_TASKS} tasks nothing is known of other tasks."
            )
        return f"{start}, 95 % interval {self.low:.2f} to {self.high:.2f} (tasks and seeds resampled)."


def speed_dispersion_table(findings: Findings) -> pd.DataFrame:
    """Speed-up of every pair of runs beside the ratio of their pooled median dispersions.

    Args:
        findings: with runs and the queries of their last checkpoints.

    Returns:
        The rows of :func:`~semdiag.findings.convergence.speed_ups` with ratio (median δ of the sparse model
        over that of the full one), ratio_low and ratio_high (95 % interval, whole sequences resampled).
    """
    pairs = speed_ups(findings(arrivals))
    names = {*pairs["model"], *pairs["full"]}
    queries = {str(m): own for m, own in findings.measurements.queries.groupby("model", sort=False) if m in names}
    intervals = [
        ratio_interval(queries[pair["model"]], queries[pair["full"]], resamples=_RESAMPLES_OF_SEQUENCES)
        for pair in pairs.to_dict("records")
    ]
    return pairs.assign(
        ratio=[i.estimate for i in intervals],
        ratio_low=[i.low for i in intervals],
        ratio_high=[i.high for i in intervals],
    )


def run_statistics(findings: Findings) -> pd.DataFrame:
    """Each kind of attention over the seeds of a setting: :func:`~semdiag.findings.convergence.over_seeds`."""
    return over_seeds(findings(arrivals), findings(speed_dispersion_table))


def run_correlation(findings: Findings) -> SpeedDispersion:
    """Whether runs with the smaller dispersion learn faster: :func:`speed_dispersion` of all pairs of runs."""
    return speed_dispersion(findings(speed_dispersion_table))


def speed_dispersion(table: pd.DataFrame, seed: int = 0) -> SpeedDispersion:
    """Correlate speed-up with δ_h/δ_s; censored runs take part as far as their order is certain.

    Args:
        table: from :func:`speed_dispersion_table`.
        seed: of the resampling.

    Returns:
        τ with an interval over tasks.
    """
    known = table[(table["known"] != "unknown") & table["ratio"].notna()]
    tau, comparable = _tau(known)
    tasks = known["task"].unique()
    low = high = math.nan
    if len(tasks) >= FEWEST_TASKS:
        rng = np.random.default_rng(seed)
        drawn = [_tau(_resampled(known, rng))[0] for _ in range(_RESAMPLES_OF_TASKS)]
        low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return SpeedDispersion(tau, float(low), float(high), comparable, len(known), len(tasks))


def _tau(rows: pd.DataFrame) -> tuple[float, int]:
    return rank_agreement(rows["ratio"].tolist(), rows["low"].tolist(), rows["high"].tolist())


def _resampled(rows: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Draw tasks, then seeds of each, with replacement; what shares a seed stays together."""
    tasks = rows["task"].unique()
    parts: list[pd.DataFrame] = []
    for task in rng.choice(tasks, len(tasks)):
        own = rows[rows["task"] == task]
        seeds = own["seed"].unique()
        parts += [own[own["seed"] == seed] for seed in rng.choice(seeds, len(seeds))]
    return pd.concat(parts)
