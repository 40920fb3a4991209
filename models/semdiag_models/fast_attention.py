"""Quicker ways to the same attention: few draws for dropout, strips of scores, gathered keys, masked matrices.

Both ways draw dropout by :func:`dropped_positions`, so that its draws are a function of the seed alone.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STRIP = 2**20  # scores held at a time: 4 MB in float32, about one core's share of the cache
_ACCELERATOR_FACTOR = 2**6  # without a cache to fit, and slow to launch operations: 256 MB in float32
_LARGEST_MATRIX = 2**28  # largest number of entries of a sparse matrix that is written out, 1 GB
SHORT = 128  # number of tokens up to which training steps on a CPU use masked matrices
_GAPS = np.random.Generator(np.random.Philox(key=0))
_NEW_STATE: Any = _GAPS.bit_generator.state  # of a new generator; setting it takes a tenth of making one


def matrices_at_once(device: torch.device, entries: int) -> int:
    """Return how many matrices of so many scores to hold at a time on a device."""
    strip = _STRIP if device.type == "cpu" else _STRIP * _ACCELERATOR_FACTOR
    return max(1, strip // entries)


def uses_masked_matrices(layer: nn.Module, q: Tensor) -> bool:
    """Return whether a step takes masked matrices instead of gathered keys."""
    return layer.training and q.shape[2] <= SHORT and q.device.type == "cpu"


def dropped_positions(n: int, p: float) -> Tensor:
    """Return the indices, among n, at which independent coins with probability p drop."""
    # numpy draws the gaps between them in a third of torch's time; torch's generator seeds it
    _NEW_STATE["state"]["key"][0] = int(torch.randint(2**62, ()))
    _GAPS.bit_generator.state = _NEW_STATE
    positions = _GAPS.geometric(p, int(n * p + 8 * math.sqrt(n * p) + 20)).cumsum()
    while positions[-1] < n:  # eight standard deviations away, but exactness requires it
        positions = np.append(positions, positions[-1] + _GAPS.geometric(p, len(positions)).cumsum())
    return torch.from_numpy(positions[: positions.searchsorted(n, "right")] - 1)


def dropout(x: Tensor, p: float, training: bool, residual: Tensor | None = None) -> Tensor:
    """Zero each element with probability p and divide the others by 1 - p, while training; add the residual."""
    if training and p and x.device.type == "cpu":
        return _Dropout.apply(x, p, dropped_positions(x.numel(), p), residual)  # type: ignore[no-any-return]
    dropped = F.dropout(x, p) if training and p else x
    return dropped if residual is None else residual + dropped


class _Dropout(torch.autograd.Function):
    """x / (1 - p) with zeros at the flat positions ``drops``: the few that are dropped, not a coin for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, drops: Tensor, residual: Tensor | None) -> Tensor:
        ctx.p = p
        ctx.drops = drops
        ctx.has_residual = residual is not None
        y = x.contiguous() * (1 / (1 - p))
        y.view(-1).index_fill_(0, drops, 0)
        return y if residual is None else y.add_(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_residual = grad if ctx.has_residual else None
        return _Dropout.forward(ctx, grad, ctx.p, ctx.drops, None), None, None, d_residual


def largest_positions(
    q: Tensor, keys: Tensor, scale: float, k: int, allowed: Tensor | None, in_order: bool
) -> Tensor:
    """Return the positions of each query's k largest scores, -1 for keys that are not allowed, strip by strip."""
    batch, heads, length, _ = q.shape
    queries, all_keys = (t.detach().reshape(batch * heads, length, -1) for t in (q, keys))  # drops tangents, too
    mask = None if allowed is None else ~allowed.repeat_interleave(heads, 0)[:, None]
    step = matrices_at_once(q.device, length**2)
    memory = queries.new_empty(min(step, batch * heads), length, length)  # one for all strips
    parts = []
    for start in range(0, batch * heads, step):
        rows = slice(start, start + step)
        scores = memory[: len(queries[rows])]
        torch.baddbmm(scores, queries[rows], all_keys[rows].mT, beta=0, alpha=scale, out=scores)
        if mask is not None:
            scores.masked_fill_(mask[rows], float("-inf"))
        values, positions = largest(scores, k, in_order or torch.compiler.is_compiling())
        parts.append(positions if mask is None else positions.masked_fill(values == float("-inf"), -1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(batch, heads, length, k)


def largest(scores: Tensor, k: int, in_order: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row, and their positions; in their order or not, which is quicker."""
    if not in_order:
        rows = scores.numpy()
        places = np.flatnonzero(rows >= np.partition(rows, -k, -1)[..., -k, None])
        if len(places) == k * scores[..., 0].numel():  # else some are equal
            positions = torch.from_numpy(places % scores.shape[-1]).view(*scores.shape[:-1], k)
            return scores.gather(-1, positions), positions
    if scores.device.type == "cuda":
        from semdiag_models.cuda_steps import LARGEST_K, LONGEST_ROW, largest_of_rows  # which needs Triton

        if k <= LARGEST_K and scores.shape[-1] <= LONGEST_ROW:
            return largest_of_rows(scores, k)  # type: ignore[no-any-return]
    return scores.topk(k, -1)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, p: float) -> Tensor:
    """Return softmax(scale · q kᵀ) v, with dropout on the softmax weights."""
    if p == 0 or q.device.type != "cpu":
        mask = None if valid is None else valid[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, scale=scale)
    bias = None
    if valid is not None:
        bias = q.new_zeros(valid.shape).masked_fill_(~valid, -math.inf).repeat_interleave(q.shape[1], 0)[:, None]
    return _Strips.apply(q, k, v, bias, scale, False, p)  # type: ignore[no-any-return]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor, p: float) -> Tensor:
    """Return attention over the selected keys by masked matrices, for short inputs on a CPU."""
    bias = selection_bias(selected, k).flatten(0, 1)
    return _Strips.apply(q, k, v, bias, scale, True, p)  # type: ignore[no-any-return]


def selection_bias(selected: Tensor, k: Tensor) -> Tensor:
    """Return 0 for the selected keys and -inf for the others: (B, H, L, K) -> (B, H, L, L)."""
    bias = k.new_full((*selected.shape[:3], k.shape[2] + 1), -math.inf)
    return bias.scatter_(3, selected.masked_fill(selected < 0, k.shape[2]), 0)[..., :-1]


class _Strips(torch.autograd.Function):
    """Attention in strips of samples and heads; weights of a single strip are kept, of several computed again."""

    # bias: 0, or -inf for keys that do not count, (B·H, 1 or L, L); empty: whether a query may have no key at all

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, empty: bool, p: float
    ) -> Tensor:
        heads = q.shape[1]
        factor = 1 / (1 - p)
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))  # (B·H, L, D)
        strips = range(0, len(q), max(1, _STRIP // (q.shape[1] * k.shape[1])))
        drops: list[Tensor | None] = []  # the dropped positions of each strip
        mixed = q.new_empty(q.shape)
        for start in strips:
            s = slice(start, start + strips.step)
            weights = _weights(q[s], k[s], scale, None if bias is None else bias[s], empty)
            drops.append(dropped_positions(weights.numel(), p) if p else None)
            torch.baddbmm(mixed[s], _zeroed(weights, drops[-1]), v[s], beta=0, alpha=factor, out=mixed[s])
        ctx.save_for_backward(q, k, v, bias, weights if len(strips) == 1 else None, *drops)
        ctx.plan = scale, factor, heads, strips, empty
        return mixed.view(-1, heads, *q.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, saved_weights, *drops = ctx.saved_tensors
        scale, factor, heads, strips, empty = ctx.plan
        grad = grad.reshape(q.shape)
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        for start, positions in zip(strips, drops, strict=True):
            s = slice(start, start + strips.step)
            weights = saved_weights
            if weights is None:
                weights = _weights(q[s], k[s], scale, None if bias is None else bias[s], empty)
            torch.baddbmm(dv[s], _zeroed(weights, positions).mT, grad[s], beta=0, alpha=factor, out=dv[s])
            d_weights = torch.baddbmm(weights, grad[s], v[s].mT, beta=0, alpha=factor)
            if positions is not None:
                d_weights.view(-1).index_fill_(0, positions, 0)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype, grad_input=d_weights)
            torch.baddbmm(dq[s], d_scores, k[s], beta=0, alpha=scale, out=dq[s])
            torch.baddbmm(dk[s], d_scores.mT, q[s], beta=0, alpha=scale, out=dk[s])
        dq, dk, dv = (t.view(-1, heads, *t.shape[1:]) for t in (dq, dk, dv))
        return dq, dk, dv, None, None, None, None


def _zeroed(weights: Tensor, positions: Tensor | None) -> Tensor:
    """Return weights with zeros at flat positions."""
    return weights if positions is None else weights.view(-1).index_fill(0, positions, 0).view_as(weights)


def _weights(q: Tensor, k: Tensor, scale: float, bias: Tensor | None, empty: bool) -> Tensor:
    scores = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scale)
    if bias is not None:
        scores.add_(bias)
    weights = torch.softmax(scores, -1, out=scores)
    return weights.nan_to_num_(0.0) if empty else weights


def selected_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor, p: float) -> Tensor:
    """Return the softmax of scale · q kᵀ over the selected keys, times v, with dropout on the weights."""
    batch, heads, length, width = q.shape
    offset = torch.arange(batch * heads, device=q.device).mul_(length).view(batch, heads, 1, 1)
    index = (selected.clamp(min=0) + offset).view(-1, selected.shape[-1])  # (B·H·L, K) rows of the flat keys
    rows = tuple(t.reshape(-1, width).contiguous() for t in (q, k, v))
    mixed = _Selected.apply(*rows, index, (selected < 0).view(index.shape), length, scale, p)
    return mixed.view(batch, heads, length, width)  # type: ignore[no-any-return]


class _Selected(torch.autograd.Function):
    """softmax_j(scale · q[i] · k[index[i, j]]), dropped, times v[index[i, j]]; rows (B·H·L, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, missing: Tensor, length: int, scale: float,
        p: float,
    ) -> Tensor:  # fmt: skip
        scores = _row_dots(q, k, index).mul_(scale).masked_fill_(missing, torch.finfo(q.dtype).min)
        weights = scores.softmax(-1).masked_fill_(missing, 0)
        factors = dropout(torch.ones_like(weights), p, training=True) if p else None
        ctx.save_for_backward(q, k, v, index, weights, factors)
        ctx.scale = scale
        ctx.length = length
        return _gather_sum(weights if factors is None else weights * factors, v, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, index, weights, factors = ctx.saved_tensors
        grad = grad.contiguous()
        key_sums = _key_sums(index, ctx.length)
        d_weights, dropped = (t if factors is None else t * factors for t in (_row_dots(grad, v, index), weights))
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(ctx.scale)
        d_k = key_sums(d_scores, q)
        d_v = key_sums(dropped, grad)
        return _gather_sum(d_scores, k, index), d_k, d_v, None, None, None, None, None


def _row_dots(rows: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Return rows[i] · table[index[i, j]] for all i, j: (N, D), (M, D), (N, K) -> (N, K)."""
    n, k = index.shape
    starts = torch.arange(0, n * k, k, device=index.device)
    bags = torch.arange(n, device=index.device).repeat_interleave(k)
    dots = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return dots(rows, table, index.reshape(-1), starts, bags, 0).view(n, k)  # type: ignore[no-any-return]


def _gather_sum(weights: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Return Σ_j weights[i, j] table[index[i, j]]: (N, K), (M, D), (N, K) -> (N, D); (N, K, D) is never stored."""
    return F.embedding_bag(index, table, per_sample_weights=weights.contiguous(), mode="sum")


def _key_sums(index: Tensor, length: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of weights and rows Σ over index[i, j] = m of weights[i, j] rows[i] for all m."""
    n, k = index.shape

    def by_products(weights: Tensor, rows: Tensor) -> Tensor:
        matrix = weights.new_zeros(n, length).scatter_add_(1, index % length, weights)  # one is not 0: no race
        return (matrix.view(-1, length, length).mT @ rows.view(-1, length, rows.shape[1])).view(n, -1)

    if index.device.type != "cpu" and n * length <= _LARGEST_MATRIX:  # sorting takes longer
        return by_products
    order = index.view(-1).argsort(stable=True)
    counts = torch.bincount(index.view(-1), minlength=n)
    starts = counts.cumsum(0) - counts
    query_rows = order // k
    return lambda weights, rows: F.embedding_bag(
        query_rows, rows, starts, per_sample_weights=weights.reshape(-1)[order], mode="sum"
    )
