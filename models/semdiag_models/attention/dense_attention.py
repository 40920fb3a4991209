"""Attention over all keys, with dropout on the weights; nothing of size L×L is kept."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag_models.dropout import dropped_positions

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
    mixed: Tensor = _Strips.apply(q, k, v, scale, valid, p)  # type: ignore[no-untyped-call]
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
