"""Functions, modes and threads that a watch changes, and that are as before when it ends, whatever happens."""

import _thread
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from multiprocessing.pool import ThreadPool
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch as dispatch


@contextmanager
def undone(*undo: Callable[[], object]) -> Iterator[ExitStack]:
    """Yield a stack; afterwards close it and call the functions, again in case an interrupt cut that short."""
    stack = ExitStack()
    for step in reversed(undo):
        stack.callback(step)
    try:
        try:
            yield stack
        finally:
            stack.close()
    finally:
        stack.close()
        for step in undo:
            step()


class SharedChange:
    """A change of the process's state that watches share: the first one makes it, the last one undoes it."""

    def __init__(self, change: Callable[[], AbstractContextManager[object]]) -> None:
        self._change = change
        self._lock = threading.RLock()
        self._holders: set[object] = set()
        self._made: ExitStack | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the change inside the context."""
        holder = object()
        with undone(partial(self._let_go, holder)):
            with self._lock:
                self._holders.add(holder)
                if self._made is None:
                    self._made = ExitStack()
                    self._made.enter_context(self._change())
            yield

    def _let_go(self, holder: object) -> None:
        """Undo the change if nobody else holds it; a second call does what the first one left."""
        try:
            with self._lock:
                self._holders.discard(holder)
                if not self._holders and self._made is not None:
                    self._made.close()
                    self._made = None
        finally:
            while self._lock._is_owned():  # type: ignore[attr-defined]  # interrupted before it was released
                self._lock.release()


@contextmanager
def replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Replace a function, in the context, by one that gets the original before its arguments."""
    is_defined_there = name in vars(owner)  # else it is inherited
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    def put_back() -> None:
        if vars(owner).get(name) is replacement:  # else someone replaced it later, and calls ours
            setattr(owner, name, original) if is_defined_there else delattr(owner, name)

    with undone(put_back):
        setattr(owner, name, replacement)
        yield


def _kind(mode: object) -> Any:
    return TorchFunctionMode if isinstance(mode, TorchFunctionMode) else dispatch.TorchDispatchMode


def modes_here() -> list[Any]:
    """Return the function and dispatch modes of this thread, each from the lowest on."""
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [*functions, *dispatch._get_current_dispatch_mode_stack()]


def put_on(mode: object) -> None:
    """Put a removed mode back onto this thread's stack."""
    _kind(mode).__enter__(mode)


def take_off(mode: object) -> bool:
    """Remove a mode from this thread's stack, wherever it is; the others keep their order."""
    return put_below(mode, None)


def put_below(mode: object, condition: Callable[[object], bool] | None) -> bool:
    """Move a mode below those that meet a condition, to see what they call; None removes the mode.

    Return whether it was in the stack.
    """
    stack = [entry for entry in modes_here() if _kind(entry) is _kind(mode)]
    if mode not in stack:
        return False
    rest = [entry for entry in stack if entry is not mode]
    if condition is not None:
        place = stack.index(mode)
        rest.insert(next((i for i, entry in enumerate(stack[:place]) if condition(entry)), place), mode)
    with undone(partial(_restack, _kind(mode), rest)):
        return True


def _restack(kind: Any, stack: list[Any]) -> None:
    """Make these the modes of a kind, from the lowest on."""
    now = [mode for mode in modes_here() if _kind(mode) is kind]
    alike = len([*takewhile(lambda pair: pair[0] is pair[1], zip(now, stack, strict=False))])
    for mode in reversed(now[alike:]):
        kind.__exit__(mode, None, None, None)
    for mode in stack[alike:]:
        kind.__enter__(mode)


@contextmanager
def without_modes() -> Iterator[None]:
    """Run, inside, without the modes of this thread; those that something leaves there are taken off."""
    before = modes_here()
    try:
        for kind in (TorchFunctionMode, dispatch.TorchDispatchMode):
            _restack(kind, [])
        yield
    finally:
        for kind in (TorchFunctionMode, dispatch.TorchDispatchMode):
            _restack(kind, [mode for mode in before if _kind(mode) is kind])


Entered = Callable[[], AbstractContextManager[None]]
_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")  # their threads outlive the functions that they run
_GIVING = ("apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered")
_WATCHES: list[Callable[[], Entered | None]] = []
_HERE = threading.local()


def is_followed() -> bool:
    """Return whether this thread runs a function from a watched model's forward pass."""
    return getattr(_HERE, "followed", False)


@contextmanager
def followed(watch: Callable[[], Entered | None]) -> Iterator[None]:
    """Run under a watch what this thread gives to other threads in the context."""

    def forget() -> None:
        if watch in _WATCHES:
            _WATCHES.remove(watch)

    with _STARTS.held(), undone(forget):
        _WATCHES.append(watch)
        yield


def _carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs under the watches that are active in this thread."""
    entered = [context for watch in tuple(_WATCHES) if (context := watch()) is not None]
    if not entered:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        before = is_followed()
        _HERE.followed = True
        try:
            with ExitStack() as stack:
                for context in entered:
                    stack.enter_context(context())
                return function(*args, **kwargs)
        finally:
            _HERE.followed = before

    return run


def is_of_pool(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to a pool."""
    return getattr(getattr(thread, "_target", None), "__module__", None) in _POOLS


def _started(start: Callable[..., Any], thread: threading.Thread) -> Any:
    run = thread.run if is_of_pool(thread) else _carried(thread.run)
    if run != thread.run:
        thread.run = run  # type: ignore[method-assign]
    return start(thread)


def _begun(start: Callable[..., Any], run: Callable[..., Any], *args: Any) -> Any:
    return start(_carried(run), *args)


def _given(method: Any, pool: object, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(pool, _carried(function), *args, **kwargs)


@contextmanager
def _starts() -> Iterator[None]:
    """Make every way of giving a function to a thread ask the watches first."""
    pools = ((ThreadPoolExecutor, "submit"), *((ThreadPool, name) for name in _GIVING))
    with undone() as stack:
        stack.enter_context(replaced(threading.Thread, "start", _started))
        stack.enter_context(replaced(_thread, "start_new_thread", _begun))
        for owner, name in pools:
            stack.enter_context(replaced(owner, name, _given))
        yield


_STARTS = SharedChange(_starts)
