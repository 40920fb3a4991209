"""``with semdiag.capture(model) as calls``: what the attention of one's own forward passes says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.capturing.audit import Audit
from semdiag.capturing.batches import real_queries, real_tokens
from semdiag.mathematics.row_statistics import RowStatistics
from semdiag.measurement.calls.collector import statistics_of
from semdiag.measurement.calls.layers import Layers, skipped_table

LARGEST_K = 32


@dataclass(frozen=True, eq=False)
class _Reduced:
    """What is kept of a call: which one it was, which of its queries and keys are real, its row statistics."""

    place: dict[str, Any]
    queries: np.ndarray  # (B, H, Lq) bool
    keys: np.ndarray  # (B, H, Lk) bool
    statistics: RowStatistics


class Calls:
    """The attention calls of a capture, reduced as they came: nothing of size L × L, no query and no key is kept.

    Every table has the columns call (number in the context), module, layer (place of its first call), occurrence
    (which call of the module in one forward), sample (in its batch), head, and query or key. Padded queries are
    left out. Everything counts from 0; scores are in nats.
    """

    def __init__(self, k: int) -> None:
        self._k, self._layers, self._reduced = k, Layers(), list[_Reduced]()
        self._audit = Audit()

    def __len__(self) -> int:
        return len(self._reduced)

    def dispersion(self, k: int | Sequence[int] | None = None) -> pd.DataFrame:
        """Semantic dispersion δ of every query: the range of the scores it attends to.

        Args:
            k: as if each query kept its k largest scores; one k or several, up to the capture's. None: what the
                model really attends to.

        Returns:
            One row per query (and k): also the columns keys, k (missing for None) and dispersion, NaN for a
            query without keys.

        Raises:
            ValueError: if a k is not in 1 … the capture's k.
        """
        return self._per_query("dispersion", k, lambda statistics, n: statistics.dispersion(n))

    def separation(self, k: int | Sequence[int] | None = None) -> pd.DataFrame:
        """Semantic separation Δ of every query: the smallest kept score minus the largest dropped one.

        Args:
            k: as in :meth:`dispersion`.

        Returns:
            One row per query (and k): also keys, k and separation, +inf where nothing is dropped.

        Raises:
            ValueError: if a k is not in 1 … the capture's k.
        """
        return self._per_query("separation", k, lambda statistics, n: statistics.separation(n))

    def loads(self, k: int | Sequence[int] | None = None) -> pd.DataFrame:
        """Key load: how many queries attend to each key, a raw count.

        Args:
            k: as in :meth:`dispersion`.

        Returns:
            One row per key (and k): also k and load; padded keys have none.

        Raises:
            ValueError: if a k is not in 1 … the capture's k.
        """
        return self._table("key", "load", k, lambda statistics, n: statistics.key_load(n), with_keys=False)

    @property
    def residual(self) -> pd.DataFrame:
        """One row per layer: mechanism, mask, heads, calls, and the largest residual.

        The residual is the largest relative deviation of softmax(scale · q kᵀ + …) v, recomputed on a few
        queries, from what the layer returned: about 1e-7 in float32 if nothing was missed.
        """
        return self._layers.table("").drop(columns="model")

    @property
    def audit(self) -> pd.DataFrame:
        """What looks like attention and was not captured: module, operation, reason, times."""
        return skipped_table("", self._audit, self._layers.modules).drop(columns="model")

    def _per_query(self, name: str, k: Any, value: Callable[[RowStatistics, int | None], Tensor]) -> pd.DataFrame:
        return self._table("query", name, k, value, with_keys=True)

    def _table(
        self,
        position: str,
        name: str,
        k: int | Sequence[int] | None,
        value: Callable[[RowStatistics, int | None], Tensor],
        with_keys: bool,
    ) -> pd.DataFrame:
        ks: list[int | None] = [None] if k is None else [k] if isinstance(k, int) else list(k)
        wrong = [n for n in ks if n is not None and not 1 <= n <= self._k]
        if wrong:
            raise ValueError(
                f"k must lie in 1 … {self._k}, the capture's k. Got {wrong[0]}: use capture(model, k={wrong[0]})."
            )
        parts = [
            _rows(reduced, position, name, n, value(reduced.statistics, n), with_keys)
            for reduced in self._reduced
            for n in ks
        ]
        if parts:
            return pd.concat(parts, ignore_index=True).astype({"k": "Int64"})
        head = [
            "call",
            "module",
            "layer",
            "occurrence",
            "sample",
            "head",
            position,
            *["keys"] * with_keys,
            "k",
            name,
        ]
        return pd.DataFrame({column: [] for column in head})

    @torch.no_grad()
    def _add(self, call: AttentionCall, real: Mapping[str, Tensor]) -> None:
        if call.queries is None and real:
            shape = (call.q.shape[0], call.q.shape[2])
            call = replace(call, queries=real_queries(real, call.module, shape, call.first_query))
        statistics = statistics_of(call, self._k)
        layer = self._layers.add(call, statistics.keys)
        place = {"call": len(self._reduced), "module": call.module, "layer": layer, "occurrence": call.occurrence}
        ones = torch.ones(call.q.shape[0], call.q.shape[2], dtype=torch.bool)
        queries = (ones if call.queries is None else call.queries.cpu())[:, None].expand(statistics.keys.shape)
        # Where every allowed key is kept, a key that nobody keeps is padding.
        keys = statistics.load.cpu() > 0 if call.selected is None else queries
        on_cpu = {field.name: getattr(statistics, field.name).cpu() for field in fields(statistics)}
        self._reduced.append(_Reduced(place, queries.numpy(), keys.numpy(), RowStatistics(**on_cpu)))


def _rows(
    reduced: _Reduced, position: str, name: str, k: int | None, values: Tensor, with_keys: bool
) -> pd.DataFrame:
    """One call's rows: an entry per sample, head and position of (B, H, L)."""
    sample, head, where = (axis.ravel() for axis in np.indices(values.shape))
    columns = {**reduced.place, "sample": sample, "head": head, position: where}
    if with_keys:
        columns["keys"] = reduced.statistics.keys.numpy().ravel()
    table = pd.DataFrame({**columns, "k": pd.NA if k is None else k, name: values.numpy().ravel()})
    return table[(reduced.queries if with_keys else reduced.keys).ravel()]


