"""Let watches overlap: in threads, in asynchronous tasks, ending in any order."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch
from torch.utils._python_dispatch import _push_mode as _push_dispatch


class SharedChange:
    """A change of the process's state that watches share: the first one makes it, the last one undoes it.

    If each watch made and undid it alone, the first to end would take it from the others, and the last would
    restore the state that the first had made.

    Args:
        change: returns a context that makes and undoes it.

    Example:
        >>> import contextlib
        >>> change = SharedChange(lambda: contextlib.nullcontext(print("made")))
        >>> with change.held(), change.held():
        ...     pass
        made
    """

    def __init__(self, change: Callable[[], AbstractContextManager[object]]) -> None:
        self._change, self._lock = change, threading.RLock()
        self._holders: set[object] = set()
        self._made: ExitStack | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the change inside the context."""
        own = object()
        try:
            with self._lock:
                self._holders.add(own)
                if self._made is None:
                    self._made = ExitStack()
                    self._made.enter_context(self._change())
            yield
        finally:
            with self._lock:
                self._holders.discard(own)
                if not self._holders and self._made is not None:
                    made, self._made = self._made, None
                    made.close()
            while self._lock._is_owned():  # type: ignore[attr-defined]  # interrupted before it was released
                self._lock.release()


def take_off(mode: TorchFunctionMode) -> bool:
    """Remove a function mode from this thread's stack, wherever it is; the others keep their order.

    Returns:
        Whether it was there: it may have been entered in another thread.
    """
    above: list[TorchFunctionMode] = []
    while torch._C._len_torch_function_stack():
        top = _pop_mode()  # type: ignore[no-untyped-call]
        if top is mode:
            break
        above.append(top)
    else:
        top = None
    for other in reversed(above):
        _push_mode(other)  # type: ignore[no-untyped-call]
    return top is mode


def take_off_dispatch(mode: TorchDispatchMode) -> bool:
    """Remove a dispatch mode from this thread's stack unless it is on top, where it leaves by itself.

    Returns:
        Whether it was not on top.
    """
    stack = _get_current_dispatch_mode_stack()
    if stack and stack[-1] is mode:
        return False
    above: list[TorchDispatchMode] = []
    while mode in stack and (top := _pop_dispatch()) is not mode:
        above.append(top)
    for name in vars(mode):
        if name.startswith("old_") and name.endswith("_flags") and (kept := getattr(mode, name)):
            flag = kept.pop()  # state to restore; the mode above must restore it now
            if above and getattr(above[-1], name, None):
                getattr(above[-1], name)[-1] = flag
    for other in reversed(above):
        _push_dispatch(other)
    return True


def put_on(mode: TorchFunctionMode) -> None:
    """Put a removed function mode back onto this thread's stack."""
    _push_mode(mode)  # type: ignore[no-untyped-call]


def put_below(mode: TorchFunctionMode, others: Callable[[object], bool]) -> None:
    """Move a function mode from the top of this thread's stack below others: it then sees what they call.

    Args:
        mode: just entered.
        others: whether a mode must be above it.
    """
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    lowest = next((i for i, other in enumerate(stack) if others(other)), len(stack))
    above = [_pop_mode() for _ in stack[lowest:]]  # type: ignore[no-untyped-call]
    for other in above[:1] + above[:0:-1]:
        _push_mode(other)  # type: ignore[no-untyped-call]


def put_below_dispatch(mode: TorchDispatchMode, others: Callable[[object], bool]) -> None:
    """Move a dispatch mode from the top of this thread's stack below others.

    Args:
        mode: just entered.
        others: whether a mode must be above it.
    """
    stack = _get_current_dispatch_mode_stack()
    lowest = next((i for i, other in enumerate(stack) if others(other)), len(stack))
    if lowest == len(stack):
        return
    for name in vars(mode):
        if name.startswith("old_") and name.endswith("_flags") and (kept := getattr(mode, name)):
            upper = getattr(stack[lowest], name)  # each restores the state below it
            kept[-1], upper[-1] = upper[-1], kept[-1]
    above = [_pop_dispatch() for _ in stack[lowest:]]
    for other in above[:1] + above[:0:-1]:
        _push_dispatch(other)
