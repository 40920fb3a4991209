"""Is sparse attention enough, and with which k? Plausible, not without loss, or cannot tell."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
import scipy
from numpy.typing import NDArray

from semdiag.capturing.attention_call import DENSE, HEAVY_HITTERS
from semdiag.measuring.findings.findings import Findings, records
from semdiag.measuring.findings.resampling import Interval, sum_ratio_interval
from semdiag.measuring.table import ALL
from semdiag.measuring.words import FEWEST, counted, interval_words, limit_of_share, strict_percent, whole_percent
from semdiag.presenting.section import Answer, Glance, span_words
from semdiag.questions.k_sweep.budgets import KINDS, RANDOM, TOP_K
from semdiag.questions.k_sweep.rerun import (
    HARM,
    LEAST_SAMPLES,
    MOST_HARMED,
    NO_MASK,
    QUARTERS,
    TOLERANCES,
    measure_of,
)

ROUNDING = 5e-5  # anything smaller may be rounding: nats, or relative
SEEN = 0.1  # of the tolerance: a smaller change of a sample is as good as none
_OF_THE_SWEEP = ("mass", "mass_without_first", "head_change", "stream_change")


def change_table(findings: Findings) -> pd.DataFrame:
    """Return the changes by each mask of each rerun, with 95% intervals over samples, or chunks of few ones."""
    rows: list[dict[str, Any]] = []
    sweep = findings.measurements.sweep
    for model, again in findings.measurements.rerun.groupby("model", sort=False):
        means = sweep[(sweep["model"] == model) & (sweep["layer"] == ALL)].set_index(["quantity", "k"])["mean"]
        base = again[again["mask"] == NO_MASK].set_index(["sample", "part"])
        measure = measure_of(again)
        limit = tolerance_of(findings, measure)
        for place, rows_of_mask in again.groupby(["mask", "k"], sort=False):
            (mask, k), own = cast("tuple[str, int]", place), rows_of_mask.set_index(["sample", "part"])
            before = base.loc[own.index]
            samples, chunk = own.index.get_level_values(0).nunique(), int(own["chunk"].max())
            row: dict[str, Any] = {"model": model, "mask": mask, "k": int(k), "samples": samples}
            row |= {"units": len(own), "chunk": chunk, "measure": measure, "classes": int(own["classes"].max())}
            row["before"] = _ratio(before["loss"], before["targets"])
            sums, counts = _sums(measure, own, before)
            change = change_interval(sums, counts, limit)
            row |= {"change": change.estimate, "low": change.low, "high": change.high, "tolerance": limit}
            row |= _shares(sums, counts, limit)
            for name, share in (("divergence", False), ("changed", True)):
                values = own[name].to_numpy(np.float64), own["predictions"].to_numpy(np.float64)
                row |= sum_ratio_interval(*values, share=share).columns(name)
            row["accuracy"] = _ratio(own["correct"], own["targets"])
            for name in _OF_THE_SWEEP:
                known = mask == TOP_K and (name, k) in means.index
                row[name] = float(means[name, k]) if known else math.nan
            row["kept"] = _ratio(own["kept"], own["keys"])
            rows.append(row)
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["model", "mask", "k", "kept"])


def _sums(
    measure: str, own: pd.DataFrame, before: pd.DataFrame
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the summed change of each unit, and the number of its terms."""
    output = measure == "output_change"
    sums = own[measure] if output else own[measure] - before[measure]
    counts = own[measure].notna() if output else own["targets" if measure == "loss" else "predictions"]
    return np.asarray(sums, np.float64), np.asarray(counts, np.float64)


def change_interval(sums: NDArray[np.float64], counts: NDArray[np.float64], tolerance: float) -> Interval:
    """Return a mean change; no interval where all units change alike, or none by a tenth of the tolerance."""
    interval = sum_ratio_interval(sums, counts).if_varied()
    seen = _seen(sums[counts > 0] / counts[counts > 0], tolerance).any()
    return interval if seen else Interval(interval.estimate, math.nan, math.nan)


def _seen(changes: NDArray[np.float64], tolerance: float) -> NDArray[np.bool_]:
    """Return which changes are seen; one that is no number is."""
    return ~(np.abs(changes) <= SEEN * tolerance)


