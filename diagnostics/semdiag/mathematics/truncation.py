"""How much a head's output changes if each query keeps its k largest scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from semdiag.mathematics.score_strips import Scores, ScoreStrip

_MOST = 2**19  # numbers of truncated outputs held at a time, to stay in the CPU cache


@dataclass(frozen=True, eq=False)
class Truncations:
    """The effect of truncation at each of n values of k, and the weight on keys other than the first.

    Attributes:
        change: (B, H, R, n), ‖o(k) − o‖.
        size: (B, H, R), ‖o‖.
        projected: (B, H, R, n), ‖(o(k) − o) W‖; None without a projection.
        others: (B, H, R), ln Σ exp(z) over all keys but the first, and the sink.
    """

    change: Tensor
    size: Tensor
    projected: Tensor | None
    others: Tensor


@torch.no_grad()
def truncations(
    scores: Scores,
    values: Tensor,
    largest: tuple[Tensor, Tensor],
    log_sum_exp: Tensor,
    ks: Sequence[int],
    first: Tensor,
    sinks: Tensor | None = None,
    projection: Tensor | None = None,
) -> Truncations:
    """Compute how each query's output changes if it keeps its k largest scores.

    o(k) − o = τ (μ_kept − μ_dropped), with τ the weight that is dropped, and μ the means of the values over kept
    and dropped keys by their weights. A sink counts as a kept key of value 0.

    Source: docs/theory.md#truncation; not in the paper. Deviation: computed as μ_kept − o, which is equal.

    Args:
        scores: of R queries (those at its ``places``, if given), in float32 or float64.
        values: (B, Hk, Lk, D); Hk divides H.
        largest: the largest scores of each row in descending order (B, H, R, ≥ K), -inf beyond the number of keys,
            and the positions of their keys (B, H, R, K).
        log_sum_exp: (B, H, R), of each row, including the sink.
        ks: ascending, from 1 to K.
        first: (B, H), position of the first key.
        sinks: (H,) one more logit per head in the softmax's denominator, without a value; None means none.
        projection: (H, D, d), of each head's output into the residual stream; None means none.

    Returns:
        Norms. If a row has at most k keys, nothing is dropped, and the change is rounding; NaN for rows without
        keys.

    Example:
        >>> one, two = torch.ones(1, 1, 1, 1), torch.tensor([[[[1.0], [3.0]]]])  # weights of 1/2 each
        >>> scores = Scores(one, torch.zeros(1, 1, 2, 1), 1.0)
        >>> top = torch.zeros(1, 1, 1, 2), torch.tensor([[[[0, 1]]]])
        >>> truncated = truncations(scores, two, top, torch.tensor([[[2.0]]]).log(), [1], torch.tensor([[0]]))
        >>> round(truncated.change.item(), 5), round(truncated.size.item(), 5)  # 1/2 · (1 − 3), and their mean, 2
        (1.0, 2.0)
    """
    values = values.to(log_sum_exp.dtype)
    change, others = log_sum_exp.new_empty(*log_sum_exp.shape, len(ks)), torch.empty_like(log_sum_exp)
    size, projected = torch.empty_like(others), None if projection is None else torch.empty_like(change)
    shared = scores.q.shape[1] // scores.k.shape[1]
    for strip in scores.strips(max(1, _MOST // (len(ks) * values.shape[3])) * scores.k.shape[2]):
        b, h, r = strip.samples, strip.heads, strip.queries
        own = values[b, h.start // shared : h.stop // shared]
        log_sum, score = log_sum_exp[b, h, r], torch.full_like(log_sum_exp[b, h, r], -torch.inf)
        if sinks is not None:
            score = sinks.to(score.dtype)[h, None].expand_as(score)
        sink = (score - log_sum).exp()
        weights = (largest[0][b, h, r, : ks[-1]] - log_sum[..., None]).exp()
        sums, mass = _kept(weights, largest[1][b, h, r], own, ks)
        others[b, h, r] = torch.logaddexp(score, _besides(strip, first[b, h]))
        output = _whole(strip, log_sum, own, sink)
        moved = sums.div_(mass.add_(sink[..., None])[..., None]).sub_(output[..., None, :])
        size[b, h, r], change[b, h, r] = output.norm(dim=-1), moved.norm(dim=-1)
        if projected is not None and projection is not None:
            by_head = moved.transpose(0, 1)
            written = by_head.flatten(1, 3) @ projection[h].to(moved.dtype)
            projected[b, h, r] = written.norm(dim=-1).view(by_head.shape[:4]).transpose(0, 1)
    return Truncations(change, size, projected, others)


def _kept(weights: Tensor, places: Tensor, values: Tensor, ks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sum weights times values (b, h, r, n, D), and weights (b, h, r, n), over the k largest scores."""
    batch, heads, _, count = weights.shape
    key_heads, length = values.shape[1:3]
    head = torch.arange(heads, device=values.device) // (heads // key_heads)
    table = torch.arange(batch, device=values.device)[:, None] * key_heads + head  # which rows of keys
    index = (table[..., None, None] * length + places[..., :count].clamp(min=0)).flatten()
    starts = torch.arange(0, weights.numel(), count, device=values.device)[:, None]
    starts = (starts + torch.tensor([0, *ks[:-1]], device=values.device)).flatten()
    sums = torch.nn.functional.embedding_bag(  # nothing of size K × D is held
        index, values.reshape(-1, values.shape[3]), starts, mode="sum", per_sample_weights=weights.flatten()
    )
    mass = torch.stack([weights[..., low:high].sum(-1) for low, high in pairwise((0, *ks))], -1)
    return sums.view(*mass.shape, -1).cumsum_(-2), mass.cumsum_(-1)


def _besides(strip: ScoreStrip, first: Tensor) -> Tensor:
    """Return ln Σ exp(z) over a strip's keys except the first, (b, h, r); forbidden keys get -inf in the strip."""
    strip.forbid_(-torch.inf)
    keys = torch.arange(strip.scores.shape[3], device=first.device)
    return strip.scores.masked_fill(keys == first[..., None, None], -torch.inf).logsumexp(-1)


def _whole(strip: ScoreStrip, log_sum: Tensor, values: Tensor, sink: Tensor) -> Tensor:
    """Return the output over all keys, (b, h, r, D); overwrites a strip whose forbidden scores are -inf."""
    weights = strip.scores.sub_(log_sum[..., None]).exp_()
    batch, heads, rows, seen = weights.shape
    sums = weights.view(batch, values.shape[1], -1, seen) @ values[:, :, :seen]
    return sums.view(batch, heads, rows, -1) / (weights.sum(-1) + sink)[..., None]
