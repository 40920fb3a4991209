"""Percentile tables of a quantity that every query has."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
_LONG = 2**14  # a row: a shorter one is sorted as fast as it is cut in parts
_SHARES = np.array(PERCENTILES) / 100


def percentiles(values: ArrayLike) -> dict[str, float | int]:
    """Return count, mean and percentiles of the finite values, linearly interpolated.

    Args:
        values: any shape; entries that are not finite count as undefined.

    Returns:
        ``queries``, ``mean``, ``p0`` … ``p100`` (NaN if nothing is finite), ``undefined``, ``not_positive``.

    Example:
        >>> table = percentiles([1.0, 3.0, float("inf")])
        >>> table["queries"], table["p50"], table["undefined"]
        (3, 2.0, 1)
    """
    columns = percentile_columns(np.asarray(values, dtype=np.float64).reshape(1, -1))
    return {name: column[0].item() for name, column in columns.items()}


def percentile_columns(values: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    """Return :func:`percentiles` of each row of ``values`` (rows, n): by name, (rows,) int64 or float64."""
    finite = np.isfinite(values)
    if len(values) > 1 and not (finite == finite[:1]).all():
        rows = [percentile_columns(row[None]) for row in values]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    whole = values if finite.all() else np.compress(finite[0], values, 1)
    size = whole.shape[1]
    nothing = np.full((len(values), len(PERCENTILES)), np.nan)
    cuts = _cuts(whole) if size else nothing
    return {
        "queries": np.full(len(values), values.shape[1]),
        "mean": whole.mean(1) if size else nothing[:, 0],
        **{f"p{p}": cuts[:, at] for at, p in enumerate(PERCENTILES)},
        "undefined": np.full(len(values), values.shape[1] - size),
        "not_positive": (whole <= 0).sum(1),
    }


def _cuts(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the percentiles of rows (rows, n), bit for bit those of ``numpy.percentile``, but faster."""
    place = _SHARES * (values.shape[1] - 1)
    below = np.floor(place).astype(np.intp)
    above = np.minimum(below + 1, values.shape[1] - 1)
    part = place - below
    values = np.sort(values) if values.shape[1] < _LONG else np.partition(values, np.unique((below, above)))
    low, high = values[:, below], values[:, above]
    # Interpolate from the nearer end, as numpy does.
    cuts: NDArray[np.float64] = np.where(part < 0.5, low + (high - low) * part, high - (high - low) * (1 - part))
    return cuts


def layer_table(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Return percentiles of a quantity for every layer and head of one model, in their order.

    Args:
        rows: a table with the columns layer, head and ``quantity``.
        quantity: the column.
    """
    places = rows[["layer", "head"]].drop_duplicates().sort_values(["layer", "head"])
    table = []
    for layer, head in zip(places["layer"], places["head"], strict=True):
        values = rows[(rows["layer"] == layer) & (rows["head"] == head)][quantity]
        table.append({"layer": int(layer), "head": int(head), **percentiles(values)})
    return pd.DataFrame(table)


def pooled_table(rows: pd.DataFrame, quantity: str, by: str = "model") -> pd.DataFrame:
    """Return percentiles of a quantity pooled over layers and heads.

    Args:
        rows: a table with the columns ``by`` and ``quantity``.
        quantity: the column.
        by: the column that separates the groups.

    Returns:
        One row per value of ``by``, in order of appearance.
    """
    groups = rows.groupby(by, sort=False)[quantity]
    return pd.DataFrame([{by: name, **percentiles(group)} for name, group in groups])
