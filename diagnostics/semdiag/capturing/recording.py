"""What all mechanisms share: which module is running, what is covered already, and handing calls on safely."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Audit, Captured, Remark, Skipped
from semdiag_models import AttentionCore

_STEEP = -1000.0  # a bias below this forbids a key in all but name


class Recorder:
    """Attributes attention to modules and hands calls to the consumer.

    Attributes:
        audit: filled on the way.
        covered: above 0 while an attention runs whose record is taken further out; what happens inside it is
            not recorded again.
        heads: number of heads where the surrounding function says it and the tensors do not; None otherwise.
        in_function: whether a torch function runs that was seen in Python.
        running: names of the modules that are running, the innermost last.
    """

    def __init__(self, model: nn.Module, consume: Callable[[AttentionCall], None]) -> None:
        named = [(name.replace("_orig_mod", "").strip("."), module) for name, module in model.named_modules()]
        cores = [name for name, module in named if isinstance(module, AttentionCore)]
        self.audit = Audit(modules=cores)
        self.names = {id(module): name for name, module in named}
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters() if is_plain(p)}
        self.covered = 0
        self.heads: int | None = None
        self.in_function = False
        self.running: list[str] = []
        self._model = model
        self._consume = consume
        self._calls: Counter[str] = Counter()

    @property
    def listening(self) -> bool:
        """Whether an attention that ran now would be recorded."""
        return bool(self.running) and not self.covered

    @property
    def module(self) -> str:
        """Name of the innermost running module."""
        return self.running[-1] if self.running else ""

    def enter(self, module: nn.Module) -> bool:
        """Note that a module starts; returns whether it belongs to the model."""
        name = self.names.get(id(module))
        if name is None:
            return False
        if module is self._model or not self.running:  # also cleans up after an interrupted forward
            self.running.clear()
            self._calls.clear()
            self.covered = 0
        self.running.append(name)
        return True

    def leave(self, module: nn.Module) -> bool:
        """Note that a module ends; returns whether it belongs to the model and had started."""
        name = self.names.get(id(module))
        if name is None or name not in self.running:
            return False
        while self.running.pop() != name:
            pass
        return True

    def close(self) -> None:
        """Record nothing any more: a wrapper that someone kept does nothing."""
        self.running.clear()

    @contextlib.contextmanager
    def covering(self) -> Iterator[None]:
        """Inside, nothing is recorded: the caller records the whole."""
        self.covered += 1
        try:
            yield
        finally:
            self.covered = max(0, self.covered - 1)

    def record(self, call: AttentionCall) -> None:
        """Hand a call on; its layer, occurrence and, if empty, its module are filled in here."""
        module = call.module or self.module
        reason = _unusable(call)
        if reason:
            self.skip(call.mechanism, reason, module)
            return
        call = replace(call, module=module, layer=self.audit.layer(module), occurrence=self._calls[module])
        self._calls[module] += 1
        self.audit.captured[Captured(module, call.mechanism)] += 1
        with outside_all_modes(call.q.device.type):
            if call.bias is not None and bool((call.bias <= _STEEP).any()):
                text = (
                    f"a mask adds {float(call.bias.min()):.3g} instead of -inf: it counts as a bias on the scores"
                )
                self.audit.remarks[Remark(module, text)] += 1
            self._consume(call)

    def skip(self, operation: str, reason: str, module: str | None = None) -> None:
        """Note an operation that looks like attention and is not captured."""
        self.audit.skipped[Skipped(self.module if module is None else module, operation, reason)] += 1


@contextlib.contextmanager
def outside_all_modes(device: str) -> Iterator[None]:
    """No gradient, no autocast, no function or dispatch mode, neither ours nor another's."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast(device, enabled=False),
    ):
        yield


def _unusable(call: AttentionCall) -> str | None:
    if torch._C._current_graph_task_id() != -1:
        return "recomputed in the backward pass (checkpointing): close the context before backward"
    if torch._C._functorch.is_functorch_wrapped_tensor(call.q):
        return "runs under a torch.func transform (vmap, jvp): its tensors have no values of their own"
    return None


def is_plain(tensor: object) -> bool:
    """Whether it is a tensor with values of its own: no subclass (nested, fake, distributed), not lazy."""
    return type(tensor) in (Tensor, nn.Parameter)


def split_mask(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into the keys that it allows and the bias that it adds.

    Args:
        mask: bool, true where attention is allowed; or float, added to the scores, where values at or below half
            of the dtype's lowest number forbid a key.

    Returns:
        Allowed keys, bool, or None if none is forbidden; bias, or None if it is zero.

    Example:
        >>> split_mask(torch.tensor([0.0, -torch.inf]))
        (tensor([ True, False]), None)
        >>> split_mask(torch.tensor([0.0, 2.0]))
        (None, tensor([0., 2.]))
    """
    with outside_all_modes(mask.device.type):
        mask = mask.detach()
        if not mask.is_floating_point():
            return mask.bool(), None
        forbidden = mask <= torch.finfo(mask.dtype).min / 2
        some = bool(forbidden.any())
        bias = mask.masked_fill(forbidden, 0) if some else mask
        return (~forbidden if some else None), (bias if bool(bias.any()) else None)


def four_axes(tensor: Tensor, heads: int | None = None) -> Tensor:
    """View (…, L, D) as (B, H, L, D).

    Args:
        tensor: two axes or more. With three, the first is samples times ``heads`` (one head if unknown); with
            more than four, those before the heads are samples.
        heads: number of heads, for three axes.

    Returns:
        Four axes.
    """
    if tensor.ndim == 2:
        return tensor[None, None]
    if tensor.ndim == 3:
        return tensor[:, None] if heads is None else tensor.reshape(-1, heads, *tensor.shape[1:])
    return tensor if tensor.ndim == 4 else tensor.flatten(0, -4)


def mask_axes(mask: Tensor, lead: torch.Size, heads: int | None = None) -> Tensor:
    """Bring a mask that broadcasts to (*lead, Lq, Lk) into four axes that broadcast to (B, H, Lq, Lk)."""
    if len(lead) == 2 or mask.ndim <= 2:
        return mask[(None,) * (4 - mask.ndim)]
    return four_axes(mask.expand(*lead, -1, -1), heads)
