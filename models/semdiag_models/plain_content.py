"""Check content of torch.save: only plain tensors, in containers that do not contain themselves."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semdiag_models.archive import DamagedError

_DEEPEST = 50  # levels of nested containers
_SHARED = 10**6  # values in shared containers, counted at each occurrence


class OddTensorError(Exception):
    """Raised for a kind of tensor that is not read; the message names it."""


def check_plain(content: Any) -> None:
    """Refuse tensors that are not plain dense memory, and containers that cannot be traversed."""
    _Follower().follow(content, _DEEPEST)


class _Follower:
    """Traverses each container once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int] | None] = {}  # by container; None while it is being traversed
        self._seen = 0  # values, each once

    def follow(self, content: Any, depth: int) -> tuple[int, int]:
        """Return the number of values, counting shared ones at each occurrence, and the nesting depth."""
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
                raise DamagedError("containers that contain each other too often")
            self._known[id(content)] = size, height
        found = self._known[id(content)]
        if found is None:
            raise DamagedError("a container that contains itself")
        return found


def _check_tensor(tensor: Tensor) -> None:
    odd = "nested" if tensor.is_nested else "meta" if tensor.is_meta else ""
    odd = odd or ("" if tensor.layout == torch.strided else "sparse")
    if odd or tensor.is_quantized:
        raise OddTensorError(odd or "quantised")
