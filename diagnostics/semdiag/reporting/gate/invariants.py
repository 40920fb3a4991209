"""What must hold for every measurement: the capture is complete, and certificates hold."""

import math
from dataclasses import dataclass

from semdiag.measuring.findings.completeness import Completeness, completeness
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import records


@dataclass(frozen=True)
class Invariant:
    """A statement about the measurements, and whether it holds."""

    name: str  # ``residual``, ``captured``, ``finite`` or ``certified``
    passed: bool  # whether it holds for every model
    words: str  # the statement with its numbers


def invariants(findings: Findings) -> list[Invariant]:
    """Check the residual of every capture, its completeness, the scores, and certified masks under noise."""
    measurements = findings.measurements
    models = measurements.models
    answers = {completeness(row): row for row in records(models)}
    layers, captured = int(models["attention_found"].sum()), int(models["attention_captured"].sum())
    bad = int(measurements.non_finite["scores"].sum())
    # The deviation is rounding and differs between processors: its digits are meaningless while it is allowed.
    deviation = "is what the model computed, within rounding"
    exact = not answers.keys() & {Completeness.MISSING, Completeness.UNKNOWN}
    if (worst := answers.get(Completeness.UNKNOWN)) is not None:
        deviation = "deviates by a value that is not a number"
    elif (worst := answers.get(Completeness.MISSING)) is not None:
        times = worst["residual_over_rounding"]
        more = "" if math.isnan(times) else f", {times:.2g} times what rounding can do"
        deviation = f"deviates by {worst['residual']:.1e}{more}: something is missing"
    elif (worst := answers.get(Completeness.BLIND)) is not None:
        deviation = "is within rounding, which is so coarse at this precision that it tells nothing"
    checked = [
        Invariant("residual", exact, f"attention recomputed from the capture {deviation}"),
        Invariant(
            "captured",
            bool((models["attention_found"] == models["attention_captured"]).all()),
            f"attention layers found {layers}, captured {captured}",
        ),
        Invariant("finite", bad == 0, f"scores that are NaN or infinite: {bad:,}"),
    ]
    masks = measurements.masks
    if len(masks):
        rows = round(float((masks["certified"].astype(float) * masks["draws"]).sum()))
        changed = int(masks["certified_changed"].sum())
        words = f"certified masks that changed under noise: {changed:,} of {rows:,}"
        checked.append(Invariant("certified", changed == 0, words))
    return checked
