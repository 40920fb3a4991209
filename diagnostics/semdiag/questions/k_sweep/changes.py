"""What masks change: by kind and k, by quarter and length of texts; budgets; and the paper's conditions by k."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import numpy as np
import pandas as pd
import scipy
import torch
from numpy.typing import NDArray

from semdiag.mathematics.bounds.corollary import paper_input_condition, paper_weight_condition
from semdiag.measuring.findings.estimates import sampled_models
from semdiag.measuring.findings.findings import Findings, records
from semdiag.measuring.findings.resampling import Interval, sum_ratio_interval
from semdiag.measuring.table import ALL, rows_of_model
from semdiag.measuring.words import FEWEST, counted, interval_words, limit_of_share, number
from semdiag.presenting.answer import Claim, Outcome
from semdiag.questions.bounds.corollary import JUDGED_PERCENTILES, PAPER_PERCENTILES, separation_rounding
from semdiag.questions.k_sweep.budgets import BUDGET_TABLE, KINDS, TOP_K
from semdiag.questions.k_sweep.measure import K_SWEEP_TABLE
from semdiag.questions.k_sweep.rerun import (
    HARM,
    KIND_NOT_RUN,
    LENGTHS_TABLE,
    MOST_HARMED,
    NO_MASK,
    RERUN_FAILED,
    RERUN_TABLE,
    TOLERANCES,
    UNITS,
    Numbers,
    measure_of,
    unit_changes,
)

Row = Mapping[str, Any]
SEEN = 0.1  # of the tolerance: a smaller change of a sample is as good as none
_OF_THE_SWEEP = ("weight_kept", "weight_kept_without_first", "head_change", "stream_change")


def change_table(findings: Findings) -> pd.DataFrame:
    """Return the changes by each mask of each rerun, with 95% intervals over samples, or chunks of few ones."""
    rows: list[dict[str, Any]] = []
    for model, again in findings.measurements[RERUN_TABLE].groupby("model", sort=False):
        sweep = rows_of_model(findings.measurements[K_SWEEP_TABLE], str(model))
        means = sweep[sweep["layer"] == ALL].set_index(["quantity", "k"])["mean"]
        base = again[again["mask"] == NO_MASK].set_index(UNITS)
        measure = measure_of(again)
        limit = tolerance_of(findings, measure)
        for place, rows_of_mask in again.groupby(["mask", "k"], sort=False):
            (mask, k), rows_with_mask = cast("tuple[str, int]", place), rows_of_mask.set_index(UNITS)
            before = base.loc[rows_with_mask.index]
            samples = rows_with_mask.index.get_level_values(0).nunique()
            chunk = int(rows_with_mask["chunk"].max())
            row: dict[str, Any] = {"model": model, "mask": mask, "k": int(k), "samples": samples}
            row |= {
                "units": len(rows_with_mask),
                "chunk": chunk,
                "measure": measure,
                "classes": int(rows_with_mask["classes"].max()),
            }
            row["before"] = _ratio(before["loss"], before["targets"])
            sums, counts = unit_changes(measure, rows_with_mask, base)
            row |= _interval(sums, counts, limit) | {"tolerance": limit} | _shares(sums, counts, limit)
            for name, share in (("divergence", False), ("changed", True)):
                values = (
                    rows_with_mask[name].to_numpy(np.float64),
                    rows_with_mask["predictions"].to_numpy(np.float64),
                )
                row |= sum_ratio_interval(*values, share=share).columns(name)
            row["accuracy"] = _ratio(rows_with_mask["correct"], rows_with_mask["targets"])
            for name in _OF_THE_SWEEP:
                measured = mask == TOP_K and (name, k) in means.index
                row[name] = float(means[name, k]) if measured else math.nan
            rows.append(row | {"kept": _ratio(rows_with_mask["kept"], rows_with_mask["keys"])})
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["model", "mask", "k", "kept"])


def change_interval(sums: Numbers, counts: Numbers, tolerance: float) -> Interval:
    """Return a mean change; no interval where all units change alike, or none by a tenth of the tolerance."""
    interval = sum_ratio_interval(sums, counts).if_varied()
    varies = _seen(sums[counts > 0] / counts[counts > 0], tolerance).any()
    return interval if varies else Interval(interval.estimate, math.nan, math.nan)


def _interval(sums: Numbers, counts: Numbers, tolerance: float) -> dict[str, float]:
    interval = change_interval(sums, counts, tolerance)
    return {"change": interval.estimate, "low": interval.low, "high": interval.high}


def _seen(changes: Numbers, tolerance: float) -> NDArray[np.bool_]:
    """Return which changes are seen; one that is no number is."""
    return ~(np.abs(changes) <= SEEN * tolerance)


def _shares(sums: Numbers, counts: Numbers, tolerance: float) -> dict[str, float]:
    changes = sums[counts > 0] / counts[counts > 0]
    harmed = ~(changes <= HARM * tolerance)
    ends = {"least": float(changes.min()), "worst": float(changes.max())} if len(changes) else {}
    shares = share_below("seen", _seen(changes, tolerance)) | share_below("harmed", harmed)
    return shares | {"least": math.nan, "worst": math.nan} | ends


def share_below(name: str, some: NDArray[np.bool_]) -> dict[str, float]:
    """Return a share under a name, and as ``name_high`` its one-sided 95% limit for unseen inputs."""
    n = len(some)
    above = int(some.sum())
    if not n:
        return {name: math.nan, f"{name}_high": math.nan}
    high = 1.0 if above == n else float(scipy.stats.beta.ppf(0.95, above + 1, n - above))
    return {name: above / n, f"{name}_high": high}


def tolerance_of(findings: Findings, measure: str) -> float:
    """Return the largest change of a measure that counts as none: the user's limit, else the default."""
    return float(findings.measurements.provenance.get("tolerance") or TOLERANCES[measure])


