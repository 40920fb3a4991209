"""``with semdiag.capture(model) as calls``: statistics of the attention in your own forward passes."""

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import product
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing import attention_calls as hooks
from semdiag.capturing import batches as batching
from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.capturing.audit import Audit, Remark, Skipped, failure
from semdiag.capturing.batches import Batch, as_whole_number, as_whole_numbers, checked_real
from semdiag.capturing.call_strips import mark_largest
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.padding import Padding
from semdiag.capturing.patches import undone
from semdiag.mathematics.row_statistics import RowStatistics
from semdiag.mathematics.score_strips import as_mask
from semdiag.measuring.calls.collector import (
    KeptScores,
    Layers,
    QueryDraws,
    ReducedCall,
    folded,
    remarks_table,
    rows_of_call,
    skipped_table,
)
from semdiag.measuring.calls.counted_rows import Arrivals, Tensors, counted_rows, remark_path
from semdiag.measuring.calls.running import running
from semdiag.measuring.metrics import METRICS, Metric
from semdiag.measuring.words import counted
from semdiag_files import InputError, unknown_name
from semdiag_models import Encoder

LARGEST_K = 32


class Calls:
    """Attention calls of a capture, reduced on arrival: nothing of size L × L, no query and no key is kept.

    Every table has the columns call (number in the context), module, layer (in order of first calls), occurrence
    (number of the module's call in one forward pass), sample (row of the batch axis), head, and query or key. If a
    call gives the positions of its queries among its keys, as with a cache, ``query`` is that position, else the
    number in the call. Padded queries are left out. Everything counts from 0; scores are in nats.
    """

    def __init__(self, k: int, draws: QueryDraws, keep: bool = False) -> None:
        self._kept: KeptScores | None = KeptScores() if keep else None
        self._k = k
        self._layers = Layers()
        self._reduced = list[ReducedCall]()
        self._draws = draws
        self._calls = 0
        self._arrivals = Arrivals()
        self._audit = Audit()

    def __len__(self) -> int:
        return self._calls

    def __repr__(self) -> str:
        self._arrivals.settle()
        if not self._reduced:
            return "Calls: none captured yet (run the model inside the context)"
        samples, heads, _ = self._reduced[0].queries.shape
        counts = f"{counted(len(self), 'call')} of {counted(len(self._layers), 'layer')}"
        of_first = f"{counted(samples, 'sample')} and {counted(heads, 'head')} in the first"
        return f"Calls: {counts}, {of_first}; k up to {self._k}. Tables: dispersion(), separation(), loads(), …"

    def dispersion(self, k: int | Sequence[int] | None = None) -> pd.DataFrame:
        """Return the semantic dispersion δ of every query: the range of the scores that it attends to, in nats.

        With a k, or several, each query would keep its k largest scores. Further columns are keys, k (missing for
        None) and dispersion (NaN without keys). A k that is not in 1 … the capture's k is a ValueError.
        """
        return self._table(METRICS["dispersion"], k)

    def separation(self, k: int | Sequence[int] | None = None) -> pd.DataFrame:
        """Return the semantic separation Δ of every query: its smallest kept score minus the largest dropped one.

        In nats, +inf if nothing is dropped; ``k``, columns and errors as of :meth:`dispersion`.
        """
        return self._table(METRICS["separation"], k)

    def loads(self, k: int | Sequence[int] | None = None) -> pd.DataFrame:
        """Return the key load, how many queries attend to each key, and the weight that the key receives.

        ``k`` and errors as of :meth:`dispersion`. There is one row per key and k, with the further columns k, load
        and received, Σ_i p_ij over the queries that were looked at (NaN with a k); no row for padded keys.
        """
        table = self._table(METRICS["load"], k)
        if k is not None:
            return table.assign(received=math.nan)
        return table.assign(received=self._table(METRICS["received"], None)["received"])

    def entropy(self) -> pd.DataFrame:
        """Return the entropy −Σ p ln p of the attention weights of every query, in nats; NaN without keys."""
        return self._table(METRICS["entropy"], None)

    def metric(self, name: str, k: int | Sequence[int] | None = None) -> pd.DataFrame:
        """Return a metric that ``semdiag list metrics`` names, of every query or key, like ``weight_kept``, k=8.

        ``k``, columns and errors as of :meth:`dispersion`. A name that is no metric of single queries or keys, or
        a k where the metric takes none, or none where it needs one, is an InputError.
        """
        names = [metric.name for metric in METRICS.values() if metric.of_rows and metric.per != "head"]
        if name not in names:
            raise unknown_name("metric", name, names)
        metric = METRICS[name]
        if k is None and not metric.takes(None):
            raise InputError(f"{name} needs a k: calls.metric({name!r}, k=8).")
        if k is not None and not metric.takes(1):
            raise InputError(f"{name} takes no k. Got k={k!r}.")
        return self._table(metric, k)

    def scores(self, layer: int, head: int | None = None) -> Tensor:
        """Return a layer's scores before its softmax, in nats, from a capture with ``scores=True``.

        (B, H, L, Lk), or (B, L, Lk) for one head; −∞ where a query does not attend to a key. Forward passes are
        concatenated along the first axis. Layers are numbered as in the tables. An InputError says that no scores
        are kept, that there is no such call or head, or that the forward passes differ in length.
        """
        return self._of_kept(layer, head, KeptScores.scores)

    def weights(self, layer: int, head: int | None = None) -> Tensor:
        """Return a layer's attention weights, the softmax of :meth:`scores`; rows without keys are zeros.

        Arguments, shape and errors as of :meth:`scores`. With attention sinks, rows sum to less than 1.

        Example:
            >>> from semdiag_models import Encoder, ModelConfig
            >>> model = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1)).eval()
            >>> with capture(model, scores=True) as calls:
            ...     _ = model(torch.tensor([[0, 1, 1, 0]]))
            >>> calls.weights(layer=0, head=0).shape
            torch.Size([1, 4, 4])
        """
        return self._of_kept(layer, head, KeptScores.weights)

    def received(self) -> pd.DataFrame:
        """Return the weight that each key receives, r_j = Σ_i p_ij over the queries: a part of :meth:`loads`."""
        return self._table(METRICS["received"], None).drop(columns="k")

    def weight_between(self, groups: Mapping[str, Any]) -> pd.DataFrame:
        """Return the weight that groups of tokens give one another, from a capture with ``scores=True``.

        w(A, B) = mean over the queries i in A that attend to something of Σ_{j in B} p_ij: one row per layer, head
        and pair of groups, with the columns group, to, queries and weight (NaN without queries). A group is bool,
        (L,) or (B, L), else an InputError. Layers whose keys are not their queries' tokens are left out.
        """
        parts = []
        for layer in range(len(self._layers)):
            weights = self.weights(layer).double()
            size = weights.shape
            attends = self.scores(layer).isfinite().any(-1)
            if size[2] != size[3]:
                continue
            masks = {name: _group(name, tokens, size[0], size[3]) for name, tokens in groups.items()}
            for (name, rows), (to, keys) in product(masks.items(), repeat=2):
                among = attends & rows[:, None]
                weight = (weights * keys[:, None, None]).sum(-1).where(among, 0).sum((0, 2))
                queries = among.sum((0, 2))
                place = {"layer": layer, "head": range(size[1]), "group": name, "to": to}
                parts.append(pd.DataFrame(place | {"queries": queries, "weight": weight / queries}))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    def recall(self, indices: Mapping[int, Tensor]) -> pd.DataFrame:
        """Return what a choice of keys of your own keeps, from a capture with ``scores=True``.

        Indices by layer are positions of the chosen keys, (B, H or 1, L, k), -1 for none. By layer and head:
        queries (that attend to something), weight (mean weight of the chosen keys), top_weight (that of as many
        largest), recall (share of those that were chosen). Indices that do not fit are an InputError, and so is a
        layer that hides keys by a choice of its own, as an indexer does: of hidden keys there are no scores.
        """
        parts = []
        for layer, chosen in indices.items():
            weights = self.weights(layer).double()
            scores = self.scores(layer)
            size = weights.shape
            length = weights.shape[3]
            fits = chosen.shape[:-1] in (size[:3], (size[0], 1, size[2])) and not chosen.is_floating_point()
            if not fits or int(chosen.max()) >= length or int(chosen.min()) < -1:
                raise InputError(
                    f"Indices of layer {layer} are whole numbers (B, H or 1, L, k), of {(*size[:3], 'k')}, that "
                    f"lie in 0 … {length - 1} or are -1. Got {tuple(chosen.shape)}."
                )
            mask = as_mask(chosen.long().expand(*size[:3], -1), length)
            _check_seen(layer, mask, scores.isfinite())
            mask &= scores.isfinite()
            best = mark_largest(scores, mask.sum(-1, keepdim=True))
            attends = scores.isfinite().any(-1).sum((0, 2))
            facts = {
                "queries": attends,
                "weight": (weights * mask).sum((0, 2, 3)) / attends,
                "top_weight": (weights * best).sum((0, 2, 3)) / attends,
                "recall": (mask & best).sum((0, 2, 3)) / best.sum((0, 2, 3)),
            }
            parts.append(pd.DataFrame({"layer": layer, "head": range(size[1]), **facts}))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    def _of_kept(self, layer: int, head: int | None, read: Callable[[KeptScores, int], Tensor]) -> Tensor:
        if self._kept is None:
            raise InputError("This capture keeps no scores: use capture(model, scores=True).")
        matrices = read(self._kept, layer)
        if head is not None and not 0 <= head < matrices.shape[1]:
            raise InputError(f"head must lie in 0 … {matrices.shape[1] - 1}. Got {head}.")
        return matrices if head is None else matrices[:, head]

    @property
    def share(self) -> float:
        """Fraction of the queries that was drawn, 1 for all: extremes and loads are over these alone."""
        return self._draws.share

    @property
    def residual(self) -> pd.DataFrame:
        """One row per layer: mechanism, mask, heads, calls, and the largest residual.

        The residual is the largest relative deviation of softmax(scale · q kᵀ + …) v, recomputed on random rows,
        from the layer's output: about 1e-7 in float32 if nothing was missed; NaN with dropout in training mode.
        """
        self._arrivals.settle()
        return self._layers.table("").drop(columns="model")

    @property
    def audit(self) -> pd.DataFrame:
        """What (``not captured``, or a ``remark`` on what was), module, operation, reason and times."""
        skipped = skipped_table("", self._audit, self._layers.modules).assign(what="not captured")
        remarks = remarks_table("", self._audit).rename(columns={"text": "reason"})
        table = pd.concat([skipped, remarks.assign(what="remark", operation="")], ignore_index=True)
        return table[["what", "module", "operation", "reason", "times"]]

    @property
    def other_softmaxes(self) -> int:
        """Number of softmaxes that met no values (routers, losses, outputs), which are no attention."""
        return self._audit.others.total()

    def _table(self, metric: Metric, k: int | Sequence[int] | None) -> pd.DataFrame:
        ks: tuple[int | None, ...] = (None,) if k is None else as_whole_numbers(k, "k", 1)
        if wrong := [n for n in ks if n is not None and n > self._k]:
            raise ValueError(
                f"k must lie in 1 … {self._k}, the capture's k. Got {wrong[0]}: use capture(model, k={wrong[0]})."
            )
        self._arrivals.settle()
        parts = [rows_of_call(reduced, metric, n) for reduced in self._reduced for n in ks]
        if parts:
            return pd.concat(parts, ignore_index=True).astype({"k": "Int64"})
        place = ["call", "module", "layer", "occurrence", "sample", "head", metric.per]
        if metric.per == "query":
            place.append("keys")
        return pd.DataFrame(columns=[*place, "k", metric.name])

    @torch.no_grad()
    def _add(self, call: AttentionCall, padding: Padding, samples: int, second: int) -> None:
        call = padding.marked(call, self._audit)
        if (problem := folded(call.q.shape[0], samples, second)) is not None:
            self._audit.remarks[Remark(call.module, f"{problem}: each row counts as a sample")] += 1
        remark_path(call, self._audit)
        rows = counted_rows(call, self._k, self._draws.places(call), received=True)
        layer = self._layers.add(rows, self._arrivals)
        if self._kept is not None:
            self._kept.add(call, layer)
        place = {"call": self._calls, "module": call.module, "layer": layer, "occurrence": call.occurrence}
        self._calls += 1
        first = call.keys_before + call.first_query
        keys_before = call.keys_before
        sent = {field.name: getattr(rows.statistics, field.name) for field in fields(RowStatistics)}
        sent["top_keys"] = sent["top_keys"][..., :0]  # unused
        if rows.places is not None:
            sent["places"] = rows.places

        def receive(tensors: Tensors) -> None:
            queries = tensors.pop("real").numpy()
            keys = tensors.pop("some_keys").numpy()
            places = tensors.pop("places").numpy() if "places" in tensors else None
            self._reduced.append(
                ReducedCall(place, first, keys_before, queries, places, keys, RowStatistics(**tensors))
            )

        self._arrivals.send(sent | {"real": rows.queries, "some_keys": rows.keys}, receive)


