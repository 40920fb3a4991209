"""Test whether a quantity ranks masks by an outcome in several tasks, by rank correlations over masks."""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
FEWEST_MASKS = 5  # per task: a rank correlation of fewer means nothing
FEWEST_FOR_INTERVAL = 8  # with fewer masks, resampling them says nothing about other masks
MOST_UNLIKE = 0.25  # largest share of resamples in which only some tasks keep five masks
_ALL = 10_000  # up to so many relabellings, all are tried
_CHUNK = 1000  # relabellings at a time


@dataclass(frozen=True, eq=False)
class RankTests:
    """Results of testing C candidates on T tasks and M masks.

    Attributes:
        correlation: (C,) Spearman's ρ within tasks, mean over tasks; NaN without a task of enough masks.
        by_task: (C, T) ρ of each task; NaN if the task is not counted.
        low: (C,) lower end of the bootstrap interval; NaN below 8 masks, and if tasks have such different numbers
            of masks that over a quarter of the resamples leave five in some tasks but not in others.
        high: (C,) upper end.
        p: (C,) two-sided p-value of the joint permutation.
        p_family: (C,) p-value of the largest |ρ| of all candidates, which corrects for their number.
        relabellings: number of distinct ones, the observed one included; no p-value is below 1 / relabellings.
        tried: number tried, the observed one included; all of them, or drawn with replacement.
        tasks: number of counted tasks: with five masks or more, and not all outcomes or candidates equal.
        cells: number of task × mask cells used.
    """

    correlation: Matrix
    by_task: Matrix
    low: Matrix
    high: Matrix
    p: Matrix
    p_family: Matrix
    relabellings: int
    tried: int
    tasks: int
    cells: int


def joint_rank_tests(
    outcome: Matrix, candidates: Matrix, *, draws: int = 9999, resamples: int = 2000, seed: int = 0
) -> RankTests:
    """Correlate candidates with an outcome within tasks, and test this by relabelling masks in all tasks alike.

    The statistic is (1/T) Σ_t ρ_t, with ρ_t Spearman's correlation over the masks of task t. A mask may have the
    same effect in every task, so tasks are not independent: outcomes are exchanged between masks in all tasks
    alike. All candidates use the same cells: those in which the outcome and every candidate are known. Tasks that
    are not counted contribute neither cells nor masks of their own. A relabelling that moves an unknown cell to a
    mask leaves that cell out, which makes the test conservative.

    Source: Westfall and Young, Resampling-Based Multiple Testing (1993), single-step max-T; Phipson and Smyth 2010
    for the observed order counted among drawn ones. Deviation: ranks within blocks that are permuted jointly.

    Args:
        outcome: (T, M), NaN where unknown; +inf is the largest and ties with itself.
        candidates: (C, T, M), NaN where unknown.
        draws: number of relabellings drawn if there are more than 10,000.
        resamples: of the masks, for the 95% percentile interval; 0 means no interval.
        seed: of draws and resamples.

    Returns:
        Correlations, p-values, intervals.

    Raises:
        ValueError: if the shapes do not fit.

    Example:
        >>> speed = np.array([[1.0, 2, 3, 4, 5]] * 2)
        >>> tests = joint_rank_tests(speed, speed[None])
        >>> tests.correlation.tolist(), tests.relabellings, round(tests.p[0] * 120)  # this order and its reverse
        ([1.0], 120, 2)
    """
    if candidates.ndim != 3 or candidates.shape[1:] != outcome.shape:
        raise ValueError(f"Needs (T, M) and (C, T, M). Got {outcome.shape} and {candidates.shape}.")
    known = complete_cells(outcome, candidates)
    usable = np.array(
        [_ranks_masks(y[k], x[:, k]) for y, x, k in zip(outcome, candidates.swapaxes(0, 1), known, strict=True)],
        bool,
    )
    some = known[usable].any(0)
    outcome, candidates, known = (
        outcome[usable][:, some],
        candidates[:, usable][:, :, some],
        known[usable][:, some],
    )
    ranks = _Ranks(outcome, candidates, known)
    masks = known.shape[1]
    same, once = np.arange(masks)[None], np.ones((1, masks))
    own = ranks.correlations(once, same)[0]
    correlation = _over_tasks(own)
    by_task = np.full((len(candidates), len(usable)), math.nan)
    by_task[:, usable] = own
    rng = np.random.default_rng(seed)
    distinct = _distinct(outcome, known)
    p, p_family, tried = _p_values(ranks, correlation, distinct, draws, rng)
    low, high = _interval(ranks, masks, resamples, rng)
    return RankTests(correlation, by_task, low, high, p, p_family, distinct, tried, len(own.T), int(known.sum()))


def _ranks_masks(outcome: Matrix, candidates: Matrix) -> bool:
    """Return whether a task ranks anything: five known masks, and outcomes and a candidate that differ."""
    enough = outcome.size >= FEWEST_MASKS and len(candidates) > 0
    return enough and bool((outcome != outcome[0]).any() and (candidates != candidates[:, :1]).any())


def complete_cells(outcome: Matrix, candidates: Matrix) -> NDArray[np.bool_]:
    """Return the cells (T, M) in which the outcome (T, M) and every candidate (C, T, M) are known."""
    return ~(np.isnan(outcome) | np.isnan(candidates).any(0))


