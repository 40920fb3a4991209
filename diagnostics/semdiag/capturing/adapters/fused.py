"""Fused attention: torch's own, flash-attention and flex attention."""

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from semdiag.capturing.attention_call import Args, AttentionCall, Kwargs, call_from_tensors
from semdiag.capturing.patches import SharedChange, replaced, undone
from semdiag.capturing.provenance.score_history import full_rows, split_mask, split_scores
from semdiag.capturing.provenance.tags import read_leading


class CachedKeys(NamedTuple):
    """Keys that a cache returned for one call."""

    keys: int  # number of keys, the first ones of the call
    new: int  # number of tokens that the call added
    before: int | None  # number of tokens before the first key, which the cache has dropped
    room: int  # number of keys after the last token's, which are no tokens yet; 0 if unknown


class _Last(threading.local):
    keys: Tensor | None = None  # keys that a cache returned last; the module may have changed them since
    layer: int | None = None


_RETURNED: Any = WeakTensorKeyDictionary()  # records by returned keys
_LAST = _Last()


@contextlib.contextmanager
def watched_caches() -> Iterator[None]:
    """Record, in the context, the number of tokens before the first key whenever a cache returns keys."""
    imported = hasattr(_cache(), "update")
    with undone(forget_last), _PATCHED.held() if imported else contextlib.nullcontext():
        yield


def cached_keys(keys: Tensor, layer: int | None, queries: int) -> CachedKeys | None:
    """Return the record of a call's keys from a cache; None if there is none."""
    record: CachedKeys | None = _RETURNED.get(keys)
    last = _LAST.keys
    if record is not None or last is None or (last.ndim, keys.ndim) != (4, 4) or len(last) != len(keys):
        return record
    record = _RETURNED.get(last)
    if record is None or (record.keys, record.new, _LAST.layer) == (keys.shape[2], queries, layer):
        return record
    like = record.keys < keys.shape[2] and (last.device, last.dtype) == (keys.device, keys.dtype)
    return record if like and torch.equal(keys[:, :, : record.keys], last) else None


def forget_last() -> None:
    """Forget the last keys of a cache in this thread: a model starts, and its calls have other keys."""
    _LAST.keys = None


def _cache() -> Any:
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)


def _updated(
    original: Any, cache: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
) -> Any:
    """Record a cache's keys; the last one is the last token's unless the cache has unused room."""
    result = original(cache, key_states, value_states, layer_idx, *args, **kwargs)
    if torch.compiler.is_compiling():
        return result
    with contextlib.suppress(Exception):  # custom caches may raise anything
        keys = result[0]
        layer = cache.layers[layer_idx]
        count = keys.shape[2]
        length = layer.get_seq_length()
        if isinstance(length, Tensor) and not layer.is_sliding:
            length = int(length)
        before = max(0, length - count) if isinstance(length, int) else None
        room = max(0, count - length) if isinstance(length, int) else 0
        _RETURNED[keys] = CachedKeys(count, key_states.shape[2], before, room)
        _LAST.keys = keys
        _LAST.layer = layer_idx
    return result


_PATCHED = SharedChange(lambda: replaced(_cache(), "update", _updated))
MECHANISM = "transformers attention interface"