def within(row: Row, limit: float) -> bool:
    """Return whether a mean change's upper end is within a limit; without one, the change of every unit."""
    alone = math.isnan(row["high"]) and row["units"] >= FEWEST
    return bool(row["high"] <= limit or (alone and row["worst"] <= limit))


def costs(row: Row, limit: float) -> bool:
    """Return whether a mean change's lower end is above a limit; without one, the change of every unit."""
    alone = math.isnan(row["low"]) and row["units"] >= FEWEST
    return bool(row["low"] > limit or (alone and row["least"] > limit))


def harmless(row: Row, limit: float) -> bool:
    """Return whether a mean change is within a limit, and few inputs can change by much more.

    Chunks of few samples are no inputs: however many they are, they say nothing of other texts.
    """
    return not row["chunk"] and within(row, limit) and bool(row["harmed_high"] <= MOST_HARMED)


def smallest_from(rows: Sequence[Row], holds: Callable[[Row], bool]) -> Row | None:
    """Return the row of the smallest k from which on the condition holds; None if it fails for the largest."""
    smallest = None
    for row in sorted(rows, key=lambda row: -row["k"]):
        if not holds(row):
            break
        smallest = row
    return smallest


def _ratio(sums: "pd.Series[Any]", counts: "pd.Series[Any]") -> float:
    return float(sums.sum() / counts.sum()) if counts.sum() else math.nan


