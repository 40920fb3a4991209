"""What all mechanisms share: which module is running, what is covered already, and handing calls on safely."""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.utils._python_dispatch import _disable_current_modes

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Audit, Captured, Remark, Skipped, failure
from semdiag_models import AttentionCore

_STEEP = -1000.0  # a bias below this is remarked on
_FAINT = math.log(1e-9)  # likewise one that takes a key's weight below that of the best of its row by this factor
NOTHING = "has no query or no key: there is nothing to measure"
TRANSFORMED = "runs under a torch.func transform (vmap, grad, jvp): its tensors have no values of their own"
_OPEN: ContextVar[tuple["Recorder", ...]] = ContextVar("open", default=())  # of this thread or asynchronous task


class Watched:
    """What the threads that run a watched model share.

    Attributes:
        model: that is watched.
        consume: gets the calls, one at a time.
        mask: says which keys a call keeps; None: there is none.
        modules: by name.
        audit: filled on the way.
        names: of the modules, by their id.
        parameters: addresses of the storages of the model's parameters and buffers.
        ran: names of all modules that have run.
        lock: held while something is noted or handed on.
        closed: whether the watch is over: a wrapper that someone kept does nothing.
        failure: the last exception that the consumer raised.
    """

    def __init__(
        self,
        model: nn.Module,
        consume: Callable[[AttentionCall], None],
        mask: Callable[[AttentionCall], Tensor | None] | None = None,
    ) -> None:
        named = [(name.replace("_orig_mod", "").strip("."), module) for name, module in model.named_modules()]
        self.model, self.consume, self.mask = model, consume, mask
        self.modules = dict(named)
        self.audit = Audit(modules=[name for name, module in named if isinstance(module, AttentionCore)])
        self.names = {id(module): name for name, module in named}
        own = (*model.parameters(), *model.buffers())
        self.parameters = {
            t.untyped_storage().data_ptr() for t in own if is_plain(t) and t.layout == torch.strided
        }
        self.ran: set[str] = set()
        self.lock, self.closed = threading.RLock(), False
        self.failure: BaseException | None = None


