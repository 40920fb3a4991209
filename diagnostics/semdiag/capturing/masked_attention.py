"""Attention over the keys that a rule keeps, without a mask of queries × keys: in strips of rows."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.kept_keys import Choice, Strip, key_heads, products
from semdiag.capturing.recording import Inputs, Mixed, outside_all_modes


def why_dense(call: AttentionCall) -> str | None:
    """Return why a fused call's mask must be a tensor of queries × keys; None if it need not."""
    if call.dropout:
        return "it drops weights at random"
    if call.fully_masked is not None:
        return "finite constants hide all keys of a query"
    if call.softcap is not None or call.sinks is not None:
        return "it has terms that its function may ignore"
    return None


def as_computed(call: AttentionCall, inputs: Inputs) -> tuple[AttentionCall, Inputs]:
    """Return a call and its inputs in the dtype in which a fused function would compute under autocast."""
    kind = inputs[0].device.type
    if not torch.is_autocast_enabled(kind) or inputs[0].dtype == torch.float64:
        return call, inputs
    q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in inputs)
    return replace(call, q=q.detach(), k=k.detach(), v=v.detach()), (q, k, v)


def attended(choice: Choice, inputs: Inputs) -> tuple[Mixed, Tensor]:
    """Return what queries gather from the keys that a choice keeps, (B, H, Lq, Dv), and the numbers of these keys.

    Each strip computes its scores once: it chooses, normalises and sums values; the backward pass computes them
    again. What is held is a strip's scores, and numbers for each row.
    """
    q = inputs[0]
    number = torch.zeros(q.shape[:3], dtype=torch.int32, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        return Mixed(_Attended.apply(*inputs, choice, number)), number  # type: ignore[no-untyped-call]


class _Attended(torch.autograd.Function):
    """Attention strip by strip."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, choice: Choice, number: Tensor) -> Tensor:
        """Sum the values of kept keys; write the numbers of kept keys."""
        mixed = q.new_empty(len(q), q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        with outside_all_modes(q.device.type):
            for strip in choice.strips(banded=True):
                strip, weights, kept = _weights(choice, strip)
                b, h, r = strip.samples, strip.heads, strip.queries
                number[b, h, r] = kept
                mixed[b, h, r] = products(weights, key_heads(v, strip, choice.call).to(weights.dtype))
        ctx.choice = choice
        ctx.save_for_backward(q, k, v, mixed)
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in queries, keys and values; the choice of keys has none."""
        choice: Choice = ctx.choice
        q, k, v, mixed = ctx.saved_tensors
        with outside_all_modes(q.device.type):
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
            for strip in choice.strips(banded=True):
                strip, weights, _ = _weights(choice, strip)
                b, h, r = strip.samples, strip.heads, strip.queries
                out = given[b, h, r].to(dtype)
                _add_keys(dv, strip, choice.call, weights, out)
                slope = products(out, key_heads(v, strip, choice.call).to(dtype).mT)
                slope -= (out * mixed[b, h, r].to(dtype)).sum(-1, keepdim=True)
                slope *= weights
                dq[b, h, r] = products(slope, key_heads(k, strip, choice.call).to(dtype), choice.call.scale)
                _add_keys(dk, strip, choice.call, slope, q[b, h, r].to(dtype) * choice.call.scale)
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _weights(choice: Choice, strip: Strip) -> tuple[Strip, Tensor, Tensor]:
    """Return a strip's weights, zero outside of the kept keys, and the numbers of these; the strip may widen."""
    scores, allowed = choice.scores(strip), choice.allowed(strip)
    kept, number = choice.kept(strip, scores, allowed)
    some = bool(number.all())
    if strip.banded and not some:  # a query without any near key keeps all
        return _weights(choice, choice.widened(strip))
    weights = scores.masked_fill_(~kept, -torch.inf).softmax(-1)
    return strip, weights if some else weights.masked_fill_((number == 0)[..., None], 0), number


def _add_keys(total: Tensor, strip: Strip, call: AttentionCall, weights: Tensor, rows: Tensor) -> None:
    """Add weightsᵀ @ rows to the keys of a strip; heads that share a key add up."""
    shared = call.q.shape[1] // call.k.shape[1]
    heads = slice(strip.heads.start // shared, -(-strip.heads.stop // shared))
    own = total[strip.samples, heads]
    folded = (x.reshape(own.shape[0] * own.shape[1], -1, x.shape[3]) for x in (weights, rows))
    left, right = folded
    part = torch.bmm(left.mT, right).view(*own.shape[:2], -1, own.shape[3])
    if isinstance(strip.keys, slice):
        own[:, :, strip.keys] += part
    else:
        own.index_add_(2, strip.keys, part)
