"""Reducing attention calls to columns of numbers as they come; nothing of a call is kept."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.attention_calls import AttentionCall
from semdiag.mathematics.row_statistics import RowStatistics, row_statistics
from semdiag.measurement.calls.layers import Layers
from semdiag_models import InputError

MAX_QUERIES = 20_000_000  # rows held in memory at once: about 1 GB


def statistics_of(call: AttentionCall, top: int = 0) -> RowStatistics:
    """Row statistics of an attention call.

    Args:
        call: its scores, masks and selections.
        top: K, the number of heavy hitters for which counterfactuals can be asked.
    """
    return row_statistics(
        call.q,
        call.k,
        call.scale,
        call.allowed,
        call.selected,
        call.queries,
        top,
        bias=call.bias,
        softcap=call.softcap,
        sinks=call.sinks,
        causal=call.causal,
        first_query=call.first_query,
    )


class Collector:
    """Consumes calls; hands out the tables of one model's measurements.

    Args:
        model: written into the column ``model``.
        k: counterfactual numbers of heavy hitters.
    """

    def __init__(self, model: str, k: Sequence[int]) -> None:
        self.model, self.k, self.samples, self.rows = model, k, 0, 0
        self.batch = 0  # samples of the running batch
        self.layers = Layers()
        self.counted: Counter[int] = Counter()  # queries of each layer that are no padding
        self._queries: list[dict[str, np.ndarray]] = []
        self._loads: list[dict[str, np.ndarray]] = []
        self._non_finite: list[dict[str, np.ndarray]] = []

    def start(self, samples: int) -> None:
        """Begin a batch.

        Args:
            samples: how many it has.
        """
        self.samples += self.batch
        self.batch = samples

    def add(self, call: AttentionCall) -> None:
        """Reduce a call, its padded queries marked.

        Raises:
            InputError: if there are more queries than can be kept.
        """
        self.rows += call.q[..., 0].numel()
        if self.rows > MAX_QUERIES:
            done = self.samples + self.batch
            raise InputError(
                f"More than the {MAX_QUERIES:,} queries that are kept, after {done} samples. Measure on fewer."
            )
        statistics = statistics_of(call, max(self.k, default=0))
        layer = self.layers.add(call, statistics.keys)
        self._add_rows(call, layer, statistics)
        self._add_loads(call, layer, statistics)

    def _places(self, values: Tensor, layer: int, position: str) -> dict[str, np.ndarray]:
        """Sample, layer, head and position of each entry of (B, H, L), flattened."""
        index, head, where = (axis.ravel() for axis in np.indices(values.shape, dtype=np.int32))
        if self.batch and values.shape[0] % self.batch == 0:  # windows of an image are parts of one sample
            index = index // (values.shape[0] // self.batch)
        sample = index + np.int32(self.samples)
        return {"sample": sample, "layer": np.full_like(sample, layer), "head": head, position: where}

    def _add_rows(self, call: AttentionCall, layer: int, statistics: RowStatistics) -> None:
        columns = self._places(statistics.keys, layer, "query") | {
            "keys": _flat(statistics.keys, np.int32),
            "kept": _flat(statistics.kept, np.int32),
            "dispersion": _flat(statistics.dispersion()),
            "separation": _flat(statistics.separation()),
            "largest_weight": _flat(statistics.largest_weight()),
        }
        for k in self.k:
            columns[f"dispersion_k{k}"] = _flat(statistics.dispersion(k))
            columns[f"separation_k{k}"] = _flat(statistics.separation(k))
            columns[f"mass_k{k}"] = _flat(statistics.mass_kept(k))
        rows = _only(columns, call.queries, statistics.keys)
        self.counted[layer] += len(rows["sample"])
        self._queries.append(rows)
        counted = 1 if call.queries is None else call.queries[:, None]
        bad = (statistics.non_finite * counted).sum(2)
        if bool(bad.any()):
            columns = self._places(bad[..., None], layer, "query") | {"scores": _flat(bad)}
            some = columns["scores"] > 0
            del columns["query"]
            self._non_finite.append(_where(columns, some))

    def _add_loads(self, call: AttentionCall, layer: int, statistics: RowStatistics) -> None:
        columns = self._places(statistics.load, layer, "key") | {"load": _flat(statistics.load, np.int32)}
        for k in self.k:
            columns[f"load_k{k}"] = _flat(statistics.key_load(k), np.int32)
        if call.selected is not None:
            self._loads.append(_only(columns, call.queries, statistics.load))
        else:  # where every allowed key is kept, a key that nobody keeps is padding
            self._loads.append(_where(columns, columns["load"] > 0))

    def queries(self) -> pd.DataFrame:
        """The table ``queries``."""
        return self._table(self._queries, ())

    def loads(self) -> pd.DataFrame:
        """The table ``loads``."""
        return self._table(self._loads, ())

    def non_finite(self) -> pd.DataFrame:
        """The table ``non_finite``."""
        return self._table(self._non_finite, ("sample", "layer", "head", "scores"))

    def calls(self) -> pd.DataFrame:
        """The table ``calls``: one row per place where attention happens."""
        return self.layers.table(self.model)

    def _table(self, parts: list[dict[str, np.ndarray]], empty: Sequence[str]) -> pd.DataFrame:
        names = list(parts[0]) if parts else list(empty)
        columns = {
            name: np.concatenate([part[name] for part in parts]) if parts else np.zeros(0, np.int64)
            for name in names
        }
        rows = len(columns["sample"])
        return pd.DataFrame({"model": pd.Series([self.model] * rows, dtype="str"), **columns})


def _flat(values: Tensor, dtype: type[np.generic] | None = None) -> np.ndarray:
    array = values.to(torch.float32 if values.dtype == torch.bfloat16 else values.dtype).cpu().numpy().ravel()
    return array if dtype is None else array.astype(dtype)


def _only(columns: dict[str, np.ndarray], valid: Tensor | None, like: Tensor) -> dict[str, np.ndarray]:
    """Drop the rows of padded positions."""
    if valid is None:
        return columns
    return _where(columns, valid[:, None, :].expand(like.shape).cpu().numpy().ravel())


def _where(columns: dict[str, np.ndarray], keep: np.ndarray) -> dict[str, np.ndarray]:
    return {name: column[keep] for name, column in columns.items()}