def _shares(sums: NDArray[np.float64], counts: NDArray[np.float64], tolerance: float) -> dict[str, float]:
    """Return the shares of units that change, and that are harmed, with their limits; and the extreme changes."""
    changes = sums[counts > 0] / counts[counts > 0]
    some = {"seen": _seen(changes, tolerance), "harmed": ~(changes <= HARM * tolerance)}
    ends = {"least": float(changes.min()), "worst": float(changes.max())} if len(changes) else {}
    shares = {name: x for n, these in some.items() for name, x in share_below(n, these).items()}
    return shares | {"least": math.nan, "worst": math.nan} | ends


def share_below(name: str, some: NDArray[np.bool_]) -> dict[str, float]:
    """Return a share under a name, and as ``name_high`` its one-sided 95% limit for unseen inputs."""
    n, above = len(some), int(some.sum())
    if not n:
        return {name: math.nan, f"{name}_high": math.nan}
    high = 1.0 if above == n else float(scipy.stats.beta.ppf(0.95, above + 1, n - above))
    return {name: above / n, f"{name}_high": high}


def tolerance_of(findings: Findings, measure: str) -> float:
    """Return the largest change of a measure that counts as none: the user's limit, else the default."""
    return float(findings.measurements.provenance.get("tolerance") or TOLERANCES[measure])


def within(row: Mapping[str, Any], limit: float) -> bool:
    """Return whether a mean change's upper end is within a limit; without one, the change of every unit."""
    alone = math.isnan(row["high"]) and row["units"] >= FEWEST
    return bool(row["high"] <= limit or (alone and row["worst"] <= limit))


def costs(row: Mapping[str, Any], limit: float) -> bool:
    """Return whether a mean change's lower end is above a limit; without one, the change of every unit."""
    alone = math.isnan(row["low"]) and row["units"] >= FEWEST
    return bool(row["low"] > limit or (alone and row["least"] > limit))


def _ratio(sums: "pd.Series[Any]", counts: "pd.Series[Any]") -> float:
    return float(sums.sum() / counts.sum()) if counts.sum() else math.nan


def budget_content(findings: Findings, model: str) -> dict[str, Any]:
    """Return a model's budgets in the form of a budget file: docs/commands/k-sweep.md."""
    measurements = findings.measurements
    own = measurements.budgets[measurements.budgets["model"] == model]
    again = findings(change_table)
    again = again[again["model"] == model]
    facts = next(row for row in measurements.models.to_dict("records") if row["model"] == model)
    limit = tolerance_of(findings, str(again["measure"].iloc[0])) if len(again) else None
    budgets = {}
    for name, rows in own.groupby("budget", sort=False):
        tested = records(again[again["mask"] == name])[0]
        block = int(rows["block"].iloc[0])
        samples = measurements.rerun[(measurements.rerun["model"] == model) & (measurements.rerun["mask"] == name)]
        budgets[str(name)] = {
            "block": block,
            "total": int(rows["k"].sum()),
            "share": _ratio(rows["kept_keys"], rows["all_keys"]),
            "chosen": {"samples": [0, int(samples["sample"].min()) - 1]},
            "tested": {
                "samples": [int(samples["sample"].min()), int(samples["sample"].max())],
                "measure": tested["measure"],
                "without_mask": float(tested["before"]),
                "change": float(tested["change"]),
                "interval": [float(tested["low"]), float(tested["high"])],
                "harmed": float(tested["harmed"]),
                "harmed_high": float(tested["harmed_high"]),
                "holds": _holds(tested, limit),
            },
            "layers": _layers(rows),
        }
    default = "loss" if "loss" in budgets else next(iter(budgets), None)
    return {
        "schema": "semdiag.budget/1",
        "model": model,
        "sha256": facts["sha256"],
        "inputs": facts["inputs"],
        "tolerance": limit,
        "default": default,
        "budgets": budgets,
    }


def _holds(tested: Mapping[str, Any], limit: float | None) -> bool | None:
    """Return whether a budget suffices; None if these samples do not decide."""
    if limit is None:
        return None
    if within(tested, limit) and tested["harmed_high"] <= MOST_HARMED:
        return True
    return False if costs(tested, limit) else None


