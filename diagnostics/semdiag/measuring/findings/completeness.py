"""Judge whether the capture of a model's attention is complete."""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

BLIND = 0.25  # of the largest output: if rounding can change it by so much, missing terms go unnoticed,
OFF = 0.1  # and a change of so much by rounding may as well be a missing term
_OLDER = 1e-3  # residual above which something is missing, if the effect of rounding is unknown


class Completeness(StrEnum):
    """The verdict on the residuals of a model."""

    COMPLETE = "recomputed within rounding"
    MISSING = "something is missing"
    BLIND = "cannot tell at this precision"
    UNKNOWN = "unknown"


def completeness(row: Mapping[str, Any]) -> Completeness:
    """Judge whether attention recomputed from the capture agrees with the model's."""
    residual, excess = float(row["residual"]), float(row["residual_over_rounding"])
    if math.isnan(residual):
        return Completeness.UNKNOWN
    if math.isnan(excess):
        return Completeness.COMPLETE if residual < _OLDER else Completeness.MISSING
    if excess > 1:
        return Completeness.MISSING
    return Completeness.BLIND if row["rounding"] > BLIND or residual > OFF else Completeness.COMPLETE