def spearman(x: Matrix, y: Matrix) -> float:
    """Return Spearman's rank correlation with mean ranks for ties; +inf ties with itself.

    Args:
        x: (n,) numbers.
        y: (n,) numbers.

    Returns:
        ρ in [-1, 1]; NaN if all numbers of one side are equal.

    Example:
        >>> spearman(np.array([1.0, 2, 3]), np.array([5.0, np.inf, np.inf]))
        0.8660254037844387
    """
    a, b = _order(x).sum(-1), _order(y).sum(-1)
    spread = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / spread if spread else math.nan


def _order(x: Matrix) -> Matrix:
    """Return (…, n, n): 1 if the row's number exceeds the column's, −1 if it is less, 0 if equal or unknown.

    The sum over columns is twice the centred mean rank; weighted, that of numbers repeated by their weights.
    """
    row, column = x[..., :, None], x[..., None, :]
    return (row > column).astype(np.float64) - (row < column).astype(np.float64)


class _Ranks:
    def __init__(self, outcome: Matrix, candidates: Matrix, known: NDArray[np.bool_]) -> None:
        self.known, self.outcome, self.candidates = known, _order(outcome), _order(candidates)

    def correlations(self, times: Matrix, source: NDArray[np.int64]) -> Matrix:
        """Return ρ (B, C, T) with mask m counted ``times[b, m]`` times and given the outcome of ``source[b, m]``.

        NaN if fewer than 5 masks remain; 0 if all of them are equal.
        """
        count = len(self.candidates)
        statistics = np.full((len(times), count, len(self.known)), math.nan)
        rows = np.arange(len(times))[:, None]
        for t in range(len(self.known)):
            weights = times * self.known[t] * self.known[t][source]
            moved = np.zeros_like(weights)
            moved[rows, source] = weights
            ys = (moved @ self.outcome[t].T)[rows, source]
            enough = (weights > 0).sum(1) >= FEWEST_MASKS
            spread_y = (weights * ys * ys).sum(1)
            for c in range(count):
                xs = weights @ self.candidates[c, t].T
                spread = np.sqrt((weights * xs * xs).sum(1) * spread_y)
                with np.errstate(invalid="ignore", divide="ignore"):
                    value = np.where(spread > 0, (weights * xs * ys).sum(1) / spread, 0.0)
                statistics[:, c, t] = np.where(enough, value, math.nan)
        return statistics


def _over_tasks(by_task: Matrix) -> Matrix:
    """Return the mean over the last axis without NaN; NaN if all are NaN."""
    known = ~np.isnan(by_task)
    with np.errstate(invalid="ignore"):
        mean: Matrix = np.where(known, by_task, 0.0).sum(-1, dtype=np.float64) / known.sum(-1)
    return mean


def _distinct(outcome: Matrix, known: NDArray[np.bool_]) -> int:
    """Return distinct relabellings: exchanging masks with equal outcomes in every task changes nothing."""
    columns = Counter(map(tuple, np.where(known, outcome, -math.inf).T.tolist()))
    return math.factorial(outcome.shape[1]) // math.prod(math.factorial(n) for n in columns.values())


def _p_values(
    ranks: _Ranks, observed: Matrix, distinct: int, draws: int, rng: np.random.Generator
) -> tuple[Matrix, Matrix, int]:
    masks = ranks.known.shape[1]
    if not len(ranks.known):
        unknown = np.full(len(observed), math.nan)
        return unknown, unknown, 0
    every = math.factorial(masks) <= _ALL
    if every:
        sources = np.array([*permutations(range(masks))], dtype=np.int64).reshape(-1, masks)
    else:
        sources = rng.permuted(np.tile(np.arange(masks), (draws, 1)), axis=1)
    size = np.abs(observed)
    own, largest = np.zeros(len(size)), np.zeros(len(size))
    for start in range(0, len(sources), _CHUNK):
        source = sources[start : start + _CHUNK]
        drawn = np.abs(_over_tasks(ranks.correlations(np.ones(source.shape), source)))
        drawn = np.where(np.isnan(drawn), math.inf, drawn)  # too few cells remain: counted against significance
        own += (drawn >= size - 1e-9).sum(0)
        largest += (drawn.max(1, initial=0.0)[:, None] >= size - 1e-9).sum(0)
    tried = len(sources) + (not every)
    p, p_family = (
        np.where(np.isnan(observed), math.nan, np.maximum((count + (not every)) / tried, 1 / distinct))
        for count in (own, largest)
    )
    return p, p_family, tried


def _interval(ranks: _Ranks, masks: int, resamples: int, rng: np.random.Generator) -> tuple[Matrix, Matrix]:
    nothing = np.full(len(ranks.candidates), math.nan)
    if not resamples or not len(ranks.known) or masks < FEWEST_FOR_INTERVAL:
        return nothing, nothing
    drawn = rng.multinomial(masks, np.full(masks, 1 / masks), size=resamples).astype(float)
    same = np.tile(np.arange(masks), (resamples, 1))
    by_task = ranks.correlations(drawn, same)
    lost = np.isnan(by_task[:, 0])
    if (lost.any(1) & ~lost.all(1)).mean() > MOST_UNLIKE:  # the mean would be over other tasks
        return nothing, nothing
    tests = _over_tasks(by_task)
    low, high = np.nanpercentile(tests, [2.5, 97.5], axis=0)
    return low, high
