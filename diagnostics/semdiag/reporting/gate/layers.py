"""Judge whether δ_h < δ_s holds at the median of every layer of a pair."""

import math
from dataclasses import dataclass

from semdiag.measuring.findings.distributions import known_rows
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.percentiles import percentiles
from semdiag.measuring.table import rows_of
from semdiag.questions.dispersion.answer.pairs import NO_NUMBER, GateResult


@dataclass(frozen=True)
class LayerGate:
    """The median dispersions of a pair, layer by layer."""

    label: str  # of the pair
    full: tuple[float, ...]  # δ_s at p50 in each layer (nats), heads pooled
    topk: tuple[float, ...]  # δ_h at p50 in each layer (nats)
    every: bool  # whether it must hold in every layer

    @property
    def failing(self) -> tuple[int, ...]:
        """Return the layers in which δ_h < δ_s does not hold at the median, or is unknown."""
        pairs = zip(self.full, self.topk, strict=True)
        return tuple(layer for layer, (full, topk) in enumerate(pairs) if not topk < full)

    @property
    def unknown(self) -> tuple[int, ...]:
        """Return the failing layers in which a median is NaN, so that the answer is unknown."""
        return tuple(layer for layer in self.failing if math.isnan(self.full[layer] + self.topk[layer]))

    @property
    def fault(self) -> str:
        """Return the layers in which it does not hold or is unknown, in words; empty if there are none."""
        failed = [layer for layer in self.failing if layer not in self.unknown]
        parts = []
        if failed:
            many = f"{len(failed)} of {len(self.full)} layers"
            parts.append(f"δ_h < δ_s fails at the median of {many} ({', '.join(map(str, failed))})")
        if self.unknown:
            many = f"{len(self.unknown)} of {len(self.full)} layers ({', '.join(map(str, self.unknown))})"
            parts.append(f"δ_h < δ_s cannot be judged at the median of {many}, {NO_NUMBER}")
        return "; ".join(parts)

    @property
    def passed(self) -> bool:
        """Return whether fewer than half of the layers fail; none, if every layer must hold."""
        return not self.failing if self.every else 2 * len(self.failing) < len(self.full)


def layer_gate(findings: Findings, results: list[GateResult], every: bool = False) -> list[LayerGate]:
    """Compare the median dispersion of paired models in each layer."""

    def medians(model: str) -> tuple[float, ...]:
        layers = sorted(int(layer) for layer in rows_of(findings.measurements.queries, model)["layer"].unique())
        dispersions = (known_rows(findings, model, "dispersion", layer)["dispersion"] for layer in layers)
        return tuple(float(percentiles(values)["p50"]) for values in dispersions)

    pairs = [result.pair for result in results]
    return [LayerGate(pair.label, medians(pair.full), medians(pair.other), every) for pair in pairs]
