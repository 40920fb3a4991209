"""Percentile tables of a per-query quantity."""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
_SHARES = np.array(PERCENTILES) / 100


def percentiles(values: ArrayLike) -> dict[str, float | int]:
    """Count, mean and percentiles of the finite values, linear interpolation.

    Args:
        values: any shape; entries that are not finite count as undefined.

    Returns:
        ``queries``, ``mean``, ``p0`` … ``p100`` (NaN if nothing is finite), ``undefined``, ``not_positive``.

    Example:
        >>> table = percentiles([1.0, 3.0, float("inf")])
        >>> table["queries"], table["p50"], table["undefined"]
        (3, 2.0, 1)
    """
    array = np.asarray(values, dtype=np.float64).ravel()
    finite = array[np.isfinite(array)]
    cuts = _of_sorted(np.sort(finite)) if finite.size else np.full(len(PERCENTILES), np.nan)
    return {
        "queries": int(array.size),
        "mean": float(finite.mean()) if finite.size else float("nan"),
        **{f"p{p}": float(cut) for p, cut in zip(PERCENTILES, cuts, strict=True)},
        "undefined": int(array.size - finite.size),
        "not_positive": int((finite <= 0).sum()),
    }


def _of_sorted(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """As ``numpy.percentile``, to the last bit, which does not make use of the order."""
    place = _SHARES * (len(values) - 1)
    below = np.floor(place).astype(np.intp)
    part = place - below
    low, high = values[below], values[np.minimum(below + 1, len(values) - 1)]
    # From the nearer end, as numpy does.
    return np.where(part < 0.5, low + (high - low) * part, high - (high - low) * (1 - part))


def layer_table(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Percentiles of a quantity in every layer and head of one model.

    Args:
        rows: a table with the columns layer, head and ``quantity``.
        quantity: the column.

    Returns:
        One row per layer and head, in their order.
    """
    places = rows[["layer", "head"]].drop_duplicates().sort_values(["layer", "head"])
    table = []
    for layer, head in zip(places["layer"], places["head"], strict=True):
        values = rows[(rows["layer"] == layer) & (rows["head"] == head)][quantity]
        table.append({"layer": int(layer), "head": int(head), **percentiles(values)})
    return pd.DataFrame(table)


def pooled_table(rows: pd.DataFrame, quantity: str, by: str = "model") -> pd.DataFrame:
    """Percentiles of a quantity pooled over layers and heads.

    Args:
        rows: a table with the columns ``by`` and ``quantity``.
        quantity: the column.
        by: what stays apart.

    Returns:
        One row per value of ``by``, in order of appearance.
    """
    groups = rows.groupby(by, sort=False)[quantity]
    return pd.DataFrame([{by: name, **percentiles(group)} for name, group in groups])
