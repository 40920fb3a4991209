"""Capture flex_attention: call its score and mask functions to get a bias and a mask."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.fully_masked import swallowing
from semdiag.capturing.score_masks import full_rows, split_scores

MECHANISM = "flex_attention"
_ARGUMENTS = (
    *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
    *("score_mod_other_buffers", "mask_mod_other_buffers"),
)
_AXES = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None))


def flex_call(args: tuple[Any, ...], kwargs: dict[str, Any], mixed: Tensor) -> AttentionCall:
    """Describe a call of the operator flex_attention."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    q, k, v = (given[name].detach() for name in _ARGUMENTS[:3])
    k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
    blocks, score, buffers = given["block_mask"], given["score_mod"], given.get("score_mod_other_buffers", ())
    call = AttentionCall(
        module="",
        layer=0,
        q=q,
        k=k,
        v=v,
        scale=float(given["scale"]),
        allowed=None,
        queries=None,
        selected=None,
        mixed=mixed.detach(),
        mechanism=MECHANISM,
    )
    with torch.no_grad(), _disable_current_modes(), torch.autocast(q.device.type, enabled=False):
        shape = (*blocks[2].shape[:2], q.shape[2], k.shape[2])
        allowed = mask_of(blocks[-1], shape, q.device, given.get("mask_mod_other_buffers", ()))
        if getattr(score, "__name__", "") == "_identity":
            return AttentionCall(**{**vars(call), "allowed": allowed})
        scores = call.scores(torch.float64 if q.dtype == torch.float64 else torch.float32)
        modified = _over_all(score, (0,), buffers)(scores, *_places(scores.shape, q.device), *buffers)
        modified = modified if allowed is None else modified.masked_fill(~allowed, -torch.inf)
        full = full_rows(modified)
        allowed, modified, forbidding = split_scores(modified)
        bias = modified - scores
        bias = bias if allowed is None else bias.masked_fill(~allowed, 0.0)
        call = AttentionCall(**{**vars(call), "allowed": allowed, "bias": bias, "forbidding": forbidding})
        return swallowing(call, full)


def mask_of(
    mask: Callable[..., Tensor], shape: tuple[int, ...], device: torch.device, buffers: tuple[Any, ...] = ()
) -> Tensor | None:
    """Evaluate a mask function at all positions."""
    with torch.no_grad():
        allowed = _over_all(mask, (), buffers)(*_places(shape, device), *buffers).expand(shape)
        return None if bool(allowed.all()) else allowed


def _places(shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    return [torch.arange(length, device=device) for length in shape]


def _over_all(
    function: Callable[..., Tensor], first: tuple[int, ...], buffers: tuple[Any, ...]
) -> Callable[..., Tensor]:
    """Vectorise a function of scalars over all axes, as torch evaluates it uncompiled."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for axes in _AXES:
        function = torch.vmap(function, in_dims=(*first, *axes, *(None,) * len(buffers)))

    def evaluated(*args: Any) -> Tensor:
        with TransformGetItemToIndex():  # functions may index tables by position
            return function(*args)

    return evaluated
