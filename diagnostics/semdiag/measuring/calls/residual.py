"""Whether a captured call is all that the layer's attention is made of."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.mathematics.unraveled import unraveled

_CHECKED_ROWS = 32  # of all samples, heads and queries, drawn at random


def recomputation_residual(call: AttentionCall, generator: torch.Generator | None = None) -> float:
    """Largest deviation of the attention's formula, recomputed on random rows, from what the layer returned.

    The formula is that of :class:`AttentionCall`, with soft-cap, bias, sinks, grouped heads and selection. It
    tells whether the captured tensors are all that the layer's attention is made of: about 1e-7 in
    float32 if they are; a missed bias, soft-cap or mask shows as 1e-4 or more. Rows without an allowed key
    and padded queries are left out: what a layer returns for them is its own choice.

    Args:
        call: one attention call.
        generator: on CPU; draws 32 rows of all samples, heads and queries. None: one of a fixed seed.

    Returns:
        The deviation, relative to the largest output of these rows; NaN if an output is not finite, or if weights
        were dropped at random (training mode with dropout).

    Example:
        >>> one, two = torch.ones(1, 1, 1, 1), torch.tensor([[[[1.0], [3.0]]]])
        >>> call = AttentionCall("attention", 0, one, two, two, 0.0, None, None, None, 2 * one)
        >>> recomputation_residual(call)
        0.0
    """
    if call.dropout:
        return float("nan")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    shape = call.q.shape[:3]
    rows = math.prod(shape)
    drawn = (
        torch.randperm(rows, generator=generator)[:_CHECKED_ROWS]
        if rows <= 2**20
        else torch.randint(rows, (_CHECKED_ROWS,), generator=generator)
    )
    index = unraveled(drawn, shape, call.q.device)
    again, some = _attend(call, index)
    mixed = call.mixed[index].to(again.dtype)
    scale = (mixed * some).abs().max()
    deviation = ((again - mixed) * some).abs().max()
    return float(deviation / scale.clamp(min=torch.finfo(scale.dtype).tiny))  # zeros: no fault


def _attend(call: AttentionCall, index: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Mixed values of some rows (r, Dv), and (r, 1) which of them have a key."""
    sample, head, query = index
    dtype = torch.float32 if call.q.dtype in (torch.float16, torch.bfloat16) else call.q.dtype
    full = (*call.q.shape[:3], call.k.shape[2])
    shared = head // (call.q.shape[1] // call.k.shape[1])
    places = list(zip(sample.tolist(), shared.tolist(), strict=True))
    scores = _products((call.k[at].to(dtype) for at in places), call.q[index].to(dtype) * call.scale)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias.expand(full)[index]
    keep = torch.ones_like(scores, dtype=torch.bool)
    if call.allowed is not None:
        keep = keep & call.allowed.expand(full)[index]
    if call.causal:
        keep = keep & (torch.arange(full[3], device=keep.device) <= call.first_query + query[:, None])
    some = keep.any(-1, keepdim=True)
    if call.queries is not None:  # what a layer returns for padding is its own choice, too
        some = some & call.queries[sample, query, None]
    if call.selected is not None:
        chosen = call.selected[index]
        mask = torch.zeros(len(keep), full[3] + 1, dtype=torch.bool, device=keep.device)
        keep = keep & mask.scatter(-1, chosen.where(chosen >= 0, full[3]), True)[:, :-1]
    scores = scores.masked_fill(~keep, torch.finfo(dtype).min)
    if call.sinks is not None:
        weights = torch.cat([scores, call.sinks.to(dtype)[head][:, None]], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return _products((call.v[at].to(dtype).T for at in places), weights * keep), some


def _products(matrices: Iterable[Tensor], vectors: Tensor) -> Tensor:
    """Matrices (n, m), r of them, times vectors (r, m): (r, n). One by one: what is read is not copied."""
    return torch.stack([matrix @ vector for matrix, vector in zip(matrices, vectors, strict=True)])
