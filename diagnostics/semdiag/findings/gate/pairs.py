"""The gate of ``semdiag check``: heavy hitters must have the smaller dispersion."""

from dataclasses import dataclass

from semdiag.findings.findings import Findings
from semdiag.findings.pairing import Pair, find_pairs
from semdiag.measurement.percentiles import percentiles
from semdiag_models import InputError

GATED = ("p50", "p75", "p90", "p95")
SHOWN = (*GATED, "p100")  # p100 is one query among hundreds of thousands: printed, not gated


@dataclass(frozen=True)
class GateResult:
    """The pooled dispersions of one pair.

    Attributes:
        pair: full model and top-k model.
        full: δ_s of the full model by percentile (nats).
        topk: δ_h of the top-k model by percentile (nats).
        failed: gated percentiles at which δ_h < δ_s does not hold.
    """

    pair: Pair
    full: dict[str, float]
    topk: dict[str, float]
    failed: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether δ_h < δ_s at every gated percentile."""
        return not self.failed


def dispersion_gate(findings: Findings) -> list[GateResult]:
    """Compare pooled dispersions of paired full and top-k models.

    Source: paper, the comparison of δ_s and δ_h at matching percentiles. Deviation: the maximum is not gated.

    Args:
        findings: of full and top-k models.

    Returns:
        One result per pair.

    Raises:
        InputError: if a full or top-k model has no partner, or there is nothing to pair.
    """
    pairs, alone = find_pairs(findings.measurements.models)
    if alone:
        raise InputError(
            f"{alone[0]} has no partner: a full and a top-k checkpoint of the same task, seed, size and snapshot "
            "are needed. Train the other one with semdiag train."
        )
    if not pairs:
        raise InputError(
            "There is no full or top-k checkpoint to pair. Train both with: semdiag train even-pairs, and: "
            "semdiag train even-pairs --attention topk --k 5."
        )
    dispersions = {name: rows["dispersion"] for name, rows in findings.measurements.queries.groupby("model")}
    results = []
    for pair in pairs:
        full, topk = percentiles(dispersions[pair.full]), percentiles(dispersions[pair.other])
        failed = tuple(p for p in GATED if not topk[p] < full[p])
        results.append(GateResult(pair, {p: full[p] for p in SHOWN}, {p: topk[p] for p in SHOWN}, failed))
    return results
