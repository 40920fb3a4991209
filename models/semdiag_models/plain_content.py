"""What a file of torch.save may hold: plain tensors, in containers that do not hold themselves."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semdiag_models.archive import DamagedError

_DEEPEST = 50  # containers in containers
_SHARED = 10**6  # values in containers that stand at several places, counted at each


class OddTensorError(Exception):
    """A file holds a tensor of a kind that is not read; the message names it."""


def check_plain(content: Any) -> None:
    """Refuse tensors whose numbers do not lie in memory one after the other: nothing here could read them.

    And containers that hold themselves, or each other so often that nobody could go through them: in a pickle of
    a few hundred bytes, each may hold the one before it many times.

    Args:
        content: what was read.

    Raises:
        OddTensorError: naming the kind of a tensor.
        DamagedError: of containers.

    Example:
        >>> check_plain({"a": [torch.zeros(2), 1]})
        >>> check_plain([torch.zeros(2, device="meta")])
        Traceback (most recent call last):
        semdiag_models.plain_content.OddTensorError: meta
    """
    _Follower().follow(content, _DEEPEST)


class _Follower:
    """Goes through containers once each."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int] | None] = {}  # by container; None while it is gone through
        self._seen = 0  # values, those of a shared container once

    def follow(self, content: Any, depth: int) -> tuple[int, int]:
        """Return the number of values, those of a shared container at each of its places; and containers in containers."""
        if isinstance(content, Tensor):
            _check_tensor(content)
        if not isinstance(content, Mapping | list | tuple):
            self._seen += 1
            return 1, 0
        if id(content) not in self._known:
            self._known[id(content)] = None
            if not depth:
                raise DamagedError("containers that are nested too deeply")
            values = content.values() if isinstance(content, Mapping) else content
            inner = [self.follow(value, depth - 1) for value in values]
            size, height = 1 + sum(size for size, _ in inner), 1 + max((height for _, height in inner), default=0)
            if height > _DEEPEST:
                raise DamagedError("containers that are nested too deeply")
            if size > _SHARED + 10 * (self._seen + len(self._known)):
                raise DamagedError("containers that hold each other too often")
            self._known[id(content)] = size, height
        found = self._known[id(content)]
        if found is None:
            raise DamagedError("a container that holds itself")
        return found


def _check_tensor(tensor: Tensor) -> None:
    odd = "nested" if tensor.is_nested else "meta" if tensor.is_meta else ""
    odd = odd or ("" if tensor.layout == torch.strided else "sparse")
    if odd or tensor.is_quantized:
        raise OddTensorError(odd or "quantised")
