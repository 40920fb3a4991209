"""Attention over all keys in strips, or over k selected keys per query at a cost proportional to k."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def dropped_positions(n: int, p: float) -> Tensor:
    """Return the indices, among n, at which independent coins with probability p drop."""
    enough = int(n * p + 10 * math.sqrt(n * p) + 20)
    positions = torch.empty(enough, dtype=torch.int64).geometric_(p).cumsum(0).sub_(1)
    while positions[-1] < n - 1:  # ten standard deviations away, but exactness requires it
        more = torch.empty(enough, dtype=torch.int64).geometric_(p).cumsum(0).add_(positions[-1])
        positions = torch.cat([positions, more])
    return positions[: int(torch.searchsorted(positions, n))]


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Zero each element with probability p and divide the others by 1 - p, while training."""
    if not training or p == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p)
    dropped: Tensor = _Dropout.apply(x, p)
    return dropped


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.p, drops = p, dropped_positions(x.numel(), p)
        ctx.save_for_backward(drops)
        return _zeroed(x, p, drops)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _zeroed(grad, ctx.p, *ctx.saved_tensors), None


def _zeroed(x: Tensor, p: float, drops: Tensor) -> Tensor:
    """Return x / (1 - p) with zeros at the flat positions ``drops``."""
    kept = x.contiguous() * (1 / (1 - p))
    kept.view(-1).index_fill_(0, drops, 0)
    return kept


drop = dropout


def selected_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor, dropout: float) -> Tensor:
    """Return the softmax of scale · q kᵀ over the selected keys, times v, with dropout on the weights."""
    batch, heads, length, width = q.shape
    offset = torch.arange(batch * heads, device=q.device).mul_(length).view(batch, heads, 1, 1)
    index = (selected.clamp(min=0) + offset).view(-1, selected.shape[-1])  # (B·H·L, K) rows of the flat keys
    rows = tuple(t.reshape(-1, width).contiguous() for t in (q, k, v))
    mixed: Tensor = _Selected.apply(*rows, index, (selected < 0).view(index.shape), scale, dropout)
    return mixed.view(batch, heads, length, width)


def plain_selected_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor) -> Tensor:
    """Return :func:`selected_attention` without dropout, in elementary operations."""
    missing = selected < 0
    width = q.shape[-1]
    rows = selected.clamp(min=0).flatten(-2)[..., None].expand(*selected.shape[:2], -1, width)  # (B, H, L·K, D)
    keys, values = (t.gather(2, rows).view(*selected.shape, width) for t in (k, v))  # (B, H, L, K, D)
    scores = (scale * q[..., None, :] * keys).sum(-1).masked_fill(missing, torch.finfo(q.dtype).min)
    weights = scores.softmax(-1).masked_fill(missing, 0)
    mixed: Tensor = (weights[..., None] * values).sum(-2)
    return mixed


class _Selected(torch.autograd.Function):
    """softmax_j(scale · q[i] · k[index[i, j]]), dropped, times v[index[i, j]]; rows (B·H·L, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, missing: Tensor, scale: float, p: float
    ) -> Tensor:
        scores = _row_dots(q, k, index).mul_(scale).masked_fill_(missing, torch.finfo(q.dtype).min)
        weights = scores.softmax(-1).masked_fill_(missing, 0)
        kept = drop(torch.ones_like(weights), p, training=True) if p else None
        ctx.save_for_backward(q, k, v, index, weights, kept)
        ctx.scale = scale
        return _gather_sum(weights if kept is None else weights * kept, v, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, index, weights, kept = ctx.saved_tensors
        grad, of_key = grad.contiguous(), _by_key(index, len(k))
        d_weights = _row_dots(grad, v, index)
        dropped = weights if kept is None else weights * kept
        d_scores = torch._softmax_backward_data(
            d_weights if kept is None else d_weights * kept, weights, -1, weights.dtype
        ).mul_(ctx.scale)
        d_q, d_k = _gather_sum(d_scores, k, index), _scatter_sum(d_scores, q, *of_key)
        return d_q, d_k, _scatter_sum(dropped, grad, *of_key), None, None, None, None


def _row_dots(rows: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Return rows[i] · table[index[i, j]] for all i, j: (N, D), (M, D), (N, K) -> (N, K)."""
    n, k = index.shape
    if rows.dtype == torch.bfloat16 and rows.device.type != "cpu":  # CUDA has no such kernel
        return _row_dots(rows.float(), table.float(), index).to(rows.dtype)
    starts = torch.arange(0, n * k, k, device=index.device)
    bags = torch.arange(n, device=index.device).repeat_interleave(k)
    dots: Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        rows, table, index.reshape(-1), starts, bags, 0
    )
    return dots.view(n, k)


