"""What is kept of an attention call, and its rows as a table."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from semdiag.mathematics.row_statistics import RowStatistics


@dataclass(frozen=True, eq=False)
class ReducedCall:
    """What is kept of a call: its identity, positions of query 0 and key 0, what is real, row statistics."""

    place: dict[str, Any]
    first_query: int
    keys_before: int
    queries: np.ndarray  # (B, H, R) bool
    places: np.ndarray | None  # (B, H, R), positions of the queries; None means all, in order
    keys: np.ndarray  # (B, H, Lk) bool
    statistics: RowStatistics


def rows_of_call(reduced: ReducedCall, position: str, name: str, k: int | None, values: Tensor) -> pd.DataFrame:
    """Return one call's rows: an entry per sample, head and position of (B, H, L)."""
    sample, head, where = (axis.ravel() for axis in np.indices(values.shape))
    columns = {**reduced.place, "sample": sample, "head": head, position: where}
    if position == "query":
        columns["keys"] = reduced.statistics.keys.numpy().ravel()
        columns["query"] = reduced.first_query + (where if reduced.places is None else reduced.places.ravel())
    else:
        columns["key"] = reduced.keys_before + where
    table = pd.DataFrame({**columns, "k": pd.NA if k is None else k, name: values.numpy().ravel()})
    return table[(reduced.queries if position == "query" else reduced.keys).ravel()]
