"""Whether top-k attention suffices, judged by runs with masks: an outcome, the run that decides, and why."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import pandas as pd

from semdiag.measuring.findings.findings import Findings, records
from semdiag.measuring.findings.resampling import sum_ratio_interval
from semdiag.measuring.table import ALL, rows_of_model
from semdiag.presenting.answer import Outcome
from semdiag.questions.k_sweep.budgets import RANDOM, TOP_K
from semdiag.questions.k_sweep.changes import (
    Row,
    change_table,
    costs,
    harmless,
    smallest_from,
    tolerance_of,
    unit_of,
    within,
)
from semdiag.questions.k_sweep.measure import K_SWEEP_TABLE
from semdiag.questions.k_sweep.rerun import LEAST_SAMPLES, RERUN_TABLE, UNITS

ENOUGH_WEIGHT = 0.95  # of the attention weight, where nothing else is known
MOST_KEYS = 0.5  # share of all keys above which a mask is hardly sparse
_CHANCE = 0.99  # of ln C: a loss above it is no better than that of C equally likely classes


class Reason(StrEnum):
    """What decides on top-k attention."""

    HARMLESS = "from a sparse k on, the change is within the limit, and few inputs change by much more"
    SOME_HARMED = "the mean change is within the limit, but too many inputs may change by much more"
    NOTHING_SPARSE = "only masks of more than half of the keys were run"
    NOT_FINITE = "some outputs are no finite numbers"
    TOO_FEW_SAMPLES = "the limit is inside the interval of the change"
    NEEDS_MORE_KEYS = "the change is above the limit up to half of the keys, and within it for a larger k"
    COSTLY = "the change is above the limit for every k"
    AT_CHANCE = "the model predicts no better than chance"
    LIKE_RANDOM_KEYS = "as many random keys change as little"


@dataclass(frozen=True)
class Judgement:
    """What reruns with top-k masks say, without words."""

    answer: Outcome
    row: Row  # the run that decides
    reason: Reason
    needed: Row | None = None  # the smallest run within the limit, where that is not sparse

    @property
    def estimates_cost(self) -> bool:
        """Return whether the change at the row's k says what its mask costs."""
        return self.reason not in (Reason.AT_CHANCE, Reason.LIKE_RANDOM_KEYS)


def judgement_of(findings: Findings, model: str) -> Judgement | None:
    """Judge the reruns of a model with top-k masks; None if no mask that drops keys was run."""
    changes = rows_of_model(findings(change_table), model)
    top = records(changes[(changes["mask"] == TOP_K) & (changes["kept"] < 1)].sort_values("k"))
    if not top:
        return None
    measure = unit_of(findings, model).measure
    limit = tolerance_of(findings, measure)
    judgement = _judged_changes(top, limit, measure)
    row = judgement.row
    chance = math.log(row["classes"]) if measure == "loss" and row["classes"] > 1 else math.inf
    if _CHANCE * chance <= row["before"] < math.inf:
        return Judgement(Outcome.OPEN, row, Reason.AT_CHANCE)
    control = records(changes[(changes["mask"] == RANDOM) & (changes["k"] == row["k"])])
    if judgement.answer in (Outcome.OPEN, Outcome.PLAUSIBLE) and control and within(control[0], limit):
        return Judgement(Outcome.OPEN, row, Reason.LIKE_RANDOM_KEYS)
    return judgement


def _judged_changes(top: Sequence[Row], limit: float, measure: str) -> Judgement:
    """Judge the changes by masks of top-k, k in ascending order, against a limit."""
    stays = smallest_from(top, lambda row: within(row, limit))
    safe = smallest_from(top, lambda row: harmless(row, limit))
    sparse = [row for row in top if row["kept"] <= MOST_KEYS]
    last = sparse[-1] if sparse else top[-1]
    if safe is not None and safe["kept"] <= MOST_KEYS:
        return Judgement(Outcome.PLAUSIBLE, safe, Reason.HARMLESS)
    if stays is not None and stays["kept"] <= MOST_KEYS:
        return Judgement(Outcome.OPEN, stays, Reason.SOME_HARMED)
    if stays is not None and not sparse:
        return Judgement(Outcome.OPEN, stays, Reason.NOTHING_SPARSE)
    for row in (top[-1], last):
        if not math.isfinite(row["change"]):
            return Judgement(Outcome.OPEN, row, Reason.NOT_FINITE)
    if not costs(last, limit):
        return Judgement(Outcome.OPEN, last, Reason.TOO_FEW_SAMPLES)
    return _costly(top[-1], last, stays, limit, measure)


def _costly(largest: Row, last_sparse: Row, stays: Row | None, limit: float, measure: str) -> Judgement:
    """Judge changes that are above a limit at half of the keys: is any measured k enough?"""
    answer = Outcome.COSTS if measure == "loss" else Outcome.CHANGES
    if stays is not None:
        return Judgement(answer, last_sparse, Reason.NEEDS_MORE_KEYS, stays)
    return Judgement(answer, largest if costs(largest, limit) else last_sparse, Reason.COSTLY)