def _gather_sum(weights: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Return Σ_j weights[i, j] table[index[i, j]]: (N, K), (M, D), (N, K) -> (N, D); (N, K, D) is never stored."""
    return F.embedding_bag(index, table, per_sample_weights=weights.contiguous(), mode="sum")


def _by_key(index: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return the pairs (i, j) sorted by index[i, j], as flat positions, and each key's start: (N·K,), (M,)."""
    counts = _counts(index.view(-1), keys)
    return index.view(-1).argsort(stable=True), counts.cumsum(0) - counts


def _scatter_sum(weights: Tensor, rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Return out[m] = Σ over (i, j) with index[i, j] = m of weights[i, j] rows[i]: (N, K), (N, D) -> (M, D)."""
    pairs = weights.reshape(-1)[order]
    return F.embedding_bag(order // weights.shape[1], rows, starts, per_sample_weights=pairs, mode="sum")


def _counts(index: Tensor, n: int) -> Tensor:
    """Return the number of occurrences of each of 0 … n - 1: (M,) -> (n,)."""
    if index.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.bincount(index, minlength=n)
    # bincount first finds the largest entry, which waits for the device; it cannot be compiled.
    return torch.zeros(n, dtype=torch.int64, device=index.device).scatter_add_(0, index, torch.ones_like(index))


_STRIP = 2**20  # scores held at a time: 4 MB in float32, about one core's share of the cache


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, dropout: float) -> Tensor:
    """Return softmax(scale · q kᵀ) v, with dropout on the softmax weights."""
    if dropout == 0:
        return _torch_attention(q, k, v, scale, valid, 0.0)
    attend = _strip_attention if q.device.type == "cpu" else _torch_attention
    return attend(q, k, v, scale, valid, dropout)


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, p: float) -> Tensor:
    mask = None if valid is None else valid[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, scale=scale)


def _strip_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, p: float) -> Tensor:
    mixed: Tensor = _Strips.apply(q, k, v, scale, valid, p)
    return mixed


class _Strips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, p: float) -> Tensor:
        heads = q.shape[1]
        q, k, v = (t.reshape(-1, *t.shape[2:]).contiguous() for t in (q, k, v))  # (B·H, L, D)
        per_strip = max(1, _STRIP // (q.shape[1] * k.shape[1]))
        drops: list[Tensor] = []
        mixed = torch.empty_like(q)
        for rows in range(0, len(q), per_strip):
            s = slice(rows, rows + per_strip)
            weights = _weights(q[s], k[s], scale, _strip_mask(valid, heads, s))
            drops.append(dropped_positions(weights.numel(), p))
            weights.view(-1).index_fill_(0, drops[-1], 0)
            torch.bmm(weights, v[s], out=mixed[s])
        ctx.save_for_backward(q, k, v, *drops)
        ctx.plan = scale, valid, p, heads, per_strip
        return mixed.div_(1 - p).view(-1, heads, *q.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *drops = ctx.saved_tensors
        scale, valid, p, heads, per_strip = ctx.plan
        grad = grad.reshape(q.shape) / (1 - p)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows, drop in zip(range(0, len(q), per_strip), drops, strict=True):
            s = slice(rows, rows + per_strip)
            weights = _weights(q[s], k[s], scale, _strip_mask(valid, heads, s))
            d_weights = torch.bmm(grad[s], v[s].transpose(1, 2))
            d_weights.view(-1).index_fill_(0, drop, 0)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            torch.bmm(d_scores, k[s], out=dq[s])
            torch.bmm(d_scores.transpose(1, 2), q[s], out=dk[s])
            weights.view(-1).index_fill_(0, drop, 0)
            torch.bmm(weights.transpose(1, 2), grad[s], out=dv[s])
        dq, dk, dv = (t.view(-1, heads, *t.shape[1:]) for t in (dq.mul_(scale), dk.mul_(scale), dv))
        return dq, dk, dv, None, None, None


def _weights(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=scale)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    return torch.softmax(scores, -1)


def _strip_mask(valid: Tensor | None, heads: int, strip: slice) -> Tensor | None:
    return None if valid is None else valid.repeat_interleave(heads, 0)[strip, None, :]
