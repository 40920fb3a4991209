"""What all mechanisms share: running modules and recorded calls."""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.autograd import forward_ad
from torch.utils import _python_dispatch as dispatch

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import NUMBERS_DIFFER, Audit, Captured, Remark, Skipped, bare_blocks, failure, remarks
from semdiag.capturing.patches import undone
from semdiag_models import AttentionCore

NOTHING = "has no query or no key: there is nothing to measure"
TRANSFORMED = "runs under a torch.func transform (vmap, grad, jvp): its tensors have no values of their own"
Inputs = tuple[Tensor, Tensor, Tensor]  # queries, keys and values with their gradients


class MaskedOutput(NamedTuple):
    """What queries gather from the keys that a mask keeps, in place of a fused function's output."""

    output: Tensor  # (B, H, Lq, Dv)
    number: Tensor  # numbers of kept keys, int32, broadcastable to (B, H, Lq)
    close: Tensor | None = None  # number of rows whose choice rounding could change; None: it could not


# From a call that is about to run, and its inputs if its function may be replaced, to its kept keys, bool
# (B, H, Lq, Lk), or to the output with these keys; None: all keys.
Mask = Callable[[AttentionCall, Inputs | None], Tensor | MaskedOutput | None]
Consume = Callable[[AttentionCall], None]
_OPEN: ContextVar[tuple["Recorder", ...]] = ContextVar("open", default=())  # of this thread or async task


class Watched:
    """State of a watch that all threads share."""

    def __init__(self, model: nn.Module, consume: Consume, mask: Mask | None = None, traces: bool = True) -> None:
        self.traces = traces  # whether operations are traced by modes
        named = [(name.replace("_orig_mod", "").strip("."), module) for name, module in model.named_modules()]
        self.model = model
        self.consume = consume
        self.mask = mask
        self.modules = dict(named)
        self.audit = Audit(modules=[name for name, module in named if isinstance(module, AttentionCore)])
        self.names = {id(module): name for name, module in named}
        self.parameters: set[int] = set()  # addresses, of buffers too
        self.trained: set[int] = set()  # addresses of parameters alone
        parts = model.modules() if traces else ()
        self._held = [value for module in parts for value in vars(module).values() if is_plain(value)]
        self.constants: dict[int, Any] = {}  # storages of tensors that are no parameters, by their addresses
        self.find_parameters()
        self.ran: set[str] = set()
        self.numbers: dict[str, int] = {}
        self.lock = threading.RLock()
        self.closed = False
        self.failure: BaseException | None = None

    def find_parameters(self, inputs: tuple[object, ...] = ()) -> None:
        """Note where parameters and constants are now: buffers, tensors of modules, a square input (edges)."""
        if not self.traces:
            return
        trained = {storage.data_ptr() for storage in storages(self.model.parameters())}
        buffers = {storage.data_ptr() for storage in storages(self.model.buffers())}
        for addresses, now in ((self.trained, trained), (self.parameters, trained | buffers)):
            addresses &= now  # other threads read these sets
            addresses |= now
        squares = [x for x in inputs if len(shape := shape_of(x)) > 1 and shape[-1] == shape[-2]]
        edges = squares if len(squares) == 1 else []
        held = storages((*self.model.buffers(), *self._held, *edges))
        constants = {storage.data_ptr(): storage for storage in held}
        self.constants.update((key, constants[key]) for key in constants.keys() - trained)
        for key in self.constants.keys() - constants.keys():
            del self.constants[key]


