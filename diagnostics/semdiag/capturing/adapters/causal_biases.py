"""Letting a model make torch's causal biases under a watch, which torch refuses under any dispatch mode."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from semdiag.capturing.overlapping import SharedChange


@contextmanager
def _made_outside_modes() -> Iterator[None]:
    """Make ``causal_lower_right(…)`` and its like without modes: they are tensors without content.

    The constructor of a subclass of Tensor makes a tensor and says then which class it is of. It cannot of one
    that has been handed to Python, as to a mode.
    """
    biases = sys.modules.get("torch.nn.attention.bias")  # importing it takes a second: only if someone else has
    if biases is None or "__new__" in vars(biases.CausalBias):  # then torch makes it in a way of its own
        yield
        return

    def made(kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes():
            return Tensor.__new__(kind, *args, **kwargs)

    biases.CausalBias.__new__ = made
    try:
        yield
    finally:
        del biases.CausalBias.__new__


MADE_OUTSIDE_MODES = SharedChange(_made_outside_modes)
