"""Capture Hugging Face models where they look up their attention function."""

import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing import patches, recording
from semdiag.capturing.adapters.fused import InterfaceCall, NotFollowedError, flash_call, mask_of, watched_caches
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.call_strips import allowed_mask, count_true
from semdiag.capturing.provenance.score_history import split_mask


def first_query(allowed: Tensor | None, queries: int, keys: int) -> int:
    """Return the position of query 0 among the tokens' keys."""
    if allowed is None or queries == keys:
        return keys - queries
    by_any = allowed.any(1)
    keys_of_last = by_any[:, -1].any(0).nonzero()  # of the last query
    last = max(0, int(keys_of_last.max()) + 1 - queries) if len(keys_of_last) else keys - queries
    if by_any.shape[1] < 2 or keys < queries:
        return last
    is_seen, first = by_any.to(torch.uint8).max(1)  # (B, Lk): is a key seen, and by which query first
    place = torch.arange(keys, device=first.device) - first
    place = place[is_seen.bool() & (place >= 0) & (place <= keys - queries)]
    votes = torch.bincount(place, minlength=keys - queries + 1)
    best = (votes == votes.max()).nonzero().flatten()
    return last if last in best else int(best[-1])


# Implementations with masks that are functions, or tensors over queries and keys.
_UNDERSTOOD = ("eager", "sdpa", "flex_attention")
_LOAD = "load the model with attn_implementation='sdpa' or 'eager' to capture it"
_NAMES = ("attention_mask", "scaling", "dropout")
_ADDED = (
    "its bool mask forbids nothing: eager attention adds it to the scores as 0 and 1 (pass 0 and -inf instead)"
)
_NO_PLACE = (
    "its cache holds a window of keys and does not say how many tokens it has seen: queries and keys are "
    "numbered from the first key in the cache"
)
_OTHERS = (
    "after its tokens' keys come others that its queries attend to (summaries of several tokens, or another "
    "sequence): they count as keys, and get the next numbers"
)
IGNORED = "its function ignores the mask: load the model with another attn_implementation ('sdpa') to mask it"
_CHECKED = 16  # queries of one sample, in all heads, on which a mask is checked
_RECORDERS: list[recording.Recorder] = []  # active recorders; those with a mask come last, in the order they began


@contextlib.contextmanager
def intercepted_interface(recorder: recording.Recorder) -> Iterator[None]:
    """Record the calls of Hugging Face models' attention functions."""
    if not hasattr(_interface(), "get_interface"):  # absent or too old: other mechanisms see its models
        yield
        return

    def forget() -> None:
        if recorder in _RECORDERS:
            _RECORDERS.remove(recorder)

    with patches.undone(forget):
        _RECORDERS.insert(len(_RECORDERS) if recorder.masking else 0, recorder)
        with _PATCHED.held(), watched_caches():
            yield


def _interface() -> Any:
    return getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)


def _looked_up(original: Any, interface: object, implementation: str, default: Callable[..., Any]) -> Any:
    attend = original(interface, implementation, default)
    for recorder in tuple(_RECORDERS):
        attend = _recorded(recorder, implementation, attend)
    return attend


_PATCHED = patches.SharedChange(lambda: patches.replaced(_interface(), "get_interface", _looked_up))


