"""Carry watches into other threads to which a model's forward pass gives work."""

import _thread
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

from semdiag.capturing.overlapping import SharedChange, replaced

Entered = Callable[[], AbstractContextManager[None]]
_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")  # their threads outlive the functions that they run
_GIVING = ("apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered")
_WATCHES: list[Callable[[], Entered | None]] = []
_HERE = threading.local()


def is_followed() -> bool:
    """Return whether this thread runs a function that a watched model's forward pass gave to it."""
    return getattr(_HERE, "followed", False)


@contextmanager
def followed(watch: Callable[[], Entered | None]) -> Iterator[None]:
    """Run under a watch, inside, what this thread gives to other threads."""
    with _STARTS.held():
        _WATCHES.append(watch)
        try:
            yield
        finally:
            _WATCHES.remove(watch)


def _carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs under the watches that are active here and now."""
    entered = [context for watch in tuple(_WATCHES) if (context := watch()) is not None]
    if not entered:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        before, _HERE.followed = is_followed(), True
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


def _given(
    method: Callable[..., Any], pool: object, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return method(pool, _carried(function), *args, **kwargs)


def _raw(start: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    return start(_carried(function), *args)


@contextmanager
def _starts() -> Iterator[None]:
    """Make every way to give a function to a thread ask the watches first."""
    with ExitStack() as stack:
        stack.enter_context(replaced(threading.Thread, "start", _started))
        stack.enter_context(replaced(_thread, "start_new_thread", _raw))
        stack.enter_context(replaced(ThreadPoolExecutor, "submit", _given))
        for name in _GIVING:
            stack.enter_context(replaced(ThreadPool, name, _given))
        yield


_STARTS = SharedChange(_starts)