def _check_seen(layer: int, chosen: Tensor, visible: Tensor) -> None:
    """Refuse a choice of keys that a layer, which hides keys between others, has made itself or has hidden."""
    real = visible.any(2, keepdim=True).any(1, keepdim=True)
    between = visible.cumsum(-1).bool() & visible.flip(-1).cumsum(-1).flip(-1).bool()
    hidden = between & real & ~visible
    if not bool(hidden.any()):  # a causal mask, a window, padding
        return
    if bool((chosen & hidden).any()) or not bool((visible & ~chosen).any()):
        raise InputError(
            f"Layer {layer} hides keys between those that a query sees, as an indexer does: of these there are no "
            "scores, and a recall would be 1 whatever was chosen. Capture the model with all keys kept (of an "
            "indexer, index_topk of at least the text's length)."
        )
    text = f"layer {layer} hides keys between those that a query sees: the recall is among those that it sees"
    warnings.warn(text, stacklevel=3)


def _group(name: str, group: Any, samples: int, length: int) -> Tensor:
    tokens = torch.as_tensor(group)
    if tokens.dtype != torch.bool or tokens.shape not in ((length,), (samples, length)):
        shape_words = f"{str(tokens.dtype).removeprefix('torch.')} of {tuple(tokens.shape)}"
        raise InputError(
            f"The group {name} must be bool, ({length},) or ({samples}, {length}). Got {shape_words}."
        )
    return tokens.cpu().expand(samples, length)


