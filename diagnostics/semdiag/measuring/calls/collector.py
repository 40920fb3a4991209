"""Reduce attention calls to columns of numbers on arrival; nothing of a call is kept."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad

from semdiag.capturing.attention_calls import AttentionCall
from semdiag.mathematics.query_draws import PER_STRATUM
from semdiag.mathematics.score_strips import rows_of
from semdiag.mathematics.top_recall import top_recall
from semdiag.measuring.calls.batch_rows import SampleNumbers
from semdiag.measuring.calls.counted_rows import CountedRows, counted_rows
from semdiag.measuring.calls.layers import Layers
from semdiag.measuring.calls.query_draws import QueryDraws
from semdiag.measuring.kept_rows import SKETCHES, KeptRows
from semdiag.measuring.tables import HEADS

MAX_QUERIES = 20_000_000  # rows held in memory at once: about 1 GB
LEAST_MAX_QUERIES = 50  # with fewer, the sample of a larger table may be empty
_QUERY_PLACES = ("sample", "layer", "head", "query", "stratum", "kept")
_KEY_PLACES = ("sample", "layer", "head", "key")


class Collector:
    """Consumes calls and makes the tables of one model's measurements."""

    def __init__(
        self,
        model: str,
        k: Sequence[int],
        draws: QueryDraws,
        wanted: int | None = None,
        min_keys: int = 1,
        max_queries: int = MAX_QUERIES,
    ) -> None:
        self.model, self.k, self.draws, self.wanted = model, k, draws, wanted
        self._min_keys = min_keys
        self.samples = 0  # so far, the current batch included
        self._numbers = SampleNumbers()
        self.layers = Layers()
        self.counted: Counter[int] = Counter()  # real queries of each layer
        self._queries = KeptRows(max_queries, _QUERY_PLACES)
        self._loads = KeptRows(max_queries, _KEY_PLACES)
        self._non_finite: list[dict[str, np.ndarray]] = []
        self._heads: dict[int, Tensor] = {}  # by layer, (4 + number of k, H): queries, and sums over them

    def start(self, samples: int) -> None:
        """Start a batch with so many samples."""
        self.samples += samples
        self._numbers.start(samples)

    def add(self, call: AttentionCall) -> None:
        """Reduce a call whose padded queries are marked."""
        rows = counted_rows(call, max(self.k, default=0), self.draws.places(call))
        layer = self.layers.add(rows)
        self._add_rows(rows, layer)
        self._add_loads(rows, layer)
        self._add_heads(rows, layer)

    def _places(self, values: Tensor, layer: int, position: str) -> dict[str, np.ndarray]:
        """Return sample, layer, head and position of each entry of (B, H, L), flattened."""
        index, head, where = (axis.ravel() for axis in np.indices(values.shape, dtype=np.int32))
        sample = self._numbers.of(len(values))[index]
        return {"sample": sample, "layer": np.full_like(sample, layer), "head": head, position: where}

    def _add_rows(self, rows: CountedRows, layer: int) -> None:
        call, statistics = rows.call, rows.statistics
        columns = self._places(statistics.keys, layer, "query")
        if rows.places is not None:
            stratum = columns["query"] // PER_STRATUM
            columns |= {"query": _flat(rows.places, np.int32), "stratum": stratum}
        columns |= {
            "keys": _flat(statistics.keys, np.int32),
            "kept": _flat(statistics.kept, np.int32),
            "dispersion": _flat(statistics.dispersion()),
            "separation": _flat(statistics.separation()),
            "largest_weight": _flat(statistics.largest_weight()),
        }
        if self.wanted is not None and call.selected is not None:
            q, selected, allowed = call.q, call.selected, call.allowed
            if rows.places is not None:
                q, selected = rows_of(q, rows.places), rows_of(selected, rows.places)
                allowed = None if allowed is None else rows_of(allowed, rows.places)
            columns["recall"] = _flat(top_recall(q, call.k, call.scale, selected, self.wanted, allowed))
        for k in self.k:
            columns[f"dispersion_k{k}"] = _flat(statistics.dispersion(k))
            columns[f"separation_k{k}"] = _flat(statistics.separation(k))
            columns[f"mass_k{k}"] = _flat(statistics.mass_kept(k))
        self.counted[layer] += int(rows.queries.sum())
        self._queries.add(_where(columns, rows.queries & (statistics.keys >= self._min_keys)))
        bad = (statistics.non_finite * rows.queries).sum(2)
        if bool(bad.any()):
            columns = self._places(bad[..., None], layer, "query") | {"scores": _flat(bad)}
            del columns["query"]
            self._non_finite.append(_where(columns, bad > 0))

    def _add_loads(self, rows: CountedRows, layer: int) -> None:
        statistics = rows.statistics
        columns = self._places(statistics.load, layer, "key") | {"load": _flat(statistics.load, np.int32)}
        for k in self.k:
            columns[f"load_k{k}"] = _flat(statistics.key_load(k), np.int32)
        self._loads.add(_where(columns, rows.keys))

    def _add_heads(self, rows: CountedRows, layer: int) -> None:
        some = rows.attending & (rows.statistics.keys >= self._min_keys)
        firsts = [rows.first_weight(), *(rows.first_kept(k) for k in (None, *self.k))]
        values = torch.stack([some, rows.statistics.entropy, *firsts])
        sums = torch.where(some, values, 0.0).sum((1, 3), dtype=torch.float64).cpu()
        known = self._heads.get(layer, sums.new_zeros(len(sums), 0))
        heads = max(known.shape[1], sums.shape[1])  # calls of one layer may differ in their number of heads
        known, sums = (pad(x, (0, heads - x.shape[1])) for x in (known, sums))
        self._heads[layer] = known + sums

    def heads(self) -> pd.DataFrame:
        """Return the table ``heads``, with first_key_kK for each counterfactual K."""
        names = ["entropy", "first_weight", "first_key", *(f"first_key_k{k}" for k in self.k)]
        rows = [
            {"model": self.model, "layer": layer, "head": head, "queries": int(queries)}
            | {name: total / max(queries, 1) for name, total in zip(names, totals, strict=True)}
            for layer, sums in sorted(self._heads.items())
            for head, (queries, *totals) in enumerate(sums.T.tolist())
        ]
        further = {name: pd.Series([row[name] for row in rows], dtype="float64") for name in names[2:]}
        return HEADS.of_rows(rows).assign(**further)

    def queries(self) -> pd.DataFrame:
        """Return the table ``queries``."""
        return self._table(self._queries.parts, ())

    def loads(self) -> pd.DataFrame:
        """Return the table ``loads``."""
        return self._table(self._loads.parts, ())

    def sketches(self) -> pd.DataFrame:
        """Return the table ``sketches``: percentiles of tables that have more rows than are kept."""
        rows = [*self._queries.sketched(), *self._loads.sketched()]
        return SKETCHES.of_rows({"model": self.model, **row} for row in rows)

    @property
    def share_kept(self) -> float:
        """Probability that a query that was looked at is in the table: below 1 if not all were kept."""
        return self._queries.share

    def non_finite(self) -> pd.DataFrame:
        """Return the table ``non_finite``."""
        return self._table(self._non_finite, ("sample", "layer", "head", "scores"))

    def calls(self) -> pd.DataFrame:
        """Return the table ``calls``: one row per layer and occurrence."""
        return self.layers.table(self.model)

    def _table(self, parts: list[dict[str, np.ndarray]], empty: Sequence[str]) -> pd.DataFrame:
        names = list(parts[0]) if parts else list(empty)
        columns = {
            name: np.concatenate([part[name] for part in parts]) if parts else np.zeros(0, np.int64)
            for name in names
        }
        rows = len(columns["sample"])
        return pd.DataFrame({"model": pd.Series(self.model, index=range(rows), dtype="str"), **columns})


def _flat(values: Tensor, dtype: type[np.generic] | None = None) -> np.ndarray:
    array = values.to(torch.float32 if values.dtype == torch.bfloat16 else values.dtype).cpu().numpy().ravel()
    return array if dtype is None else array.astype(dtype)


def _where(columns: dict[str, np.ndarray], keep: Tensor) -> dict[str, np.ndarray]:
    """Return the rows of the entries to keep."""
    if bool(keep.all()):
        return columns
    kept = _flat(keep)
    return {name: column[kept] for name, column in columns.items()}
