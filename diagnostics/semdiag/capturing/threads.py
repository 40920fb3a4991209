"""Functions that a model's forward gives to other threads: they run under its watches, too."""

import _thread
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

from semdiag.capturing.overlapping import SharedChange

Entered = Callable[[], AbstractContextManager[None]]
_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")  # their threads outlive the functions that they get
_WATCHES: list[Callable[[], Entered | None]] = []
_HERE = threading.local()


def is_followed() -> bool:
    """Whether this thread runs what a watched model's forward gave to it."""
    return getattr(_HERE, "followed", False)


@contextmanager
def followed(watch: Callable[[], Entered | None]) -> Iterator[None]:
    """Inside, what a thread gives to another to run is run under a watch.

    Threads, timers and pools are followed, also pools that were there before. Who puts work into a queue of his
    own, for a thread or a process that waits there, is not.

    Args:
        watch: is asked in the thread that gives; returns what the other thread enters meanwhile, or None where
            nothing of the model runs.

    Yields:
        Nothing.
    """
    with _STARTS.held():
        _WATCHES.append(watch)
        try:
            yield
        finally:
            _WATCHES.remove(watch)


def _carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, under the watches of what runs here and now."""
    entered = [found for watch in tuple(_WATCHES) if (found := watch()) is not None]
    if not entered:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        before, _HERE.followed = is_followed(), True
        try:
            with ExitStack() as stack:
                for watch in entered:
                    stack.enter_context(watch())
                return function(*args, **kwargs)
        finally:
            _HERE.followed = before

    return run


def _started(start: Callable[..., Any], thread: threading.Thread) -> Any:
    target = getattr(thread, "_target", None)
    run = thread.run if getattr(target, "__module__", None) in _POOLS else _carried(thread.run)
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
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    own, original = name in vars(owner), getattr(owner, name)
    here = partial(by, original)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return here(*args, **kwargs)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if vars(owner).get(name) is replacement:  # else someone has replaced it since, and calls this one
            setattr(owner, name, original) if own else delattr(owner, name)


@contextmanager
def _starts() -> Iterator[None]:
    """Every way to give a function to a thread asks the watches first."""
    with ExitStack() as stack:
        stack.enter_context(_replaced(threading.Thread, "start", _started))
        stack.enter_context(_replaced(_thread, "start_new_thread", _raw))
        stack.enter_context(_replaced(ThreadPoolExecutor, "submit", _given))
        for name in ("apply_async", "_map_async", "imap", "imap_unordered"):
            stack.enter_context(_replaced(ThreadPool, name, _given))
        yield


_STARTS = SharedChange(_starts)
