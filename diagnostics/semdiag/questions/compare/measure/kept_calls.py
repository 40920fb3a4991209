"""The attention calls of one model on one batch, kept until the other model has run on it."""

from dataclasses import replace

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag_models.device import with_float64
from semdiag_models.reading import require_memory


def own_copy(call: AttentionCall) -> AttentionCall:
    """Return a copy of a call without its L × L scores, in memory of its own."""
    return replace(
        call,
        q=_copy(call.q),
        k=_copy(call.k),
        v=_copy(call.v),
        allowed=None if call.allowed is None else _narrow(call.allowed),
        queries=None if call.queries is None else _copy(call.queries),
        selected=None if call.selected is None else _copy(call.selected),
        mixed=_copy(call.mixed[..., :0]),
        bias=None if call.bias is None else _narrow(call.bias),
        sinks=None if call.sinks is None else _copy(call.sinks),
        fully_masked=None,
    )


class KeptCalls:
    """Keeps the calls of the base on a batch, in their order."""

    def __init__(self) -> None:
        self._calls: list[AttentionCall] = []
        self._masks: list[Tensor] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: AttentionCall) -> None:
        """Keep a copy of a call."""
        copy = own_copy(call)
        copy = replace(copy, allowed=self._shared(copy.allowed), bias=self._shared(copy.bias))
        self._size += sum(x.numel() * x.element_size() for x in (copy.q, copy.k, copy.v))
        masks = sum(x.numel() * x.element_size() for x in self._masks)
        require_memory(self._size + masks, "To keep a batch of the attention of the base (see --batch-size)")
        self._calls.append(copy)

    def pop(self, place: int) -> AttentionCall:
        """Return a call, and keep it no longer."""
        call, self._calls[place] = self._calls[place], None  # type: ignore[call-overload]
        return call

    def clear(self) -> None:
        """Forget the batch."""
        self._calls, self._masks, self._size = [], [], 0

    def _shared(self, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        for known in self._masks:
            if known.dtype == mask.dtype and torch.equal(known, mask):
                return known
        self._masks.append(mask)
        return mask


def _copy(values: Tensor) -> Tensor:
    return values.detach().to(with_float64(values.device)).clone(memory_format=torch.contiguous_format)


def _narrow(values: Tensor) -> Tensor:
    """Return a copy in which expanded axes (stride 0) have length 1."""
    for axis, step in enumerate(values.stride()):
        values = values.narrow(axis, 0, 1) if step == 0 else values
    return _copy(values)
