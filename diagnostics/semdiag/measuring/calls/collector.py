"""Reduce attention calls to columns of numbers on arrival: layers, drawn queries, scores to keep, and tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from semdiag.capturing.attention_call import joint_kind, mask_kind
from semdiag.capturing.attention_calls import AttentionCall
from semdiag.capturing.audit import Audit
from semdiag.capturing.batches import as_whole_number
from semdiag.mathematics.paper_stability import top_recall
from semdiag.mathematics.row_statistics import RowStatistics
from semdiag.mathematics.sampled_intervals import PER_STRATUM, draw_queries
from semdiag.mathematics.score_strips import as_mask, rows_of
from semdiag.measuring.calls.counted_rows import Arrivals, CountedRows, Tensors, counted_rows
from semdiag.measuring.calls.residual import residual_numbers
from semdiag.measuring.metrics import Metric, in_table, metric_columns
from semdiag.measuring.row_sample import SKETCHES, KeptRows
from semdiag.measuring.table import CALLS, HEADS, REMARKS, RESIDUALS, SKIPPED
from semdiag.measuring.words import counted
from semdiag_files import InputError


@dataclass
class Layer:
    """Facts about one attention layer: a module, and one of its calls in a forward pass."""

    number: int  # position in the order of first calls
    mechanism: str  # adapter that saw it
    kinds: set[str] = field(default_factory=set)  # kinds of its masks so far
    heads: int = 0  # number of query heads
    key_heads: int = 0  # number of key heads
    width: int | None = None  # width of a head; None where the scores alone are known
    longest: int = 0  # largest number of keys
    calls: int = 0  # number of calls so far
    residual: float = 0.0  # largest residual so far, relative to the largest output; NaN if one was NaN
    residual_over_rounding: float = 0.0  # the same in units of the possible effect of rounding
    rounding: float = 0.0  # largest possible effect of rounding so far, relative to the largest output

    def add(self, call: AttentionCall) -> None:
        """Record a call's shape."""
        self.heads = call.q.shape[1]
        self.key_heads = call.k.shape[1]
        self.width = call.q.shape[3] if call.factored else None
        self.longest = max(self.longest, call.k.shape[2])
        self.calls += 1

    def note(self, kind: str, residual: list[float]) -> None:
        """Record a call's kind of mask, and the numbers of its residual."""
        self.kinds.add(kind)
        for name, value in zip(RESIDUALS, residual, strict=True):
            setattr(self, name, float(np.maximum(getattr(self, name), value)))  # keeps a NaN


class Layers:
    """Numbers layers in the order of first calls; a module called twice per forward pass makes two layers."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], Layer] = {}
        self._generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self._places)

    def add(self, rows: CountedRows, arrivals: Arrivals) -> int:
        """Record a call, whose mask and residual are still on their way; return the number of its layer."""
        call = rows.call
        name = call.module, call.occurrence
        place = self._places.get(name) or Layer(len(self._places), call.mechanism)
        # first, because a call for which it fails does not count
        sent = {"residual": residual_numbers(call, self._generator)}
        sent |= {"keys": rows.statistics.keys, "reached": rows.keys.any(1), "queries": rows.queries}
        if rows.places is not None:
            sent["places"] = rows.places
        place.add(call)
        self._places[name] = place

        def note(here: Tensors) -> None:
            kind = mask_kind(here["keys"], here["reached"], here["queries"], here.get("places"))
            place.note(kind, here["residual"].tolist())

        arrivals.send(sent, note)
        return place.number

    @property
    def modules(self) -> set[str]:
        """Names of the modules."""
        return {module for module, _ in self._places}

    @property
    def kind(self) -> str:
        """Common kind of all layers' masks."""
        return joint_kind({kind for place in self._places.values() for kind in place.kinds})

    def largest(self, name: str) -> float:
        """Return the largest value of an attribute of :class:`Layer` over all layers; NaN if one is NaN."""
        return float(np.max([getattr(place, name) for place in self._places.values()]))

    def table(self, model: str) -> pd.DataFrame:
        """Return the table ``calls`` of :class:`~semdiag.measuring.measurements.Measurements`."""
        shared = ("mechanism", "heads", "key_heads", "width", "calls", *RESIDUALS)
        return CALLS.of_rows(
            {"model": model, "layer": place.number, "module": module, "occurrence": occurrence}
            | {"mask": joint_kind(place.kinds)}
            | {name: getattr(place, name) for name in shared}
            for (module, occurrence), place in self._places.items()
        )


