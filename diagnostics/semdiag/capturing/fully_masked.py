"""Rows in which finite constants forbid every key: the softmax still attends to those with the largest one."""

from dataclasses import replace

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.provenance.score_history import ScoreHistory
from semdiag.capturing.score_masks import FORBIDDING, ROOM


def swallowing(call: AttentionCall, full: Tensor | None, *, fused: bool = False) -> AttentionCall:
    """Describe fully masked rows as they act: the constant swallows their scores, so all keys weigh equally."""
    if full is None or call.sinks is not None:
        return call
    swallowed = not (fused and call.q.dtype == torch.float16)
    q = call.q.masked_fill(full.any(-1, keepdim=True), 0) if swallowed else call.q
    return replace(call, q=q, fully_masked=full)


def with_full_rows_read(
    history: ScoreHistory, scores: Tensor
) -> tuple[ScoreHistory, Tensor | None, Tensor | None]:
    """Read fully masked rows, and rows at one low constant, from the softmax's input."""
    allowed, top = history.allowed, scores.amax(-1, keepdim=True)
    enough = FORBIDDING + ROOM
    low = (top <= enough) & top.isfinite()
    if not bool(low.any()):
        return history, allowed, None
    below = scores - top
    near = below > enough
    none = torch.zeros_like(low) if allowed is None else ~allowed.expand(scores.shape).any(-1, keepdim=True)
    rows = low & (none | ((below == 0) | ~near).all(-1, keepdim=True))
    if not bool(rows.any()):
        return history, allowed, None
    full = rows & near
    bias = torch.where(rows, below.masked_fill(~near, 0), 0.0 if history.bias is None else history.bias)
    q = history.q.expand(*history.lead, *history.q.shape[-2:]).masked_fill(rows, 0)
    allowed = ~rows if allowed is None else ~rows & allowed
    return replace(history, q=q, bias=bias if bool(bias.any()) else None), allowed, full