class Recorder(threading.local):
    """Attributes attention to modules and hands calls to the consumer; each thread has its own running modules.

    Args:
        watched: what its threads share.

    Attributes:
        audit: filled on the way.
        names: of the modules, by their id.
        covered: above 0 while an attention runs that is recorded further out: nothing inside it is, then.
        foreign: above 0 while modules run that are not the model's.
        generator: of rows that are checked; nobody else's.
        heads: number of heads where the surrounding function says it and the tensors do not; None otherwise.
        in_function: whether a torch function runs that was seen in Python.
        parameters: addresses of the storages of the model's parameters and buffers.
        running: names of the modules that are running, the innermost last.
        shared: whether several threads run the model's forward.
        shapes: of the first input of each of these, as far as it is a tensor.
        without_watch: modules that run without the function mode, which they could not run under.
    """

    def __init__(self, watched: Watched) -> None:  # called again in each thread
        self.audit, self.names, self.parameters = watched.audit, watched.names, watched.parameters
        self.generator = torch.Generator().manual_seed(0)
        self.foreign, self.in_function = 0, False
        self.without_watch: list[tuple[nn.Module, bool]] = []
        self._watched = watched
        self.forget()

    def forget(self) -> None:
        """Nothing runs here any more."""
        self.shared, self.covered = False, 0
        self.heads: int | None = None
        self.running: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self._calls, self._asked = Counter[str](), Counter[str]()

    @property
    def masking(self) -> bool:
        """Whether the model runs with a mask of its user's: see :meth:`kept`."""
        return self._watched.mask is not None

    @property
    def listening(self) -> bool:
        """Whether an attention that ran now would be recorded."""
        return bool(self.running) and not self.covered and not self._watched.closed

    @property
    def closed(self) -> bool:
        """Whether the watch is over."""
        return self._watched.closed

    @property
    def module(self) -> str:
        """Name of the innermost running module."""
        return self.running[-1] if self.running else ""

    def outside(self, kind: type[nn.Module]) -> str:
        """Name of the innermost running module that is not of a kind."""
        return next((n for n in reversed(self.running) if not isinstance(self._watched.modules[n], kind)), "")

    def enter(self, module: nn.Module, inputs: tuple[object, ...] = ()) -> bool:
        """Note that a module starts; returns whether it belongs to the model and to this watch."""
        name = self.names.get(id(module))
        if name is None:
            self.foreign += not self.running
            return False
        if not (self.running or self._is_meant(module)):
            return False
        self.foreign = 0
        if module is self._watched.model or not self.running:  # also cleans up after an interrupted forward
            self.forget()
        self.running.append(name)
        with torch._C.DisableTorchFunction():  # a function mode would see each property that is read
            self.shapes.append(tuple(inputs[0].shape) if inputs and is_plain(inputs[0]) else ())
        self._watched.ran.add(name)
        return True

    def _is_meant(self, module: nn.Module) -> bool:
        """Whether a call in this thread or task is for this watch, and not for one that was opened here."""
        own = [r for r in _OPEN.get() if id(module) in r.names and not r._watched.closed]
        return not own or self in own

    def leave(self, module: nn.Module) -> bool:
        """Note that a module ends; returns whether it belongs to the model and had started."""
        name = self.names.get(id(module))
        if name is None or name not in self.running:
            self.foreign = max(0, self.foreign - (name is None and not self.running))
            return False
        while self.running.pop() != name:
            self.shapes.pop()
        self.shapes.pop()
        return True

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, it records what this thread or task runs, and what those run that have no watch of their own."""
        _OPEN.set((*_OPEN.get(), self))
        try:
            yield
        finally:
            _OPEN.set(tuple(other for other in _OPEN.get() if other is not self))
            self._close()

    def _close(self) -> None:
        """Record nothing any more, a wrapper that someone kept does nothing; say what has no attention."""
        self._watched.closed = True
        ran = self._watched.ran
        found = {*self.audit.modules, *(seen.module for seen in self.audit.skipped)}
        if "" in ran and not found:
            self.audit.remarks[Remark("", "no softmax attention was seen while the model ran")] += 1
        for name, text in _bare_blocks(self._watched.model, ran, found):
            self.audit.remarks[Remark(name, text)] += 1

    def handed_on(self) -> Callable[[], bool] | None:
        """What a thread calls that is given a part of what runs here; returns whether nothing ran there before."""
        if not self.running or self.closed:
            return None
        self.shared, running, shapes = True, [*self.running], [*self.shapes]
        state = self.covered, self.heads, self._calls, self._asked

        def go_on() -> bool:
            if self.running or self.closed:
                return False
            self.shared, self.running, self.shapes = True, [*running], [*shapes]
            self.covered, self.heads, self._calls, self._asked = state
            return True

        return go_on

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
        with self._watched.lock, outside_all_modes(call.q.device.type):
            call = replace(call, module=module, layer=self.audit.layer(module), occurrence=self._calls[module])
            self._calls[module] += 1
            self.audit.captured[Captured(module, call.mechanism)] += 1
            for text in _remarks(call, self.shapes[-1] if self.shapes else ()):
                self.audit.remarks[Remark(module, text)] += 1
            try:
                self._watched.consume(call)
            except BaseException as error:
                self._watched.failure = error
                raise

    def kept(self, call: AttentionCall) -> Tensor | None:
        """The keys that the mask leaves, (B, H, Lq, Lk) bool; None: those that there are.

        Args:
            call: that is about to run; of its values and output only the shape matters.
        """
        if self._watched.mask is None or _unusable(call):  # the latter is noted once it has run
            return None
        module = call.module or self.module
        call = replace(call, module=module, layer=self.audit.layer(module), occurrence=self._asked[module])
        self._asked[module] += 1
        return self._watched.mask(call)

    def skip(self, operation: str, reason: str, module: str | None = None) -> None:
        """Note an operation that looks like attention and is not captured."""
        with self._watched.lock:
            self.audit.skipped[Skipped(self.module if module is None else module, operation, reason)] += 1

    def failed(self, operation: str, error: Exception, module: str | None = None) -> None:
        """Note that the watch itself failed, which is no reason to stop the model.

        Raises:
            Exception: the error, if it is the consumer's: what becomes of it is the consumer's affair.
        """
        if error is self._watched.failure:
            raise error
        self.skip(operation, failure(error), module)


def runs_masked(model: nn.Module) -> bool:
    """Whether this thread or task runs some of the model's modules with a mask: a copy of them would have none."""
    return any(r.masking and not r.closed and any(id(m) in r.names for m in model.modules()) for r in _OPEN.get())


