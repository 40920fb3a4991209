"""Attention behind indexers, beside the dense attention that the same layer would be without a selection."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.mathematics.selections.dense_weights import dense_agreement
from semdiag.measuring.calls.residual import recomputation_residual
from semdiag.questions.selections.measure.own_rows import Choices

_AT_ONCE = 2**22  # scores held


class DenseRows(NamedTuple):
    """Shares for the r queries of one call that had to leave out a key; H heads, in float64.

    Attributes:
        recalled: (r, H), see :func:`~semdiag.mathematics.selections.dense_weights.dense_agreement`.
        hit: (r, H), 1 where the key of the largest weight is kept.
        best: (r,).
        at_random: (r,).
        lost: (r, H), the weight on keys left out, as a share of all weight (also that on other keys and sinks).
    """

    recalled: Tensor
    hit: Tensor
    best: Tensor
    at_random: Tensor
    lost: Tensor


@dataclass
class IndexedAttention:
    """One attention layer whose keys an indexer chose, in all batches.

    Attributes:
        module: of the attention.
        chosen_by: the module of the indexer, which may be that of an earlier layer.
        parts: of each call.
        unlike: number of calls that attended to other keys than were chosen; they are not measured.
    """

    module: str
    chosen_by: str
    parts: list[DenseRows] = field(default_factory=list)
    unlike: int = 0


@dataclass
class KeptAll:
    """One attention layer when its indexer may keep every key.

    Attributes:
        module: of the attention.
        rows: number of queries that are not padding.
        other_keys: how many of them attend to other keys than dense attention does.
        residual: the largest deviation from recomputed dense attention, relative to the largest output.
        over_rounding: the same in units of what rounding can do: at most 1 if both are equal up to rounding; NaN
            if an output is not finite.
    """

    module: str
    rows: int = 0
    other_keys: int = 0
    residual: float = 0.0
    over_rounding: float = 0.0


class DenseWatch:
    """Takes what indexers choose and what layers attend to, in the order in which they run.

    A layer belongs to the choice that was made last if it attends to these keys and no others.
    """

    def __init__(self) -> None:
        self.layers: dict[str, IndexedAttention] = {}
        self._latest: tuple[str, Choices] | None = None

    def chosen(self, name: str, choices: Choices) -> None:
        """Take what a module has chosen."""
        if choices.kind != "experts" and len(choices.shape) == 2:
            self._latest = name, choices

    def attended(self, call: AttentionCall) -> None:
        """Take a call of a layer."""
        if self._latest is None or (keys := _Keys.of(call, self._latest[1])) is None:
            return
        name, inside = self._latest[0], self._latest[0].startswith(f"{call.module}.")
        if not inside and (not keys.as_chosen or not bool(keys.deciding.any())):
            return  # not this indexer's layer: a choice that leaves out nothing would fit any layer
        layer = self.layers.setdefault(call.module, IndexedAttention(call.module, name))
        if keys.as_chosen:
            layer.parts.append(_dense_rows(call, keys))
        else:
            layer.unlike += 1

    def forget(self) -> None:
        """Forget the last choice: a forward has ended."""
        self._latest = None


class KeptAllWatch(DenseWatch):
    """Takes the same while indexers may keep every key.

    Args:
        modules: layers whose keys indexers choose.
    """

    def __init__(self, modules: frozenset[str]) -> None:
        super().__init__()
        self.modules = modules
        self.kept_all: dict[str, KeptAll] = {}

    def attended(self, call: AttentionCall) -> None:
        """Take a call of a layer."""
        if call.module not in self.modules or self._latest is None:
            return
        keys = _Keys.of(call, self._latest[1])
        if keys is None:
            return
        dense = keys.dense
        layer = self.kept_all.setdefault(call.module, KeptAll(call.module))
        layer.rows += int(keys.real.sum())
        layer.other_keys += int(((keys.seen != dense).any(-1) & keys.real).sum())
        real = keys.real.to(call.q.device)
        mixed = call.mixed.masked_fill(~real[:, None, :, None], 0)  # of padding it may be NaN
        dense_call = replace(
            call, allowed=dense[:, None].to(call.q.device), causal=False, queries=real, mixed=mixed
        )
        again = recomputation_residual(dense_call)
        layer.residual = _largest(layer.residual, again.residual)
        layer.over_rounding = _largest(layer.over_rounding, again.over_rounding)


@dataclass(frozen=True, eq=False)
class _Keys:
    """Keys that a call attends to, (B, L, Lk) bool; of the last n, which are chosen and which available."""

    seen: Tensor
    kept: Tensor
    available: Tensor
    real: Tensor

    @classmethod
    def of(cls, call: AttentionCall, choices: Choices) -> "_Keys | None":
        """Read a call; None if the choices cannot be of its keys."""
        batch, _, length, _ = call.q.shape
        number, length_of_keys = choices.order.shape[1], call.k.shape[2]
        fits = (
            number == length_of_keys if choices.kind == "keys" else number < length_of_keys
        )  # blocks stand behind a window's keys
        if choices.shape != (batch, length) or not fits:
            return None
        allowed = call.part().allowed
        if allowed is None:
            allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        if bool((allowed != allowed[:, :1]).any()):
            return None
        seen = allowed[:, 0].expand(batch, length, length_of_keys).cpu()
        shape = batch, length, number
        return cls(seen, choices.kept.view(shape), choices.available.view(shape), choices.real.view(batch, length))

    @property
    def as_chosen(self) -> bool:
        """Return whether every query that counts attends to the chosen keys alone."""
        return bool((self.seen[..., -self.kept.shape[-1] :] == self.kept)[self.real].all())

    @property
    def deciding(self) -> Tensor:
        """Return the queries that had to leave out a key, (B, L)."""
        return self.real & (self.available & ~self.kept).any(-1)

    @property
    def dense(self) -> Tensor:
        """Return the keys without a selection, (B, L, Lk)."""
        keys = self.seen.clone()
        keys[..., -self.kept.shape[-1] :] = self.available
        return keys


def _largest(one: float, other: float) -> float:
    """Return the larger number; NaN if either is."""
    return float(np.maximum(one, other))


def _dense_rows(call: AttentionCall, keys: _Keys) -> DenseRows:
    """Compute the dense attention of the queries that decide, a few at a time."""
    heads, number, parts = call.q.shape[1], keys.kept.shape[-1], []
    kind = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    dense = keys.dense
    for sample, deciding in enumerate(keys.deciding):
        rows = deciding.nonzero()[:, 0]
        for queries in rows.split(max(1, _AT_ONCE // (heads * call.k.shape[2]))) if len(rows) else ():
            part = call.part(slice(sample, sample + 1), queries.to(call.q.device))
            scores = part.scores(kind).cpu().double()
            kept, available = keys.kept[sample, queries][None], keys.available[sample, queries][None]
            agreement = dense_agreement(scores[..., -number:], kept, available)
            scores = scores.masked_fill(~dense[sample, queries], -torch.inf)
            if call.sinks is not None:
                sinks = call.sinks.cpu().double()[None, :, None, None].expand(1, heads, len(queries), 1)
                scores = torch.cat([sinks, scores], -1)
            lost = scores.softmax(-1)[..., -number:].masked_fill(~(available & ~kept)[:, None], 0).sum(-1)
            by_row = (agreement.recalled, agreement.hit.double(), lost)
            recalled, hit, lost = (each[0].T for each in by_row)
            parts.append(DenseRows(recalled, hit, agreement.best[0], agreement.at_random[0], lost))
    if not parts:
        none, each = torch.zeros(0, heads, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        return DenseRows(none, none, each, each, none)
    return DenseRows(*(torch.cat(each) for each in zip(*parts, strict=True)))