class _Batch(threading.local):
    """Number of samples in this thread's current batch, from its first tensor; 0 if unknown."""

    samples = 0
    second = 0  # the number, if samples are the second axis

    @contextmanager
    def counted(self, model: nn.Module) -> Iterator[None]:
        """Observe the model's arguments, except those of torch's own layers, which keep their heads apart."""
        if isinstance(model, torch.jit.ScriptModule) or type(model).__module__.startswith("torch.nn."):
            yield
            return
        of_model = hooks.Hooks(model, self._before, self._after)
        with undone(of_model.remove):
            of_model.put_on()
            yield

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = *args, *kwargs.values()
        self.samples = batching.samples_of(batch)
        self.second = batching.second_axis(module, batch)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self.samples = 0


@contextmanager
def capture(
    model: nn.Module,
    k: int = LARGEST_K,
    queries: int | None = None,
    *,
    scores: bool = False,
    real: Tensor | None = None,
    seed: int = 0,
) -> Iterator[Calls]:
    """Watch every softmax attention of a model while you run it.

    The model's outputs, parameters, mode and gradients are unchanged, and nothing is left behind after the
    context. The capture never stops the model: if it fails itself, :attr:`Calls.audit` says so. Watches may
    overlap, in threads and in asynchronous tasks. With dropout in training mode, layers have no residual.

    Args:
        model: any module, unmodified.
        k: the largest k for :meth:`Calls.dispersion` and its like. Each query keeps k + 1 scores.
        queries: number of queries of the first call that are drawn per sample and head; of other calls the same
            fraction is drawn. None means all. No score of the others is computed.
        scores: whether to keep all scores, for :meth:`Calls.scores` and :meth:`Calls.weights`, of a few texts.
        real: (B, L) bool, false for padded queries. By default it is read from the arguments of each forward pass
            (``attention_mask``, …). :attr:`Calls.audit` lists the calls that it does not fit.
        seed: random seed for the draws.

    Yields:
        Calls, which fill while the model runs. Arguments of other kinds are an InputError.

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
    if not isinstance(model, nn.Module):
        raise InputError(f"A capture watches a torch.nn.Module. Got {type(model).__name__}.")
    as_whole_number(k, "k", 0)
    as_whole_number(seed, "seed", 0)
    calls = Calls(k, QueryDraws(queries, seed), scores)
    padding = Padding(model, checked_real(real))

    batch = _Batch()

    def consume(call: AttentionCall) -> None:
        try:
            calls._add(call, padding, batch.samples, batch.second)
        except Exception as error:
            calls._audit.skipped[Skipped(call.module, call.mechanism, failure(error))] += 1

    with padding.watched(), batch.counted(model), watch_attention(model, consume) as calls._audit:
        yield calls
    calls._arrivals.settle()
    if not len(calls) and (calls._audit.skipped or calls._audit.remarks):
        warnings.warn("No softmax attention was captured: calls.audit says what was seen.", stacklevel=3)


def longest_call(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[int, int]:
    """Return the largest number of queries, and of keys, in the attention calls on some inputs."""
    if all(map(batching.only_token_ids, batches)):
        further = loaded.module.config.extra_tokens if isinstance(loaded.module, Encoder) else 0
        length = max(map(batching.longest, batches), default=1) + further
        return length, length
    sizes = [(1, 1)]

    def look(call: AttentionCall) -> None:
        sizes.append((call.q.shape[2], call.k.shape[2]))

    batch = max(
        batches, key=lambda batch: max((t.shape[1:].numel() for t in batching.tensors_of(batch)), default=0)
    )
    alone = len(batching.tensors_of(batch)) == 1  # several may depend on each other
    if alone and not isinstance(batch, tuple | list):
        batch = next(batching.each(batch, 1))
    with running(loaded, look, device, dtype) as run:
        run(batch)
    queries, keys = zip(*sizes, strict=True)
    return max(queries), max(keys)