def skipped_table(model: str, audit: Audit, captured: set[str]) -> pd.DataFrame:
    """Return the table ``skipped``: what looks like attention but was not captured, and modules never called."""
    rows = [{"model": model, **entry._asdict(), "times": times} for entry, times in audit.skipped.items()]
    reached = captured | {entry.module for entry in audit.skipped}
    idle = [name for name in audit.modules if name not in reached]
    rows += [{"model": model, "module": n, "operation": "", "reason": "never called", "times": 0} for n in idle]
    return SKIPPED.of_rows(rows)


def remarks_table(model: str, audit: Audit) -> pd.DataFrame:
    """Return the table ``remarks``: what readers should know about the captured attention."""
    remarks = audit.remarks.items()
    return REMARKS.of_rows({"model": model, **remark.to_dict(), "times": times} for remark, times in remarks)


_TIE = 8  # units of roundoff of a dot product below |scale|·‖q‖·‖k‖, with a margin


class NotAvailableError(InputError):
    """Raised if something cannot be measured on a model; the message can follow "because"."""


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Scores of rows and statistics of their sets; shapes (B, H, L) unless stated otherwise."""

    scores: Tensor  # (B, H, L, L) float64, nats; -inf where a key is not allowed
    selected: Tensor  # (B, H, L, L) bool, S_i; empty for padded queries
    counted: Tensor  # bool, false for padded queries and for rows without keys
    kept: Tensor  # number of kept keys k_i, int64
    dispersion: Tensor  # δ_i in nats; 0 if a row does not count
    separation: Tensor  # Δ_i in nats

    @property
    def weights(self) -> Tensor:
        """(B, H, L, L) softmax of the scores over S_i, 0 elsewhere; rows without keys are zeros."""
        weights = self.scores.masked_fill(~self.selected, -torch.inf).softmax(-1)
        return weights.where(self.selected, 0.0)

    def halves(self) -> tuple["ScoredRows", "ScoredRows"]:
        """Return the rows of the first and the second half of the batch."""
        first, second = zip(*(getattr(self, name).chunk(2) for name in self.__dataclass_fields__), strict=True)
        return ScoredRows(*first), ScoredRows(*second)


def tie_width(call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """Return by how much rounding in a dtype may separate equal scores of a query, (B, H, Lq) float64, nats."""
    longest_key = call.k.double().norm(dim=-1).amax(-1, keepdim=True)
    longest_key = longest_key.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    largest: Tensor = abs(call.scale) * call.q.double().norm(dim=-1) * longest_key
    return _TIE * torch.finfo(dtype).eps * largest


def scored_rows(call: AttentionCall) -> ScoredRows:
    """Return the scores of an attention call, with δ, Δ and the sets."""
    if call.sinks is not None:
        raise NotAvailableError("its softmax has attention sinks, which a row of scores does not show")
    scores = call.scores(torch.float64)
    visible = call.part().allowed
    allowed = call.counted[..., None] if visible is None else call.counted[..., None] & visible
    allowed = allowed.expand(scores.shape)
    selected = allowed if call.selected is None else allowed & as_mask(call.selected, scores.shape[-1])
    lowest = scores.masked_fill(~selected, torch.inf).amin(-1)
    highest = scores.masked_fill(~selected, -torch.inf).amax(-1)
    passed_over = scores.masked_fill(~allowed | selected, -torch.inf).amax(-1)
    counted = selected.any(-1)
    gap = torch.where(counted, lowest - passed_over, torch.inf)
    rounding = tie_width(call, torch.float64)
    return ScoredRows(
        scores=scores.masked_fill(~allowed, -torch.inf),
        selected=selected,
        counted=counted,
        kept=selected.sum(-1),
        dispersion=torch.where(counted, highest - lowest, 0.0),
        separation=torch.where(gap.abs() <= rounding, 0.0, gap),
    )


DRAWN = "queries were drawn:"  # start of a remark about them
FEWEST = 2  # a single query shows no variation


class QueryDraws:
    """Draws the same fraction of the queries of every call: N per sample and head of the longest sequence."""

    def __init__(self, count: int | None, seed: int) -> None:
        if isinstance(count, Tensor):
            raise InputError("queries is the number to draw. To mark padding, use real=mask.")
        if count is not None:
            as_whole_number(count, "Queries to draw per sample and head", FEWEST)
        self.count = count
        self.seed = seed
        self._longest = 1
        self._started = False
        self._seen = 0  # number of real queries of the longest sequence so far
        self._samples: Counter[tuple[int, int]] = Counter()

    def expect(self, longest: int) -> None:
        """Set, before the first call, the number of queries of the longest sequence."""
        self._longest = longest

    @property
    def share(self) -> float:
        """Probability with which a query is drawn, N / L; 1 if all are looked at."""
        return 1.0 if self.count is None else min(1.0, self.count / self._longest)

    @property
    def remarks(self) -> list[str]:
        """Remark on the number drawn of the longest sequence so far, if it is not N; else empty."""
        if self.count is None or abs(self.share * self._seen - min(self.count, self._seen)) < 1:
            return []
        return [
            f"{DRAWN} {self.share * self._seen:.3g} of {self._seen} per sample and head of the longest sequence, "
            f"not {self.count}: the fraction, {self.count} of {self._longest}, was fixed before it was seen"
        ]

    def places(self, call: AttentionCall) -> Tensor | None:
        """Return the positions of queries drawn from those of a call that count; None for all."""
        batch, heads, length, _ = call.q.shape
        if not self._started:
            self._longest = max(self._longest, length)
            self._started = True
        if self.count is None:
            return None
        real = np.ones((batch, length), bool) if call.queries is None else call.queries.cpu().numpy()
        self._seen = max(self._seen, int(real.sum(1).max(initial=0)))
        if self.share == 1:
            return None
        place = call.layer, call.occurrence
        first = self._samples[place]
        self._samples[place] = self._samples[place] + batch
        chosen = []
        for row, real_row in enumerate(real, first):
            positions = np.flatnonzero(real_row)
            rng = np.random.default_rng([self.seed, *place, row])
            indices = draw_queries(len(positions), heads, self.count, self._longest, rng)
            chosen.append(np.where(indices >= 0, positions[indices], -1) if len(positions) else indices)
        padded = pad_sequence([torch.from_numpy(columns.T) for columns in chosen], True, -1)  # (B, most, H)
        return padded.mT.contiguous().to(call.q.device)


class KeptScores:
    """Scores by layer, on the CPU, in float32 or the model's dtype if that is finer."""

    def __init__(self) -> None:
        self._scores: dict[int, list[Tensor]] = {}
        self._sinks: dict[int, Tensor | None] = {}

    def add(self, call: AttentionCall, layer: int) -> None:
        """Keep the scores of a call whose padded queries are marked."""
        call = call.part()  # writes the causal rule into ``allowed``
        exact = torch.promote_types(call.q.dtype, torch.float32)
        with torch.autocast(call.q.device.type, enabled=False):
            scores = call.scores(exact)
        attended = call.counted[..., None]
        attended = attended if call.allowed is None else attended & call.allowed
        attended = attended if call.selected is None else attended & as_mask(call.selected, scores.shape[-1])
        self._scores.setdefault(layer, []).append(scores.masked_fill(~attended, -torch.inf).cpu())
        self._sinks[layer] = None if call.sinks is None else call.sinks.detach().to(exact).cpu()

    def scores(self, layer: int) -> Tensor:
        """Return scores (B, H, L, Lk), −∞ where a query does not attend; forward passes are joined along B."""
        if layer not in self._scores:
            last = max(self._scores, default=None)
            layers = "none: run the model inside the context" if last is None else f"layers 0 to {last}"
            raise InputError(f"There are no scores of layer {layer}. Kept: {layers}.")
        parts = self._scores[layer]
        if len({part.shape[1:] for part in parts}) > 1:
            raise InputError(
                f"The forward passes of layer {layer} differ in length, so their scores do not fit one tensor: "
                "capture one forward pass at a time."
            )
        return torch.cat(parts)

    def weights(self, layer: int) -> Tensor:
        """Return the softmax of :meth:`scores`, the sink's logit in the denominator; 0 in rows without keys."""
        scores = self.scores(layer)
        total = scores.logsumexp(-1, keepdim=True)
        if (sinks := self._sinks[layer]) is not None:
            total = torch.logaddexp(total, sinks[:, None, None])
        return torch.where(torch.isfinite(scores), (scores - total).exp(), 0.0)


