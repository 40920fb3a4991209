"""What must hold of every measurement, whatever the model: capture is complete, certificates are kept."""

import math
from dataclasses import dataclass

from semdiag.measuring.findings.findings import Findings

# By the dtype that was computed in: rounding, with a margin. A missed bias or mask shows as 1e-3 or more.
RESIDUAL = {"float64": 1e-9, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Invariant:
    """One statement about the measurements, and whether it holds.

    Attributes:
        name: ``residual``, ``captured``, ``finite`` or ``certified``.
        passed: whether it holds of every model.
        words: the statement with its numbers.
    """

    name: str
    passed: bool
    words: str


def invariants(findings: Findings) -> list[Invariant]:
    """Check the residual of every capture, its completeness, the scores, and certified masks under noise.

    Args:
        findings: of one or more models; with masks, certificates are checked, too.

    Returns:
        Three or four statements. Certified rows: those whose mask provably cannot change under the noise that
        was added (docs/theory.md#mask-stability); one that does is an error of semdiag.
    """
    measurements = findings.measurements
    models = measurements.models
    allowed = RESIDUAL.get(str(measurements.provenance.get("dtype")), RESIDUAL["float32"])
    largest = float(models["residual"].max(skipna=False))
    found, captured = int(models["attention_found"].sum()), int(models["attention_captured"].sum())
    bad = int(measurements.non_finite["scores"].sum())
    exact = not math.isnan(largest) and largest <= allowed
    # The deviation is rounding, another on each processor: its digits say nothing while it is allowed.
    deviation = f"deviates by at most {allowed:g}"
    if not exact:
        deviation = (
            "deviates by a value that is not a number" if math.isnan(largest) else f"deviates by {largest:.1e}"
        )
        deviation += f" (allowed {allowed:g})"
    checked = [
        Invariant("residual", exact, f"attention recomputed from the capture {deviation}"),
        Invariant(
            "captured",
            bool((models["attention_found"] == models["attention_captured"]).all()),
            f"attention layers found {found}, captured {captured}",
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