@contextlib.contextmanager
def outside_all_modes(device: str) -> Iterator[None]:
    """No gradient, no autocast, no function or dispatch mode, neither ours nor another's."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast(device, enabled=False)
        if is_autocast_available(device) and torch.is_autocast_enabled(device)
        else contextlib.nullcontext(),
    ):
        yield


def _unusable(call: AttentionCall) -> str | None:
    if torch._C._current_graph_task_id() != -1:
        return "recomputed in the backward pass (checkpointing): close the context before backward"
    if torch._C._functorch.is_functorch_wrapped_tensor(call.q):
        return TRANSFORMED
    if not (call.q[..., 0].numel() and call.k.shape[2]):
        return NOTHING
    return None


def _bare_blocks(model: nn.Module, ran: set[str], found: set[str]) -> Iterator[tuple[str, str]]:
    """Lists of blocks of which some ran without attention, each with the words for it.

    A list is an ``nn.ModuleList``, and an ``nn.Sequential`` as far as its modules are of a class that has
    attention in it: others there are no blocks, but parts of one.
    """

    def attends(name: str) -> bool:
        return any(f"{module}.".startswith(f"{name}.") for module in found)

    outer: list[str] = []  # what the names of modules in a list begin with
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or name.startswith((*outer,)):
            continue
        blocks = {f"{name}.{key}".lstrip("."): type(block) for key, block in module.named_children()}
        kinds = {kind for block, kind in blocks.items() if isinstance(module, nn.ModuleList) or attends(block)}
        running = [block for block, kind in blocks.items() if kind in kinds and block in ran]
        bare = sum(not attends(block) for block in running)
        if isinstance(module, nn.ModuleList) or len(running) > 1:
            outer.append(f"{name}." if name else "")
        if 0 < bare < len(running):
            yield name, f"{bare} of {len(running)} blocks ran without softmax attention"


def is_plain(tensor: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor with values of its own: no subclass (fake, distributed), not nested, not meta."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and not tensor.is_nested  # type: ignore[attr-defined]


def not_plain(tensor: Tensor) -> str:
    """Say why a tensor of another kind is not captured."""
    if tensor.is_meta:
        return "meta tensors have no values"
    if type(tensor).__name__ == "DTensor":
        return (
            "q, k and v are of type DTensor, of which each process holds a part: watch before they are distributed"
        )
    kind = "NestedTensor" if tensor.is_nested else type(tensor).__name__
    return f"tensors of type {kind}: only plain ones are captured"


def _remarks(call: AttentionCall, given: tuple[int, ...]) -> Iterator[str]:
    if call.dropout:
        yield (
            f"dropout of {call.dropout:g} in training mode: what the layer returns is not what its formula gives, "
            "so there is no residual; model.eval() first"
        )
    _, heads, length, width = call.q.shape
    if len(given) == 3 and width == given[1] and heads * length == given[2] and call.k.shape[2] == length != width:
        yield f"its queries and keys are channels, not positions: the product runs over the {given[1]} positions"
    if call.forbidding is not None:
        yield f"a mask of {call.forbidding:.3g} instead of -inf: the keys that it is given to count as forbidden"
    if call.bias is None:
        return
    alike = call.bias == call.bias[..., :1]  # the same for all keys of a query: it changes no softmax
    bias = call.bias.masked_fill(alike.all(-1, keepdim=True), 0)
    if bool((bias <= _STEEP).any()):
        yield f"a term of down to {float(bias.min()):.3g} counts as a bias on the scores, not as a mask"
    elif bool(call.q.any()) and _masks_faintly(bias):  # without queries, the bias is the scores
        yield (
            f"a term of down to {float(bias.min()):.3g} counts as a bias on the scores: if it is meant as a "
            "mask, the keys that it is given to count as attended all the same"
        )


def _masks_faintly(bias: Tensor) -> bool:
    """Whether a bias has two sorts of terms, near the best of their row and far below, and none between."""
    below = bias - bias.amax(-1, keepdim=True)
    faint = below <= _FAINT
    return bool(faint.any()) and not bool((~faint & (below < _FAINT / 2)).any())
