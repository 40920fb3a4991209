"""Is sparse attention enough, and with which k? Plausible, not without loss, or cannot tell."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from semdiag.capturing.attention_kinds import DENSE, SCORED
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import percent
from semdiag.measuring.findings.resampling import FEWEST
from semdiag.measuring.findings.strict_json import records
from semdiag.measuring.table import ALL
from semdiag.presenting.glance import Answer, Glance
from semdiag.questions.k_sweep.answer.rerun import change_table, costs, tolerance_of, within
from semdiag.questions.k_sweep.measure.kinds import RANDOM, TOP_K
from semdiag.questions.k_sweep.measure.rerun import LEAST_SAMPLES, MOST_HARMED

MASS = 0.95  # of the attention weight, where nothing else is known
NEAR_UNIFORM = 0.95  # entropy of half of the queries' weights, in that of uniform weights
MOST_KEYS = 0.5  # share of the keys above which a mask is hardly sparse
_COSTS = {"loss": "costs {} of loss", "perplexity": "costs {} perplexity"}
_CHANGES = {
    "perplexity": "changes perplexity by {}",
    "loss": "changes the loss by {}",
    "divergence": "changes the output distribution by {} (KL divergence)",
    "output_change": "changes the outputs by {} of their norm",
}
ROUNDING = 5e-5  # nats: anything smaller may be rounding
_DOUBLED = math.log(2)  # above it, a change of perplexity is given as a factor
_OF_MASKS = "fixed_mask", "own_mask"  # reasons why a model with its own mask cannot be judged
_BY_WEIGHT = "not_rerun", "other_kinds"  # reasons that leave only the weights to go by
ESTIMATED = "few_samples", "harmed", "uncertain"  # reasons that are shown with the estimate
_CHANCE = 0.99  # of ln C: a loss above it is no better than that of C equally likely classes

Row = dict[str, Any]


@dataclass(frozen=True)
class SparseVerdict:
    """Whether top-k attention suffices in a model without retraining.

    Attributes:
        answer: ``plausible``, ``not without loss`` or ``cannot tell``.
        reason: why there is no answer, as a keyword: near_uniform, chance, control, few_samples, harmed,
            uncertain, not_sparse, not_rerun, other_kinds (run, but not with top-k), not_finite, drops_nothing,
            fixed_mask, own_mask, not_measured; empty if there is one.
        k: what the answer is about: the smallest k from which on the loss stays; if there is none, the largest
            that certainly costs, of all or of those at most half of the keys (uncertain: of the latter); or the
            smallest that keeps 95% of the weight; None: none of these.
        share: mean of k divided by the number of keys of its queries.
        mass: mean attention weight that k keeps of queries with more than k keys; NaN above the sweep's largest k.
        queries: such queries.
        left_out: queries with at most k keys, of which nothing is dropped.
        measure: what changes: loss (nats per target), divergence (nats per position) or output_change (relative);
            empty without a rerun.
        perplexity: whether the loss is that of the next token, so that exp(change) is a factor
            of perplexity.
        change: its change at k, and its interval over samples.
        low: end of the interval.
        high: end of the interval.
        before: the loss without a mask.
        harmed: the share of samples that change by more than HARM times the tolerance.
        harmed_high: upper confidence limit of that share.
        tolerance: largest change that counts as none.
        samples: that were run.
        costly: the largest k of at most half of the keys, where it costs and k does not; None: not so.
    """

    answer: str
    reason: str = ""
    k: int | None = None
    share: float = math.nan
    mass: float = math.nan
    queries: int = 0
    left_out: int = 0
    measure: str = ""
    perplexity: bool = False
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    before: float = math.nan
    harmed: float = math.nan
    harmed_high: float = math.nan
    tolerance: float = math.nan
    samples: int = 0
    costly: "SparseVerdict | None" = None


def sparse_verdict(findings: Findings, model: str) -> SparseVerdict:
    """Judge whether the k largest scores of each query suffice for a model.

    Plausible: there is a k, at most half of the keys, from which on, at every k that was run, the upper end of the
    change's interval is within the tolerance, and no more than 1% of the inputs can change by more than ten times
    the tolerance (at 95%: it takes 299 samples). Not without loss: at the largest k that is at most half of the
    keys the lower end is above the tolerance. No answer: these samples decide neither; the loss is no better than
    chance; as many random keys do as little harm; the change that decides is not finite; the attention is near
    uniform and no loss shows that its largest scores matter; the model was not run with masks, or only with masks
    that drop nothing; or its mask ranks no scores.

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
    if not top and facts["attention"] not in DENSE:  # the model itself computes no weights of all its scores
        return SparseVerdict("cannot tell", "own_mask")
    if not top:
        enough = [k for k, kept in mass.items() if kept >= MASS]
        reason = "not_rerun" if again.empty else "other_kinds"
        verdict = SparseVerdict("cannot tell", reason, k=min(enough, default=None))
    else:
        dropping = [row for row in top if not math.isnan(row["share"])]
        if not dropping:
            return SparseVerdict("cannot tell", "drops_nothing", k=int(top[0]["k"]))
        verdict = _judged(dropping, again, tolerance_of(findings, top[0]["measure"]))
        perplexity = verdict.measure == "loss" and next_token(findings, model)
        verdict = replace(verdict, perplexity=perplexity)
        if verdict.costly is not None:
            share = float(pooled["mean"].get(("share", verdict.costly.k), math.nan))
            verdict = replace(verdict, costly=replace(verdict.costly, share=share, perplexity=perplexity))
    if verdict.k is not None:
        known = "mass" if verdict.k in mass else "share"
        queries, left_out = (int(pooled[name][known, verdict.k]) for name in ("queries", "undefined"))
        share, kept = float(pooled["mean"].get(("share", verdict.k), math.nan)), mass.get(verdict.k, math.nan)
        verdict = replace(verdict, share=share, mass=kept, queries=queries - left_out, left_out=left_out)
    # If as many random keys raise the loss and the largest do not, that decides, however even the weights are.
    if even >= NEAR_UNIFORM and (verdict.measure != "loss" or verdict.answer == "cannot tell"):
        return replace(verdict, answer="cannot tell", reason="near_uniform", costly=None)
    return verdict


