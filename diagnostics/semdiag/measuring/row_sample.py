"""Rows without a limit to their number: exact totals, and a random sample of the rows."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from semdiag.measuring.percentiles import PERCENTILES, rank_error
from semdiag.measuring.table import ALL, Table, columns_of

SKETCHES = Table(
    "sketches",
    "One row per quantity, layer and head (ALL: pooled) of a model with more queries or keys than are kept row by "
    "row: numbers, mean and extremes (p0, p100) are exact; the other percentiles may be those of a rank that is "
    "off by rank_error (with 99% confidence).",
    columns_of(
        f"model quantity str; layer head queries int64; mean {' '.join(f'p{p}' for p in PERCENTILES)} float64; "
        "undefined not_positive int64; rank_error float64"
    ),
)


# Totals of a stream of numbers, and how those of two streams are joined; counts are of finite numbers.
_TOTALS = {"count": "sum", "min": "min", "max": "max", "sum": "sum", "undefined": "sum", "not_positive": "sum"}


class KeptRows:
    """Rows that arrive in parts: columns of equal length, all of one layer."""

    def __init__(self, limit: int, places: Sequence[str], seed: int = 0) -> None:
        self.parts: list[dict[str, np.ndarray]] = []
        self.share = 1.0  # probability with which a row is kept
        self._limit = limit
        self._places = places
        self._rows = 0
        self._rng = np.random.default_rng(seed)
        self._totals: list[pd.DataFrame] = []  # one row per head, of one part and quantity

    def add(self, part: dict[str, np.ndarray]) -> None:
        """Add rows."""
        if self.share < 1:
            self._count(part)
            part = self._thinned(part, self.share)
        self.parts.append(part)
        self._rows += len(part["layer"])
        while self._rows > self._limit:
            for earlier in self.parts if self.share == 1 else ():
                self._count(earlier)
            self.share /= 2
            self.parts = [self._thinned(earlier, 0.5) for earlier in self.parts]
            self._rows = sum(len(earlier["layer"]) for earlier in self.parts)

    def _thinned(self, part: dict[str, np.ndarray], share: float) -> dict[str, np.ndarray]:
        chosen = self._rng.random(len(part["layer"])) < share
        return {name: column[chosen] for name, column in part.items()}

    def _count(self, part: dict[str, np.ndarray]) -> None:
        if not len(part["layer"]):
            return
        for name in part.keys() - set(self._places):
            values = pd.Series(part[name].astype(np.float64)).replace([np.inf, -np.inf], np.nan)
            table = values.groupby(part["head"]).agg(["count", "min", "max", "sum", "size"])
            table["undefined"] = table.pop("size") - table["count"]
            table["not_positive"] = (values <= 0).groupby(part["head"]).sum()
            self._totals.append(table.assign(quantity=name, layer=int(part["layer"][0])))

    def sketched(self) -> Iterator[dict[str, Any]]:
        """Yield rows of the table ``sketches``: by layer and head, by layer, and pooled; none below the limit."""
        if not self._totals:
            return
        table = pd.concat(self._totals).rename_axis("head").reset_index()
        levels = [table, table.assign(head=ALL), table.assign(layer=ALL, head=ALL)]
        totals = pd.concat(levels).groupby(["quantity", "layer", "head"]).agg(_TOTALS)
        for row in totals.reset_index().to_dict("records"):
            sample = self._sample(row["quantity"], row["layer"], row["head"])
            inner = PERCENTILES[1:-1]
            ends = [
                row["min"],
                *(np.percentile(sample, inner) if len(sample) else [math.nan] * len(inner)),
                row["max"],
            ]
            yield {
                **{name: row[name] for name in ("quantity", "layer", "head", "undefined", "not_positive")},
                "queries": row["count"] + row["undefined"],
                "mean": row["sum"] / row["count"] if row["count"] else math.nan,
                **{f"p{p}": float(cut) for p, cut in zip(PERCENTILES, ends, strict=True)},
                "rank_error": rank_error(len(sample)) if len(sample) else 1.0,
            }

    def _sample(self, name: str, layer: int, head: int) -> np.ndarray:
        numbers = [np.empty(0)]
        for part in self.parts:
            if len(part["layer"]) and layer in (ALL, part["layer"][0]):
                values = part[name] if head == ALL else part[name][part["head"] == head]
                numbers.append(values[np.isfinite(values)].astype(np.float64))
        return np.concatenate(numbers)
