"""Capturing torch's own attention functions, and what is written by hand, at the level of Python functions."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.recording import Recorder, four_axes, is_plain, mask_axes, split_mask
from semdiag.capturing.softmax_provenance import SoftmaxProvenance

MECHANISM = "scaled_dot_product_attention"


class FunctionWatch(TorchFunctionMode):
    """Sees every call of a torch function, also through names that were imported before.

    Args:
        recorder: gets the calls.
        everything: whether a softmax that is not recognised as attention is noted, too.
    """

    def __init__(self, recorder: Recorder, everything: bool = False) -> None:
        super().__init__()
        self._recorder = recorder
        self._provenance = SoftmaxProvenance(recorder, everything)
        self._special: dict[str, Callable[[Any, Sequence[type], tuple[Any, ...], dict[str, Any]], Any]] = {
            "scaled_dot_product_attention": self._scaled_dot_product,
            "multi_head_attention_forward": self._multi_head,
            "flex_attention": self._flex,
        }

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function, and record it if it attends."""
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        if not self._recorder.listening or self._recorder.in_function or name == "__get__":
            return func(*args, **kwargs)
        name = name.partition(".")[0]  # operators of exported graphs are called name.overload
        special = self._special.get(name)
        if special is not None:
            return special(func, types, args, kwargs)
        if not self._provenance.follows(name):
            return func(*args, **kwargs)
        self._recorder.in_function = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._recorder.in_function = False
        self._provenance.follow(name, args, kwargs, result)
        return result

    def __exit__(self, *exception: Any) -> None:
        """Leave; what was begun and not finished goes into the audit."""
        self._provenance.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _scaled_dot_product(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._recorder.covering():
            mixed: Tensor = func(*args, **kwargs)
        given = dict(zip(_SDPA, args, strict=False)) | kwargs
        if not is_plain(mixed):
            self._recorder.skip(
                MECHANISM, f"tensors of type {type(mixed).__name__}: only plain tensors are captured"
            )
        else:
            self._recorder.record(_sdpa_call(given, mixed, self._recorder.heads))
        return mixed

    def _multi_head(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Go on watching inside: with weights it is a softmax by hand, without them a fused attention."""
        if not hasattr(torch.overrides, "redispatch_function"):
            self._recorder.skip("multi_head_attention_forward", "it takes torch 2.13 to look inside")
            return func(*args, **kwargs)
        outer = self._recorder.heads
        self._recorder.heads = int(kwargs["num_heads"] if "num_heads" in kwargs else args[4])
        try:
            with self:
                return torch.overrides.redispatch_function(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        finally:
            self._recorder.heads = outer

    def _flex(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._recorder.skip(
            "flex_attention", "its score and mask functions cannot be read back as a bias and a mask"
        )
        with self._recorder.covering():
            return func(*args, **kwargs)


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _sdpa_call(given: dict[str, Any], mixed: Tensor, heads: int | None) -> AttentionCall:
    q, k, v = (given[name].detach() for name in _SDPA[:3])
    mask, causal, first = given.get("attn_mask"), bool(given.get("is_causal")), 0
    biases = sys.modules.get("torch.nn.attention.bias")  # importing it takes a second: only if someone else has
    if biases is not None and isinstance(mask, biases.CausalBias):
        causal = True
        first = k.shape[-2] - q.shape[-2] if mask.variant == biases.CausalVariant.LOWER_RIGHT else 0
        mask = None
    allowed, bias = (None, None) if mask is None else split_mask(mask)
    lead, scale = mixed.shape[:-2], given.get("scale")
    grouped = bool(given.get("enable_gqa"))
    if not grouped:
        q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
    return AttentionCall(
        module="",
        layer=0,
        q=four_axes(q, heads),
        k=four_axes(k, heads),
        v=four_axes(v, heads),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        allowed=None if allowed is None else mask_axes(allowed, lead, heads),
        queries=None,
        selected=None,
        mixed=four_axes(mixed.detach(), heads),
        bias=None if bias is None else mask_axes(bias, lead, heads),
        causal=causal,
        first_query=first,
        mechanism=MECHANISM,
        dropout=float(given.get("dropout_p") or 0.0),
    )
