"""Let a model make torch's causal biases under a watch; torch refuses to under any dispatch mode."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from semdiag.capturing.overlapping import SharedChange


@contextmanager
def _made_outside_modes() -> Iterator[None]:
    """Make ``causal_lower_right(…)`` and its like without modes: they are tensors without content."""
    biases = sys.modules.get("torch.nn.attention.bias")  # None unless already imported, which takes a second
    if biases is None or "__new__" in vars(biases.CausalBias):  # then torch has a constructor of its own
        yield
        return

    def made(kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes():
            return Tensor.__new__(kind, *args, **kwargs)

    try:
        biases.CausalBias.__new__ = made
        yield
    finally:
        if "__new__" in vars(biases.CausalBias):
            del biases.CausalBias.__new__


MADE_OUTSIDE_MODES = SharedChange(_made_outside_modes)