def _rows_per_sample(rows: int, samples: int) -> int:
    return rows // samples if samples and rows % samples == 0 else 1


class SampleNumbers:
    """Numbers samples across batches; no two batches share a number, whatever counts as a sample."""

    def __init__(self) -> None:
        self._batch = 0
        self._first = 0
        self._next = 0

    def start(self, samples: int) -> None:
        """Start a batch of this many samples."""
        self._batch = samples
        self._first = self._next
        self._next = self._next + samples

    def of(self, rows: int) -> NDArray[np.int32]:
        """Return the sample number of each row of a call's batch axis."""
        numbers = self._first + np.arange(rows, dtype=np.int32) // _rows_per_sample(rows, self._batch)
        self._next = max(self._next, int(numbers[-1]) + 1)
        return numbers.astype(np.int32)


def folded(rows: int, samples: int, second: int = 0) -> str | None:
    """Return a remark that a batch axis does not hold one row per sample; None if it does."""
    if not samples or rows == samples:
        return None
    if rows == second:
        return "its samples are the second axis of its input (batch_first=False), not the first"
    if rows % samples == 0:
        return f"its batch axis holds {counted(rows // samples, 'row')} per sample (heads or windows)"
    return f"its batch axis holds {counted(rows, 'row')}, but the batch has {counted(samples, 'sample')}"