class Recorder(threading.local):
    """Attributes attention to modules and passes calls to the consumer; running modules are kept per thread."""

    def __init__(self, watched: Watched) -> None:  # runs again in each thread
        self.audit = watched.audit
        self.names = watched.names
        self.constants = watched.constants
        self.parameters = watched.parameters
        self.trained = watched.trained
        self.generator = torch.Generator().manual_seed(0)
        self.vectorized = False  # whether the torch function that runs is under torch.func.vmap
        self.foreign = 0
        self.in_function = False
        self.without_watch: list[tuple[nn.Module, bool]] = []
        self.watched = watched
        self.masking = watched.mask is not None  # whether the user put a mask on the model
        self.forget()

    def forget(self) -> None:
        """Forget what is running in this thread."""
        self.shared = False
        self.covered = 0
        self.heads: int | None = None
        self.running: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self._calls = Counter[str]()
        self._mask_calls = Counter[str]()

    @property
    def listening(self) -> bool:
        """Whether attention that runs now is recorded."""
        return bool(self.running) and not self.covered and not self.watched.closed

    @property
    def module(self) -> str:
        """Name of the innermost running module."""
        return self.running[-1] if self.running else ""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in a parameter that the innermost module got for its run (sharding)."""
        module = self.watched.modules.get(self.module) if self.running else None
        tensors = () if module is None else module._parameters.values()
        gathered = {storage.data_ptr() for storage in storages(tensors)} - self.parameters
        return any(storage.data_ptr() in gathered for storage in storages((tensor,)))

    def outside(self, kind: type[nn.Module]) -> str:
        """Return the name of the innermost running module that is not of this kind."""
        return next((n for n in reversed(self.running) if not isinstance(self.watched.modules[n], kind)), "")

    def enter(self, module: nn.Module, inputs: tuple[object, ...] = ()) -> bool:
        """Note the start of a module; return whether it belongs to the model and this watch."""
        name = self.names.get(id(module))
        if name is None:
            self.foreign += not self.running
            return False
        here = [] if self.running else [r for r in _OPEN.get() if id(module) in r.names and not r.watched.closed]
        if here and self not in here:  # the call is for another watch, opened here
            return False
        self.foreign = 0
        if module is self.watched.model or not self.running:  # also resets after an interrupted forward pass
            self.forget()
        self.running.append(name)
        with torch._C.DisableTorchFunction():  # a function mode would see every property access
            self.shapes.append(shape_of(inputs[0]) if inputs else ())
            if module is self.watched.model:
                self.watched.find_parameters(inputs)
        self.watched.ran.add(name)
        return True

    def find_edges(self, module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        """Note a graph's edges among the arguments of the model, by name too."""
        with torch._C.DisableTorchFunction():
            self.watched.find_parameters((*inputs, *named.values()))

    def leave(self, module: nn.Module) -> bool:
        """Note the end of a module; return whether it belongs to the model and had started."""
        name = self.names.get(id(module))
        if name is None or name not in self.running:
            self.foreign = max(0, self.foreign - (name is None and not self.running))
            return False
        while self.running.pop() != name:
            self.shapes.pop()
        self.shapes.pop()
        if not self.running:
            with self.watched.lock:
                for called, number in self._calls.items():
                    if self.watched.numbers.setdefault(called, number) != number:
                        self.remark(NUMBERS_DIFFER, called)
        return True

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Record what this thread or task runs in the context, and what threads without their own watch run."""
        with undone(self._close):
            _OPEN.set((*(recorder for recorder in _OPEN.get() if not recorder.watched.closed), self))
            yield

    def _close(self) -> None:
        """Stop recording, also in wrappers that outlive the watch; note which blocks had no attention."""
        _OPEN.set(tuple(recorder for recorder in _OPEN.get() if recorder is not self))
        if self.watched.closed:
            return
        self.watched.closed = True
        ran = self.watched.ran
        attentions = {*self.audit.modules, *(skipped.module for skipped in self.audit.skipped)}
        if "" in ran and not attentions:
            self.remark("no softmax attention was seen while the model ran", "")
        for name, text in bare_blocks(self.watched.model, ran, attentions):
            self.remark(text, name)

    def handed_on(self) -> Callable[[], bool] | None:
        """Return a function with which another thread takes over the running modules; None if nothing runs."""
        if not self.running or self.watched.closed:
            return None
        self.shared = True
        running = [*self.running]
        shapes = [*self.shapes]
        state = {name: getattr(self, name) for name in ("shared", "covered", "heads", "_calls", "_mask_calls")}

        def go_on() -> bool:
            if self.running or self.watched.closed:
                return False
            vars(self).update(state, running=[*running], shapes=[*shapes])
            return True

        return go_on

    @contextmanager
    def covering(self) -> Iterator[None]:
        """Record nothing in the context: the caller records the whole."""
        self.covered += 1
        try:
            yield
        finally:
            self.covered = max(0, self.covered - 1)

    def record(self, call: AttentionCall) -> None:
        """Pass a call to the consumer, with its layer, its occurrence and, if empty, its module."""
        module = call.module or self.module
        if reason := _unusable(call):
            self.skip(call.mechanism, reason, module)
            return
        with self.watched.lock, outside_all_modes(call.q.device.type):
            call = self._placed(call, module, self._calls)
            self.audit.captured[Captured(module, call.mechanism)] += 1
            first = module not in self.watched.numbers and not call.occurrence
            parts = self.watched.modules.get(module, self.watched.model).modules() if call.dropout else ()
            training = any(part.training for part in parts)
            self.audit.remarks.update(remarks(call, self.shapes, first, training))
            try:
                self.watched.consume(call)
            except BaseException as error:
                self.watched.failure = error
                raise

    def kept(self, call: AttentionCall) -> Tensor | None:
        """Return the keys that the mask keeps, (B, H, Lq, Lk) bool; None means all."""
        kept_keys = self.masked(call, None)
        assert not isinstance(kept_keys, MaskedOutput)
        return kept_keys

    def masked(self, call: AttentionCall, inputs: Inputs | None) -> Tensor | MaskedOutput | None:
        """Return the keys that the mask keeps, or the output with them where the function may be replaced."""
        if self.watched.mask is None or _unusable(call):  # unusable calls are noted after they have run
            return None
        module = call.module or self.module
        return self.watched.mask(self._placed(call, module, self._mask_calls), inputs)

    def _placed(self, call: AttentionCall, module: str, calls: Counter[str]) -> AttentionCall:
        """Return a call with its place, and count it; keys of width 0 become zeros of width 1."""
        layer = self.audit.layer(module)
        occurrence = calls[module]
        calls[module] += 1
        q, k = (x if x.shape[3] else x.new_zeros(()).expand(*x.shape[:3], 1) for x in (call.q, call.k))
        return replace(call, q=q, k=k, module=module, layer=layer, occurrence=occurrence)

    def remark(self, text: str, module: str | None = None) -> None:
        """Note what readers should know of a module, by default the running one."""
        self.audit.remarks[Remark(self.module if module is None else module, text)] += 1

    def skip(self, operation: str, reason: str, module: str | None = None) -> None:
        """Note an operation that looks like attention and is not captured."""
        with self.watched.lock:
            self.audit.skipped[Skipped(self.module if module is None else module, operation, reason)] += 1

    def forgives(self, error: Exception, operation: str) -> bool:
        """Note a failure of the watch itself; return whether the model may go on, as it may without a mask."""
        if self.masking or error is self.watched.failure:
            return False
        with suppress(Exception):
            self.skip(operation, failure(error))
        return True

    @contextmanager
    def guarded(self, operation: str, module: str | None = None) -> Iterator[None]:
        """Note a failure of the watch itself in the context, which is no reason to stop the model."""
        try:
            yield
        except Exception as error:
            if error is self.watched.failure:
                raise
            self.skip(operation, failure(error), module)


class Once:
    """A function that runs at most once, whatever fails around it."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.begun = self.ended = False
        self.result: Any = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run another form of the function in its place."""
        self.begun = True
        self.result = function(*args, **kwargs)
        self.ended = True
        return self.result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        return self.run(self.function, *args, **kwargs)


def runs_masked(model: nn.Module) -> bool:
    """Return whether this thread or task runs the model's modules with a mask, which copies would lack."""
    masking = (r for r in _OPEN.get() if r.masking and not r.watched.closed)
    return any(id(module) in r.names for r in masking for module in model.modules())


