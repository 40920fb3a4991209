"""Detect functions with a backward pass of their own, and activation checkpoints."""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import FunctionMeta

from semdiag.capturing.overlapping import SharedChange, replaced


class _Running(threading.local):
    def __init__(self) -> None:  # called again in each thread
        self.names: list[str] = []
        self.begun: type | None = None


_RUNNING = _Running()


def own_backward() -> str | None:
    """Return the name of the outermost running ``autograd.Function`` that needs gradients; None if none runs."""
    return _RUNNING.names[0] if _RUNNING.names else None


def checkpointed() -> bool:
    """Return whether torch.utils.checkpoint runs this forward pass and will run it again."""
    if not torch.is_grad_enabled() and own_backward() is None:
        return False
    frame, home = sys._getframe(1), vars(torch.utils.checkpoint)
    while frame is not None and frame.f_globals is not home:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _found(original: Callable[..., Any], cls: type, name: str) -> Any:
    """Look up an attribute of a Function; ``apply`` gets a ``forward`` that is recorded."""
    found = original(cls, name)
    if name == "_backward_cls":
        _RUNNING.begun = cls if torch.is_grad_enabled() else None
    elif name == "forward" and _RUNNING.begun is cls:
        _RUNNING.begun = None
        return _recorded(cls.__name__, found)
    return found


def _recorded(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # else a function mode sees every access
            tracked = any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values()))
        if not tracked:
            return forward(*args, **kwargs)
        _RUNNING.names.append(name)
        try:
            return forward(*args, **kwargs)
        finally:
            _RUNNING.names.pop()

    return run


OWN_GRADIENTS = SharedChange(lambda: replaced(FunctionMeta, "__getattribute__", _found))
