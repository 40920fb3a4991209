"""Let watches overlap: in threads, in asynchronous tasks, ending in any order."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class SharedChange:
    """A change of the process's state that watches share: the first one makes it, the last one undoes it."""

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


@contextmanager
def replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Replace a function, inside, by one that gets the original before its arguments."""
    own, original = name in vars(owner), getattr(owner, name)
    here = partial(by, original)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return here(*args, **kwargs)

    try:
        setattr(owner, name, replacement)
        yield
    finally:
        if vars(owner).get(name) is replacement:  # else someone replaced it since, and calls ours
            setattr(owner, name, original) if own else delattr(owner, name)


def take_off(mode: TorchFunctionMode) -> bool:
    """Remove a function mode from this thread's stack, wherever it is; the others keep their order."""
    return _reordered(TorchFunctionMode, _get_current_function_mode_stack(), mode, None)  # type: ignore[no-untyped-call]


def take_off_dispatch(mode: TorchDispatchMode) -> bool:
    """Remove a dispatch mode from this thread's stack, wherever it is; return whether it was there."""
    return _reordered(TorchDispatchMode, _get_current_dispatch_mode_stack(), mode, None)


def put_on(mode: TorchFunctionMode) -> None:
    """Put a removed function mode back onto this thread's stack."""
    TorchFunctionMode.__enter__(mode)  # type: ignore[no-untyped-call]


def put_below(mode: TorchFunctionMode, others: Callable[[object], bool]) -> None:
    """Move a function mode in this thread's stack below others: it then sees what they call."""
    _reordered(TorchFunctionMode, _get_current_function_mode_stack(), mode, others)  # type: ignore[no-untyped-call]


def put_below_dispatch(mode: TorchDispatchMode, others: Callable[[object], bool]) -> None:
    """Move a dispatch mode in this thread's stack below others, as :func:`put_below` does."""
    _reordered(TorchDispatchMode, _get_current_dispatch_mode_stack(), mode, others)


def modes_here() -> list[object]:
    """Return the function and the dispatch modes of this thread, each from the lowest on."""
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [*functions, *_get_current_dispatch_mode_stack()]


@contextmanager
def without_modes() -> Iterator[None]:
    """Run, inside, without the modes of this thread."""
    stacks = (
        (TorchFunctionMode, _get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
        (TorchDispatchMode, _get_current_dispatch_mode_stack()),
    )
    kinds: list[tuple[Any, Any]] = [(kind, mode) for kind, stack in stacks for mode in stack]
    for kind, mode in reversed(kinds):
        kind.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for kind, mode in kinds:
            kind.__enter__(mode)


def _reordered(kind: Any, stack: list[Any], mode: object, others: Callable[[object], bool] | None) -> bool:
    """Move a mode below others, or take it off; return whether it was in the stack."""
    if mode not in stack:
        return False
    own = stack.index(mode)
    lowest = own if others is None else next((i for i, other in enumerate(stack[:own]) if others(other)), own)
    if others is None or lowest < own:
        for other in reversed(stack[lowest:]):
            kind.__exit__(other, None, None, None)
        for other in [mode] * (others is not None) + [other for other in stack[lowest:] if other is not mode]:
            kind.__enter__(other)
    return True
