"""Combine the looks of all ranks into one: extremes, and means weighted by rows."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from semdiag.measuring.calls.monitor_heads import LARGEST, PLACE, SMALLEST
from semdiag.measuring.calls.monitor_ranks import Look


class Reduction:
    """Combines the looks of all ranks; every rank gets the same result."""

    def __init__(self) -> None:
        self._heads_before: dict[tuple[str, str], int] = {}  # by module and part of its weights

    def __call__(self, looks: Sequence[Look]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows of layers and of heads of one step, from the ranks' looks in rank order."""
        if len(looks) == 1:
            return looks[0].rows, looks[0].heads
        layers: dict[str, int] = {}
        for look in looks:
            for row in look.rows:
                layers.setdefault(row["module"], row["layer"])
        if len(set(layers.values())) < len(layers):  # ranks with other modules also number them from 0
            layers = {module: layer for layer, module in enumerate(layers)}
        rows = [row | {"layer": layers[row["module"]]} for look in looks for row in look.rows]
        heads = [row | {"layer": layers[row["module"]]} for look in looks for row in self._numbered(look)]
        return _reduced(rows, ["module", "occurrence"]), _reduced(heads, ["module", "occurrence", "head"])

    def _numbered(self, look: Look) -> list[dict[str, Any]]:
        """Return a rank's rows of heads, numbered after those of other parts of the same module."""
        count: dict[tuple[str, str], int] = {}
        for row in look.heads:
            key = row["module"], look.parts.get(row["module"], "")
            count[key] = max(count.get(key, 0), row["head"] + 1)
        for (module, part), heads in count.items():
            if (module, part) not in self._heads_before:
                self._heads_before[module, part] = self._heads_before.get((module, "all"), 0)
                self._heads_before[module, "all"] = self._heads_before[module, part] + heads
        return [
            row | {"head": row["head"] + self._heads_before[row["module"], look.parts.get(row["module"], "")]}
            for row in look.heads
        ]


def _reduced(rows: list[dict[str, Any]], place: list[str]) -> list[dict[str, Any]]:
    """Return one row per module, occurrence and head, in the order that a single process would have."""
    if not rows:
        return []
    table = pd.DataFrame(rows)
    table["order"] = table.groupby(["module", "occurrence"], sort=False).ngroup()
    by = [table[name] for name in place]
    names = [name for name in table if name not in (*PLACE, "order")]
    means = [name for name in names if name not in (*LARGEST, *SMALLEST)]
    weights = table[means].notna().mul(table["rows"], axis=0)
    sums = (table[means].fillna(0.0) * weights).groupby(by, sort=False).sum()
    groups = table.groupby(place, sort=False)
    joined = pd.concat(
        [
            groups[["step", "layer", "order"]].first(),
            groups["rows"].sum(),
            sums / weights.groupby(by, sort=False).sum(),
            groups[[name for name in names if name in LARGEST]].max(),
            groups[[name for name in names if name in SMALLEST]].min(),
        ],
        axis=1,
    )
    joined = joined.reset_index().sort_values(["order", *place[2:]], kind="stable").drop(columns="order")
    return [{str(name): value for name, value in row.items()} for row in joined.to_dict("records")]