def length_table(findings: Findings) -> pd.DataFrame:
    """Return the mean change by each mask at each length of texts, with 95% intervals over samples or chunks."""
    rows: list[dict[str, Any]] = []
    for place, again in findings.measurements[LENGTHS_TABLE].groupby(["model", "length"], sort=False):
        measure = measure_of(again)
        unit = "targets" if measure == "loss" else "predictions"
        limit = tolerance_of(findings, measure)
        sums = again.groupby(["mask", "k", *UNITS])[[measure, unit, "kept", "keys"]].sum()
        before = sums.loc[NO_MASK].droplevel("k")[measure]
        for mask, k in dict.fromkeys((mask, k) for mask, k, *_ in sums.drop(NO_MASK).index):
            sums_of_mask = sums.loc[mask, k]
            change = (sums_of_mask[measure] - before[sums_of_mask.index]).to_numpy(np.float64)
            row = dict(zip(("model", "length"), cast("tuple[str, int]", place), strict=True))
            samples = sums_of_mask.index.get_level_values("sample").nunique()
            row |= {"mask": mask, "k": int(k), "samples": samples, "measure": measure}
            row |= _interval(change, sums_of_mask[unit].to_numpy(np.float64), limit)
            rows.append(row | {"kept": _ratio(sums_of_mask["kept"], sums_of_mask["keys"])})
    order = ["model", "length", "mask", "k", "samples", "measure", "change", "low", "high", "kept"]
    return pd.DataFrame(rows, columns=order)


def smallest_enough(findings: Findings, model: str) -> pd.DataFrame:
    """By length and kind of mask the smallest k that was run from which on the mean change is tolerated."""
    table = rows_of_model(findings(length_table), model)
    table = table[table["mask"].isin(KINDS)]
    rows = []
    for place, these in table.groupby(["length", "mask"], sort=False):
        length, mask = cast("tuple[int, str]", place)
        small = these["change"] <= tolerance_of(findings, str(these["measure"].iloc[0]))
        smallest = smallest_from(records(these.assign(small=small)), itemgetter("small"))
        k, kept = (None, math.nan) if smallest is None else (smallest["k"], smallest["kept"])
        rows.append({"length": length, "mask": mask, "k": k, "kept": kept, "largest": int(these["k"].max())})
    return pd.DataFrame(rows, columns=["length", "mask", "k", "kept", "largest"]).astype({"k": "Int64"})


def condition_table(findings: Findings) -> pd.DataFrame:
    """Return both conditions of Corollary 1 within each model, for every k, at matching percentiles."""
    rows = []
    for model, sweep in findings.measurements[K_SWEEP_TABLE].groupby("model", sort=False):
        pooled = {(str(row["quantity"]), row["k"]): row for row in records(sweep[sweep["layer"] == ALL])}
        if ("dispersion", 0) not in pooled or model in sampled_models(findings):
            continue
        full = _cuts(pooled["dispersion", 0])
        rounding = separation_rounding(findings.measurements, str(model), float(full[-1]))
        for k in sorted(sweep.loc[sweep["quantity"] == "separation", "k"].unique()):
            delta = _cuts(pooled["dispersion", k])
            load = _cuts(pooled["load", k]) / int(k)
            gap = _cuts(pooled["separation", k], mirrored=True)
            gap = torch.where(gap.isnan(), torch.inf, gap.where(gap.abs() > rounding, 0.0))
            sides = {
                "W": paper_weight_condition(full, delta, gap),
                "X": paper_input_condition(full, delta, gap, load),
            }
            for parameter, condition in sides.items():
                for at, percentile in enumerate(PAPER_PERCENTILES):
                    row = {"model": model, "k": int(k), "percentile": percentile, "parameter": parameter}
                    met = {"left_side": float(condition.left_side[at]), "met": bool(condition.met[at])}
                    rows.append(row | met)
    table = pd.DataFrame(rows, columns=["model", "k", "percentile", "parameter", "left_side", "met"])
    return table.astype({"k": "int64", "percentile": "int64", "left_side": "float64", "met": "bool"})  # if empty


def _cuts(row: Row, mirrored: bool = False) -> torch.Tensor:
    names = [f"p{100 - p if mirrored else p}" for p in PAPER_PERCENTILES]
    return torch.tensor([row[name] for name in names], dtype=torch.float64)


