"""Capturing Hugging Face models: where they look up the function that attends."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing.adapters.flash import NotFollowedError, flash_call
from semdiag.capturing.adapters.flex import mask_of
from semdiag.capturing.adapters.interface_call import InterfaceCall
from semdiag.capturing.attention_call import AttentionCall, four_axes
from semdiag.capturing.audit import Remark
from semdiag.capturing.overlapping import SharedChange
from semdiag.capturing.recording import Recorder, is_plain, not_plain, outside_all_modes
from semdiag.capturing.score_masks import split_mask

_UNDERSTOOD = ("eager", "sdpa", "flex_attention")  # their masks are tensors over queries and keys, or functions
_LOAD = "load the model with attn_implementation='sdpa' or 'eager' to capture it"
_NAMES = ("attention_mask", "scaling", "dropout")
_ADDED = (
    "its mask of truths forbids nothing: eager attention adds it to the scores as 0 and 1 (give it 0 and -inf)"
)
_RECORDERS: list[Recorder] = []  # those that record now, in the order in which they began


@contextlib.contextmanager
def intercepted_interface(recorder: Recorder) -> Iterator[None]:
    """Record what Hugging Face models give to their attention functions.

    The lookup of the function is intercepted, not the registry: a model told to use another implementation
    would also build another mask. The interface sees what the functions inside it do not hand on: soft-cap, sinks,
    key heads before they are repeated, positions in a cache. It takes precedence over the other mechanisms.

    Args:
        recorder: gets the calls.

    Yields:
        Nothing.
    """
    if not hasattr(_interface(), "get_interface"):  # not imported, or too old: the other mechanisms see its models
        yield
        return
    _RECORDERS.append(recorder)
    try:
        with _PATCHED.held():
            yield
    finally:
        _RECORDERS.remove(recorder)


def _interface() -> Any:
    return getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    interface = _interface()
    original = interface.get_interface

    def get_interface(self: object, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attend: Callable[..., Any] = original(self, implementation, default)
        for recorder in tuple(_RECORDERS):
            attend = _recorded(recorder, implementation, attend)
        return attend

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


_PATCHED = SharedChange(_patched)


def _recorded(recorder: Recorder, implementation: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        name = recorder.names.get(id(module))
        if name is None or not recorder.listening:
            return attend(module, query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
        options = dict(zip(_NAMES, args, strict=False)) | kwargs
        given = InterfaceCall(name, module, implementation, query, key, value, options)
        if recorder.masking and _maskable(given):
            options |= _masked(recorder, given)
            args, kwargs = (), options
        with recorder.covering():
            output: tuple[Tensor, Tensor | None] = attend(module, query, key, value, *args, **kwargs)
        try:
            with outside_all_modes(query.device.type):
                _record(recorder, given, output[0])
        except Exception as error:
            recorder.failed(implementation, error, name)
        return output

    return attention


def _maskable(given: InterfaceCall) -> bool:
    """Whether a mask of the recorder's can be combined with that of the call."""
    mask = given.options.get("attention_mask")
    plain = mask is None or (isinstance(mask, Tensor) and mask.ndim == 4)
    return given.implementation in ("eager", "sdpa") and is_plain(given.q) and plain


def _masked(recorder: Recorder, given: InterfaceCall) -> dict[str, Any]:
    """The options that change under the recorder's mask."""
    kept = recorder.kept(_call(given, given.q.transpose(1, 2)))
    if kept is None:
        return {}
    mask = _mask(given)
    if mask is None and given.implementation == "eager":  # which adds it to the scores
        mask = given.q.new_zeros(())
    if mask is None or mask.dtype == torch.bool:
        found = kept if mask is None else kept & mask[..., : kept.shape[-1]]
    else:
        mask = mask if mask.ndim < 4 else mask[..., : kept.shape[-1]]
        found = mask.expand(kept.shape).masked_fill(~kept, torch.finfo(mask.dtype).min)
    return {"attention_mask": found, **({"is_causal": False} if "is_causal" in given.options else {})}


def _mask(given: InterfaceCall) -> Any:
    """The mask as the implementation takes it: eager attention adds a bool mask to the scores, as 0 and 1."""
    mask: Any = given.options.get("attention_mask")
    return mask.to(given.q.dtype) if _adds_bools(given) else mask


def _adds_bools(given: InterfaceCall) -> bool:
    mask = given.options.get("attention_mask")
    return given.implementation == "eager" and isinstance(mask, Tensor) and mask.dtype == torch.bool


def _record(recorder: Recorder, given: InterfaceCall, output: Tensor) -> None:
    name, implementation, q = given.name, given.implementation, given.q
    mask: Any = given.options.get("attention_mask")
    if not is_plain(q):
        recorder.skip(implementation, not_plain(q), name)
    elif "flash" in implementation and not implementation.startswith("paged|"):
        try:
            call = flash_call(given, output)
        except NotFollowedError as error:
            recorder.skip(implementation, f"{error}: {_LOAD}", name)
            return
        recorder.record(call)
    elif implementation not in _UNDERSTOOD:
        recorder.skip(implementation, _LOAD, name)
    else:
        if implementation == "flex_attention" and hasattr(mask, "mask_mod"):
            with recorder.covering():
                mask = mask_of(mask.mask_mod, (*mask.shape[:2], q.shape[2], given.k.shape[2]), q.device)
        if mask is None or (isinstance(mask, Tensor) and mask.ndim == 4):
            options = given.options | {"attention_mask": mask}
            recorder.record(_call(replace(given, options=options), output))
            if _adds_bools(given):
                recorder.audit.remarks[Remark(name, _ADDED)] += 1
        else:
            recorder.skip(implementation, f"its mask is a {type(mask).__name__} of an unknown kind", name)


def _call(given: InterfaceCall, output: Tensor) -> AttentionCall:
    implementation, options = given.implementation, given.options
    mask, bias = _mask(given), options.get("position_bias")
    q_length, k_length = given.q.shape[2], given.k.shape[2]
    causal = given.causal(implementation == "sdpa")
    allowed, forbidding = None, None
    if mask is not None:
        allowed, added, forbidding = split_mask(mask[..., :k_length])
        bias = added if bias is None else bias if added is None else bias + added
    by_rule = causal and mask is None and q_length > 1 and implementation == "sdpa"
    return given.attention(
        output,
        allowed,
        bias=None if bias is None else four_axes(bias.detach()),
        sinks=getattr(given.module, "sinks", None) if implementation == "eager" else None,
        causal=by_rule,
        first_query=0 if by_rule or not causal else _first_query(allowed, q_length, k_length),
        forbidding=forbidding,
    )


def _first_query(allowed: Tensor | None, q_length: int, k_length: int) -> int:
    """Position of query 0: the last query stands at the last key that it may see (a cache may have room left)."""
    if allowed is None or q_length == k_length:
        return k_length - q_length
    seen = allowed[:, :, -1].flatten(0, 1).any(0).nonzero()
    return max(0, int(seen.max()) + 1 - q_length) if len(seen) else k_length - q_length
