"""Capture torch's attention functions, and hand-written attention, at the level of Python functions."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, _higher_order_ops
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from semdiag.capturing.adapters import fused as flex
from semdiag.capturing.adapters.fused import flex_call, swallowing
from semdiag.capturing.attention_call import AttentionCall, four_axes, mask_axes
from semdiag.capturing.audit import Remark
from semdiag.capturing.call_strips import allowed_keys
from semdiag.capturing.provenance.operations import OperationWatch, register_mode, run_as_written
from semdiag.capturing.provenance.softmaxes import FOLLOWED, SoftmaxProvenance
from semdiag.capturing.provenance.tags import read_leading
from semdiag.capturing.recording import (
    Mixed,
    Recorder,
    SharedChange,
    is_plain,
    modes_here,
    not_plain,
    outside_all_modes,
    split_mask,
    take_off,
    undone,
)
from semdiag_models import AttentionCore, Encoder
from semdiag_models.encoder import Affine, Attention, Block

MECHANISM = "scaled_dot_product_attention"


class FunctionWatch(TorchFunctionMode):
    """Sees every call of a torch function, even through names imported earlier."""

    def __init__(self, recorder: Recorder, below: OperationWatch) -> None:
        super().__init__()
        self._recorder, self._below = recorder, below
        self._provenance = SoftmaxProvenance(below.writes, below.product)
        looks = self._scaled_dot_product, self._multi_head, self._flex
        self._special = dict(zip(_SPECIAL, looks, strict=True))

    @property
    def masking(self) -> bool:
        """Whether this watch applies a mask."""
        return self._recorder.masking

    @property
    def over(self) -> bool:
        """Whether the context of this watch has been left."""
        return self._recorder.closed

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function, and record its attention."""
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "").partition(".")[0]  # operators of exported graphs: name.overload
        if name not in _WATCHED and name not in _higher_order_ops:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            register_mode(func, OperationWatch)
        if self._recorder.in_function or not self._recorder.listening:
            return func(*args, **kwargs)
        special = self._special.get(name)
        if special is not None:
            return special(func, types, args, kwargs)
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if name not in _WATCHED:
            return func(*args, **kwargs)
        if name in _SOFTMAX:
            masked = False
            if self._recorder.masking:
                args, kwargs, masked = self._provenance.masked(self._recorder, args, kwargs)
            self._below.offer(self._provenance.history(args[0] if args else kwargs["input"]), masked)
        self._provenance.before(args, kwargs)
        self._recorder.in_function = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._recorder.in_function = False
            self._below.offer(None)
        if name not in _SOFTMAX:
            try:
                self._provenance.follow(name, args, kwargs, result)
            except Exception as error:
                self._provenance.close()  # its tags may be out of date
                self._recorder.failed(name, error)
        return result

    def __exit__(self, *exception: Any) -> None:
        """Leave, and forget all tags."""
        self._provenance.close()
        take_off(self)

    def _scaled_dot_product(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = dict(zip(_SDPA, args, strict=False)) | kwargs
        masked: dict[str, Any] | Mixed = {}
        if self._recorder.masking and all(is_plain(given[name]) for name in _SDPA[:3]):
            watched = any(
                isinstance(mode, FunctionWatch | OperationWatch)
                for mode in modes_here()
                if mode not in (self, self._below)
            )
            masked = _masked(self._recorder, given, replaceable=not watched)
            given |= {} if isinstance(masked, Mixed) else masked
            args, kwargs = (
                tuple(given[name] for name in _SDPA[:3]),
                {n: x for n, x in given.items() if n not in _SDPA[:3]},
            )
        if isinstance(masked, Mixed):
            mixed = masked.output
        else:
            with self._recorder.covering():
                mixed = func(*args, **kwargs)
        try:
            if not is_plain(mixed):
                self._recorder.skip(MECHANISM, not_plain(mixed))
                return mixed
            with outside_all_modes(mixed.device.type):
                call, _, remark = _sdpa_call(given, mixed, self._recorder)
                self._recorder.record(call)
                if remark is not None:
                    self._recorder.audit.remarks[Remark(self._recorder.module, remark)] += 1
                self._below.mark_output(mixed)
        except Exception as error:
            self._recorder.failed(MECHANISM, error)
        return mixed

    def _multi_head(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep watching inside: with weights it is a softmax by hand, without them a fused attention."""
        outer = self._recorder.heads
        self._recorder.heads = int(kwargs["num_heads"] if "num_heads" in kwargs else args[4])
        try:
            with self:
                return _not_overridden(func)(*args, **kwargs)
        finally:
            self._recorder.heads = outer

    def _higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = run_as_written(func, args, kwargs, OperationWatch)
        if run is None:
            return func(*args, **kwargs)
        with self:
            return run()

    def _flex(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._recorder.covering():
            output = func(*args, **kwargs)
            try:
                call = flex_call(args, kwargs, output[0]) if is_plain(args[0]) else None
            except Exception as error:
                self._recorder.failed(flex.FLEX_MECHANISM, error)
                return output
        if call is None:
            self._recorder.skip(flex.FLEX_MECHANISM, not_plain(args[0]))
        else:
            self._recorder.record(call)
            self._below.mark_output(*output[:2])
        return output


_SOFTMAX = ("softmax", "_softmax", "special_softmax")
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_SPECIAL = ("scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention")
_WATCHED = frozenset((*_SOFTMAX, *_SPECIAL, *FOLLOWED))


def _not_overridden(func: FunctionType) -> FunctionType:
    """Return a copy that asks no override, because it runs inside a mode, which sees its calls."""
    known = func.__globals__ | {"has_torch_function": lambda tensors: False}
    copy = FunctionType(func.__code__, known, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _masked(recorder: Recorder, given: dict[str, Any], replaceable: bool) -> dict[str, Any] | Mixed:
    """Return the arguments that change under the recorder's mask, or the output where it replaces the function."""
    q, k, v = (given[name] for name in _SDPA[:3])
    shared = ((*x.shape[:-3], 1) if given.get("enable_gqa") else x.shape[:-2] for x in (k, v))
    lead: torch.Size = torch.broadcast_shapes(q.shape[:-2], *shared)  # type: ignore[no-untyped-call]
    call, order, _ = _sdpa_call(given, q.expand(*lead, *q.shape[-2:]), recorder)
    mask = given.get("attn_mask")
    replaceable = replaceable and q.ndim == k.ndim == v.ndim == 4 and k.shape[:2] == v.shape[:2]
    replaceable = replaceable and q.shape[:2] == call.q.shape[:2] and k.shape[:2] == call.k.shape[:2]
    replaceable = replaceable and not (mask is not None and mask.requires_grad)
    kept = recorder.masked(call, (q, k, v) if replaceable else None)
    if kept is None or isinstance(kept, Mixed):
        return {} if kept is None else kept
    kept = kept.reshape(*(lead[d] for d in order), *kept.shape[-2:])
    kept = kept.permute(*(order.index(d) for d in range(len(order))), -2, -1)
    if mask is None or not is_plain(mask):  # a causal rule already limits the kept keys
        combined = kept
    else:
        combined = (
            kept & mask if mask.dtype == torch.bool else mask.expand(kept.shape).masked_fill(~kept, -math.inf)
        )
    return {"attn_mask": combined, "is_causal": False}


def _sdpa_call(
    given: dict[str, Any], mixed: Tensor, recorder: Recorder
) -> tuple[AttentionCall, tuple[int, ...], str | None]:
    """Return the call; the order of its axes before the queries; a remark on them, or None."""
    heads = recorder.heads
    q, k, v = (given[name].detach() for name in _SDPA[:3])
    mask, causal, first = given.get("attn_mask"), bool(given.get("is_causal")), 0
    biases = sys.modules.get("torch.nn.attention.bias")  # None unless already imported, which takes a second
    if biases is not None and isinstance(mask, biases.CausalBias):
        causal = True
        first = k.shape[-2] - q.shape[-2] if mask.variant == biases.CausalVariant.LOWER_RIGHT else 0
        mask = None
    allowed, bias, forbidding, full = (None,) * 4 if mask is None else split_mask(mask)
    mixed, scale = mixed.detach(), given.get("scale")
    order, remark = tuple(range(mixed.ndim - 2)), None
    if given.get("enable_gqa"):
        k, v = _as_many_heads(k, v)
        samples = mixed.shape[:-3] or (1,)  # the first of three axes is the heads'
        q, k, v, mixed = (x.expand(*samples, *x.shape[-3:]) for x in (q, k, v, mixed))
    else:
        q, k, v = (x.expand(*mixed.shape[:-2], *x.shape[-2:]) for x in (q, k, v))
    lead = mixed.shape[:-2]
    if len(lead) > 2 and not given.get("enable_gqa"):  # (B, H, windows, L, D) or (B, windows, H, L, D)
        order, remark = read_leading(q, k.shape[-2], recorder.shapes)

        def read(x: Tensor) -> Tensor:
            return x.permute(*order, -2, -1)

        q, k, v, mixed = map(read, (q, k, v, mixed))
        allowed, bias, full = (
            x if x is None or x.ndim <= 2 else read(x.expand(*lead, *x.shape[-2:])) for x in (allowed, bias, full)
        )
        lead = mixed.shape[:-2]
    call = AttentionCall(
        module="",
        layer=0,
        q=four_axes(q, heads),
        k=four_axes(k, heads),
        v=four_axes(v, heads),
        scale=1 / math.sqrt(max(1, q.shape[-1])) if scale is None else float(scale),
        allowed=None if allowed is None else mask_axes(allowed, lead, heads),
        queries=None,
        selected=None,
        mixed=four_axes(mixed, heads),
        bias=None if bias is None else mask_axes(bias, lead, heads),
        causal=causal,
        first_query=first,
        mechanism=MECHANISM,
        dropout=float(given.get("dropout_p") or 0.0),
        forbidding=forbidding,
    )
    full = None if full is None else mask_axes(full, lead, heads)
    return swallowing(call, full, fused=True), order, remark


def _as_many_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values (…, H, L, D), each shared by groups of heads, to a common number of heads."""
    heads = math.lcm(k.shape[-3], v.shape[-3])
    k, v = (x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3) for x in (k, v))
    return k, v


CORE_MECHANISM = "hook"
_PARTS = Encoder, Block, Affine, Attention, AttentionCore, nn.Embedding, nn.Linear, nn.ModuleList


def hooked_alone(model: nn.Module) -> bool:
    """Return whether a model is an unchanged encoder of semdiag_models, so that hooks see all its attention."""
    return type(model) is Encoder and all(
        type(part) in _PARTS
        and all(map(_own, (*part._forward_hooks.values(), *part._forward_pre_hooks.values())))
        and not any(callable(getattr(type(part), name, None)) for name in vars(part))
        for part in model.modules()
    )


def _own(hook: Callable[..., object]) -> bool:
    return getattr(hook, "__module__", "").startswith("semdiag.")


def core_call(name: str, core: AttentionCore, inputs: tuple[object, ...], mixed: Tensor) -> AttentionCall:
    """Return one call of an :class:`AttentionCore`."""
    q, k, v, scale, valid, selected = inputs
    queries = cast("Tensor | None", valid)
    allowed = None if queries is None else queries[:, None, None, :]
    if core.apart:
        length = cast(Tensor, q).shape[2]
        apart = torch.ones(1, 1, length, length, dtype=torch.bool, device=cast(Tensor, q).device)
        apart[..., 1:, 0] = False
        allowed = apart if allowed is None else allowed & apart
    return AttentionCall(
        module=name,
        layer=0,
        q=cast(Tensor, q).detach(),
        k=cast(Tensor, k).detach(),
        v=cast(Tensor, v).detach(),
        scale=cast(float, scale),
        allowed=allowed,
        queries=queries,
        selected=_ragged(core, selected, queries) if isinstance(selected, Tensor) else None,
        mixed=mixed.detach(),
        mechanism=CORE_MECHANISM,
        dropout=core.p if core.training else 0.0,
    )


def masked_inputs(
    recorder: Recorder, core: AttentionCore, inputs: tuple[object, ...]
) -> tuple[object, ...] | None:
    """Return a core's inputs with only the keys selected that the recorder's mask keeps; None if unchanged."""
    call = core_call("", core, inputs, cast(Tensor, inputs[2]))
    kept = recorder.kept(call)
    return None if kept is None else (*inputs[:5], key_positions(kept & allowed_keys(call.part())))


def key_positions(kept: Tensor) -> Tensor:
    """Return the positions of kept keys, -1 for none: (B, H, L, L) bool -> (B, H, L, K) int64."""
    first, places = kept.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
    most = int(kept.sum(-1).max())
    return places[..., :most].masked_fill(first[..., :most] == 0, -1)


def _ragged(core: AttentionCore, selected: Tensor, valid: Tensor | None) -> Tensor:
    """Fill in the rows of queries that attend to all valid keys: (B, H, L, K) -> (B, H, L, L)."""
    first, last = core.everywhere
    if first + last == 0:
        return selected
    length = selected.shape[2]
    keys = torch.arange(length, device=selected.device).expand(len(selected), -1)
    keys = keys if valid is None else keys.where(valid, -1)
    whole = F.pad(selected, (0, max(0, length - selected.shape[3])), value=-1)
    for rows in (slice(first), slice(length - last, length)):
        whole[:, :, rows, :length] = keys[:, None, None, :]
    return whole


@contextmanager
def _made_outside_modes() -> Iterator[None]:
    """Make ``causal_lower_right(…)`` and its like without modes: they are tensors without content."""
    biases = sys.modules.get("torch.nn.attention.bias")  # None unless already imported, which takes a second
    if biases is None or "__new__" in vars(biases.CausalBias):  # then torch has a constructor of its own
        yield
        return

    def made(kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes():
            return Tensor.__new__(kind, *args, **kwargs)

    def remove() -> None:
        if "__new__" in vars(biases.CausalBias):
            del biases.CausalBias.__new__

    with undone(remove):
        biases.CausalBias.__new__ = made
        yield


MADE_OUTSIDE_MODES = SharedChange(_made_outside_modes)