@contextmanager
def capture(model: nn.Module, k: int = LARGEST_K, queries: Tensor | None = None) -> Iterator[Calls]:
    """Watch every softmax attention of a model while you run it.

    The model's outputs, parameters, mode and gradients are its own; nothing stays behind after the context.
    Dropout in training mode is part of what the model does, and of the residual.

    Args:
        model: any module, unmodified.
        k: the largest k that :meth:`Calls.dispersion` and its like can be asked for. Each query keeps k + 1
            scores.
        queries: (B, L) bool, false for padded queries. By default read from the arguments of each forward
            (``attention_mask``, ``key_padding_mask``, …).

    Yields:
        The calls, which fill as the model runs.

    Raises:
        ValueError: if k is negative.

    Example:
        >>> from semdiag_models import Encoder, ModelConfig
        >>> model = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1)).eval()
        >>> with capture(model, k=2) as calls:
        ...     _ = model(torch.tensor([[0, 1, 1, 0]]))
        >>> calls.dispersion(k=2)[["call", "module", "layer", "head", "query", "keys", "k"]].head(2)
           call                   module  layer  head  query  keys  k
        0     0  blocks.0.attention.core      0     0      0     4  2
        1     0  blocks.0.attention.core      0     0      1     4  2
    """
    if k < 0:
        raise ValueError(f"k must not be negative. Got k={k}.")
    calls = Calls(k)
    real: dict[str, Tensor] = {} if queries is None else {"queries": queries.bool()}

    def read_padding(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        real.clear()
        real.update(real_tokens(module, kwargs) | real_tokens(module, args))

    handle = model.register_forward_pre_hook(read_padding, with_kwargs=True) if queries is None else None
    try:
        with watch_attention(model, lambda call: calls._add(call, real)) as audit:
            calls._audit = audit
            yield calls
    finally:
        real.clear()
        if handle is not None:
            handle.remove()
