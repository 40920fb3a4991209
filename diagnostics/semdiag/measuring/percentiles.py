"""Percentile tables of a quantity that every query has."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
_LONG = 2**14  # a row: a shorter one is sorted as fast as it is cut in parts
_SHARES = np.array(PERCENTILES) / 100


def percentiles(values: ArrayLike) -> dict[str, float | int]:
    """Return count, mean and percentiles of the finite values, linearly interpolated."""
    columns = percentile_columns([np.asarray(values, dtype=np.float64).reshape(1, -1)])
    return {name: column[0].item() for name, column in columns.items()}


def percentile_columns(tables: Iterable[NDArray[np.float64]], pooled: bool = False) -> dict[str, NDArray[Any]]:
    """Return :func:`percentiles` of each row of tables (rows, n): by name, (rows,) int64 or float64."""
    parts = [part for values in tables for part in _finite(values)]
    ordered = [_ordered(values) for values, _ in parts]
    blocks = [_columns(*part, inside) for part, inside in zip(parts, ordered, strict=True)]
    if pooled:
        size = sum(len(values) * size for values, size in parts)
        # What is in order row by row is soon in order.
        blocks.append(_columns(_joined(v for v, _ in parts), size, _ordered(_joined(ordered))))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _joined(tables: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([values.ravel() for values in tables])[None]


def _finite(values: NDArray[np.float64]) -> Iterator[tuple[NDArray[np.float64], int]]:
    """Yield the finite values of rows, and how many values a row had: row by row if others are finite in each."""
    finite = np.isfinite(values)
    if len(values) > 1 and not (finite == finite[:1]).all():
        for row in values:
            yield from _finite(row[None])
    else:
        yield values if finite.all() else np.compress(finite[0], values, 1), values.shape[1]


def _columns(values: NDArray[np.float64], size: int, ordered: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    """Return the columns of rows of finite values, out of ``size`` in each."""
    known = values.shape[1]
    nothing = np.full((len(values), len(PERCENTILES)), np.nan)
    cuts = _cuts(ordered) if known else nothing
    return {
        "queries": np.full(len(values), size),
        "mean": values.mean(1) if known else nothing[:, 0],
        **{f"p{p}": cuts[:, at] for at, p in enumerate(PERCENTILES)},
        "undefined": np.full(len(values), size - known),
        "not_positive": (values <= 0).sum(1),
    }


def _places(size: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
    """Return between which of ``size`` ordered values each percentile lies, and how far from the lower one."""
    place = _SHARES * (size - 1)
    below = np.floor(place).astype(np.intp)
    return below, np.minimum(below + 1, size - 1), place - below


def _ordered(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows (rows, n) in order, or long ones with what the percentiles need in its place."""
    if values.shape[1] < _LONG:
        return np.sort(values)
    below, above, _ = _places(values.shape[1])
    return np.partition(values, np.unique((below, above)))


def _cuts(ordered: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the percentiles of ordered rows (rows, n), bit for bit those of ``numpy.percentile``."""
    below, above, part = _places(ordered.shape[1])
    low, high = ordered[:, below], ordered[:, above]
    # Interpolate from the nearer end, as numpy does.
    cuts: NDArray[np.float64] = np.where(part < 0.5, low + (high - low) * part, high - (high - low) * (1 - part))
    return cuts


def layer_table(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Return percentiles of a quantity for every layer and head of one model, in their order."""
    places = rows[["layer", "head"]].drop_duplicates().sort_values(["layer", "head"])
    table = []
    for layer, head in zip(places["layer"], places["head"], strict=True):
        values = rows[(rows["layer"] == layer) & (rows["head"] == head)][quantity]
        table.append({"layer": int(layer), "head": int(head), **percentiles(values)})
    return pd.DataFrame(table)


def pooled_table(rows: pd.DataFrame, quantity: str, by: str = "model") -> pd.DataFrame:
    """Return percentiles of a quantity pooled over layers and heads."""
    groups = rows.groupby(by, sort=False)[quantity]
    return pd.DataFrame([{by: name, **percentiles(group)} for name, group in groups])
