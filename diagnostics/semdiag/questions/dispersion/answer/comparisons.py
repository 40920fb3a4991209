"""δ of sparse models beside that of full attention, by layer and pooled."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from semdiag.capturing.attention_kinds import FIXED_MASKS
from semdiag.measuring.findings.distributions import known_rows, pooled_percentiles
from semdiag.measuring.findings.divergence import diverged
from semdiag.measuring.findings.estimates import in_part
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.layered_summary import Percentile, by_layer, without
from semdiag.measuring.findings.number_words import interval_words, ratio_words
from semdiag.measuring.findings.pairing import Pair, find_pairs
from semdiag.measuring.findings.resampling import Interval, ratio_interval
from semdiag.measuring.findings.strict_json import Summary
from semdiag.questions.dispersion.answer.pairs import GateResult, dispersion_gate

_WHEN = {"last": "", "initialisation": "At initialisation: ", "best": "Best snapshots: "}


def dispersion_summary(findings: Findings) -> Summary:
    """Return percentiles of δ by layer and head and pooled; with counterfactual columns, also of δ_h(k) and mass."""
    queries = findings.measurements.queries

    def describe(of: Percentile, suffix: str) -> Summary:
        numbers = without(of("dispersion" + suffix), "not_positive")
        if suffix and "mass" + suffix in queries:
            numbers["mass"] = without(of("mass" + suffix), "not_positive")
        if not suffix and "recall" in queries and of("recall")["queries"] > of("recall")["undefined"]:
            undefined = numbers["undefined"] / max(1, numbers["queries"])  # of a query that keeps no key
            numbers |= {"recall": of("recall")["mean"], "without_keys": undefined}
        return numbers

    return by_layer("dispersion", findings, describe)


def recall_table(findings: Findings) -> pd.DataFrame:
    """Return the recall of the largest scores in models that select by hashes or clusters."""
    models = {row["model"]: row for row in findings.measurements.models.to_dict("records")}
    keys = findings.measurements.queries.groupby("model")["keys"].max()
    rows = []
    for result in findings(dispersion_summary)["results"]:
        model = result["model"]
        for row in (*result["layers"], {"layer": "all", "head": "all", **result["all"]}):
            if "recall" in row:
                at_random = min(1.0, models[model]["k"] / keys[model])
                numbers = {name: row[name] for name in ("layer", "head", "recall", "without_keys", "queries")}
                rows.append({"model": model, **numbers, "at_random": at_random})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class PairComparison:
    """A top-k model beside its full counterpart."""

    gate: GateResult  # pooled percentiles of both, and whether δ_h < δ_s at p50, p75, p90 and p95
    ratio: Interval  # of the pooled medians, with a 95% interval from resampled sequences
    snapshot: str  # name of the snapshots compared
    samples: int  # sequences behind the ratio, of the model with fewer

    @property
    def answer(self) -> str:
        """Return whether δ_h < δ_s, in a word or two."""
        if self.gate.unknown:
            return "cannot tell"
        return "yes" if self.gate.passed else f"no at {', '.join(self.gate.failed)}"

    @property
    def sentence(self) -> str:
        """Return the comparison in a sentence."""
        full, topk, ratio = self.gate.full, self.gate.topk, self.ratio
        pair = _WHEN.get(self.snapshot, f"Snapshot {self.snapshot}: ")
        pair += self.gate.pair.label.removesuffix(f", {self.snapshot}")
        if self.gate.unknown:
            return f"{pair}: it is unclear which model has the smaller dispersion, because a δ is not a number."
        alike = ratio.low < ratio.high and round(ratio.low, 2) == round(ratio.high, 2)
        ratio_text = partial(ratio_words, digits=3 if alike else 2)  # tells the ends of the interval apart
        medians = f"median δₕ {topk['p50']:.3g} against δₛ {full['p50']:.3g} nats"
        if math.isfinite(ratio.estimate):
            interval = interval_words(ratio.low, ratio.high, ratio_text, self.samples)
            medians += f", ratio {ratio_text(ratio.estimate)}, {interval}"
        if self.gate.passed:
            where = "at the 50th, 75th, 90th and 95th percentile"
            return f"{pair}: the top-k model has the smaller dispersion {where} ({medians})."
        failed = ", ".join(f"{p} (δₕ {topk[p]:.3g}, δₛ {full[p]:.3g})" for p in self.gate.failed)
        return f"{pair}: δₕ is not below δₛ at {failed} ({medians})."

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        gate, ratio = self.gate, self.ratio
        return {
            "label": gate.pair.label,
            "snapshot": self.snapshot,
            "full": gate.pair.full,
            "topk": gate.pair.other,
            "dispersion_full": gate.full,
            "dispersion_topk": gate.topk,
            "passed": gate.passed,
            "failed": list(gate.failed),
            "unknown": list(gate.unknown),
            "median_ratio": {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high, "confidence": 0.95},
        }


def pair_comparisons(findings: Findings) -> list[PairComparison]:
    """Compare every top-k model that has a full counterpart with it, last snapshots first."""
    measurements = findings.measurements
    pairs, _ = find_pairs(measurements.models)
    paired = {model for pair in pairs for model in (pair.full, pair.other)}
    if not paired or in_part(findings):
        return []
    models = measurements.models[measurements.models["model"].isin(sorted(paired))]
    snapshots = dict(zip(models["model"], models["snapshot"], strict=True))
    comparisons = []
    for gate in dispersion_gate(Findings(measurements.replace(models=models))):
        other, full = (known_rows(findings, m, "dispersion") for m in (gate.pair.other, gate.pair.full))
        ratio = ratio_interval(other, full, resamples=RESAMPLES)
        samples = min(other["sample"].nunique(), full["sample"].nunique())
        comparisons.append(PairComparison(gate, ratio, snapshots[gate.pair.other], samples))
    return sorted(comparisons, key=lambda comparison: comparison.snapshot != "last")


RATIO_PERCENTILES = (50, 95)
RESAMPLES = 300  # of whole sequences: the ends of a 95% interval are then known to about a tenth of its width


def layer_ratios(findings: Findings, resamples: int = RESAMPLES) -> pd.DataFrame:
    """Return the ratios of dispersion between every sparse model and its full counterpart, by layer."""
    pairs, _ = find_pairs(findings.measurements.models, attention=None)
    queries = findings.measurements.queries
    rows = {
        (str(model), int(layer)): known_rows(findings, str(model), "dispersion", int(layer))
        for model, of_model in queries.groupby("model", sort=True)["layer"]
        for layer in sorted(of_model.unique())
    }
    ratios = []
    for pair in pairs:
        layers = [layer for model, layer in rows if model == pair.other and (pair.full, layer) in rows]
        for percentile in RATIO_PERCENTILES:
            for layer in layers:
                interval = ratio_interval(
                    rows[pair.other, layer], rows[pair.full, layer], percentile=percentile, resamples=resamples
                )
                numbers = (interval.estimate, interval.low, interval.high)
                ratios.append((pair.other, pair.full, percentile, layer, *numbers))
    return pd.DataFrame(ratios, columns=["model", "full", "percentile", "layer", "ratio", "low", "high"])


def fixed_mask_ratios(findings: Findings) -> list[tuple[Pair, float]]:
    """Return pooled median δ under input-agnostic masks (controls) over full attention's; last snapshots only."""
    models = findings.measurements.models[findings.measurements.models["snapshot"] == "last"]
    pairs, _ = find_pairs(models[models["attention"].isin(FIXED_MASKS)], attention=None)
    medians = {model: table["p50"] for model, table in findings(pooled_percentiles, "dispersion").items()}
    return [
        (pair, medians[pair.other] / medians[pair.full])
        for pair in pairs
        if medians.get(pair.full, 0) > 0 and medians.get(pair.other, math.nan) >= 0
    ]


_BINS = 24
FEWEST = 10  # queries in a bin, to give its percentiles


def dispersion_by_number_of_keys(findings: Findings) -> dict[str, pd.DataFrame]:
    """Return percentiles of δ by the number of allowed keys, from two on, in bins of equal ratio."""
    return {
        str(model): pd.DataFrame() if diverged(findings, str(model)) else _binned(rows)
        for model, rows in findings.measurements.queries.groupby("model", sort=False)
    }


def _binned(rows: pd.DataFrame) -> pd.DataFrame:
    finite = rows[np.isfinite(rows["dispersion"]) & (rows["keys"] > 1)]
    if finite.empty:
        return pd.DataFrame()
    keys = finite["keys"].to_numpy(float)
    edges = np.unique(np.round(np.geomspace(2, keys.max() + 1, _BINS + 1)))
    bins = np.digitize(keys, edges)
    groups = finite.assign(bin=bins).groupby("bin")
    table = groups["dispersion"].quantile([0.05, 0.25, 0.5, 0.75, 0.95]).unstack()
    table["keys"], table["queries"] = groups["keys"].mean(), groups.size()
    shown: pd.DataFrame = table[table["queries"] >= FEWEST]
    return shown
