"""Whether a captured call is all that the layer's attention is made of."""

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall

_CHECKED_ROWS = 4  # queries at each end of the first sample on which the output is recomputed


def recomputation_residual(call: AttentionCall) -> float:
    """Largest deviation of the attention's formula, recomputed on a few queries, from what the layer returned.

    The formula is that of :class:`AttentionCall`, with soft-cap, bias, sinks, grouped heads and selection. It
    tells whether the captured tensors are all that the layer's attention is made of: about 1e-7 in
    float32 if they are; a missed bias, soft-cap or mask shows as 1e-4 or more. Rows without an allowed key
    are left out: what a layer returns for them is its own choice.

    Args:
        call: one attention call.

    Returns:
        The deviation, relative to the largest output; NaN if an output is not finite, or if weights were
        dropped at random (training mode with dropout).

    Example:
        >>> one, two = torch.ones(1, 1, 1, 1), torch.tensor([[[[1.0], [3.0]]]])
        >>> call = AttentionCall("attention", 0, one, two, two, 0.0, None, None, None, 2 * one)
        >>> recomputation_residual(call)
        0.0
    """
    if call.dropout:
        return float("nan")
    length = call.q.shape[2]
    ends = [(0, min(_CHECKED_ROWS, length)), (max(_CHECKED_ROWS, length - _CHECKED_ROWS), length)]
    deviations, largest = [], []
    for start, stop in ends:
        if start < stop:
            mixed = call.mixed[:1, :, start:stop].to(_dtype(call.q))
            again, some = _attend(call, start, stop)
            deviations.append(((again - mixed) * some).abs().max())
            largest.append((mixed * some).abs().max())
    scale = torch.stack(largest).max()
    return float(torch.stack(deviations).max() / scale.clamp(min=torch.finfo(scale.dtype).tiny))  # zeros: no fault


def _attend(call: AttentionCall, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Mixed values of some queries of the first sample, and (1, H, rows, 1) which of them have a key."""
    dtype, groups = _dtype(call.q), call.q.shape[1] // call.k.shape[1]
    k, v = (x[:1].to(dtype).repeat_interleave(groups, 1) for x in (call.k, call.v))
    scores = (call.scale * call.q[:1, :, start:stop].to(dtype)) @ k.transpose(2, 3)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        bias = call.bias[:1]
        scores = scores + (bias[:, :, start:stop] if bias.shape[2] > 1 else bias)
    keep = torch.ones_like(scores, dtype=torch.bool)
    allowed = call.allowed_keys(start, stop)
    if allowed is not None:
        keep = keep & (allowed[:1] if allowed.ndim == 4 else allowed)
    some = keep.any(-1, keepdim=True)
    if call.selected is not None:
        chosen = call.selected[:1, :, start:stop]
        padded = keep.new_zeros(*keep.shape[:3], keep.shape[3] + 1)
        keep = keep & padded.scatter(-1, chosen.where(chosen >= 0, keep.shape[3]), True)[..., :-1]
    scores = scores.masked_fill(~keep, torch.finfo(dtype).min)
    if call.sinks is not None:
        sinks = call.sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights * keep) @ v, some


def _dtype(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
