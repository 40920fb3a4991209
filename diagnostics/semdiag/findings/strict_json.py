"""Values that strict JSON can hold."""

import math
from typing import Any

import pandas as pd


def json_ready(value: Any) -> Any:
    """Replace what JSON has no number for — NaN and infinities — by None, at any depth."""
    if isinstance(value, dict):
        return {str(key): json_ready(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return None if value is pd.NA else value
