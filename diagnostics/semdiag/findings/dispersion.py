"""Does the sparse model focus? δ of sparse models beside full attention's, pooled and layer by layer."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.findings.gate.pairs import GateResult, dispersion_gate
from semdiag.findings.layered_summary import by_layer, without
from semdiag.findings.pairing import find_pairs
from semdiag.findings.resampling import Interval, ratio_interval
from semdiag.findings.strict_json import Summary
from semdiag.measurement.percentiles import percentiles

_WHEN = {"last": "", "initialisation": "At initialisation: ", "best": "Best snapshots: "}


def dispersion_summary(findings: Findings) -> Summary:
    """Percentiles of δ per layer and head, and pooled; with counterfactual columns also δ_h(k) and the mass kept.

    Args:
        findings: of one or more models.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.dispersion/1``; null where a number is undefined.
    """

    def describe(rows: pd.DataFrame, loads: pd.DataFrame, suffix: str) -> Summary:
        found = without(percentiles(rows["dispersion" + suffix]), "not_positive")
        if suffix and "mass" + suffix in rows:
            found["mass"] = without(percentiles(rows["mass" + suffix]), "not_positive")
        return found

    return by_layer("dispersion", findings, describe)


@dataclass(frozen=True)
class PairComparison:
    """One top-k model against its full counterpart.

    Attributes:
        gate: pooled percentiles of both, and whether δ_h < δ_s at p50, p75, p90 and p95.
        ratio: of the pooled medians, with a 95 % interval from resampled sequences.
        snapshot: which snapshots were compared.
    """

    gate: GateResult
    ratio: Interval
    snapshot: str

    @property
    def answer(self) -> str:
        """Whether δ_h < δ_s, in a word or two."""
        return "yes" if self.gate.passed else f"no at {', '.join(self.gate.failed)}"

    @property
    def sentence(self) -> str:
        """The comparison in a sentence."""
        full, topk, ratio = self.gate.full, self.gate.topk, self.ratio
        medians = (
            f"median δₕ {topk['p50']:.3g} against δₛ {full['p50']:.3g} nats, "
            f"ratio {ratio.estimate:.2f}, 95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
        )
        start = _WHEN.get(self.snapshot, f"Snapshot {self.snapshot}: ")
        start += self.gate.pair.label.removesuffix(f", {self.snapshot}")
        if self.gate.passed:
            where = "at the 50th, 75th, 90th and 95th percentile"
            return f"{start}: the top-k model has the smaller dispersion {where} ({medians})."
        failed = ", ".join(f"{p} (δₕ {topk[p]:.3g}, δₛ {full[p]:.3g})" for p in self.gate.failed)
        return f"{start}: δₕ is not below δₛ at {failed} ({medians})."

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values."""
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
            "median_ratio": {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high, "confidence": 0.95},
        }


def pair_comparisons(findings: Findings) -> list[PairComparison]:
    """Compare every top-k model that has a full counterpart with it, last snapshots first.

    Args:
        findings: of any number of models; those without a partner are left out.

    Returns:
        One comparison per pair.
    """
    measurements = findings.measurements
    pairs, _ = find_pairs(measurements.models)
    paired = {model for pair in pairs for model in (pair.full, pair.other)}
    if not paired:
        return []
    models = measurements.models[measurements.models["model"].isin(sorted(paired))]
    queries = {str(model): rows for model, rows in measurements.queries.groupby("model", sort=False)}
    snapshots = dict(zip(models["model"], models["snapshot"], strict=True))
    found = []
    for gate in dispersion_gate(Findings(measurements.replace(models=models))):
        ratio = ratio_interval(queries[gate.pair.other], queries[gate.pair.full], resamples=RESAMPLES)
        found.append(PairComparison(gate, ratio, snapshots[gate.pair.other]))
    return sorted(found, key=lambda comparison: comparison.snapshot != "last")


RATIO_PERCENTILES = (50, 95)


RESAMPLES = 300  # of whole sequences; the ends of a 95 % interval are then good to about a tenth of its width


def layer_ratios(findings: Findings, resamples: int = RESAMPLES) -> pd.DataFrame:
    """Ratios of dispersion between every sparse model and its full counterpart, layer by layer.

    Args:
        findings: of full models and their counterparts.
        resamples: bootstrap draws per ratio.

    Returns:
        One row per pair, percentile and layer: model, full, percentile, layer, ratio, low, high.
    """
    pairs, _ = find_pairs(findings.measurements.models, attention=None)
    rows = {
        key: group[["sample", "dispersion"]]
        for key, group in findings.measurements.queries.groupby(["model", "layer"], sort=True)
    }
    found = []
    for pair in pairs:
        layers = [layer for model, layer in rows if model == pair.other and (pair.full, layer) in rows]
        for percentile in RATIO_PERCENTILES:
            for layer in layers:
                interval = ratio_interval(
                    rows[pair.other, layer], rows[pair.full, layer], percentile=percentile, resamples=resamples
                )
                numbers = (interval.estimate, interval.low, interval.high)
                found.append((pair.other, pair.full, percentile, layer, *numbers))
    return pd.DataFrame(found, columns=["model", "full", "percentile", "layer", "ratio", "low", "high"])