@dataclass(frozen=True, eq=False)
class InterfaceCall:
    """The arguments of one call."""

    name: str  # dotted name of the module
    module: nn.Module  # module that attends
    implementation: str  # name of the function that the model looked up
    q: Tensor  # queries (B, H, Lq, D)
    k: Tensor  # keys (B, Hk, Lk, D)
    v: Tensor  # values (B, Hk, Lk, Dv)
    options: dict[str, Any]  # all other arguments, by name

    def causal(self, default: bool) -> bool:
        """Return whether the causal rule applies: by the options, else the module, else the default."""
        option = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", default) if option is None else option)

    @cached_property
    def cached(self) -> CachedKeys | None:
        """Record of the keys from a cache; None if they come from no watched cache."""
        return cached_keys(self.k, getattr(self.module, "layer_idx", None), self.q.shape[2])

    @property
    def more_keys(self) -> bool:
        """Whether other keys follow those from the cache."""
        return self.cached is not None and self.cached.keys < self.k.shape[2]

    @property
    def keys_before(self) -> int | None:
        """Number of tokens before key 0, which a cache with a window has dropped; None if unknown."""
        before = None if self.cached is None else self.cached.before
        queries = self.q.shape[2]
        keys = self.k.shape[2]
        window = self.options.get("sliding_window")
        full = isinstance(window, int) and queries < keys and keys >= window + queries - 1
        return before if before is not None or full else 0

    def attention(self, mixed: Tensor, allowed: Tensor | None, **fields: Any) -> AttentionCall:
        """Return the attention; layer and occurrence are unknown here."""
        options = self.options
        sinks = fields.pop("sinks", None)
        sinks = sinks if options.get("s_aux") is None else options["s_aux"]
        sinks = None if sinks is None else sinks.detach().flatten()
        return call_from_tensors(
            self.q, self.k, self.v, mixed.transpose(1, 2), scale=options.get("scaling"), module=self.name,
            allowed=allowed, softcap=options.get("softcap"), sinks=sinks,
            mechanism=MECHANISM, dropout=float(options.get("dropout") or 0.0), **fields,
        )  # fmt: skip


_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # read if all are given
# Other options of the interface's function; a test compares them with the installed transformers.
OPTIONS = ("attention_mask", "dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux", "cache")


class NotFollowedError(Exception):
    """Raised for attention that cannot be described; the message gives the reason."""


def flash_call(arguments: InterfaceCall, output: Tensor) -> AttentionCall:
    """Return a call of a flash-attention kernel."""
    options = arguments.options
    if options.get("cache") is not None or options.get("block_table") is not None:
        raise NotFollowedError("its keys are in the pages of a cache")
    before = arguments.keys_before
    q, k, v = (x.detach().to(output.dtype) for x in (arguments.q, arguments.k, arguments.v))  # mixed precision
    causal = arguments.causal(True)
    window = options.get("sliding_window")
    if window is not None and k.shape[2] <= window:
        window = None
    mask = options.get("attention_mask")
    if mask is None:
        allowed, queries, by_rule = _allowed_in_sequences(_sequences(options, q, k), q, k, causal, window)
    else:
        if mask.ndim != 2:
            raise NotFollowedError(f"its mask has {mask.ndim} axes, not 2")
        k = k[:, :, : mask.shape[1]]
        v = v[:, :, : mask.shape[1]]  # a static cache has unused room
        allowed, queries, by_rule = _allowed_in_padding(mask.bool(), q.shape[2], k.shape[2], causal, window)
    return replace(arguments, q=q, k=k, v=v).attention(
        output,
        allowed,
        queries=queries,
        causal=by_rule,
        first_query=max(0, k.shape[2] - q.shape[2]) if causal else 0,
        keys_before=(before if causal else 0) or 0,
    )


# Allowed keys and real queries, None for all; and whether a call's causal rule limits the keys further.
_Limits = tuple[Tensor | None, Tensor | None, bool]


def _allowed_in_padding(mask: Tensor, q_length: int, k_length: int, causal: bool, window: int | None) -> _Limits:
    """Return what queries may attend to under a mask of tokens, (B, Lk) bool."""
    queries = mask if q_length == k_length else mask[:, -q_length:] if q_length > 1 else None
    if q_length == k_length and window is None:
        return mask[:, None, None], queries, causal
    real = mask.new_ones(len(mask), 1) if queries is None else queries
    numbers = real.long() * 0, mask.long() * 0
    return _visible_keys((real, mask), numbers, causal, window), queries, False


def _allowed_in_sequences(
    sequences: tuple[Tensor, Tensor] | None, q: Tensor, k: Tensor, causal: bool, window: int | None
) -> _Limits:
    """Return what queries may attend to in packed sequences, or in one of which all tokens are real."""
    q_length = q.shape[2]
    k_length = k.shape[2]
    if sequences is None and window is None and (k_length >= q_length or not causal):
        return None, None, causal
    one = torch.zeros(len(q), max(q_length, k_length), dtype=torch.long, device=q.device)
    numbers = sequences or (one[:, :q_length], one[:, :k_length])
    queries = numbers[0] >= 0
    return _visible_keys((queries, numbers[1] >= 0), numbers, causal, window), queries, False