@contextmanager
def outside_all_modes(device: str) -> Iterator[None]:
    """Run, in the context, without gradient, autocast, and anyone's function or dispatch modes."""
    cast = is_autocast_available(device) and torch.is_autocast_enabled(device)
    plain = torch.autocast(device, enabled=False) if cast else contextlib.nullcontext()
    with torch._C.DisableTorchFunction(), dispatch._disable_current_modes(), torch.no_grad(), plain:
        yield


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_transform(tensor: Tensor) -> bool:
    """Return whether a tensor belongs to a torch.func transform and has no values of its own."""
    wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)  # without it a probe remarks
    return wrapped is not None and bool(wrapped(tensor))


def in_vmap() -> bool:
    """Return whether a torch.func.vmap runs, which hides an axis of all that is batched."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def untransformed(tensor: Tensor) -> Tensor:
    """Return the tensor that holds the values of one under torch.func transforms, those of a whole batch."""
    while in_transform(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def has_tangent(tensor: object) -> bool:
    """Return whether forward-mode differentiation follows a tensor."""
    with torch._C.DisableTorchFunction(), dispatch._disable_current_modes():
        return isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def storages(values: Iterable[object]) -> list[torch.UntypedStorage]:
    """Return the storages of the dense tensors among values that are plain, apart from transforms."""
    plain = [untransformed(x) for x in values if isinstance(x, Tensor)]
    return [x.untyped_storage() for x in plain if is_plain(x) and x.layout == torch.strided]


def shape_of(value: object) -> tuple[int, ...]:
    """Return the shape of a plain tensor, or of one under transforms as the model sees it; else ()."""
    if is_plain(value) or (isinstance(value, Tensor) and in_transform(value)):
        return tuple(value.shape)
    return ()


def _unusable(call: AttentionCall) -> str | None:
    if in_backward():
        return "recomputed in the backward pass (checkpointing): close the context before backward"
    if in_transform(call.q):
        return TRANSFORMED
    return None if math.prod(call.q.shape[:3]) and call.k.shape[2] else NOTHING


def is_plain(tensor: object) -> TypeGuard[Tensor]:
    """Return whether a tensor has values of its own: no subclass (fake), nested, meta or transformed one."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, nn.Parameter):
        return False
    return not (tensor.is_meta or tensor.is_nested or in_transform(tensor))


def not_plain(tensor: Tensor) -> str:
    """Return why a tensor that is not plain is not captured."""
    if in_transform(tensor):
        return TRANSFORMED
    if tensor.is_meta:
        return "meta tensors have no values"
    if type(tensor).__name__ == "DTensor":
        return (
            "q, k and v are DTensors, of which each process holds a part: watch the model before distributing it"
        )
    kind = "NestedTensor" if tensor.is_nested else type(tensor).__name__
    return f"tensors of type {kind}: only plain ones are captured"
