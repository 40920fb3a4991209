"""Capturing Hugging Face models: where they look up the function that attends."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.recording import Recorder, four_axes, is_plain, split_mask

MECHANISM = "transformers attention interface"
_UNDERSTOOD = ("eager", "sdpa")  # their mask is a tensor over queries and keys
_NAMES = ("attention_mask", "scaling", "dropout")


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
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    original = getattr(interface, "get_interface", None)
    if interface is None or original is None:  # not imported, or too old: then the other mechanisms see its models
        yield
        return

    def get_interface(self: object, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return _recorded(recorder, implementation, original(self, implementation, default))

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def _recorded(recorder: Recorder, implementation: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        name = recorder.names.get(id(module))
        if name is None or not recorder.listening:
            return attend(module, query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
        with recorder.covering():
            output: tuple[Tensor, Tensor | None] = attend(module, query, key, value, *args, **kwargs)
        options = dict(zip(_NAMES, args, strict=False)) | kwargs
        mask = options.get("attention_mask")
        if implementation not in _UNDERSTOOD:
            recorder.skip(
                implementation, "load the model with attn_implementation='sdpa' or 'eager' to capture it", name
            )
        elif not is_plain(query):
            recorder.skip(
                implementation, f"tensors of type {type(query).__name__}: only plain ones are captured", name
            )
        elif mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4):
            recorder.skip(implementation, f"its mask is a {type(mask).__name__} of an unknown kind", name)
        else:
            recorder.record(_call(name, implementation, module, (query, key, value), options, output[0]))
        return output

    return attention


def _call(
    name: str,
    implementation: str,
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    output: Tensor,
) -> AttentionCall:
    q, k, v = (x.detach() for x in qkv)
    mask, bias = options.get("attention_mask"), options.get("position_bias")
    q_length, k_length = q.shape[2], k.shape[2]
    given = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", implementation == "sdpa") if given is None else given)
    allowed = None
    if mask is not None:
        allowed, added = split_mask(mask[..., :k_length])
        bias = added if bias is None else bias if added is None else bias + added
    scale, sinks = options.get("scaling"), options.get("s_aux")
    if sinks is None and implementation == "eager":
        sinks = getattr(module, "sinks", None)
    by_rule = causal and mask is None and q_length > 1 and implementation == "sdpa"
    return AttentionCall(
        module=name,
        layer=0,
        q=q,
        k=k,
        v=v,
        scale=1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        allowed=allowed,
        queries=None,
        selected=None,
        mixed=output.detach().transpose(1, 2),
        bias=None if bias is None else four_axes(bias.detach()),
        softcap=options.get("softcap"),
        sinks=None if sinks is None else sinks.detach().flatten(),
        causal=by_rule,
        first_query=0 if by_rule or not causal else _first_query(allowed, q_length, k_length),
        mechanism=MECHANISM,
        dropout=float(options.get("dropout") or 0.0),
    )


def _first_query(allowed: Tensor | None, q_length: int, k_length: int) -> int:
    """Position of query 0: the last query stands at the last key that it may see (a cache may have room left)."""
    if allowed is None or q_length == k_length:
        return k_length - q_length
    seen = allowed[:, :, -1].flatten(0, 1).any(0).nonzero()
    return max(0, int(seen.max()) + 1 - q_length) if len(seen) else k_length - q_length
