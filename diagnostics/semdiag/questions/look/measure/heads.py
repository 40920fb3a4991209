"""What every head of a model does with one input: its scores before the softmax, and three numbers."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Audit
from semdiag.capturing.batches import longest, samples_of
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.counted_rows import CountedRows, counted_rows
from semdiag.measuring.calls.layers import Layers
from semdiag.measuring.calls.running import running
from semdiag.measuring.calls.scored_rows import as_mask
from semdiag.measuring.encoders.inputs import fitting
from semdiag.measuring.measure import no_attention
from semdiag.measuring.survey import remarks_on
from semdiag.questions.look.measure.sample import Cut, Sample, is_crossing, token_labels
from semdiag_models import InputError

_USUAL_K = 5
LARGEST = 12 * 2**20  # bytes of scores on a page, which writes four letters for three of them


@dataclass(frozen=True, eq=False)
class Head:
    """One head on one input."""

    scores: np.ndarray  # z of every query and the keys it may attend to, nats: query by query, keys in their order
    allowed: np.ndarray  # (Lq, Lk) bool, A_i; no key for a query that does not count
    selected: np.ndarray | None  # (Lq, Lk) bool, S_i; None: the head attends to every key it may
    sink: float | None  # one more logit in the softmax's denominator; None: there is none
    dispersion: float  # the median δ of its queries, nats, of what it attends to; NaN if none is finite
    entropy: float  # the mean entropy of its weights, nats
    first_weight: float  # the mean weight on the first key that is no padding


@dataclass(frozen=True, eq=False)
class SeenLayer:
    """One place of a model where attention happens."""

    module: str  # its dotted name
    occurrence: int  # which call of the module in the forward
    queries: list[str]  # labels of the queries: tokens, or positions
    keys: list[str]  # labels of the keys
    crossing: bool  # whether the module's name says that the keys are of another sequence than the queries
    heads: list[Head]  # of the layer


@dataclass(frozen=True, eq=False)
class Seen:
    """What the heads of a model do with one input."""

    model: LoadedModel  # the model that ran
    sample: Sample  # its input
    layers: list[SeenLayer]  # in the order of their first calls
    audit: Audit  # what was not captured, and remarks on what was
    residual: float  # the largest deviation of the recomputed attention, in units of what rounding can do
    dtype: str  # in which it ran
    folded: list[str]  # modules with heads or windows in their batch axis, of which only the first row is shown

    @property
    def length(self) -> int:
        """Return the number of queries in the layer that has most."""
        return max(len(layer.queries) for layer in self.layers)


def fitting_k(seen: Seen, k: int | None) -> int:
    """Return the k that is shown at first."""
    longest_row = max(int(head.allowed.sum(1).max()) for layer in seen.layers for head in layer.heads)
    if k is None:
        return min(_USUAL_K, longest_row)
    if all(head.selected is not None for layer in seen.layers for head in layer.heads):
        raise InputError(
            f"k applies only to models that attend to every key: {seen.model.path} has a mask of its own."
        )
    fitting([k], longest_row, "the largest number of keys")
    return k


@dataclass
class _Collector:
    """Collects the calls of one forward. If they do not fit on a page, only their size is kept."""

    sample: Sample
    layers: Layers = field(default_factory=Layers)
    seen_layers: list[SeenLayer] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    size: int = 0

    def add(self, call: AttentionCall) -> None:
        """Keep a call's first row of the batch axis: there is one sample."""
        if len(call.q) > max(samples_of(self.sample.batch), 1):
            self.folded.append(call.module)
        call = call.part(slice(0, 1))
        rows = counted_rows(call)
        self.layers.add(rows)
        exact = rows.statistics.kept_log_sum_exp.dtype
        self.size += exact.itemsize * int((rows.statistics.keys * rows.queries).sum())
        if self.size > LARGEST:
            self.seen_layers.clear()
            return
        queries, keys = token_labels(call, self.sample)
        with torch.autocast(call.q.device.type, enabled=False):  # as for the statistics
            scores = call.scores(exact)
        heads = _heads(rows, scores)
        self.seen_layers.append(
            SeenLayer(call.module, call.occurrence, queries, keys, is_crossing(call.module), heads)
        )


def see(
    model: LoadedModel,
    sample: Sample,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Seen:
    """Run a model on one input and keep what every head does with it."""
    collector, audit, kind = _run(model, sample, device, dtype)
    if collector.size > LARGEST:
        share = math.sqrt(LARGEST / collector.size)  # scores grow as the square of the length
        fits = math.floor(share * longest(sample.batch)) - 1
        shorter = sample.shortened(fits, Cut.SCORES) if fits > 1 else None
        if shorter is not None:
            sample = shorter
            collector, audit, kind = _run(model, sample, device, dtype)
    if collector.size > LARGEST:
        raise InputError(
            f"{sample.source}: its scores take {collector.size / 2**20:.0f} MiB, and a page holds "
            f"{LARGEST / 2**20:.0f}. Give a smaller input."
        )
    if not collector.seen_layers:
        raise no_attention(model.path, audit)
    if not collector.size:
        raise InputError("There is no query to look at: every token of the input is padding.")
    for remark in remarks_on(model, [sample.batch], seed):
        audit.remarks[remark] += 1
    residual = collector.layers.largest("residual_over_rounding")
    name = str(kind).removeprefix("torch.")
    return Seen(model, sample, collector.seen_layers, audit, residual, name, collector.folded)


def _run(
    model: LoadedModel, sample: Sample, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[_Collector, Audit, torch.dtype]:
    collector = _Collector(sample)
    with running(model, collector.add, device, dtype) as run:
        run(sample.batch)
    return collector, run.audit, run.dtype


def _heads(rows: CountedRows, scores: Tensor) -> list[Head]:
    """Return the heads of a call of one sample."""
    call, counted = rows.call, rows.call.counted[..., None]
    allowed = (counted if call.allowed is None else counted & call.allowed).expand(scores.shape)
    selected = None if call.selected is None else allowed & as_mask(call.selected, scores.shape[-1])
    sinks = None if call.sinks is None else call.sinks.double().tolist()
    of_rows = (rows.attending, rows.statistics.dispersion(), rows.statistics.entropy, rows.first_weight())
    attending, spans, entropies, firsts = (values[0].cpu().numpy() for values in of_rows)
    on_cpu = [None if x is None else x[0].cpu().numpy() for x in (scores, allowed, selected)]
    heads = []
    for head in range(scores.shape[1]):
        z, seen, kept = (None if x is None else x[head] for x in on_cpu)
        spread = spans[head][attending[head]]
        spread = spread[np.isfinite(spread)]
        heads.append(
            Head(
                scores=z[seen],  # type: ignore[index]
                allowed=seen,  # type: ignore[arg-type]
                selected=kept,
                sink=None if sinks is None else sinks[head],
                dispersion=float(np.median(spread)) if len(spread) else math.nan,
                entropy=_mean(entropies[head][attending[head]]),
                first_weight=_mean(firsts[head][attending[head]]),
            )
        )
    return heads


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else math.nan
