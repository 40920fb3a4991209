"""Capture torch's attention functions, and hand-written attention, at the level of Python functions."""

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from semdiag.capturing import patches, recording
from semdiag.capturing.adapters.fused import FLEX_MECHANISM, SDPA, flex_call, sdpa_call
from semdiag.capturing.attention_call import Args, AttentionCall, Kwargs, call_from_tensors
from semdiag.capturing.call_strips import allowed_mask
from semdiag.capturing.provenance.operations import OperationWatch, register_mode, run_as_written
from semdiag.capturing.provenance.softmaxes import FOLLOWED, SoftmaxProvenance
from semdiag_models import AttentionCore, Encoder
from semdiag_models.model import Attention, Block

MECHANISM = "scaled_dot_product_attention"


class FunctionWatch(TorchFunctionMode):
    """Sees every call of a torch function, even through names imported earlier."""

    def __init__(self, recorder: recording.Recorder, below: OperationWatch) -> None:
        super().__init__()
        self.recorder = recorder
        self._below = below
        self._provenance = SoftmaxProvenance(below.tags.writes, below.tags.scores)

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "").partition(".")[0]  # operators of exported graphs: name.overload
        higher_order = isinstance(func, HigherOrderOperator)
        with self.recorder.guarded(name):
            self.recorder.vectorized = recording.in_vmap()
        if name not in _WATCHED and not higher_order:
            return func(*args, **kwargs)
        once = recording.Once(func)
        try:
            return self._watched(once, name, higher_order, args, kwargs)
        except Exception as error:
            if once.begun is not once.ended or not self.recorder.forgives(error, name):
                raise
        return once.result if once.ended else func(*args, **kwargs)

    def _watched(self, func: recording.Once, name: str, higher_order: bool, args: Args, kwargs: Kwargs) -> Any:
        if higher_order:
            register_mode(func.function, OperationWatch)
        if self.recorder.in_function or not self.recorder.listening:
            return func(*args, **kwargs)
        if name in _SPECIAL:
            return getattr(self, f"_{name}")(func, args, kwargs)
        if higher_order:
            run = run_as_written(func.function, args, kwargs, OperationWatch)
            if run is None:
                return func(*args, **kwargs)
            with self:
                return func.run(run)
        if name in _SOFTMAX:
            masked = False
            if self.recorder.masking:
                args, kwargs, masked = self._provenance.masked(self.recorder, args, kwargs)
            offered = self._provenance.history(args[0] if args else kwargs["input"])
            self._below.softmaxes.offered = offered
            self._below.softmaxes.masked = masked
        self._provenance.before(args, kwargs)
        self.recorder.in_function = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.recorder.in_function = False
            self._below.softmaxes.offered = None
            self._below.softmaxes.masked = False
        if name not in _SOFTMAX:
            with self.recorder.guarded(name):
                self._provenance.follow(name, args, kwargs, result)
        return result

    def __exit__(self, *exception: Any) -> None:
        """Leave, and forget all tags."""
        self._provenance.close()
        patches.take_off(self)

    def _scaled_dot_product_attention(self, func: recording.Once, args: Args, kwargs: Kwargs) -> Any:
        arguments = dict(zip(SDPA, args, strict=False)) | kwargs
        mixed: Tensor | None = None
        if self.recorder.masking and all(recording.is_plain(arguments[name]) for name in SDPA[:3]):
            changes, mixed = _masked(self.recorder, arguments, watched=self._is_watched())
            arguments |= changes
            args = tuple(arguments[name] for name in SDPA[:3])
            kwargs = {name: value for name, value in arguments.items() if name not in SDPA[:3]}
        if mixed is None:
            with self.recorder.covering():
                mixed = func(*args, **kwargs)
        if not recording.is_plain(mixed):
            self.recorder.skip(MECHANISM, recording.not_plain(mixed))
            return mixed
        with self.recorder.guarded(MECHANISM), recording.outside_all_modes(mixed.device.type):
            call, _, remark = sdpa_call(arguments, mixed, self.recorder.heads, self.recorder.shapes)
            self.recorder.record(call)
            if remark is not None:
                self.recorder.remark(remark)
            self._below.merged.mark_output(mixed)
        return mixed

    def _is_watched(self) -> bool:
        """Return whether another watch sees this thread's operations."""
        modes = (mode for mode in patches.modes_here() if mode not in (self, self._below))
        return any(isinstance(mode, FunctionWatch | OperationWatch) for mode in modes)

    def _multi_head_attention_forward(self, func: recording.Once, args: Args, kwargs: Kwargs) -> Any:
        """Keep watching inside: with weights it is a softmax by hand, without them a fused attention."""
        outer = self.recorder.heads
        self.recorder.heads = int(kwargs["num_heads"] if "num_heads" in kwargs else args[4])
        try:
            with self:
                return func.run(_not_overridden(func.function), *args, **kwargs)
        finally:
            self.recorder.heads = outer

    def _flex_attention(self, func: recording.Once, args: Args, kwargs: Kwargs) -> Any:
        with self.recorder.covering():
            output = func(*args, **kwargs)
        if not recording.is_plain(args[0]):
            self.recorder.skip(FLEX_MECHANISM, recording.not_plain(args[0]))
            return output
        with self.recorder.guarded(FLEX_MECHANISM):
            with self.recorder.covering():
                call = flex_call(args, kwargs, output[0])
            self.recorder.record(call)
            self._below.merged.mark_output(*output[:2])
        return output


_SOFTMAX = ("softmax", "_softmax", "special_softmax")
_SPECIAL = ("scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention")
_WATCHED = frozenset((*_SOFTMAX, *_SPECIAL, *FOLLOWED))


