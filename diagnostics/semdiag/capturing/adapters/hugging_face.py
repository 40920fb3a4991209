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

from semdiag.capturing import recording
from semdiag.capturing.adapters.fused import InterfaceCall, NotFollowedError, flash_call, mask_of, watched_caches
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.call_strips import allowed_mask, count_true
from semdiag.capturing.provenance.score_history import split_mask


def first_query(allowed: Tensor | None, queries: int, keys: int) -> int:
    """Return the position of query 0 among the tokens' keys."""
    if allowed is None or queries == keys:
        return keys - queries
    by_any = allowed.any(1)
    seen = by_any[:, -1].any(0).nonzero()
    last = max(0, int(seen.max()) + 1 - queries) if len(seen) else keys - queries
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

    with recording.undone(forget):
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


_PATCHED = recording.SharedChange(lambda: recording.replaced(_interface(), "get_interface", _looked_up))


def _recorded(recorder: recording.Recorder, implementation: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        name = recorder.names.get(id(module))
        if name is None or not recorder.listening:
            return attend(module, query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
        options = dict(zip(_NAMES, args, strict=False)) | kwargs
        given = InterfaceCall(name, module, implementation, query, key, value, options)
        full: AttentionCall | None = None
        kept: Tensor | recording.MaskedOutput | None = None
        old = options.get("attention_mask")
        plain = recording.is_plain(query) and (old is None or (isinstance(old, Tensor) and old.ndim == 4))
        if recorder.masking and implementation in ("eager", "sdpa") and plain and _sinks_known(given):
            full = _call(given, query.transpose(1, 2))
            learned = any(isinstance(x, Tensor) and x.requires_grad for x in options.values())  # a position bias
            learned |= any(map(recording.has_tangent, (query, key, value, *options.values())))
            sdpa = sys.modules.get("transformers.integrations.sdpa_attention")
            # Transformers' function on torch's own; one that another recorder or a user put there is another.
            alone = attend is getattr(sdpa, "sdpa_attention_forward", None) and not learned
            kept = recorder.masked(full, (query, key, value) if alone else None)
            if isinstance(kept, Tensor):
                given = replace(given, options=options | _masked(given, kept))
            args = ()
            kwargs = given.options
        if isinstance(kept, recording.MaskedOutput):
            output: tuple[Tensor, Tensor | None] = kept.output.transpose(1, 2).contiguous(), None
            kept = None  # who watches the masked model from outside gets a mask: the function is another then
        else:
            with recorder.covering():
                output = attend(module, query, key, value, *args, **kwargs)
        with recorder.guarded(implementation, name), recording.outside_all_modes(query.device.type):
            if full is not None and kept is not None:
                if _ignored(full, kept, *output[:2]):
                    recorder.skip(implementation, IGNORED, name)
                    return output
                allowed = kept if full.allowed is None else kept & full.allowed
                full = replace(full, allowed=allowed, causal=False)  # a query without any key keeps none
            _record(recorder, given, output[0], full)
        return output

    return attention


def _sinks_known(given: InterfaceCall) -> bool:
    """Return whether eager attention's ``sinks`` are one per head, or one per query and head."""
    sinks = given.options.get("sinks")
    if sinks is None or given.implementation != "eager":
        return True
    rows = (*given.q.shape[:3], 1)
    shaped = isinstance(sinks, Tensor) and (sinks.shape == rows or sinks.numel() == sinks.shape[-1] == rows[1])
    return shaped and bool(sinks.isfinite().all())


def _masked(given: InterfaceCall, kept: Tensor) -> dict[str, Any]:
    mask, _ = _mask(given)
    kept = kept[:, :1] if kept.stride(1) == 0 else kept  # heads with the same keys need one mask
    if mask is None and given.implementation == "eager":  # eager attention adds the mask to the scores
        mask = given.q.new_zeros(())
    if mask is None or mask.dtype == torch.bool:
        combined = kept if mask is None else kept & mask[..., : kept.shape[-1]]
    else:
        mask = mask if mask.ndim < 4 else mask[..., : kept.shape[-1]]
        combined = kept.to(mask.dtype).sub_(1).mul_(torch.finfo(mask.dtype).max) + mask
    return {"attention_mask": combined, **({"is_causal": False} if "is_causal" in given.options else {})}


def _ignored(full: AttentionCall, kept: Tensor, output: Tensor, weights: Tensor | None = None) -> bool:
    """Return whether a function attended to keys that it should leave out."""
    whole = allowed_mask(full.part())
    dropped = whole & ~kept
    if full.dropout:
        shown = isinstance(weights, Tensor) and weights.shape == dropped.shape
        return shown and bool(weights.masked_select(dropped).any())  # type: ignore[union-attr]
    sample = count_true(dropped.flatten(1)).argmax()[None]
    count = count_true(dropped[sample]).sum((0, 1))
    rows = count.topk(min(_CHECKED, len(count))).indices
    part = replace(full, mixed=output.detach().transpose(1, 2)).part(sample, rows)
    kept = kept[sample][:, :, rows]
    affected = dropped[sample][:, :, rows].any(-1)
    dtype = torch.promote_types(torch.float32, output.dtype)
    scores = part.scores(dtype).masked_fill(~allowed_mask(part), -torch.inf)
    v = part.v.to(dtype).repeat_interleave(scores.shape[1] // part.v.shape[1], 1)
    far = []
    for z in (scores, scores.masked_fill(~kept, -torch.inf)):
        if part.sinks is not None:
            z = torch.cat([z, part.sinks.to(dtype)[:, None, None].expand(*z.shape[:-1], 1)], -1)
        expected = z.softmax(-1)[..., : scores.shape[-1]] @ v
        far.append((expected - part.mixed.to(dtype))[affected].abs().sum())
    return bool(far[0] < far[1] / 4)


def _mask(given: InterfaceCall) -> tuple[Any, bool]:
    """Return the mask as it is used, and whether eager attention adds bools to the scores as 0 and 1."""
    mask: Any = given.options.get("attention_mask")
    adds = given.implementation == "eager" and isinstance(mask, Tensor) and mask.dtype == torch.bool
    return (mask.to(given.q.dtype) if adds else mask), adds


def _record(
    recorder: recording.Recorder, given: InterfaceCall, output: Tensor, known: AttentionCall | None = None
) -> None:
    """Record a call; ``known`` is the call without its output, if it was described before."""
    name = given.name
    implementation = given.implementation
    q = given.q
    mask: Any = given.options.get("attention_mask")
    flash = "flash" in implementation and not implementation.startswith("paged|")
    if implementation == "flex_attention" and hasattr(mask, "mask_mod") and recording.is_plain(q):
        with recorder.covering():
            mask = mask_of(mask.mask_mod, (*mask.shape[:2], q.shape[2], given.k.shape[2]), q.device)
    reason = None
    if not recording.is_plain(q):
        reason = recording.not_plain(q)
    elif implementation not in _UNDERSTOOD and not flash:
        reason = _LOAD
    elif not _sinks_known(given):
        reason = "its sinks have an unknown form"
    elif not flash and not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 4)):
        reason = f"its mask is a {type(mask).__name__} of an unknown kind"
    if reason is not None:
        recorder.skip(implementation, reason, name)
        return
    if known is not None:
        call = replace(known, mixed=output.detach().transpose(1, 2))
    elif flash:
        try:
            call = flash_call(given, output)
        except NotFollowedError as error:
            recorder.skip(implementation, f"{error}: {_LOAD}", name)
            return
    else:
        call = _call(replace(given, options=given.options | {"attention_mask": mask}), output)
    recorder.record(call)
    _note_place(recorder, given, call, given.causal(flash or implementation == "sdpa"))
    if _mask(given)[1]:
        recorder.remark(_ADDED, name)


def _note_place(recorder: recording.Recorder, given: InterfaceCall, call: AttentionCall, causal: bool) -> None:
    places = call.first_query, call.first_query + call.q.shape[2]
    if causal and places[0] and given.keys_before is None:
        recorder.remark(_NO_PLACE, given.name)
    by_place = causal and not call.causal
    # Queries attend to keys after their tokens', which a cache's unused room does not allow.
    behind = places[1] < call.k.shape[2] and (by_place or given.more_keys)
    if behind and (call.allowed is None or bool(call.allowed[..., places[1] :].any())):
        recorder.remark(_OTHERS, given.name)


def _call(given: InterfaceCall, output: Tensor) -> AttentionCall:
    implementation = given.implementation
    options = given.options
    (mask, _), bias = _mask(given), options.get("position_bias")
    q_length = given.q.shape[2]
    k_length = given.k.shape[2]
    causal = given.causal(implementation == "sdpa")
    allowed = None
    forbidding = None
    full = None
    if mask is not None:
        mask = mask[..., :k_length]
        if bias is not None:  # judged as a sum, among the remaining keys
            mask = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
        allowed, bias, forbidding, full = split_mask(mask)
    sinks = getattr(given.module, "sinks", None) if implementation == "eager" else None
    if implementation == "eager" and options.get("sinks") is not None:
        sinks = options["sinks"].detach()
        if sinks.ndim == 4:  # one per query: shift each row to a sink of 0
            bias = (0.0 if bias is None else bias) - sinks.to(torch.promote_types(sinks.dtype, torch.float32))
            sinks = sinks.new_zeros(sinks.shape[1])
    by_rule = causal and mask is None and q_length > 1 and implementation == "sdpa"
    cached = given.cached
    behind = cached is not None and cached.new == q_length < cached.keys  # behind a prefix, whatever they see
    from_cache = not by_rule and (causal or given.more_keys or behind)
    return given.attention(
        output, allowed, bias=bias, sinks=sinks, causal=by_rule, forbidding=forbidding, full=full,
        first_query=_first_query(given, allowed) if from_cache else 0, fused=implementation == "sdpa",
        keys_before=(given.keys_before if from_cache else 0) or 0,
    )  # fmt: skip


def _first_query(given: InterfaceCall, allowed: Tensor | None) -> int:
    """Return the position of query 0, from the cache's count of tokens or else from the mask."""
    cached = given.cached
    queries = given.q.shape[2]
    if cached is None:
        return first_query(allowed, queries, given.k.shape[2])
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
    known = any(map(_is_of_library, kinds)) and all(_is_plain(kind) for kind in kinds)
    return known and not any(map(_changed, model.modules()))


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