def counted_as(rows: int, samples: int) -> str:
    """Return the sample as which the rows of such a batch axis count: the second half of a sentence."""
    if (several := _rows_per_sample(rows, samples)) == 1:
        return "each row counts as a sample"
    return f"the first {several} count as sample 0, and so on, which mixes samples if heads come before them"


def check_rows(call: AttentionCall, samples: int) -> None:
    """Refuse a call whose rows cannot be assigned to samples."""
    if (problem := folded(call.q.shape[0], samples)) is not None:
        raise NotAvailableError(
            f"the attention of {call.module or 'the model'} does not keep the samples apart: {problem}, in an "
            "unknown order; queries with four axes (batch, heads, length, width) would tell"
        )


MAX_QUERIES = 20_000_000  # rows held in memory at a time: about 1 GB
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
        chosen_k: int | None,
        min_keys: int,
        max_queries: int,
    ) -> None:
        self.model = model
        self.k = k
        self.draws = draws
        self.chosen_k = chosen_k
        self._min_keys = min_keys
        self.samples = 0  # number of samples so far, the current batch included
        self._numbers = SampleNumbers()
        self.layers = Layers()
        self.counted: Counter[int] = Counter()  # number of real queries of each layer
        self._queries = KeptRows(max_queries, _QUERY_PLACES)
        self._loads = KeptRows(max_queries, _KEY_PLACES)
        self._non_finite: list[dict[str, np.ndarray]] = []
        self._heads: dict[int, Tensor] = {}  # (1 + metrics, H) by layer: queries, and sums over them
        self.arrivals = Arrivals()  # what calls sent; to be settled before anything is read

    def start(self, samples: int) -> None:
        """Start a batch of this many samples."""
        self.arrivals.settle()
        self.samples += samples
        self._numbers.start(samples)

    def add(self, call: AttentionCall) -> None:
        """Reduce a call whose padded queries are marked."""
        rows = counted_rows(call, max(self.k, default=0), self.draws.places(call), received=True)
        layer = self.layers.add(rows, self.arrivals)
        samples = self._numbers.of(len(call.q))
        sent = self._of_queries(rows) | {"some_keys": rows.keys, "heads": self._sums(rows)}
        sent |= self._metrics("loads", rows)
        self.arrivals.send(sent, partial(self._receive, layer, samples))

    def _metrics(self, table: str, rows: CountedRows) -> Tensors:
        """Return the columns of a table that are metrics."""
        columns = metric_columns(in_table(table), self.k).items()
        return {column: metric.of(rows, k) for column, (metric, k) in columns}

    def _of_queries(self, rows: CountedRows) -> Tensors:
        """Return columns (B, H, R) of the table of queries, which of them count, and scores without a value."""
        call = rows.call
        statistics = rows.statistics
        columns = {
            "queries": rows.queries,
            "some": rows.queries & (statistics.keys >= self._min_keys),
            "bad": (statistics.non_finite * rows.queries).sum(2),
            "keys": statistics.keys,
            "kept": statistics.kept,
            **self._metrics("queries", rows),
        }
        if rows.places is not None:
            columns["places"] = rows.places
        if self.chosen_k is not None and call.selected is not None:
            q = call.q
            selected = call.selected
            allowed = call.allowed
            if rows.places is not None:
                q = rows_of(q, rows.places)
                selected = rows_of(selected, rows.places)
                allowed = None if allowed is None else rows_of(allowed, rows.places)
            columns["recall"] = top_recall(q, call.k, call.scale, selected, self.chosen_k, allowed)
        return columns

    def _sums(self, rows: CountedRows) -> Tensor:
        """Return the number of queries of each head, and sums over them, (1 + metrics, H)."""
        some = rows.attending & (rows.statistics.keys >= self._min_keys)
        values = torch.stack([some, *self._metrics("heads", rows).values()])
        return torch.where(some, values, 0.0).sum((1, 3), dtype=torch.float64)

    def _receive(self, layer: int, samples: NDArray[np.int32], here: Tensors) -> None:
        queries, counted, non_finite = (here.pop(name) for name in ("queries", "some", "bad"))
        places = here.pop("places", None)
        real_keys = here.pop("some_keys")
        sums = here.pop("heads")
        loads = {name: _compact(here.pop(name)) for name in metric_columns(in_table("loads"), self.k)}
        columns = _places(samples, queries, layer, "query")
        if places is not None:
            stratum = columns["query"] // PER_STRATUM
            columns |= {"query": _flat(places, np.int32), "stratum": stratum}
        columns |= {name: _compact(values) for name, values in here.items()}
        self.counted[layer] += int(queries.sum())
        self._queries.add(_where(columns, counted))
        if bool(non_finite.any()):
            columns = _places(samples, non_finite[..., None], layer, "query") | {"scores": _flat(non_finite)}
            del columns["query"]
            self._non_finite.append(_where(columns, non_finite > 0))
        self._loads.add(_where(_places(samples, real_keys, layer, "key") | loads, real_keys))
        sums_before = self._heads.get(layer, sums.new_zeros(len(sums), 0))
        heads = max(sums_before.shape[1], sums.shape[1])  # calls of one layer may differ in their number of heads
        sums_before, sums = (pad(x, (0, heads - x.shape[1])) for x in (sums_before, sums))
        self._heads[layer] = sums_before + sums

    def tables(self, ks: Sequence[int]) -> dict[str, pd.DataFrame]:
        """Return the tables by name; of the counterfactual numbers only ``ks``."""
        left_out = tuple(f"_k{k}" for k in self.k if k not in ks)
        sketched = [*self._queries.sketched(), *self._loads.sketched()]
        sketched = [{"model": self.model, **row} for row in sketched if not row["quantity"].endswith(left_out)]
        tables = {
            "queries": self._table(self._queries.parts, ()),
            "loads": self._table(self._loads.parts, ()),
            "heads": self._head_table(),
            "non_finite": self._table(self._non_finite, ("sample", "layer", "head", "scores")),
            "calls": self.layers.table(self.model),
            "sketches": SKETCHES.of_rows(sketched),
        }
        return {n: x[[name for name in x if not str(name).endswith(left_out)]] for n, x in tables.items()}

    @property
    def share_kept(self) -> float:
        """Probability with which a query that was looked at is in the table: below 1 if not all were kept."""
        return self._queries.share

    def _head_table(self) -> pd.DataFrame:
        names = list(metric_columns(in_table("heads"), self.k))
        rows = [
            {"model": self.model, "layer": layer, "head": head, "queries": int(queries)}
            | {name: total / max(queries, 1) for name, total in zip(names, totals, strict=True)}
            for layer, sums in sorted(self._heads.items())
            for head, (queries, *totals) in enumerate(sums.T.tolist())
        ]
        further = [name for name in names if name not in HEADS.columns]
        return HEADS.of_rows(rows).assign(**{n: np.array([row[n] for row in rows], np.float64) for n in further})

    def _table(self, parts: list[dict[str, np.ndarray]], empty: Sequence[str]) -> pd.DataFrame:
        parts = parts or [dict.fromkeys(empty, np.zeros(0, np.int64))]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        index = range(len(columns["sample"]))
        return pd.DataFrame({"model": pd.Series(self.model, index=index, dtype="str"), **columns})


