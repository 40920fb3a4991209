"""Watching what the modules of a model select: the largest of some scores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.capturing.recording import outside_all_modes

_ATEN = torch.ops.aten
_LARGEST_LOGITS = 3  # axes: those of routers have two or three, those of attention four


@dataclass(eq=False)
class Selected:
    """One selection, as it ran."""

    scores: Tensor  # (..., n), as given to the selection; negated if it takes the smallest
    order: Tensor  # (..., n), scores in the same order: the logits of a softmax or a sigmoid that made the scores
    indices: Tensor  # (..., k)
    positions: bool = False  # whether the indices are positions in a table of other indices, which are the choices

    @property
    def by_logits(self) -> bool:
        """Return whether the order is that of logits."""
        return self.order is not self.scores


Consume = Callable[[str, nn.Module, list[Selected]], None]


@contextmanager
def watch_selections(model: nn.Module, consume: Consume) -> Iterator[None]:
    """Call ``consume`` with a module's name, the module and its selections, in order, after each of its forwards."""
    names = {module: name for name, module in model.named_modules()}
    watch = _Watch()

    def before(module: nn.Module, inputs: object) -> None:
        if module in names:
            watch.frames.append([])

    def after(module: nn.Module, inputs: object, output: object) -> None:
        if module in names and watch.frames:
            selected = watch.frames.pop()
            watch.forget()
            if selected:
                with outside_all_modes(selected[0].scores.device.type):
                    consume(names[module], module, selected)

    started = register_module_forward_pre_hook(before)
    ended = register_module_forward_hook(after, always_call=True)
    try:
        with watch:
            yield
    finally:
        started.remove()
        ended.remove()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.frames: list[list[Selected]] = []
        self._logits: tuple[Tensor, Tensor] | None = None  # the last softmax or sigmoid: its result and its input
        self._sorted: tuple[Tensor, Tensor] | None = None  # the last sorting: its indices, and scores

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; note it if it may be part of a selection."""
        result = func(*args, **(kwargs or {}))
        handle = _HANDLERS.get(func)
        if handle is not None and self.frames:
            handle(self, result, *args, **(kwargs or {}))
        return result

    def forget(self) -> None:
        """Release the tensors of the module that has ended."""
        self._logits = self._sorted = None

    def _add(self, scores: Tensor, indices: Tensor, largest: bool) -> None:
        if not scores.is_floating_point() or not indices.numel():
            return
        kept = (scores if largest else -scores).detach().clone()  # the model may change them in place
        known = self._logits is not None and self._logits[0] is scores and largest
        order = self._logits[1].detach().clone() if known and self._logits is not None else kept
        self.frames[-1].append(Selected(kept, order, indices))

    def topk(
        self, result: Any, scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> None:
        if _last(scores, dim):
            self._add(scores, result[1], largest)

    def argmax(self, result: Tensor, scores: Tensor, dim: int | None = None, keepdim: bool = False) -> None:
        if dim is not None and _last(scores, dim):
            self._add(scores, result if keepdim else result[..., None], True)

    def sort(
        self, result: Any, scores: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None
    ) -> None:
        if _last(scores, dim) and scores.is_floating_point():
            self._sorted = result[1], scores if descending else -scores

    def sliced(
        self,
        result: Tensor,
        of: Tensor,
        dim: int = 0,
        start: int | None = None,
        end: int | None = None,
        step: int = 1,
    ) -> None:
        if self._sorted is None or of is not self._sorted[0] or not _last(of, dim) or step != 1:
            return
        begin, stop, _ = slice(start, end).indices(of.shape[-1])
        if begin == 0:
            self._add(self._sorted[1], result, True)
        elif stop == of.shape[-1]:
            self._add(self._sorted[1], result, False)

    def gather(self, result: Tensor, table: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> None:
        if not table.is_floating_point():
            for selected in self.frames[-1]:
                selected.positions |= selected.indices is index

    def softmax(self, result: Tensor, logits: Tensor, dim: int, half_to_float: bool = False) -> None:
        if _last(logits, dim) and logits.ndim <= _LARGEST_LOGITS:
            self._logits = result, logits

    def sigmoid(self, result: Tensor, logits: Tensor) -> None:
        if logits.ndim <= _LARGEST_LOGITS:
            self._logits = result, logits


def _last(scores: Tensor, dim: int) -> bool:
    """Return whether a dimension is the last one."""
    return scores.ndim > 0 and dim % scores.ndim == scores.ndim - 1


_HANDLERS: dict[Any, Callable[..., None]] = {
    _ATEN.topk.default: _Watch.topk,
    _ATEN.argmax.default: _Watch.argmax,
    _ATEN.sort.default: _Watch.sort,
    _ATEN.sort.stable: _Watch.sort,
    _ATEN.slice.Tensor: _Watch.sliced,
    _ATEN.gather.default: _Watch.gather,
    _ATEN._softmax.default: _Watch.softmax,
    _ATEN.sigmoid.default: _Watch.sigmoid,
}
