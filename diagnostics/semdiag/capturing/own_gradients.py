"""Detect functions with a backward pass of their own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from semdiag.capturing.overlapping import SharedChange


class _Running(threading.local):
    def __init__(self) -> None:  # called again in each thread
        self.names: list[str] = []


_RUNNING = _Running()


def own_backward() -> str | None:
    """Return the name of the outermost running ``autograd.Function`` that needs gradients; None if none runs."""
    return _RUNNING.names[0] if _RUNNING.names else None


@contextmanager
def _recorded_applies() -> Iterator[None]:
    """Make every ``Function.apply`` record its function, including one fetched from its class before."""

    def apply(cls: type[_SingleLevelFunction], *args: Any, **kwargs: Any) -> Any:
        run = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]
        with torch._C.DisableTorchFunction():  # else a function mode sees every access
            tracked = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if not tracked:
            return run(*args, **kwargs)
        _RUNNING.names.append(cls.__name__)
        try:
            return run(*args, **kwargs)
        finally:
            _RUNNING.names.pop()

    try:
        setattr(_SingleLevelFunction, "apply", classmethod(apply))  # noqa: B010
        yield
    finally:
        if "apply" in vars(_SingleLevelFunction):
            delattr(_SingleLevelFunction, "apply")


OWN_GRADIENTS = SharedChange(_recorded_applies)