def sparse_glance(findings: Findings) -> Glance:
    """Return whether sparse attention suffices: for one model its k, for several how many need how few keys."""
    verdicts = [findings(sparse_verdict, model) for model in findings.measurements.models["model"]]
    judged = [each for each in verdicts if not each.reason]
    plausible = [each for each in judged if each.answer == "plausible"]
    if len(verdicts) == 1 and verdicts[0].reason in ESTIMATED:
        return Glance(
            Answer.OPEN, f"k = {verdicts[0].k}", f"per query{keys_share(verdicts[0])} {cost_words(verdicts[0])}"
        )
    if not judged:
        return _glance_of_weights(verdicts)
    costs = Answer.COSTS if all(each.measure == "loss" for each in judged) else Answer.CHANGES
    answer = Answer.PLAUSIBLE if len(plausible) == len(judged) else costs
    if len(verdicts) == 1:
        (one,) = judged
        weight = "" if math.isnan(one.mass) else f" and keeps {percent(one.mass)}% of the weight"
        return Glance(answer, f"k = {one.k}", f"per query ({one.share:.0%} of the keys) {cost_words(one)}{weight}")
    words = "that were run with masks need at most half of their keys"
    words += f" (k = {_range([each.k for each in plausible])})" if plausible else ""
    words += f"; {len(verdicts) - len(judged)} more cannot be judged" if len(judged) < len(verdicts) else ""
    return Glance(answer, f"{len(plausible)} of {len(judged)} models", words)


def _glance_of_weights(verdicts: list[SparseVerdict]) -> Glance:
    """Return how many keys hold most of the weight, if no model was judged by a rerun."""
    weighed = [each for each in verdicts if each.reason in _BY_WEIGHT and each.k is not None]
    if not weighed:
        return Glance(Answer.OPEN, f"0 of {len(verdicts)}", "models can be judged")
    dense = sum(each.reason not in _OF_MASKS for each in verdicts)
    many = f", in {len(weighed)} of {dense} models that keep every key" if len(verdicts) > 1 else ""
    queries, left_out = (sum(getattr(each, name) for each in weighed) for name in ("queries", "left_out"))
    without = f" ({left_out:,} with no more are left out)" * (left_out > 0)
    return Glance(
        Answer.OPEN, f"k = {_range([each.k for each in weighed])}",
        f"keeps {MASS:.0%} of the weight on average over {queries:,} queries with more keys{without}{many}; "
        "to measure what a mask costs: semdiag k-sweep MODEL --rerun",
    )  # fmt: skip


def keys_share(verdict: SparseVerdict) -> str:
    """Return `` (48% of the keys)``; an empty string if unknown."""
    return f" ({verdict.share:.0%} of the keys)" if not math.isnan(verdict.share) else ""


def cost_words(verdict: SparseVerdict) -> str:
    """Return what a mask costs, with the interval: "costs 1.4% perplexity (95% interval 0.1 to 2.7%)".

    Args:
        verdict: with a change.
    """
    if verdict.perplexity and _DOUBLED < verdict.change < math.inf and math.isfinite(verdict.low):
        low, change, high = (f"{math.exp(min(x, 700)):.3g}" for x in (verdict.low, verdict.change, verdict.high))
        return f"multiplies perplexity by {change} (95% interval {low} to {high})"
    measure = "perplexity" if verdict.perplexity else verdict.measure
    costs = measure in _COSTS and verdict.change >= ROUNDING
    text = (_COSTS if costs else _CHANGES)[measure].format(_cost_amount(verdict, verdict.change, True, costs))
    alike = max(abs(verdict.low), abs(verdict.high)) < ROUNDING
    if not math.isfinite(verdict.low) or alike:
        return f"{text} ({'all samples alike' if verdict.samples >= FEWEST else 'no interval'})"
    low, high = (
        _cost_amount(verdict, verdict.low, False, costs),
        _cost_amount(verdict, verdict.high, verdict.perplexity, costs),
    )
    return f"{text} (95% interval {low} to {high})"


