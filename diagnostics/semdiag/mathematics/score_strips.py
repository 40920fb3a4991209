"""Compute the scores of an attention call in strips of whole rows; nothing of size Lq × Lk is ever held."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag_models import products

_CAUSAL_STRIPS = 8  # per sample, in long causal calls: a strip skips keys after its last query
_LONG = 256  # number of queries from which this pays
_LEAST_ROWS = 128  # rows per head in a strip: fewer would read all keys for little work


@dataclass(frozen=True, eq=False)
class ScoreStrip:
    """Scores of some samples and queries, without the keys at the end that none of the queries may see.

    Attributes:
        samples: which samples.
        heads: which heads.
        queries: which queries.
        scores: (b, H, r, n) in nats, including forbidden keys; overwritten by the next strip.
        spare: memory of the same shape, for the reader's use.
        allowed: bool, broadcastable to (b, H, r, n): A_i; None means all but ``future``.
        future: (r, t) bool, forbidden among the last t keys by the causal rule; None means none.
        counted: (b, 1 or H, r, 1) bool, queries that count towards key loads; None means all.
    """

    samples: slice
    heads: slice
    queries: slice
    scores: Tensor
    spare: Tensor
    allowed: Tensor | None
    future: Tensor | None
    counted: Tensor | None

    def forbid_(self, value: float) -> None:
        """Overwrite the scores of forbidden keys."""
        if self.allowed is not None:
            self.scores.masked_fill_(~self.allowed, value)
        elif self.future is not None:
            self.scores[..., -self.future.shape[1] :].masked_fill_(self.future, value)

    def keys(self) -> Tensor:
        """Return n_i = |A_i|, (b, H, r) int64."""
        shape, length = self.scores.shape[:3], self.scores.shape[3]
        if self.allowed is not None:
            return (self.allowed.sum(-1) * (length // self.allowed.shape[3])).expand(shape)
        if self.future is not None:
            hidden = self.future.shape[1]  # for the first query; one less for each later one
            return (
                torch.arange(length - hidden, length - hidden + shape[2], device=self.scores.device)
                .clamp(max=length)
                .expand(shape)
            )
        return torch.full(shape, length, device=self.scores.device)

    def load(self) -> Tensor:
        """Return how many counted queries may attend to each key, int64, broadcastable to (b, H, n)."""
        rows = self.scores.shape[2]
        everyone = rows if self.counted is None else self.counted.sum(2)
        if self.allowed is not None:
            if self.allowed.shape[2] == 1:
                return self.allowed[:, :, 0] * everyone
            return (self.allowed if self.counted is None else self.allowed & self.counted).sum(2)
        load = torch.zeros(1, 1, self.scores.shape[3], dtype=torch.int64, device=self.scores.device) + everyone
        if self.future is not None:
            hidden = self.future if self.counted is None else self.future & self.counted
            load[..., -self.future.shape[1] :] -= hidden.sum(-2)
        return load


@dataclass(frozen=True, eq=False)
class Scores:
    """The inputs of an attention call's scores z; see :func:`~..row_statistics.row_statistics`."""

    q: Tensor
    k: Tensor
    scale: float
    allowed: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    causal: bool = False
    first_query: int = 0
    queries: Tensor | None = None
    places: Tensor | None = None

    def strips(self, size: int) -> Iterator[ScoreStrip]:
        """Yield strips of rows in order, for one group of samples and heads after the other.

        They share their memory: finish with one before taking the next.

        Args:
            size: scores held at a time, as far as whole rows allow.
        """
        batch, all_heads = self.q.shape[:2]
        length, k_length = self.q.shape[2] if self.places is None else self.places.shape[2], self.k.shape[2]
        shared = all_heads // self.k.shape[1]  # query heads that share a key head stay together
        fitting = size // (shared * k_length * min(_LEAST_ROWS, length))
        heads = shared * min(self.k.shape[1], max(1, fitting))
        rows = min(length, max(1, size // (heads * k_length)))
        if self.causal and length >= _LONG:
            rows = min(rows, -(-length // _CAUSAL_STRIPS))
        samples = min(batch, max(1, size // (heads * rows * k_length))) if heads == all_heads else 1
        memory = self.q.new_empty(2, samples * heads * rows * k_length)
        for first in range(0, batch, samples):
            for head in range(0, all_heads, heads):
                for start in range(0, length, rows):
                    b, h = slice(first, min(first + samples, batch)), slice(head, min(head + heads, all_heads))
                    yield self._strip(b, h, slice(start, min(start + rows, length)), memory)

    def _strip(self, b: slice, h: slice, r: slice, memory: Tensor) -> ScoreStrip:
        places = None if self.places is None else self.places[b, h, r]
        last = r.stop if places is None else int(places.max()) + 1
        seen = min(self.k.shape[2], max(1, self.first_query + last)) if self.causal else self.k.shape[2]
        shape = b.stop - b.start, h.stop - h.start, r.stop - r.start, seen
        scores, spare = (part[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape) for part in memory)
        # One product per key head: the queries of all heads that share it are concatenated.
        shared = self.q.shape[1] // self.k.shape[1]
        k = self.k[b, h.start // shared : h.stop // shared, :seen].flatten(0, 1)
        q = self.q[b, h, r] if places is None else rows_of(self.q[b, h], places)
        _product_(scores.view(len(k), -1, seen), q.reshape(len(k), -1, self.q.shape[3]), k, self.scale)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        bias, allowed = (_part(values, b, h, r, seen, places) for values in (self.bias, self.allowed))
        if bias is not None:
            scores += bias
        future = None
        start = self.first_query + r.start + 1  # the first key that a query of the strip may not see
        if self.causal and places is not None:
            past = torch.arange(seen, device=scores.device) <= self.first_query + places[..., None]
            allowed = past if allowed is None else allowed & past
        elif self.causal and start < seen:
            keys = torch.arange(start, seen, device=scores.device)
            future = keys > torch.arange(start - 1, start - 1 + shape[2], device=scores.device)[:, None]
            if allowed is not None:
                hidden = torch.nn.functional.pad(future, (start, 0))
                allowed, future = allowed & ~hidden, None
        return ScoreStrip(b, h, r, scores, spare, allowed, future, self._counted(b, r, places))

    def counted(self) -> Tensor | None:
        """Return the queries that count towards key loads, (B, 1 or H, Lq, 1) bool; None means all."""
        return self._counted(slice(None), slice(None), self.places)

    def _counted(self, b: slice, r: slice, places: Tensor | None) -> Tensor | None:
        if places is None:
            return None if self.queries is None else self.queries[b, None, r, None]
        counted = places[..., None] >= 0
        return counted if self.queries is None else counted & rows_of(self.queries[b, None, :, None], places)


def _product_(out: Tensor, q: Tensor, k: Tensor, scale: float) -> None:
    """Compute scale · q kᵀ into ``out``: (n, r, D), (n, Lk, D) -> (n, r, Lk)."""
    if products.takes(q[0], k[0]):
        for rows, keys, scores in zip(q * scale, k, out, strict=True):
            scores.copy_(products.linear(rows, keys))
    else:
        torch.baddbmm(out, q, k.transpose(1, 2), beta=0, alpha=scale, out=out)


def _part(values: Tensor | None, b: slice, h: slice, r: slice, seen: int, places: Tensor | None) -> Tensor | None:
    """Return a strip's part of a tensor broadcastable to (B, H, Lq, Lk)."""
    part = part_of(values, b, r if places is None else slice(None), seen)
    if part is None:
        return None
    part = part[:, h] if part.shape[1] > 1 else part
    return part if places is None else rows_of(part, places)


def rows_of(values: Tensor, places: Tensor) -> Tensor:
    """Return the rows of some queries, chosen per sample and head.

    Args:
        values: (b, H, Lq, n); the first three axes may have length 1.
        places: (b, H, r) int64 positions of queries; negative ones give an arbitrary row.

    Returns:
        (b, H, r, n); the tensor itself if all its queries share one row.
    """
    if values.shape[2] == 1:
        return values
    sample, head = (torch.arange(length, device=values.device) for length in places.shape[:2])
    sample, head = sample * (values.shape[0] > 1), head * (values.shape[1] > 1)
    return values[sample[:, None, None], head[:, None], places.clamp(min=0)]


def part_of(
    values: Tensor | None, samples: slice | Tensor, queries: slice | Tensor, seen: int | None = None
) -> Tensor | None:
    """Return some samples, queries and first keys of a tensor broadcastable to (B, H, Lq, Lk).

    Args:
        values: at most four axes; None stays None.
        samples: a slice, or positions.
        queries: a slice, or positions.
        seen: number of keys; None means all.

    Returns:
        Four axes; those of length 1 stay so.
    """
    if values is None:
        return None
    values = values[(None,) * (4 - values.ndim)]
    values = values[samples] if values.shape[0] > 1 else values
    values = values[:, :, queries] if values.shape[2] > 1 else values
    return values[..., :seen] if values.shape[3] > 1 else values