def _places(samples: NDArray[np.int32], values: Tensor, layer: int, position: str) -> dict[str, np.ndarray]:
    """Return sample, layer, head and position of each entry of (B, H, L), flattened."""
    index, head, where = (axis.ravel() for axis in np.indices(values.shape, dtype=np.int32))
    sample = samples[index]
    return {"sample": sample, "layer": np.full_like(sample, layer), "head": head, position: where}


def _flat(values: Tensor, dtype: type[np.generic] | None = None) -> np.ndarray:
    array = values.to(torch.float32 if values.dtype == torch.bfloat16 else values.dtype).cpu().numpy().ravel()
    return array if dtype is None else array.astype(dtype)


def _compact(values: Tensor) -> np.ndarray:
    """Return values as a column, whole numbers in 32 bits."""
    return _flat(values, None if values.is_floating_point() else np.int32)


def _where(columns: dict[str, np.ndarray], chosen: Tensor) -> dict[str, np.ndarray]:
    if bool(chosen.all()):
        return columns
    rows = _flat(chosen)
    return {name: column[rows] for name, column in columns.items()}


@dataclass(frozen=True, eq=False)
class ReducedCall:
    """A call's identity, positions of query 0 and key 0, real queries and keys, and row statistics."""

    place: dict[str, Any]
    first_query: int
    keys_before: int
    queries: np.ndarray  # (B, H, R) bool
    places: np.ndarray | None  # (B, H, R), positions of the queries; None means all, in order
    keys: np.ndarray  # (B, H, Lk) bool
    statistics: RowStatistics


def rows_of_call(reduced: ReducedCall, metric: Metric, k: int | None) -> pd.DataFrame:
    """Return one call's rows: an entry per sample, head and query or key."""
    assert metric.of_rows is not None
    values = metric.of_rows(reduced.statistics, k)  # (B, H, L)
    sample, head, where = (axis.ravel() for axis in np.indices(values.shape))
    columns = {**reduced.place, "sample": sample, "head": head, metric.per: where}
    if metric.per == "query":
        columns["keys"] = reduced.statistics.keys.numpy().ravel()
        columns["query"] = reduced.first_query + (where if reduced.places is None else reduced.places.ravel())
    else:
        columns["key"] = reduced.keys_before + where
    table = pd.DataFrame({**columns, "k": pd.NA if k is None else k, metric.name: values.numpy().ravel()})
    return table[(reduced.queries if metric.per == "query" else reduced.keys).ravel()]