def _cost_amount(verdict: SparseVerdict, value: float, unit: bool, costs: bool) -> str:
    """Return an amount; a cost has no plus sign."""
    text = amount(verdict, value, unit)
    return text.removeprefix("+") if costs else text


def limit_words(verdict: SparseVerdict, value: float) -> str:
    """Return a limit in the unit of a verdict: "0.01 nats", "1%".

    Args:
        verdict: whose unit.
        value: in nats, or relative.
    """
    return amount(verdict, value, True).removeprefix("+")


def amount(verdict: SparseVerdict, value: float, unit: bool = False) -> str:
    """Return a change in the unit of a verdict.

    Args:
        verdict: whose unit.
        value: in nats, or relative.
        unit: whether to name it.
    """
    if not math.isfinite(value):
        return "no finite number"
    if verdict.measure == "output_change":
        return f"{value:.1%}"
    value = 0.0 if abs(value) < ROUNDING else value
    if verdict.perplexity and value > _DOUBLED:
        return f"× {math.exp(min(value, 700)):.3g}"
    if verdict.perplexity:
        return f"{100 * math.expm1(value):+.2g}{'%' * unit}"
    return f"{value:+.3g}{' nats' * unit}"


def _range(ks: "list[int | None]") -> str:
    low, high = min(filter(None, ks)), max(filter(None, ks))
    return f"{low}" if low == high else f"{low}–{high}"


def next_token(findings: Findings, model: str) -> bool:
    """Return whether a causal model has several targets in a sample: its next tokens.

    Args:
        findings: with a rerun.
        model: its path.
    """
    measurements = findings.measurements
    facts = measurements.models.set_index("model").loc[model]
    own = measurements.rerun[measurements.rerun["model"] == model]
    return bool(facts["attention"] == "causal" and own["targets"].max() > 1)


def _judged(top: list[Row], again: pd.DataFrame, limit: float) -> SparseVerdict:
    """Judge from the reruns alone; k in ascending order."""
    measure = top[0]["measure"]
    row, costly, answer, reason = _by_changes(top, limit)
    control = again[(again["mask"] == RANDOM) & (again["k"] == row["k"])]
    classes = int(row["classes"])
    if measure == "loss" and classes > 1 and _CHANCE * math.log(classes) <= row["before"] < math.inf:
        answer, reason = "cannot tell", "chance"
    elif answer != "not without loss" and len(control) and within(control.iloc[0], limit):
        answer, reason = "cannot tell", "control"
    verdict = _of_row(row, answer, reason, limit)
    return verdict if reason or costly is None else replace(verdict, costly=_of_row(costly, answer, reason, limit))


def _of_row(row: Row, answer: str, reason: str, limit: float) -> SparseVerdict:
    """Return a sentence on one k."""
    names = "change", "low", "high", "before", "harmed", "harmed_high"
    numbers: dict[str, Any] = {name: float(row[name]) for name in names}
    samples = int(row["samples"])
    return SparseVerdict(
        answer, reason, int(row["k"]), measure=row["measure"], tolerance=limit, samples=samples, **numbers
    )


def _by_changes(top: list[Row], limit: float) -> tuple[Row, Row | None, str, str]:
    """Return the row that decides by the masks' changes, the costly row below, the answer, a reason if none."""
    stays = _from(top, lambda row: within(row, limit))
    safe = _from(top, lambda row: within(row, limit) and row["harmed_high"] <= MOST_HARMED)
    sparse = [row for row in top if row["share"] <= MOST_KEYS]
    if safe is not None and safe["share"] <= MOST_KEYS:
        return safe, None, "plausible", ""
    if stays is not None and stays["share"] <= MOST_KEYS:
        return stays, None, "cannot tell", "few_samples" if stays["samples"] < LEAST_SAMPLES else "harmed"
    if stays and not sparse:
        return stays, None, "cannot tell", "not_sparse"
    last = sparse[-1] if sparse else top[-1]
    for row in (top[-1], last):
        if not math.isfinite(row["change"]):
            return row, None, "cannot tell", "not_finite"
    if not costs(last, limit):
        return last, None, "cannot tell", "uncertain"
    shown = top[-1] if costs(top[-1], limit) else last
    return stays or shown, last if stays and sparse else None, "not without loss", ""


def _from(top: list[Row], holds: Callable[[Row], bool]) -> Row | None:
    """Return the row of the smallest k from which on the condition holds; None if it fails for the largest."""
    smallest = None
    for row in reversed(top):
        if not holds(row):
            break
        smallest = row
    return smallest


def samples_needed(verdict: SparseVerdict) -> int | None:
    """Estimate how many samples decide whether a change is within the tolerance; None if that is unknown.

    n · (half of the interval's width / distance from the tolerance)², and at least LEAST_SAMPLES.

    Args:
        verdict: one that leaves it open.
    """
    half, distance = (verdict.high - verdict.low) / 2, abs(verdict.tolerance - verdict.change)
    if not (half > 0 and distance > 0):
        return LEAST_SAMPLES if math.isnan(half) else None
    return max(LEAST_SAMPLES, math.ceil(verdict.samples * (half / distance) ** 2))