def _not_overridden(func: FunctionType) -> FunctionType:
    """Return a copy that asks no override, because it runs inside a mode, which sees its calls."""
    variables = func.__globals__ | {"has_torch_function": lambda tensors: False}
    copy = FunctionType(func.__code__, variables, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _masked(
    recorder: recording.Recorder, arguments: dict[str, Any], watched: bool
) -> tuple[dict[str, Any], Tensor | None]:
    """Return the arguments that change under the recorder's mask, and the output if it replaces the function."""
    q, k, v = (arguments[name] for name in SDPA[:3])
    shared = ((*x.shape[:-3], 1) if arguments.get("enable_gqa") else x.shape[:-2] for x in (k, v))
    lead: torch.Size = torch.broadcast_shapes(q.shape[:-2], *shared)  # type: ignore[no-untyped-call]
    call, order, _ = sdpa_call(arguments, q.expand(*lead, *q.shape[-2:]), recorder.heads, recorder.shapes)
    mask = arguments.get("attn_mask")
    replaceable = not watched and _is_replaceable((q, k, v), mask, call)
    kept_keys = recorder.masked(call, (q, k, v) if replaceable else None)
    if kept_keys is None:
        return {}, None
    if isinstance(kept_keys, recording.MaskedOutput):
        return {}, kept_keys.output
    kept_keys = kept_keys.reshape(*(lead[d] for d in order), *kept_keys.shape[-2:])
    kept_keys = kept_keys.permute(*(order.index(d) for d in range(len(order))), -2, -1)
    if not recording.is_plain(mask):  # a causal rule already limits the kept keys
        combined = kept_keys
    elif mask.dtype == torch.bool:
        combined = kept_keys & mask
    else:
        combined = mask.expand(kept_keys.shape).masked_fill(~kept_keys, -math.inf)
    return {"attn_mask": combined, "is_causal": False}, None


def _is_replaceable(inputs: recording.Inputs, mask: Tensor | None, call: AttentionCall) -> bool:
    """Return whether an output may replace a call's: its inputs have the call's axes, and no other gradient."""
    q, k, v = inputs
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape[:2] == v.shape[:2]):
        return False
    if q.shape[:2] != call.q.shape[:2] or k.shape[:2] != call.k.shape[:2]:
        return False
    if mask is not None and mask.requires_grad:
        return False
    return not any(map(recording.has_tangent, (q, k, v, mask)))


CORE_MECHANISM = "hook"
_PARTS = Encoder, Block, Attention, AttentionCore, nn.Embedding, nn.Linear, nn.ModuleList


def hooked_alone(model: nn.Module) -> bool:
    """Return whether a model is an unchanged encoder of semdiag_models, so that hooks see all its attention."""
    return type(model) is Encoder and all(
        type(part) in _PARTS
        and all(
            getattr(hook, "__module__", "").startswith("semdiag.")
            for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        )
        and not any(callable(getattr(type(part), name, None)) for name in vars(part))
        for part in model.modules()
    )


def core_call(name: str, core: AttentionCore, inputs: Args, mixed: Tensor) -> AttentionCall:
    """Return one call of an :class:`AttentionCore`."""
    q, k, v, scale, queries, selected = inputs
    allowed = None if queries is None else queries[:, None, None, :]
    if core.cls_hidden:
        without_cls = torch.ones(1, 1, q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
        without_cls[..., 1:, 0] = False
        allowed = without_cls if allowed is None else allowed & without_cls
    return call_from_tensors(
        q, k, v, mixed, scale=scale, module=name, allowed=allowed, queries=queries, mechanism=CORE_MECHANISM,
        dropout=core.p if core.training else 0.0,
        selected=_ragged(core, selected, queries) if isinstance(selected, Tensor) else None,
    )  # fmt: skip


def masked_inputs(recorder: recording.Recorder, core: AttentionCore, inputs: Args) -> Args | None:
    """Return a core's inputs with only the keys selected that the recorder's mask keeps; None if unchanged."""
    call = core_call("", core, inputs, inputs[2])
    kept_keys = recorder.kept(call)
    if kept_keys is None:
        return None
    kept_keys = kept_keys & allowed_mask(call.part())
    first, places = kept_keys.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
    most = int(kept_keys.sum(-1).max())
    return *inputs[:5], places[..., :most].masked_fill(first[..., :most] == 0, -1)


def _ragged(core: AttentionCore, selected: Tensor, valid: Tensor | None) -> Tensor:
    """Fill in the rows of queries that attend to all valid keys: (B, H, L, K) -> (B, H, L, L)."""
    first, last = core.everywhere
    if first + last == 0:
        return selected
    length = selected.shape[2]
    keys = torch.arange(length, device=selected.device).expand(len(selected), -1)
    keys = keys if valid is None else keys.where(valid, -1)
    filled = F.pad(selected, (0, max(0, length - selected.shape[3])), value=-1)
    for rows in (slice(first), slice(length - last, length)):
        filled[:, :, rows, :length] = keys[:, None, None, :]
    return filled


def _made(new: Callable[..., Tensor], kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with _disable_current_modes():
        return new(kind, *args, **kwargs)


def _made_outside_modes() -> AbstractContextManager[None]:
    """Make ``causal_lower_right(…)`` and its like without modes: they are tensors without content."""
    biases = sys.modules.get("torch.nn.attention.bias")  # None unless already imported, which takes a second
    if biases is None or "__new__" in vars(biases.CausalBias):  # then torch has a constructor of its own
        return nullcontext()
    return patches.replaced(biases.CausalBias, "__new__", _made)


MADE_OUTSIDE_MODES = patches.SharedChange(_made_outside_modes)
