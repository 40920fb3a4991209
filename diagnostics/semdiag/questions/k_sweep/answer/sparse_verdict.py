"""Is sparse attention enough, and with which k? Plausible, not without loss, or nobody can tell."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from semdiag.capturing.attention_kinds import DENSE, SCORED
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import percent
from semdiag.measuring.findings.strict_json import records
from semdiag.measuring.table import ALL
from semdiag.presenting.glance import Answer, Glance
from semdiag.questions.k_sweep.answer.rerun import change_table
from semdiag.questions.k_sweep.measure.rerun import LEAST_SAMPLES, RANDOM, TOLERANCES, TOP_K

MASS = 0.95  # of the attention weight, where it is all that is known
NEAR_UNIFORM = 0.95  # entropy of half of the queries' weights, in that of uniform weights
MOST_KEYS = 0.5  # share of the keys above which a mask is hardly sparse
_CHANGES = {
    "loss": "changes the loss",
    "divergence": "changes the output distribution (KL divergence)",
    "output_change": "changes the outputs, relative to their norm,",
}
_OF_MASKS = "fixed_mask", "own_mask"  # reasons why nothing can be said of a model with a mask of its own
_CHANCE = 0.99  # of ln C: a loss above it is no better than that of C equally likely classes


@dataclass(frozen=True)
class SparseVerdict:
    """Whether top-k attention would do in a model as it is.

    Attributes:
        answer: ``plausible``, ``not without loss`` or ``cannot tell``.
        reason: why there is no answer, as a word: near_uniform, chance, control, few_samples, not_rerun,
            not_finite, drops_nothing, fixed_mask, own_mask, not_measured; empty if there is one.
        k: what the answer is about: the smallest k from which on the loss stays, the largest that was run if there
            is none, or the smallest that keeps 95 % of the weight; None: none of these.
        share: k in the keys of its queries, mean.
        mass: mean attention weight that k keeps of queries with more than k keys.
        queries: such queries.
        left_out: queries with at most k keys, of which nothing is dropped.
        measure: what changes: loss (nats per target), divergence (nats per position) or output_change (relative);
            empty without a rerun.
        change: its change at k, and its interval over samples.
        low: end of the interval.
        high: end of the interval.
        before: the loss without a mask.
        tolerance: largest change that counts as none.
        samples: that were run.
    """

    answer: str
    reason: str = ""
    k: int | None = None
    share: float = math.nan
    mass: float = math.nan
    queries: int = 0
    left_out: int = 0
    measure: str = ""
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    before: float = math.nan
    tolerance: float = math.nan
    samples: int = 0


def sparse_verdict(findings: Findings, model: str) -> SparseVerdict:
    """Judge whether a model would do with the k largest scores of each query.

    Plausible: there is a k from which on, at every k that was run, the upper end of the change's interval is
    within the tolerance, and it is at most half of the keys. Not without loss: there is none, or only a larger. No
    answer: the loss is no better than chance; as many random keys do as little harm; there are fewer than 8
    samples; the change that decides is no finite number; the attention is near uniform and no loss says that its
    largest scores matter; the model was not run with masks, or with such as drop nothing; or its mask ranks no
    scores.

    Args:
        findings: with a sweep, and better with a rerun.
        model: a model's path.
    """
    measurements = findings.measurements
    facts = next(row for row in measurements.models.to_dict("records") if row["model"] == model)
    own = measurements.sweep[(measurements.sweep["model"] == model) & (measurements.sweep["layer"] == ALL)]
    if own.empty:
        return SparseVerdict("cannot tell", "not_measured" if facts["attention"] in SCORED else "fixed_mask")
    pooled = own.set_index(["quantity", "k"])
    even = float(pooled["p50"].get(("evenness", 0), math.nan))
    again = findings(change_table)
    again = again[again["model"] == model]
    top = records(again[again["mask"] == TOP_K].sort_values("k"))
    ks = own[own["quantity"] == "mass"]
    mass = dict(zip(ks["k"].tolist(), ks["mean"].tolist(), strict=True))
    if not top and facts["attention"] not in DENSE:  # of all its scores the model itself has no weights
        return SparseVerdict("cannot tell", "own_mask")
    if not top:
        enough = [k for k, kept in mass.items() if kept >= MASS]
        found = SparseVerdict("cannot tell", "not_rerun", k=min(enough, default=None))
    else:
        dropping = [row for row in top if not math.isnan(mass.get(row["k"], math.nan))]
        if not dropping:
            return SparseVerdict("cannot tell", "drops_nothing", k=int(top[0]["k"]))
        found = _judged(dropping, again, tolerance_of(findings, top[0]["measure"]))
    if found.k is not None and found.k in mass:
        queries, left_out = (int(pooled[name]["mass", found.k]) for name in ("queries", "undefined"))
        share = float(pooled["mean"].get(("share", found.k), math.nan))
        counts = {"queries": queries - left_out, "left_out": left_out}
        found = SparseVerdict(**{**asdict(found), "share": share, "mass": mass[found.k], **counts})
    # A loss that as many random keys destroy, and the largest do not, is an answer, however even the weights.
    if even >= NEAR_UNIFORM and (found.measure != "loss" or found.answer == "cannot tell"):
        return SparseVerdict(**{**asdict(found), "answer": "cannot tell", "reason": "near_uniform"})
    return found


def sparse_glance(findings: Findings) -> Glance:
    """Whether sparse attention would do: of one model its k, of several how many could do with how few keys."""
    found = [findings(sparse_verdict, model) for model in findings.measurements.models["model"]]
    judged = [each for each in found if not each.reason]
    plausible = [each for each in judged if each.answer == "plausible"]
    if not judged:
        weighed = [each for each in found if each.reason == "not_rerun" and each.k is not None]
        if not weighed:
            return Glance(
                Answer.OPEN, f"0 of {len(found)}", "models have attention for which this can be answered"
            )
        dense = sum(each.reason not in _OF_MASKS for each in found)
        many = f", in {len(weighed)} of {dense} models that keep every key" if len(found) > 1 else ""
        queries, left_out = (sum(getattr(each, name) for each in weighed) for name in ("queries", "left_out"))
        return Glance(
            Answer.OPEN, f"k = {_range([each.k for each in weighed])}",
            f"keeps {MASS:.0%} of the weight on average over {queries:,} queries with more keys ({left_out:,} "
            f"with no more are left out){many}; to measure what a mask costs: semdiag k-sweep MODEL --rerun",
        )  # fmt: skip
    answer = Answer.PLAUSIBLE if len(plausible) == len(judged) else Answer.COSTS
    if len(found) == 1:
        (one,) = judged
        return Glance(
            answer, f"k = {one.k}",
            f"per query ({one.share:.0%} of the keys) {_CHANGES[one.measure]} by {one.change:+.2g} (95 % interval "
            f"{one.low:+.2g} to {one.high:+.2g}) and keeps {percent(one.mass)}% of the weight; tolerated: "
            f"{one.tolerance:g}",
        )  # fmt: skip
    words = "that were run with masks need at most half of their keys"
    words += f" (k = {_range([each.k for each in plausible])})" if plausible else ""
    words += f"; {len(found) - len(judged)} more cannot be judged" if len(judged) < len(found) else ""
    return Glance(answer, f"{len(plausible)} of {len(judged)} models", words)


def _range(ks: "list[int | None]") -> str:
    low, high = min(filter(None, ks)), max(filter(None, ks))
    return f"{low}" if low == high else f"{low}–{high}"


def tolerance_of(findings: Findings, measure: str) -> float:
    """The largest change of a measure that counts as none: as was asked, else its default.

    Args:
        findings: of any number of models.
        measure: loss, divergence or output_change.
    """
    return float(findings.measurements.provenance.get("tolerance") or TOLERANCES[measure])


def _judged(top: list[dict[str, Any]], again: pd.DataFrame, limit: float) -> SparseVerdict:
    """From the reruns alone, k in rising order."""
    measure = top[0]["measure"]
    at = len(top)
    while at and top[at - 1]["high"] <= limit:
        at -= 1
    row, stays = top[min(at, len(top) - 1)], at < len(top)
    answer, reason = ("plausible" if stays and row["share"] <= MOST_KEYS else "not without loss"), ""
    control = again[(again["mask"] == RANDOM) & (again["k"] == row["k"])]
    classes = int(row["classes"])
    if row["samples"] < LEAST_SAMPLES:
        reason = "few_samples"
    elif measure == "loss" and classes > 1 and _CHANCE * math.log(classes) <= row["before"] < math.inf:
        reason = "chance"
    elif stays and len(control) and control["high"].iloc[0] <= limit:
        reason = "control"
    elif answer != "plausible" and at and not math.isfinite(top[at - 1]["high"]):
        row, reason = top[at - 1], "not_finite"
    numbers: dict[str, Any] = {name: float(row[name]) for name in ("change", "low", "high", "before")}
    return SparseVerdict(
        "cannot tell" if reason else answer,
        reason,
        int(row["k"]),
        measure=measure,
        tolerance=limit,
        samples=int(row["samples"]),
        **numbers,
    )