def _recorded(recorder: recording.Recorder, implementation: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        name = recorder.names.get(id(module))
        if name is None or not recorder.listening:
            return attend(module, query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
        options = dict(zip(_NAMES, args, strict=False)) | kwargs
        arguments = InterfaceCall(name, module, implementation, query, key, value, options)
        if recorder.masking and _takes_mask(arguments):
            return _attend_masked(recorder, arguments, attend)
        with recorder.covering():
            output: tuple[Tensor, Tensor | None] = attend(module, query, key, value, *args, **kwargs)
        with recorder.guarded(implementation, name), recording.outside_all_modes(query.device.type):
            _record(recorder, arguments, output[0])
        return output

    return attention


def _attend_masked(
    recorder: recording.Recorder, arguments: InterfaceCall, attend: Callable[..., Any]
) -> tuple[Tensor, Tensor | None]:
    """Attend under the recorder's mask, and record the call."""
    implementation = arguments.implementation
    inputs = arguments.q, arguments.k, arguments.v
    call = _call(arguments, arguments.q.transpose(1, 2))  # its output is not known yet
    kept_keys = recorder.masked(call, inputs if _is_replaceable(arguments, attend) else None)
    if isinstance(kept_keys, Tensor):
        arguments = replace(arguments, options=arguments.options | _masked(arguments, kept_keys))
    if isinstance(kept_keys, recording.MaskedOutput):
        output: tuple[Tensor, Tensor | None] = kept_keys.output.transpose(1, 2).contiguous(), None
        kept_keys = None  # who watches the masked model from outside gets a mask: the function is another then
    else:
        with recorder.covering():
            output = attend(arguments.module, *inputs, **arguments.options)
    with recorder.guarded(implementation, arguments.name), recording.outside_all_modes(arguments.q.device.type):
        if kept_keys is not None:
            if _ignored(call, kept_keys, *output[:2]):
                recorder.skip(implementation, IGNORED, arguments.name)
                return output
            allowed = kept_keys if call.allowed is None else kept_keys & call.allowed
            call = replace(call, allowed=allowed, causal=False)  # a query without any key keeps none
        _record(recorder, arguments, output[0], call)
    return output


def _takes_mask(arguments: InterfaceCall) -> bool:
    """Return whether a function takes a mask, and all its arguments are understood."""
    if arguments.implementation not in ("eager", "sdpa") or not recording.is_plain(arguments.q):
        return False
    return _is_of_four_axes(arguments.options.get("attention_mask")) and _sinks_known(arguments)


def _is_of_four_axes(mask: object) -> bool:
    """Return whether a mask is absent, or a tensor (B, 1 or H, Lq, Lk)."""
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 4)


def _is_replaceable(arguments: InterfaceCall, attend: Callable[..., Any]) -> bool:
    """Return whether a function is Transformers' on torch's, no recorder's or user's, and learns no bias."""
    sdpa = sys.modules.get("transformers.integrations.sdpa_attention")
    if attend is not getattr(sdpa, "sdpa_attention_forward", None):
        return False
    options = arguments.options.values()
    if any(isinstance(x, Tensor) and x.requires_grad for x in options):  # a position bias
        return False
    return not any(map(recording.has_tangent, (arguments.q, arguments.k, arguments.v, *options)))


def _sinks_known(arguments: InterfaceCall) -> bool:
    """Return whether eager attention's ``sinks`` are one per head, or one per query and head."""
    sinks = arguments.options.get("sinks")
    if sinks is None or arguments.implementation != "eager":
        return True
    rows = (*arguments.q.shape[:3], 1)
    shaped = isinstance(sinks, Tensor) and (sinks.shape == rows or sinks.numel() == sinks.shape[-1] == rows[1])
    return shaped and bool(sinks.isfinite().all())


def _masked(arguments: InterfaceCall, kept_keys: Tensor) -> dict[str, Any]:
    """Return the options that limit a call to the kept keys."""
    mask, _ = _mask(arguments)
    if kept_keys.stride(1) == 0:  # heads with the same keys need one mask
        kept_keys = kept_keys[:, :1]
    if mask is None and arguments.implementation == "eager":  # eager attention adds the mask to the scores
        mask = arguments.q.new_zeros(())
    if mask is None or mask.dtype == torch.bool:
        combined = kept_keys if mask is None else kept_keys & mask[..., : kept_keys.shape[-1]]
    else:
        mask = mask if mask.ndim < 4 else mask[..., : kept_keys.shape[-1]]
        combined = kept_keys.to(mask.dtype).sub_(1).mul_(torch.finfo(mask.dtype).max) + mask
    return {"attention_mask": combined, **({"is_causal": False} if "is_causal" in arguments.options else {})}


def _ignored(full: AttentionCall, kept_keys: Tensor, output: Tensor, weights: Tensor | None = None) -> bool:
    """Return whether a function attended to keys that it should leave out."""
    dropped = allowed_mask(full.part()) & ~kept_keys
    if full.dropout:
        shown = isinstance(weights, Tensor) and weights.shape == dropped.shape
        return shown and bool(weights.masked_select(dropped).any())  # type: ignore[union-attr]
    sample = count_true(dropped.flatten(1)).argmax()[None]
    count = count_true(dropped[sample]).sum((0, 1))
    rows = count.topk(min(_CHECKED, len(count))).indices
    part = replace(full, mixed=output.detach().transpose(1, 2)).part(sample, rows)
    kept_keys = kept_keys[sample][:, :, rows]
    affected = dropped[sample][:, :, rows].any(-1)
    dtype = torch.promote_types(torch.float32, output.dtype)
    scores = part.scores(dtype).masked_fill(~allowed_mask(part), -torch.inf)
    v = part.v.to(dtype).repeat_interleave(scores.shape[1] // part.v.shape[1], 1)
    far = []
    for z in (scores, scores.masked_fill(~kept_keys, -torch.inf)):
        if part.sinks is not None:
            z = torch.cat([z, part.sinks.to(dtype)[:, None, None].expand(*z.shape[:-1], 1)], -1)
        expected = z.softmax(-1)[..., : scores.shape[-1]] @ v
        far.append((expected - part.mixed.to(dtype))[affected].abs().sum())
    return bool(far[0] < far[1] / 4)


def _mask(arguments: InterfaceCall) -> tuple[Any, bool]:
    """Return the mask as it is used, and whether eager attention adds bools to the scores as 0 and 1."""
    mask: Any = arguments.options.get("attention_mask")
    adds = arguments.implementation == "eager" and isinstance(mask, Tensor) and mask.dtype == torch.bool
    return (mask.to(arguments.q.dtype) if adds else mask), adds


def _record(
    recorder: recording.Recorder,
    arguments: InterfaceCall,
    output: Tensor,
    before_output: AttentionCall | None = None,
) -> None:
    """Record a call; ``before_output`` is the call without its output, if it was described before."""
    name = arguments.name
    implementation = arguments.implementation
    q = arguments.q
    mask: Any = arguments.options.get("attention_mask")
    flash = "flash" in implementation and not implementation.startswith("paged|")
    if implementation == "flex_attention" and hasattr(mask, "mask_mod") and recording.is_plain(q):
        with recorder.covering():
            mask = mask_of(mask.mask_mod, (*mask.shape[:2], q.shape[2], arguments.k.shape[2]), q.device)
    reason = _refusal(arguments, mask, flash)
    if reason is not None:
        recorder.skip(implementation, reason, name)
        return
    if before_output is not None:
        call = replace(before_output, mixed=output.detach().transpose(1, 2))
    elif flash:
        try:
            call = flash_call(arguments, output)
        except NotFollowedError as error:
            recorder.skip(implementation, f"{error}: {_LOAD}", name)
            return
    else:
        call = _call(replace(arguments, options=arguments.options | {"attention_mask": mask}), output)
    recorder.record(call)
    _note_place(recorder, arguments, call, arguments.causal(flash or implementation == "sdpa"))
    if _mask(arguments)[1]:
        recorder.remark(_ADDED, name)


def _refusal(arguments: InterfaceCall, mask: object, flash: bool) -> str | None:
    """Return why a call cannot be described; None if it can."""
    if not recording.is_plain(arguments.q):
        return recording.not_plain(arguments.q)
    if arguments.implementation not in _UNDERSTOOD and not flash:
        return _LOAD
    if not _sinks_known(arguments):
        return "its sinks have an unknown form"
    if not flash and not _is_of_four_axes(mask):
        return f"its mask is a {type(mask).__name__} of an unknown kind"
    return None


def _note_place(recorder: recording.Recorder, arguments: InterfaceCall, call: AttentionCall, causal: bool) -> None:
    """Note where positions are counted from, and keys that follow the tokens'."""
    places = call.first_query, call.first_query + call.q.shape[2]
    if causal and places[0] and arguments.keys_before is None:
        recorder.remark(_NO_PLACE, arguments.name)
    by_place = causal and not call.causal
    # Queries attend to keys after their tokens', which a cache's unused room does not allow.
    behind = places[1] < call.k.shape[2] and (by_place or arguments.more_keys)
    if behind and (call.allowed is None or bool(call.allowed[..., places[1] :].any())):
        recorder.remark(_OTHERS, arguments.name)


def _call(arguments: InterfaceCall, output: Tensor) -> AttentionCall:
    """Return a call of eager, torch's or flex attention; its mask is a tensor or None."""
    fused = arguments.implementation == "sdpa"
    bias = arguments.options.get("position_bias")
    mask, _ = _mask(arguments)
    q_length = arguments.q.shape[2]
    causal = arguments.causal(fused)
    allowed = None
    forbidding = None
    full = None
    if mask is not None:
        mask = mask[..., : arguments.k.shape[2]]
        if bias is not None:  # judged as a sum, among the remaining keys
            mask = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
        allowed, bias, forbidding, full = split_mask(mask)
    sinks, bias = _eager_sinks(arguments, bias)
    by_rule = causal and mask is None and q_length > 1 and fused
    cached = arguments.cached
    behind = cached is not None and cached.new == q_length < cached.keys  # behind a prefix, whatever they see
    from_cache = not by_rule and (causal or arguments.more_keys or behind)
    return arguments.attention(
        output, allowed, bias=bias, sinks=sinks, causal=by_rule, forbidding=forbidding, full=full,
        first_query=_first_query(arguments, allowed) if from_cache else 0, fused=fused,
        keys_before=(arguments.keys_before if from_cache else 0) or 0,
    )  # fmt: skip


def _eager_sinks(arguments: InterfaceCall, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return eager attention's sinks (H,) or None, and the bias, from which those of single queries are taken."""
    if arguments.implementation != "eager":
        return None, bias
    if arguments.options.get("sinks") is None:
        return getattr(arguments.module, "sinks", None), bias
    sinks = arguments.options["sinks"].detach()
    if sinks.ndim != 4:
        return sinks, bias
    shift = sinks.to(torch.promote_types(sinks.dtype, torch.float32))  # shift each row to a sink of 0
    return sinks.new_zeros(sinks.shape[1]), (0.0 if bias is None else bias) - shift


def _first_query(arguments: InterfaceCall, allowed: Tensor | None) -> int:
    """Return the position of query 0, from the cache's count of tokens or else from the mask."""
    cached = arguments.cached
    queries = arguments.q.shape[2]
    if cached is None:
        return first_query(allowed, queries, arguments.k.shape[2])
    if cached.before is not None and cached.new == queries:
        return cached.keys - cached.room - queries
    return first_query(None if allowed is None else allowed[..., : cached.keys], queries, cached.keys)


_LEAVES = (nn.Linear, nn.Embedding, nn.Dropout, nn.LayerNorm, nn.Identity, nn.ModuleList, nn.ModuleDict)
_ACTIVATIONS = "torch.nn.modules.activation"
_OF_ATTENTION = (nn.MultiheadAttention, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d)
_BASES = ("modeling_utils", "modeling_layers", "generation", "activations", "integrations", "utils")
_EAGER = "eager_attention_forward"  # what the interface returns for "eager"
_MARKS = frozenset((
    "softmax", "log_softmax", "softmin", "gumbel_softmax", "Softmax", "exp", "exp_", "exp2", "expm1", "logsumexp",
    "logaddexp", "sigmoid", "matmul", "__matmul__", "bmm", "baddbmm", "addbmm", "mm", "addmm", "einsum",
    "tensordot", "scaled_dot_product_attention", "multi_head_attention_forward", "MultiheadAttention",
    "flex_attention", "conv1d", "ops", "eval", "exec",
))  # fmt: skip


def attends_by_interface(model: nn.Module) -> bool:
    """Return whether all modules are the library's, or plain, and no source names what makes attention."""
    if not hasattr(_interface(), "get_interface"):
        return False
    kinds: set[Any] = {type(part) for part in model.modules()}
    if not any(map(_is_of_library, kinds)) or not all(map(_is_plain, kinds)):
        return False
    return not any(map(_changed, model.modules()))


def _is_of_library(kind: type) -> bool:
    return kind.__module__.startswith("transformers.")


def _changed(part: nn.Module) -> bool:
    """Return whether a module runs more than its class says."""
    hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    named = (getattr(hook, "__module__", None) or "" for hook in hooks)
    ours = all(name.startswith(("semdiag.", "transformers.")) for name in named)
    return not ours or "forward" in vars(part) or getattr(part, "_compiled_call_impl", None) is not None


@lru_cache(maxsize=1024)
def _is_plain(kind: Any) -> bool:
    """Return whether the modules of a class make no attention but by the interface."""
    if kind in _LEAVES or (kind.__module__ == _ACTIVATIONS and kind not in _OF_ATTENTION):
        return True
    if not _is_of_library(kind):
        return False
    for base in kind.__mro__:
        if not _is_of_library(base) or base.__module__.split(".")[1] in _BASES:
            continue
        try:
            classes, functions = _sources(base.__module__)
        except (OSError, TypeError, SyntaxError):
            return False
        rotary = base.__name__.endswith("RotaryEmbedding")  # angles are products of positions and frequencies
        if functions or (classes.get(base.__name__, True) and not (rotary and base.__name__ in classes)):
            return False
    return True


@lru_cache(maxsize=256)
def _sources(name: str) -> tuple[dict[str, bool], bool]:
    """Return for each class of a file, and for its functions, whether they name what attention is made of."""
    body = ast.parse(inspect.getsource(sys.modules[name])).body
    classes = {node.name: _names_any(node) for node in body if isinstance(node, ast.ClassDef)}
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name != _EAGER]
    return classes, any(map(_names_any, functions))


def _names_any(node: ast.AST) -> bool:
    names = ((each, getattr(each, "id", None) or getattr(each, "attr", None)) for each in ast.walk(node))
    return any(isinstance(getattr(each, "op", None), ast.MatMult) or name in _MARKS for each, name in names)