def judged_conditions(findings: Findings, model: str) -> pd.DataFrame:
    """Return the 6 cases (W and X at p75, p90 and p95) of each k in which the paper's conditions are judged."""
    table = rows_of_model(findings(condition_table), model)
    return table[table["percentile"].isin(JUDGED_PERCENTILES)]


def conditions_met(findings: Findings, model: str) -> dict[int, int]:
    """Return in how many of 6 cases each k meets the paper's conditions."""
    counts = judged_conditions(findings, model).groupby("k")["met"].sum()
    return {int(str(k)): int(count) for k, count in counts.items()}


def budget_content(findings: Findings, model: str) -> dict[str, Any]:
    """Return a model's budgets in the form of a budget file: docs/commands/k-sweep.md."""
    measurements = findings.measurements
    again = rows_of_model(findings(change_table), model)
    facts = rows_of_model(measurements.models, model).iloc[0]
    limit = tolerance_of(findings, str(again["measure"].iloc[0])) if len(again) else None
    budgets = {}
    for name, rows in rows_of_model(measurements[BUDGET_TABLE], model).groupby("budget", sort=False):
        tested = records(again[again["mask"] == name])[0]
        samples = measurements[RERUN_TABLE].query("model == @model and mask == @name")["sample"]
        first = int(samples.min())
        last = int(samples.max())
        budgets[str(name)] = {
            "block": int(rows["block"].iloc[0]),
            "total": int(rows["k"].sum()),
            "share": _ratio(rows["kept_keys"], rows["all_keys"]),
            "chosen": {"samples": [0, first - 1]},
            "tested": {
                "samples": [first, last], "measure": tested["measure"], "without_mask": float(tested["before"]),
                "change": float(tested["change"]), "interval": [float(tested["low"]), float(tested["high"])],
                "harmed": float(tested["harmed"]), "harmed_high": float(tested["harmed_high"]),
                "holds": None if limit is None else _holds(tested, limit),
            },
            "layers": _layers(rows),
        }  # fmt: skip
    default = "loss" if "loss" in budgets else next(iter(budgets), None)
    return {
        "schema": "semdiag.budget/1", "model": model, "sha256": facts["sha256"], "inputs": facts["inputs"],
        "tolerance": limit, "default": default, "budgets": budgets,
    }  # fmt: skip


def _holds(tested: Row, limit: float) -> bool | None:
    return True if harmless(tested, limit) else False if costs(tested, limit) else None


def _layers(rows: pd.DataFrame) -> list[dict[str, Any]]:
    attentions: dict[tuple[str, int], dict[str, Any]] = {}
    for row in records(rows.sort_values(["layer", "head"])):
        names = {name: row[name] for name in ("layer", "module", "occurrence")}
        attentions.setdefault((row["module"], row["occurrence"]), {**names, "k": []})["k"].append(row["k"])
    return list(attentions.values())


def failed_reruns(findings: Findings) -> dict[str, str]:
    """Return why a run with masks failed, by model."""
    remarks = findings.measurements.remarks
    failed = remarks[remarks["code"] == RERUN_FAILED]
    return {str(row["model"]): str(row["text"]) for row in records(failed)}


def refused_kinds(findings: Findings, model: str) -> list[str]:
    """Return which kinds of masks a model was not run with, and why, a sentence each."""
    remarks = rows_of_model(findings.measurements.remarks, model)
    refused = remarks.loc[remarks["code"] == KIND_NOT_RUN, "text"]
    return [f"{reason[:1].upper()}{reason[1:].removesuffix('.')}." for reason in map(str, refused)]


def failure_claims(findings: Findings) -> list[Claim]:
    """Return a claim on each run with masks that failed: where there is one, it comes before all else."""
    return [
        Claim(RERUN_FAILED, f"{model} was {why}.", model, verdict=Outcome.OPEN)
        for model, why in failed_reruns(findings).items()
    ]