def _sequences(options: dict[str, Any], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the sequence of each query (1, Lq) and key (1, Lk), -1 for none; None if they are not packed."""
    lengths = q.shape[2], k.shape[2]
    if all(options.get(name) is not None for name in _PACKED):
        if len(q) != 1:
            raise NotFollowedError("packed sequences fill more than one row")
        first, second = (_numbered(options[x], n) for x, n in zip(_PACKED[:2], lengths, strict=True))
        return first, second
    positions = options.get("position_ids")
    if positions is None or len(q) != 1 or positions.shape[-1] == 1:
        return None
    if positions.numel() != lengths[0]:
        raise NotFollowedError("its positions are not one per query")
    positions = positions.reshape(1, -1)
    lowest = positions.min()
    if bool((positions == lowest + torch.arange(lengths[0], device=positions.device)).all()):
        return None
    if lengths[0] != lengths[1]:
        raise NotFollowedError("packed sequences have keys besides their own")
    number = (positions == lowest).cumsum(-1) - 1
    return number, number


def _numbered(ends: Tensor, length: int) -> Tensor:
    places = torch.arange(length, device=ends.device)
    number = torch.bucketize(places, ends[1:].long(), right=True)
    return number.masked_fill((places < ends[0]) | (places >= ends[-1]), -1)[None]


def _visible_keys(
    real: tuple[Tensor, Tensor], numbers: tuple[Tensor, Tensor], causal: bool, window: int | None
) -> Tensor:
    """Return which keys each query sees, (B, 1, Lq, Lk) bool."""
    ranks = []
    counts = []
    for there, number in zip(real, numbers, strict=True):
        number = number.clamp(min=0)
        size = len(there), int(max(n.max() for n in numbers)) + 1
        count = torch.zeros(size, dtype=torch.long, device=there.device).scatter_add_(1, number, there.long())
        before = (count.cumsum(1) - count).gather(1, number)
        ranks.append(there.cumsum(1) - 1 - before)
        counts.append(count)
    sequence = numbers[0].clamp(min=0)
    place = (ranks[0] + (counts[1] - counts[0]).gather(1, sequence))[:, :, None]
    keys = ranks[1][:, None]
    visible = real[0][:, :, None] & real[1][:, None] & (numbers[0][:, :, None] == numbers[1][:, None])
    if causal:
        visible = visible & (keys <= place)
    if window is not None:
        visible = visible & ((keys - place).abs() < window)
    return visible[:, None]


SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_FLASH = (*SDPA[:3], *SDPA[4:])


def fused_call(name: str, args: Args, kwargs: Kwargs, result: Any) -> AttentionCall | None:
    """Return fused attention from the arguments of its operation; None for an unknown operation."""
    if name != "_scaled_dot_product_flash_attention_for_cpu":
        return None
    return sdpa_call(dict(zip(_FLASH, args, strict=False)) | kwargs, result[0], None, ())[0]


def sdpa_call(
    arguments: dict[str, Any], mixed: Tensor, heads: int | None, shapes: Sequence[tuple[int, ...]]
) -> tuple[AttentionCall, tuple[int, ...], str | None]:
    """Return a call by torch's names of arguments; the order of its axes before the queries; a remark, or None."""
    q, k, v = (arguments[name].detach() for name in SDPA[:3])
    mixed = mixed.detach()
    mask, causal, first = _mask_and_rule(arguments, q.shape[-2], k.shape[-2])
    allowed, bias, forbidding, full = (None,) * 4 if mask is None else split_mask(mask)
    order = tuple(range(mixed.ndim - 2))
    remark = None
    if arguments.get("enable_gqa"):
        count = math.lcm(k.shape[-3], v.shape[-3])
        k, v = (x if x.shape[-3] == count else x.repeat_interleave(count // x.shape[-3], -3) for x in (k, v))
        samples = mixed.shape[:-3] or (1,)  # the first of three axes is the heads'
        q, k, v, mixed = (x.expand(*samples, *x.shape[-3:]) for x in (q, k, v, mixed))
    else:
        lead = mixed.shape[:-2]
        q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
        if len(lead) > 2:  # (B, H, windows, L, D) or (B, windows, H, L, D)
            order, remark = read_leading(q, k.shape[-2], shapes)
            q, k, v, mixed = (x.permute(*order, -2, -1) for x in (q, k, v, mixed))
            allowed, bias, full = (_permuted(x, lead, order) for x in (allowed, bias, full))
    call = call_from_tensors(
        q, k, v, mixed, scale=arguments.get("scale"), heads=heads, full=full, fused=True, allowed=allowed,
        bias=bias, causal=causal, first_query=first, mechanism="scaled_dot_product_attention",
        forbidding=forbidding, dropout=float(arguments.get("dropout_p") or 0.0),
    )  # fmt: skip
    return call, order, remark


def _mask_and_rule(arguments: dict[str, Any], queries: int, keys: int) -> tuple[Any, bool, int]:
    """Return a call's mask or None, whether the causal rule applies, and the position of query 0 under it."""
    mask = arguments.get("attn_mask")
    biases = sys.modules.get("torch.nn.attention.bias")  # None unless already imported, which takes a second
    if biases is None or not isinstance(mask, biases.CausalBias):
        return mask, bool(arguments.get("is_causal")), 0
    return None, True, keys - queries if mask.variant == biases.CausalVariant.LOWER_RIGHT else 0


def _permuted(mask: Tensor | None, lead: torch.Size, order: tuple[int, ...]) -> Tensor | None:
    """Return a mask with the axes before the queries expanded to ``lead``, in another order."""
    return None if mask is None else mask.expand(*lead, *mask.shape[-2:]).permute(*order, -2, -1)


FLEX_MECHANISM = "flex_attention"
_ARGUMENTS = (
    *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
    *("score_mod_other_buffers", "mask_mod_other_buffers"),
)
_AXES = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None))


def flex_call(args: Args, kwargs: Kwargs, mixed: Tensor) -> AttentionCall:
    """Return a call of the operator flex_attention."""
    arguments = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    q, k, v = (arguments[name].detach() for name in _ARGUMENTS[:3])
    k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
    blocks = arguments["block_mask"]
    score = arguments["score_mod"]
    buffers = arguments.get("score_mod_other_buffers", ())
    scale = arguments["scale"]
    with torch.no_grad(), _disable_current_modes(), torch.autocast(q.device.type, enabled=False):
        shape = (*blocks[2].shape[:2], q.shape[2], k.shape[2])
        allowed = mask_of(blocks[-1], shape, q.device, arguments.get("mask_mod_other_buffers", ()))
        masks: dict[str, Any] = {"allowed": allowed}
        if getattr(score, "__name__", "") != "_identity":
            call = call_from_tensors(q, k, v, mixed, scale=scale)
            scores = call.scores(torch.float64 if q.dtype == torch.float64 else torch.float32)
            modified = _over_all(score, scores.shape, q.device, buffers, scores)
            modified = modified if allowed is None else modified.masked_fill(~allowed, -torch.inf)
            full = full_rows(modified)
            allowed, modified, forbidding = split_scores(modified)
            bias = modified - scores
            bias = bias if allowed is None else bias.masked_fill(~allowed, 0.0)
            masks = {"allowed": allowed, "bias": bias, "forbidding": forbidding, "full": full}
        return call_from_tensors(q, k, v, mixed, scale=scale, mechanism=FLEX_MECHANISM, **masks)


def mask_of(
    mask: Callable[..., Tensor], shape: tuple[int, ...], device: torch.device, buffers: tuple[Any, ...] = ()
) -> Tensor | None:
    """Evaluate a mask function at all positions."""
    with torch.no_grad():
        allowed = _over_all(mask, shape, device, buffers).expand(shape)
        return None if bool(allowed.all()) else allowed


def _over_all(
    function: Any, shape: Sequence[int], device: torch.device, buffers: tuple[Any, ...], *first: Tensor
) -> Tensor:
    """Evaluate a function of scalars at all positions, as torch does uncompiled."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for axes in _AXES:
        function = torch.vmap(function, in_dims=(*[0] * len(first), *axes, *(None,) * len(buffers)))
    with TransformGetItemToIndex():  # functions may index tables by position
        places = [torch.arange(length, device=device) for length in shape]
        evaluated: Tensor = function(*first, *places, *buffers)
        return evaluated
