"""The scores of an attention call, a strip of whole rows at a time; nothing of size Lq × Lk is ever held."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_CAUSAL_STRIPS = 8  # per sample, in long causal calls: a strip scores no key beyond its last query's
_LONG = 256  # queries from which on that pays


@dataclass(frozen=True, eq=False)
class ScoreStrip:
    """Scores of some samples and queries; keys that none of the queries may see are cut off at the end.

    Attributes:
        samples: which samples.
        queries: which queries.
        scores: (b, H, r, n) in nats, of forbidden keys too; overwritten by the next strip.
        spare: memory of the same shape, for the reader's use.
        allowed: bool, broadcastable to (b, H, r, n): A_i; None means all but ``future``.
        future: (r, t) bool, forbidden among the last t keys by the causal rule; None means none.
        counted: (b, 1, r, 1) bool, queries that count towards key loads; None means all.
    """

    samples: slice
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
            hidden = self.future.shape[1]  # of the first query; one less of each later one
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
    """What the scores z of an attention call are made of; see :func:`~..row_statistics.row_statistics`."""

    q: Tensor
    k: Tensor
    scale: float
    allowed: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    causal: bool = False
    first_query: int = 0
    queries: Tensor | None = None

    def strips(self, size: int) -> Iterator[ScoreStrip]:
        """Score strip by strip; rows in their order, for one group of samples after the other.

        Args:
            size: scores held at a time, as far as whole rows allow.

        Yields:
            Strips that share their memory: be done with one before taking the next.
        """
        batch, heads, q_length, _ = self.q.shape
        k_length = self.k.shape[2]
        rows = min(q_length, max(1, size // (heads * k_length)))
        if self.causal and q_length >= _LONG:
            rows = min(rows, -(-q_length // _CAUSAL_STRIPS))
        samples = min(batch, max(1, size // (heads * rows * k_length)))
        memory = self.q.new_empty(2, samples * heads * rows * k_length)
        for first in range(0, batch, samples):
            for start in range(0, q_length, rows):
                b, r = slice(first, min(first + samples, batch)), slice(start, min(start + rows, q_length))
                yield self._strip(b, r, memory)

    def _strip(self, b: slice, r: slice, memory: Tensor) -> ScoreStrip:
        seen = min(self.k.shape[2], self.first_query + r.stop) if self.causal else self.k.shape[2]
        shape = b.stop - b.start, self.q.shape[1], r.stop - r.start, seen
        scores, spare = (part[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape) for part in memory)
        # One product per key head: the queries of all heads that share it stand below each other.
        grouped = shape[0] * self.k.shape[1], -1, self.q.shape[3]
        q = (self.q[b, :, r] * self.scale).reshape(grouped)
        k = self.k[b, :, :seen].reshape(grouped[0], seen, grouped[2])
        torch.bmm(q, k.transpose(1, 2), out=scores.view(grouped[0], -1, seen))
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        bias = _part(self.bias, b, r, seen)
        if bias is not None:
            scores += bias
        allowed, future = _part(self.allowed, b, r, seen), None
        start = self.first_query + r.start + 1  # the first key that a query of the strip may not see
        if self.causal and start < seen:
            places = torch.arange(start, seen, device=scores.device)
            future = places > torch.arange(start - 1, start - 1 + shape[2], device=scores.device)[:, None]
            if allowed is not None:
                hidden = torch.nn.functional.pad(future, (start, 0))
                allowed, future = allowed & ~hidden, None
        counted = None if self.queries is None else self.queries[b, None, r, None]
        return ScoreStrip(b, r, scores, spare, allowed, future, counted)


def _part(values: Tensor | None, b: slice, r: slice, seen: int) -> Tensor | None:
    """The strip's part of a tensor that is broadcastable to (B, H, Lq, Lk)."""
    if values is None:
        return None
    values = values[(None,) * (4 - values.ndim)]
    values = values[b] if values.shape[0] > 1 else values
    values = values[:, :, r] if values.shape[2] > 1 else values
    return values[..., :seen] if values.shape[3] > 1 else values