ROUNDING = 5e-5  # anything smaller may be rounding: nats, or relative
_DOUBLED = math.log(2)  # above it, a change of perplexity is given as a factor
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
        value = without_rounding(value)
        if self.perplexity and value > _DOUBLED:
            return f"× {number(math.exp(min(value, 700)))}"
        if self.perplexity:
            return f"{100 * math.expm1(value):+.2g}{'%' * unit}"
        return f"{value:+.3g}{' nats' * unit}"

    def limit(self, value: float, named: bool = False) -> str:
        """Return a limit, with what it is a change of if ``named``: "1%", "0.01 nats of loss"."""
        return self.amount(value, True).removeprefix("+") + f" {self._words[3]}" * named

    def cost(self, row: Row) -> str:
        """Return what a mask costs, and how sure that is: "costs 1.4% perplexity (95% interval 0.1 to 2.7%)"."""
        low, change, high = (float(row[name]) for name in ("low", "change", "high"))
        has_interval = math.isfinite(low)
        if self.perplexity and _DOUBLED < change < math.inf and has_interval:
            low, change, high = (math.exp(min(x, 700)) for x in (low, change, high))
            ends = interval_words(low, high, number) + over_chunks(row)
            return f"multiplies perplexity by {number(change)} ({ends})"
        cost, change_in_words = self._words[1:3]
        costs = bool(cost) and ROUNDING <= change < math.inf

        def said(value: float, unit: bool) -> str:
            return self.amount(value, unit).removeprefix("+" * costs)

        ends = f"95% interval {said(low, False)} to {said(high, self.perplexity)}{over_chunks(row)}"
        words = (cost if costs else change_in_words).format(said(change, True))
        return f"{words} ({ends if has_interval else self.without_interval(row)})"

    def without_interval(self, row: Row) -> str:
        """Return what is known of a mean change that has no interval."""
        if row["seen"] == 0:
            words = f"0 of {units_of(row)} changed by more than {self.limit(SEEN * row['tolerance'])}"
            return f"{words}; {limit_of_share(row['seen_high'], kind_of_unit(row))}"
        return "all samples alike" if all_alike(row) else "no interval"


def without_rounding(value: float) -> float:
    """Return a change, 0 where it is as small as rounding."""
    return 0.0 if abs(value) < ROUNDING else value


def all_alike(row: Row) -> bool:
    """Return whether all units, enough for an interval, change by the same."""
    return bool(row["units"] >= FEWEST and row["least"] == row["worst"])


def units_of(row: Row) -> str:
    """Return what an interval is over: "24 samples", "32 chunks of these 2 texts"."""
    if not row["chunk"]:
        return counted(row["units"], "sample")
    return f"{counted(row['units'], 'chunk')} of {texts_of(row)}"


def kind_of_unit(row: Row) -> str:
    """Return what a share is of: "inputs", "chunks of this text", "chunks of these 2 texts"."""
    return f"chunks of {texts_of(row)}" if row["chunk"] else "inputs"


def texts_of(row: Row) -> str:
    """Return the texts that were cut into chunks: "this text", "these 2 texts"."""
    return "this text" if row["samples"] == 1 else f"these {row['samples']} texts"


def over_chunks(row: Row) -> str:
    """Return what an interval is about where it is not about inputs like these."""
    return f" over {kind_of_unit(row)}" if row["chunk"] else ""


def unit_of(findings: Findings, model: str) -> Unit:
    """Return in what a model's changes are written: in perplexity where it predicts next tokens."""
    measurements = findings.measurements
    rows = rows_of_model(measurements[RERUN_TABLE], model)
    measure = measure_of(rows)
    if rows.empty:  # its texts alone were cut into lengths
        measure = "loss" if rows_of_model(measurements[LENGTHS_TABLE], model)["targets"].sum() else "divergence"
    causal = rows_of_model(measurements.models, model)["attention"].iloc[0] == "causal"
    targets = rows.groupby(["mask", "k", "sample"])["targets"].sum().max() if len(rows) else 2
    return Unit(measure, bool(measure == "loss" and causal and targets > 1))
