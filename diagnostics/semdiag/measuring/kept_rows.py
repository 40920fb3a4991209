"""Rows of a table without a size limit: all up to a number; beyond it, exact totals and a sample."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from semdiag.measuring.percentiles import PERCENTILES
from semdiag.measuring.table import ALL, Table

SKETCHES = Table(
    "sketches",
    "One row per quantity, layer and head (ALL: pooled) of a model with more queries or keys than are kept row by "
    "row: numbers, mean and extremes (p0, p100) are exact; the other percentiles may be those of a rank that is "
    "off by rank_error (with 99% confidence).",
    {
        "model": "str",
        "quantity": "str",
        **dict.fromkeys(("layer", "head", "queries"), "int64"),
        "mean": "float64",
        **{f"p{p}": "float64" for p in PERCENTILES},
        **dict.fromkeys(("undefined", "not_positive"), "int64"),
        "rank_error": "float64",
    },
)


class _Totals:
    """Count, sum and extremes of a stream of numbers."""

    def __init__(self) -> None:
        self._finite, self._least, self._greatest = 0, math.inf, -math.inf
        self._sum, self._undefined, self._not_positive = 0.0, 0, 0

    def add(self, values: np.ndarray) -> None:
        """Add numbers; those that are not finite count as undefined."""
        values = values.astype(np.float64).ravel()
        finite = values[np.isfinite(values)]
        self._finite += finite.size
        self._least = min(self._least, float(finite.min(initial=math.inf)))
        self._greatest = max(self._greatest, float(finite.max(initial=-math.inf)))
        self._sum += float(finite.sum())
        self._undefined += values.size - finite.size
        self._not_positive += int((finite <= 0).sum())

    def merge(self, other: "_Totals") -> None:
        """Add the totals of another stream."""
        self._finite += other._finite
        self._least, self._greatest = min(self._least, other._least), max(self._greatest, other._greatest)
        self._sum += other._sum
        self._undefined += other._undefined
        self._not_positive += other._not_positive

    def percentiles(self, drawn: np.ndarray) -> dict[str, float | int]:
        """Return exact totals and extremes, percentiles of a sample of the numbers, and their error in rank."""
        cuts, error = [math.nan] * (len(PERCENTILES) - 2), 1.0
        if len(drawn):
            # Dvoretzky, Kiefer, Wolfowitz and Massart: all ranks at once, with 99% confidence.
            error = min(1.0, math.sqrt(math.log(2 / 0.01) / (2 * len(drawn))))
            cuts = np.percentile(drawn, PERCENTILES[1:-1]).tolist()
        ends = (self._least, self._greatest) if self._finite else (math.nan, math.nan)
        cuts = [ends[0], *cuts, ends[1]]
        return {
            "queries": self._finite + self._undefined,
            "mean": self._sum / self._finite if self._finite else math.nan,
            **{f"p{p}": float(cut) for p, cut in zip(PERCENTILES, cuts, strict=True)},
            "undefined": self._undefined,
            "not_positive": self._not_positive,
            "rank_error": error,
        }


class KeptRows:
    """Rows that arrive in parts: columns of equal length, all of one layer."""

    def __init__(self, limit: int, places: Sequence[str], seed: int = 0) -> None:
        self.parts: list[dict[str, np.ndarray]] = []
        self.share = 1.0  # probability that a row is kept
        self._limit, self._places, self._rows = limit, places, 0
        self._rng = np.random.default_rng(seed)
        self._totals: dict[tuple[str, int, int], _Totals] = {}

    def add(self, part: dict[str, np.ndarray]) -> None:
        """Add rows."""
        if self.share < 1:
            self._count(part)
            part = self._thinned(part, self.share)
        self.parts.append(part)
        self._rows += len(part["layer"])
        while self._rows > self._limit:
            if self.share == 1:
                for earlier in self.parts:
                    self._count(earlier)
            self.share /= 2
            self.parts = [self._thinned(earlier, 0.5) for earlier in self.parts]
            self._rows = sum(len(earlier["layer"]) for earlier in self.parts)

    def _thinned(self, part: dict[str, np.ndarray], share: float) -> dict[str, np.ndarray]:
        kept = self._rng.random(len(part["layer"])) < share
        return {name: column[kept] for name, column in part.items()}

    def _count(self, part: dict[str, np.ndarray]) -> None:
        if not len(part["layer"]):
            return
        layer, heads = int(part["layer"][0]), part["head"]
        order = np.argsort(heads, kind="stable")
        starts = np.flatnonzero(np.diff(heads[order], prepend=-1))
        for name, column in part.items():
            if name in self._places:
                continue
            for start, values in zip(starts, np.split(column[order], starts[1:]), strict=True):
                place = name, layer, int(heads[order[start]])
                self._totals.setdefault(place, _Totals()).add(values)

    def sketched(self) -> Iterator[dict[str, Any]]:
        """Yield rows of the table ``sketches``: by layer and head, by layer, and pooled; none below the limit."""
        pooled: dict[tuple[str, int, int], _Totals] = {}
        for (name, layer, head), totals in self._totals.items():
            for place in ((name, layer, head), (name, layer, ALL), (name, ALL, ALL)):
                pooled.setdefault(place, _Totals()).merge(totals)
        for (name, layer, head), totals in sorted(pooled.items(), key=lambda item: item[0]):
            cuts = totals.percentiles(self._sample(name, layer, head))
            yield {"quantity": name, "layer": layer, "head": head, **cuts}

    def _sample(self, name: str, layer: int, head: int) -> np.ndarray:
        """Return the finite numbers of a quantity among the kept rows."""
        numbers = [np.empty(0)]
        for part in self.parts:
            if len(part["layer"]) and layer in (ALL, part["layer"][0]):
                values = part[name] if head == ALL else part[name][part["head"] == head]
                numbers.append(values[np.isfinite(values)].astype(np.float64))
        return np.concatenate(numbers)
