"""Is a captured call all that the layer's attention is made of? Recompute its output and compare."""

import torch
from torch import Tensor

from semdiag.capturing.attention_calls import AttentionCall

_CHECKED_ROWS = 8  # queries of each call's first sample: the first, the last, and some between


def recomputation_residual(call: AttentionCall) -> float:
    """Largest deviation of the attention recomputed on a few queries from what the layer returned.

    It tells whether the captured tensors are all that the layer's attention is made of: about 1e-7 in
    float32 if they are; a missed bias, mask, soft-cap or sink shows as 1e-3 or more.

    Args:
        call: one attention call, without dropout.

    Returns:
        The deviation, relative to the largest output; NaN if an output is not finite.
    """
    length = call.q.shape[2]
    rows = torch.linspace(0, length - 1, min(length, _CHECKED_ROWS), device=call.q.device).long()
    weights = attention_weights(call, rows)
    groups = call.q.shape[1] // call.v.shape[1]
    expected = weights @ _wide(call.v[:1]).repeat_interleave(groups, 1)
    returned = _wide(call.mixed[:1, :, rows])
    largest = returned.abs().max().clamp(min=torch.finfo(returned.dtype).tiny)  # an output of zeros is no fault
    return float((expected - returned).abs().max() / largest)


def attention_weights(call: AttentionCall, rows: Tensor) -> Tensor:
    """Attention weights of some queries of a call's first sample, by the formula of :class:`AttentionCall`.

    Args:
        call: one attention call.
        rows: (R,) int64 positions of the queries.

    Returns:
        (1, H, R, Lk), float32 or float64; rows of zeros for queries without keys.
    """
    q, k = _wide(call.q[:1, :, rows]), _wide(call.k[:1])
    heads, keys = q.shape[1], k.shape[2]
    scores = (call.scale * q) @ k.repeat_interleave(heads // k.shape[1], 1).transpose(2, 3)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + _rows_of(call.bias, rows)
    keep = torch.ones_like(scores, dtype=torch.bool)
    if call.selected is not None:
        chosen = call.selected[:1, :, rows]
        padded = scores.new_zeros(*scores.shape[:3], keys + 1, dtype=torch.bool)
        keep = padded.scatter(-1, chosen.where(chosen >= 0, keys), True)[..., :-1]
    if call.allowed is not None:
        keep = keep & _rows_of(call.allowed, rows)
    if call.causal:
        keep = keep & (torch.arange(keys, device=k.device) <= (call.first_query + rows)[:, None])
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    if call.sinks is not None:
        sink = call.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] * keep
    return scores.softmax(-1) * keep


def _rows_of(mask: Tensor, rows: Tensor) -> Tensor:
    """The given queries of the first sample of a tensor (B or 1, H or 1, Lq or 1, Lk or 1)."""
    first = mask[:1]
    return first[:, :, rows] if first.shape[2] > 1 else first


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