@dataclass(frozen=True)
class CheaperRandom:
    """The k at which as many random keys cost less of the loss than the largest, and the answers at these k."""

    ks: tuple[int, ...]
    largest_excess: float  # over these k, of the loss with the largest keys over that with random ones, nats
    accuracy: float  # the largest over these k, with the largest keys
    random_accuracy: float  # the same with random keys
    error_loss: float = math.nan  # mean loss of a wrong answer, nats; NaN where samples have several targets
    random_error_loss: float = math.nan
    by_errors: float = math.nan  # share of the excess that is due to what a wrong answer costs

    @property
    def overconfident(self) -> bool:
        """Return whether most of the excess is due to what a wrong answer costs, not to how many are wrong."""
        return self.by_errors > 0.5


def cheaper_random(findings: Findings, model: str) -> CheaperRandom | None:
    """Return where random keys cost less of the loss than the largest, by more than the limit and its interval.

    With e the share of wrong answers and L the mean loss of one, the mean loss is e L + (1 - e) R. Of the excess
    over random keys, mean(e, e') (L - L') is due to L: Shapley's share.
    """
    again = rows_of_model(findings.measurements[RERUN_TABLE], model)
    if unit_of(findings, model).measure != "loss" or again["chunk"].any():
        return None
    by_mask = {
        cast("tuple[str, int]", place): rows.set_index(UNITS) for place, rows in again.groupby(["mask", "k"])
    }
    shared_ks = sorted(k for mask, k in by_mask if mask == TOP_K and (RANDOM, k) in by_mask)
    limit = tolerance_of(findings, "loss")
    excesses: dict[int, float] = {}
    for k in shared_ks:
        top = by_mask[TOP_K, k]
        excess = top["loss"] - by_mask[RANDOM, k]["loss"].loc[top.index]
        interval = sum_ratio_interval(excess.to_numpy("float64"), top["targets"].to_numpy("float64"))
        if interval.low > limit:
            excesses[k] = interval.estimate
    if not excesses:
        return None
    top = pd.concat([by_mask[TOP_K, k] for k in excesses])
    control = pd.concat([by_mask[RANDOM, k] for k in excesses])
    return CheaperRandom(
        tuple(excesses),
        max(excesses.values()),
        max(_accuracy(by_mask[TOP_K, k]) for k in excesses),
        max(_accuracy(by_mask[RANDOM, k]) for k in excesses),
        **_due_to_errors(top, control),
    )


def _accuracy(rows: pd.DataFrame) -> float:
    return float(rows["correct"].sum() / rows["targets"].sum())


def _error_loss(rows: pd.DataFrame) -> float:
    return float(rows.loc[rows["correct"] == 0, "loss"].mean())


def _due_to_errors(top: pd.DataFrame, control: pd.DataFrame) -> dict[str, float]:
    """Return what wrong answers cost, and their share of the excess; nothing for samples of several targets."""
    if (top["targets"] > 1).any():
        return {}
    error_loss = _error_loss(top)
    random_error_loss = _error_loss(control)
    errors = 1 - (_accuracy(top) + _accuracy(control)) / 2
    excess = float(top["loss"].sum() / top["targets"].sum() - control["loss"].sum() / control["targets"].sum())
    return {
        "error_loss": error_loss,
        "random_error_loss": random_error_loss,
        "by_errors": errors * (error_loss - random_error_loss) / excess,
    }


@dataclass(frozen=True)
class WeightOfK:
    """The mean attention weight that k keeps of the queries with more than k keys."""

    k: int
    weight_kept: float
    queries: int  # with more than k keys
    left_out: int  # queries with at most k keys, of which nothing is dropped


def weight_of_k(findings: Findings, model: str, k: int) -> WeightOfK | None:
    """Return the weight that k keeps; None if that was not measured."""
    masses = weights_by_k(findings, model)
    if k not in masses.index:
        return None
    left_out = int(masses["undefined"][k])
    return WeightOfK(k, float(masses["mean"][k]), int(masses["queries"][k]) - left_out, left_out)


def weights_by_k(findings: Findings, model: str) -> pd.DataFrame:
    """Return the weight that each k keeps, of all layers together."""
    sweep = rows_of_model(findings.measurements[K_SWEEP_TABLE], model)
    return sweep[(sweep["layer"] == ALL) & (sweep["quantity"] == "weight_kept")].set_index("k")


def smallest_k_by_weight(findings: Findings, model: str) -> WeightOfK | None:
    """Return the smallest k that keeps nearly all of the weight; None if no measured one does."""
    masses = weights_by_k(findings, model)
    enough = masses.index[masses["mean"] >= ENOUGH_WEIGHT]
    return weight_of_k(findings, model, int(enough[0])) if len(enough) else None


def samples_needed(row: Row, limit: float) -> int | None:
    """Estimate how many samples decide whether a change is within a limit; None if that is unknown."""
    half = (row["high"] - row["low"]) / 2
    distance = abs(limit - row["change"])
    if not (half > 0 and distance > 0):
        return LEAST_SAMPLES if math.isnan(half) else None
    return max(LEAST_SAMPLES, math.ceil(float(row["units"]) * float(half / distance) ** 2))
