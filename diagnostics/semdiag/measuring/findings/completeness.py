"""Whether what was captured of a model's attention is all of it."""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

BLIND = 0.25  # of the largest output: rounding that can move it by so much hides what is missing,
OFF = 0.1  # and rounding that has moved it by so much may be something missing
_OLDER = 1e-3  # residual above which something is missing, in measurements of which no rounding is known


class Completeness(StrEnum):
    """What the residuals of a model say."""

    COMPLETE = "recomputed within rounding"
    MISSING = "something is missing"
    BLIND = "cannot tell at this precision"
    UNKNOWN = "unknown"


def completeness(row: Mapping[str, Any]) -> Completeness:
    """Say whether attention, recomputed from what was captured, is what the model computed.

    Args:
        row: of the table ``models`` or ``calls``.

    Returns:
        Complete where no output is further off than rounding can carry it; blind where rounding can carry it so
        far, or has, that a missing head or mask would not be seen.

    Example:
        >>> completeness({"residual": 0.03, "residual_over_rounding": 0.4, "rounding": 0.05}).value
        'recomputed within rounding'
    """
    residual, excess = float(row["residual"]), float(row["residual_over_rounding"])
    if math.isnan(residual):
        return Completeness.UNKNOWN
    if math.isnan(excess):
        return Completeness.COMPLETE if residual < _OLDER else Completeness.MISSING
    if excess > 1:
        return Completeness.MISSING
    return Completeness.BLIND if row["rounding"] > BLIND or residual > OFF else Completeness.COMPLETE
