"""Attention over k selected keys per query: cost and memory are proportional to k, forward and backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_models.dropout import dropout as drop


def selected_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, selected: Tensor, dropout: float) -> Tensor:
    """Return the softmax of scale · q kᵀ over the selected keys, times v, with dropout on the weights."""
    batch, heads, length, width = q.shape
    offset = torch.arange(batch * heads, device=q.device).mul_(length).view(batch, heads, 1, 1)
    index = (selected.clamp(min=0) + offset).view(-1, selected.shape[-1])  # (B·H·L, K) rows of the flat keys
    rows = tuple(t.reshape(-1, width).contiguous() for t in (q, k, v))
    mixed: Tensor = _Selected.apply(*rows, index, (selected < 0).view(index.shape), scale, dropout)  # type: ignore[no-untyped-call]
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
    """Return the pairs (i, j) sorted by index[i, j], as flat positions, and where each key begins: (N·K,), (M,)."""
    counts = _counts(index.view(-1), keys)
    return index.view(-1).argsort(stable=True), counts.cumsum(0) - counts


def _scatter_sum(weights: Tensor, rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """out[m] = Σ over (i, j) with index[i, j] = m of weights[i, j] rows[i]: (N, K), (N, D) -> (M, D)."""
    pairs = weights.reshape(-1)[order]
    return F.embedding_bag(order // weights.shape[1], rows, starts, per_sample_weights=pairs, mode="sum")


def _counts(index: Tensor, n: int) -> Tensor:
    """Return how often each of 0 … n - 1 occurs: (M,) -> (n,)."""
    if index.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.bincount(index, minlength=n)
    # bincount first finds the largest entry, which waits for the device; it cannot be compiled.
    return torch.zeros(n, dtype=torch.int64, device=index.device).scatter_add_(0, index, torch.ones_like(index))
