"""The gaps between the gradient of the loss, its local bound and the worst case."""

import math
from collections.abc import Hashable
from typing import Any

import numpy as np

from semdiag.measuring.findings.findings import Findings

_NAMES = {("network", "local"): "local", ("network", "sound"): "sound", ("network_any_residual", "local"): "any"}


def network_rungs(findings: Findings, model: str) -> dict[str, float]:
    """Return the gaps between the whole gradient and its bounds, with their causes, in nats."""
    measurements = findings.measurements
    rows = measurements.constants[measurements.constants["model"] == model].to_dict("records")
    logs = {_NAMES[place]: _value(row) for row in rows if (place := (row["quantity"], row["form"])) in _NAMES}
    slopes = measurements.parameters.loc[measurements.parameters["model"] == model, "ln_gradient"].to_numpy(float)
    if len(logs) < len(_NAMES) or np.isnan(slopes).any():
        return {}
    gradient = float(np.logaddexp.reduce(2 * slopes, initial=-math.inf)) / 2
    if not all(map(math.isfinite, (gradient, *logs.values()))):
        return {}
    return {
        "gradient": gradient,
        "local": logs["local"],
        "sound": logs["sound"],
        "residual": logs["any"] - logs["local"],
        "point": logs["sound"] - logs["any"],
        "left": logs["local"] - gradient,
    }


def _value(row: dict[Hashable, Any]) -> float:
    return float(row["ln_finite"] if row["infinite"] else row["ln_value"])