def _layers(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the layers of a budget, each with k by head."""
    attentions: dict[tuple[str, int], dict[str, Any]] = {}
    for row in records(rows.sort_values(["layer", "head"])):
        names = {name: row[name] for name in ("layer", "module", "occurrence")}
        attentions.setdefault((row["module"], row["occurrence"]), {**names, "k": []})["k"].append(row["k"])
    return list(attentions.values())


MASS = 0.95  # of the attention weight, where nothing else is known
MOST_KEYS = 0.5  # share of all keys above which a mask is hardly sparse
_DOUBLED = math.log(2)  # above it, a change of perplexity is given as a factor
_CHANCE = 0.99  # of ln C: a loss above it is no better than that of C equally likely classes
_WORDS = {  # what changes; a cost; another change; the end of a limit
    "perplexity": ("perplexity", "costs {} perplexity", "changes perplexity by {}", "of perplexity"),
    "loss": ("the loss", "costs {} of loss", "changes the loss by {}", "of loss"),
    "divergence": (
        "the output distribution (KL divergence)", "", "changes the output distribution by {} (KL divergence)",
        "of KL divergence",
    ),
    "output_change": (
        "the outputs (of their norm)", "", "changes the outputs by {} of their norm", "of the outputs' norm",
    ),
}  # fmt: skip

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Unit:
    """How changes of a measure are written: in per cent of perplexity, in nats, or as shares of a norm."""

    measure: str = ""
    perplexity: bool = False

    @property
    def _words(self) -> tuple[str, str, str, str]:
        return _WORDS["perplexity" if self.perplexity else self.measure]

    @property
    def what(self) -> str:
        """Return what it is that changes: "perplexity", "the loss", "the outputs (of their norm)"."""
        return self._words[0]

    def amount(self, value: float, unit: bool = False) -> str:
        """Return a change: "+1.4%", "× 7.4", "+0.31 nats"."""
        if not math.isfinite(value):
            return "no finite number"
        if self.measure == "output_change":
            return f"{value:.1%}"
        value = 0.0 if abs(value) < ROUNDING else value
        if self.perplexity and value > _DOUBLED:
            return f"× {math.exp(min(value, 700)):.3g}"
        if self.perplexity:
            return f"{100 * math.expm1(value):+.2g}{'%' * unit}"
        return f"{value:+.3g}{' nats' * unit}"

    def limit(self, value: float, named: bool = False) -> str:
        """Return a limit, with what it is a change of if ``named``: "1%", "0.01 nats of loss"."""
        return self.amount(value, True).removeprefix("+") + f" {self._words[3]}" * named

    def cost(self, row: Row) -> str:
        """Return what a mask costs, and how sure that is: "costs 1.4% perplexity (95% interval 0.1 to 2.7%)"."""
        low, change, high = (float(row[name]) for name in ("low", "change", "high"))
        known = math.isfinite(low)
        if self.perplexity and _DOUBLED < change < math.inf and known:
            low, change, high = (math.exp(min(x, 700)) for x in (low, change, high))
            return f"multiplies perplexity by {change:.3g} ({interval_words(low, high, '{:.3g}'.format)})"
        cost, other = self._words[1:3]
        costs = bool(cost) and ROUNDING <= change < math.inf

        def said(value: float, unit: bool) -> str:
            return self.amount(value, unit).removeprefix("+" * costs)

        interval = f"95% interval {said(low, False)} to {said(high, self.perplexity)}"
        text = (cost if costs else other).format(said(change, True))
        return f"{text} ({interval if known else self.without_interval(row)})"

    def without_interval(self, row: Row) -> str:
        """Return what is known of a mean change that has no interval."""
        if row["seen"] == 0:
            seen = f"0 of {units_of(row)} changed by more than {self.limit(SEEN * row['tolerance'])}"
            return f"{seen}; {limit_of_share(row['seen_high'])}"
        alike = row["units"] >= FEWEST and row["least"] == row["worst"]
        return "all samples alike" if alike else "no interval"


def units_of(row: Row) -> str:
    """Return what an interval is over: "24 samples", "32 chunks of 128 tokens"."""
    chunk = f"chunk{'s' * (row['units'] != 1)} of {row['chunk']} tokens or more"
    return f"{row['units']:,} {chunk}" if row["chunk"] else counted(row["units"], "sample")


@dataclass(frozen=True)
class SparseVerdict:
    """Whether top-k attention suffices in a model without retraining."""

    answer: str  # ``plausible``, ``not without loss`` or ``cannot tell``
    sentence: str  # the answer in a sentence
    k: int | None = None
    cost: str = ""  # what k changes, in words; empty where that says nothing
    kept: float = math.nan  # share of all keys that k keeps
    mass: float = math.nan  # mean attention weight that k keeps of queries with more than k keys
    queries: int = 0  # such queries
    left_out: int = 0  # queries with at most k keys, of which nothing is dropped
    # what changes: loss (nats per target), divergence (nats per position) or output_change (relative)
    measure: str = ""
    # whether the loss is that of the next token, so that exp(change) is a factor of perplexity
    perplexity: bool = False
    tolerance: float = math.nan  # largest change that counts as none
    change: float = math.nan  # the change at k, and its interval over samples
    low: float = math.nan  # end of the interval
    high: float = math.nan  # end of the interval
    before: float = math.nan  # the loss without a mask
    harmed: float = math.nan  # the share of samples that change by more than HARM times the tolerance
    harmed_high: float = math.nan  # one-sided limit of that share
    samples: int = 0  # that were run


_OF_THE_ROW = "kept", "change", "low", "high", "before", "harmed", "harmed_high", "samples"


def sparse_verdict(findings: Findings, model: str) -> SparseVerdict:
    """Judge whether the k largest scores of each query suffice for a model."""
    sweep = findings.measurements.sweep
    own = sweep[(sweep["model"] == model) & (sweep["layer"] == ALL) & (sweep["quantity"] == "mass")].set_index("k")
    again = findings(change_table)
    again = again[again["model"] == model]
    top = records(again[(again["mask"] == TOP_K) & (again["kept"] < 1)].sort_values("k"))
    if not top:
        return _by_weight(findings, model, own, ran=len(again) > 0)
    unit = unit_of(findings, model)
    limit = tolerance_of(findings, unit.measure)
    answer, row, words = _judged(top, again, limit, unit)
    k, mass, queries, left_out = int(row["k"]), math.nan, 0, 0
    if k in own.index:
        mass, left_out = float(own["mean"][k]), int(own["undefined"][k])
        queries = int(own["queries"][k]) - left_out
    estimated = words.startswith("k =") or answer != Answer.OPEN
    weight = f", keeps {strict_percent(mass)} of the weight" if answer == Answer.PLAUSIBLE and mass == mass else ""
    head = "" if answer == Answer.OPEN and estimated else f"{answer}: "
    return SparseVerdict(
        answer, f"{head}{words}{weight}.", k, unit.cost(row) if estimated else "", mass=mass, queries=queries,
        left_out=left_out, measure=unit.measure, perplexity=unit.perplexity, tolerance=limit,
        **{name: row[name] for name in _OF_THE_ROW},
    )  # fmt: skip


def _by_weight(findings: Findings, model: str, mass: pd.DataFrame, ran: bool) -> SparseVerdict:
    """Return what the sweep says of a model that was not run with masks of top-k that drop keys."""
    attention = findings.measurements.models.set_index("model")["attention"][model]
    if attention not in (*DENSE, *HEAVY_HITTERS, "bottomk"):
        return SparseVerdict(Answer.OPEN, "cannot tell: its mask does not rank keys by their scores.")
    if ran or mass.empty or attention not in DENSE:
        return SparseVerdict(Answer.OPEN, "cannot tell: no mask of top-k that drops keys was run.")
    enough = mass[mass["mean"] >= MASS]
    if enough.empty:
        k, kept, queries, left_out = None, math.nan, 0, 0
        weight = f"no k up to the largest measured keeps {MASS:.0%} of the weight"
    else:
        k, row = int(str(enough.index[0])), enough.iloc[0]
        kept, left_out = float(row["mean"]), int(row["undefined"])
        queries, weight = int(row["queries"]) - left_out, f"k = {k} keeps {strict_percent(kept)} of the weight"
    run = f"to measure what a mask costs: semdiag k-sweep {model} --rerun"
    sentence = f"cannot tell before it is run with masks: {weight}; {run}."
    return SparseVerdict(Answer.OPEN, sentence, k, mass=kept, queries=queries, left_out=left_out)


def _judged(top: Sequence[Row], again: pd.DataFrame, limit: float, unit: Unit) -> tuple[Answer, Row, str]:
    """Return the answer of reruns, the row that decides, and the words of both; k in ascending order."""
    stays = _from(top, lambda row: within(row, limit))
    safe = _from(top, lambda row: within(row, limit) and row["harmed_high"] <= MOST_HARMED)
    sparse = [row for row in top if row["kept"] <= MOST_KEYS]
    last = sparse[-1] if sparse else top[-1]
    answer, row, more = Answer.OPEN, last, ""
    if safe is not None and safe["kept"] <= MOST_KEYS:
        answer, row = Answer.PLAUSIBLE, safe
    elif stays is not None and stays["kept"] <= MOST_KEYS:
        row, many = stays, stays["units"]
        more = f"{round(stays['harmed'] * many)} of {units_of(stays)} change by more than "
        more += f"{unit.limit(HARM * limit, True)}, and {limit_of_share(stays['harmed_high'])}"
        more += f": {LEAST_SAMPLES} samples can tell" * (many < LEAST_SAMPLES)
    elif stays is not None and not sparse:
        row, more = stays, "no k of at most half of the keys was run"
    elif not all(math.isfinite(each["change"]) for each in (top[-1], last)):
        row = next(each for each in (top[-1], last) if not math.isfinite(each["change"]))
        more = "cannot tell from outputs that are no finite numbers"
    elif not costs(last, limit):
        needed = _samples_needed(last, limit)
        more = f"{units_of(last)} cannot tell whether by more than {unit.limit(limit)}"
        more += f"; about {needed:,} would" if needed and not last["chunk"] else ""
    else:
        answer = Answer.COSTS if unit.measure == "loss" else Answer.CHANGES
        row = last if stays is not None or not costs(top[-1], limit) else top[-1]
        more = (
            ""
            if stays is None
            else f"within {unit.limit(limit)} needs {stays['k']} ({stays['kept']:.0%} of the keys)"
        )
    control = again[(again["mask"] == RANDOM) & (again["k"] == row["k"])]
    if (
        unit.measure == "loss"
        and row["classes"] > 1
        and _CHANCE * math.log(row["classes"]) <= row["before"] < math.inf
    ):
        return Answer.OPEN, row, "the model predicts no better than chance (untrained?)"
    if answer not in (Answer.COSTS, Answer.CHANGES) and len(control) and within(control.iloc[0], limit):
        return (
            Answer.OPEN,
            row,
            "as many random keys do as little harm: what is measured does not depend on the attention",
        )
    even = "even " * (answer in (Answer.COSTS, Answer.CHANGES) and not more)
    words = f"{even}k = {row['k']} per query ({row['kept']:.0%} of the keys) {unit.cost(row)}"
    return answer, row, words + f"; {more}" * bool(more)


def _from(top: Sequence[Row], holds: Callable[[Row], bool]) -> Row | None:
    """Return the row of the smallest k from which on the condition holds; None if it fails for the largest."""
    smallest = None
    for row in reversed(top):
        if not holds(row):
            break
        smallest = row
    return smallest


def _samples_needed(row: Row, limit: float) -> int | None:
    """Estimate how many samples decide whether a change is within a limit; None if that is unknown."""
    half, distance = (row["high"] - row["low"]) / 2, abs(limit - row["change"])
    if not (half > 0 and distance > 0):
        return LEAST_SAMPLES if math.isnan(half) else None
    return max(LEAST_SAMPLES, math.ceil(float(row["units"]) * float(half / distance) ** 2))


def sparse_glance(findings: Findings) -> Glance:
    """Return whether sparse attention suffices: for one model its k, for several how many need how few keys."""
    verdicts = [findings(sparse_verdict, model) for model in findings.measurements.models["model"]]
    if len(verdicts) == 1 and verdicts[0].cost:
        (one,) = verdicts
        weight = "" if math.isnan(one.mass) else f" and keeps {whole_percent(one.mass)} of the weight"
        words = f"per query ({one.kept:.0%} of the keys) {one.cost}{weight * (one.answer != Answer.OPEN)}"
        return Glance(Answer(one.answer), f"k = {one.k}", words)
    judged = [each for each in verdicts if each.answer != Answer.OPEN]
    if not judged:
        return _glance_of_weights(verdicts)
    plausible = [each for each in judged if each.answer == Answer.PLAUSIBLE]
    costs = Answer.COSTS if all(each.measure == "loss" for each in judged) else Answer.CHANGES
    answer = Answer.PLAUSIBLE if len(plausible) == len(judged) else costs
    words = "that were run with masks need at most half of their keys"
    words += f" (k = {span_words([each.k for each in plausible if each.k], '{}')})" if plausible else ""
    words += f"; {len(verdicts) - len(judged)} more cannot be judged" if len(judged) < len(verdicts) else ""
    return Glance(answer, f"{len(plausible)} of {counted(len(judged), 'model')}", words)


def _glance_of_weights(verdicts: list[SparseVerdict]) -> Glance:
    """Return how many keys hold most of the weight, if no model was judged by a rerun."""
    weighed = [each for each in verdicts if not each.samples and each.k is not None]
    if not weighed:
        return Glance(Answer.OPEN, f"0 of {counted(len(verdicts), 'model')}", "can be judged")
    many = f", in {len(weighed)} of {len(verdicts)} models" if len(verdicts) > 1 else ""
    queries, left_out = (sum(getattr(each, name) for each in weighed) for name in ("queries", "left_out"))
    without = f" ({left_out:,} with no more are left out)" * (left_out > 0)
    return Glance(
        Answer.OPEN, f"k = {span_words([each.k for each in weighed if each.k], '{}')}",
        f"keeps {MASS:.0%} of the weight on average over {counted(queries, 'query')} with more "
        f"keys{without}{many}; to measure what a mask costs: semdiag k-sweep MODEL --rerun",
    )  # fmt: skip


def unit_of(findings: Findings, model: str) -> Unit:
    """Return in what a model's changes are written: in perplexity where it predicts next tokens."""
    measurements = findings.measurements
    own = measurements.rerun[measurements.rerun["model"] == model]
    measure = measure_of(own)
    if own.empty:  # its texts alone were cut into lengths
        quarters = measurements.rerun_quarters
        measure = "loss" if quarters.loc[quarters["model"] == model, "targets"].sum() else "divergence"
    causal = measurements.models.set_index("model")["attention"][model] == "causal"
    targets = own.groupby(["mask", "k", "sample"])["targets"].sum().max() if len(own) else 2
    return Unit(measure, bool(measure == "loss" and causal and targets > 1))


WHOLE = 0  # in the column quarter: all positions
_COLUMNS = ("model", "length", "mask", "k", "quarter", "samples", "measure", "change", "low", "high", "kept")


def quarter_table(findings: Findings) -> pd.DataFrame:
    """Return the mean change of the loss by length, mask and quarter, with 95% intervals over samples."""
    rows: list[dict[str, Any]] = []
    for place, own in findings.measurements.rerun_quarters.groupby(["model", "length"], sort=False):
        model, length = cast("tuple[str, int]", place)
        measure, unit = ("loss", "targets") if own["targets"].sum() else ("divergence", "predictions")
        parts = own.pivot_table(
            index=["mask", "k", "sample"], columns="quarter", values=[measure, unit], aggfunc="sum"
        )
        parts = parts.astype(np.float64)
        base = parts.loc[NO_MASK].droplevel("k")
        kept = own.groupby(["mask", "k"])[["kept", "keys"]].sum()
        for mask, k in kept.index:
            if mask == NO_MASK:
                continue
            these = parts.loc[mask, k]
            before = base.loc[these.index]
            common = {"model": model, "length": length, "mask": mask, "k": int(k), "samples": len(these)}
            common |= {"measure": measure, "kept": float(kept["kept"][mask, k] / kept["keys"][mask, k])}
            for quarter in (WHOLE, *range(1, QUARTERS + 1)):
                at = list(range(1, QUARTERS + 1)) if quarter == WHOLE else [quarter]
                sums = (these[measure][at] - before[measure][at]).sum(axis=1)
                counts = these[unit][at].sum(axis=1)
                interval = change_interval(sums.to_numpy(), counts.to_numpy(), tolerance_of(findings, measure))
                rows.append(
                    {
                        **common,
                        "quarter": quarter,
                        "change": interval.estimate,
                        "low": interval.low,
                        "high": interval.high,
                    }
                )
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def smallest_enough(findings: Findings, model: str) -> pd.DataFrame:
    """By length and kind of mask the smallest k that was run from which on the mean change is tolerated."""
    table = findings(quarter_table)
    own = table[(table["model"] == model) & (table["length"] > 0) & (table["quarter"] == WHOLE)]
    rows = []
    for place, these in own[own["mask"].isin(KINDS)].groupby(["length", "mask"], sort=False):
        length, mask = cast("tuple[int, str]", place)
        limit, smallest = tolerance_of(findings, str(these["measure"].iloc[0])), None
        for row in these.sort_values("k", ascending=False).to_dict("records"):
            if not row["change"] <= limit:
                break
            smallest = row
        kept = math.nan if smallest is None else smallest["kept"]
        k = None if smallest is None else int(smallest["k"])
        rows.append({"length": length, "mask": mask, "k": k, "kept": kept, "largest": int(these["k"].max())})
    return pd.DataFrame(rows, columns=["length", "mask", "k", "kept", "largest"]).astype({"k": "Int64"})
