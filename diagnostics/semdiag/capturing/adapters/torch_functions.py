"""Capture torch's attention functions, and hand-written attention, at the level of Python functions."""

import math
import sys
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, _higher_order_ops
from torch.overrides import TorchFunctionMode

from semdiag.capturing.adapters import flex
from semdiag.capturing.adapters.flex import flex_call
from semdiag.capturing.attention_call import AttentionCall, four_axes, mask_axes
from semdiag.capturing.audit import Remark
from semdiag.capturing.fully_masked import swallowing
from semdiag.capturing.overlapping import take_off
from semdiag.capturing.provenance.axis_roles import read_leading
from semdiag.capturing.provenance.higher_order import register_mode, run_as_written
from semdiag.capturing.provenance.operations import OperationWatch
from semdiag.capturing.provenance.softmax_provenance import FOLLOWED, SoftmaxProvenance
from semdiag.capturing.recording import Recorder, is_plain, not_plain, outside_all_modes
from semdiag.capturing.score_masks import split_mask

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

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function, and record it if it is attention."""
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
        if self._recorder.masking and all(is_plain(given[name]) for name in _SDPA[:3]):
            given |= _masked(self._recorder, given)
            args, kwargs = (
                tuple(given[name] for name in _SDPA[:3]),
                {n: x for n, x in given.items() if n not in _SDPA[:3]},
            )
        with self._recorder.covering():
            mixed: Tensor = func(*args, **kwargs)
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
                self._recorder.failed(flex.MECHANISM, error)
                return output
        if call is None:
            self._recorder.skip(flex.MECHANISM, not_plain(args[0]))
        else:
            self._recorder.record(call)
            self._below.mark_output(*output[:2])
        return output


_SOFTMAX = ("softmax", "_softmax", "special_softmax")
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_SPECIAL = ("scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention")
_WATCHED = frozenset((*_SOFTMAX, *_SPECIAL, *FOLLOWED))


def _not_overridden(func: FunctionType) -> FunctionType:
    """Return a copy that leaves itself to no override: it runs inside a mode, which sees what it calls."""
    known = func.__globals__ | {"has_torch_function": lambda tensors: False}
    copy = FunctionType(func.__code__, known, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _masked(recorder: Recorder, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that change under the recorder's mask."""
    q, k, v = (given[name] for name in _SDPA[:3])
    shared = ((*x.shape[:-3], 1) if given.get("enable_gqa") else x.shape[:-2] for x in (k, v))
    lead: torch.Size = torch.broadcast_shapes(q.shape[:-2], *shared)  # type: ignore[no-untyped-call]
    call, order, _ = _sdpa_call(given, q.expand(*lead, *q.shape[-2:]), recorder)
    kept = recorder.kept(call)
    if kept is None:
        return {}
    kept, mask = kept.reshape(*(lead[d] for d in order), *kept.shape[-2:]), given.get("attn_mask")
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
    """Return the call; the order in which it has the axes before the queries; a remark on them, or None."""
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
        samples = mixed.shape[:-3] or (1,)  # of three axes the first is that of the heads
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
