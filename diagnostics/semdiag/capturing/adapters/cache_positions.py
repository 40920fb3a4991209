"""Where the keys stand that a Hugging Face cache hands out, of which one with a window drops the first."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from semdiag.capturing.overlapping import SharedChange

_DROPPED: Any = WeakTensorKeyDictionary()  # tokens before the first key, by the keys that a cache handed out


@contextlib.contextmanager
def watched_caches() -> Iterator[None]:
    """Note, inside the context, how many tokens came before the first key whenever a cache hands out keys.

    Yields:
        Nothing.
    """
    if hasattr(_cache(), "update"):
        with _PATCHED.held():
            yield
    else:  # transformers is not imported
        yield


def keys_dropped(keys: Tensor) -> int | None:
    """How many tokens came before the first of some keys, which a cache had dropped.

    Args:
        keys: the very tensor that the cache gave.

    Returns:
        Their number; None where the keys are of no cache, or it does not say how many tokens it was given.
    """
    found: int | None = _DROPPED.get(keys)
    return found


def _cache() -> Any:
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    cache = _cache()
    original = cache.update

    def update(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        found = original(self, key_states, value_states, layer_idx, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _note(self, layer_idx, found)
        return found

    cache.update = update
    try:
        yield
    finally:
        cache.update = original


_PATCHED = SharedChange(_patched)


def _note(cache: Any, layer_idx: int, found: Any) -> None:
    """The last key is the last token's, but in a cache that still has room, which has dropped nothing."""
    with contextlib.suppress(Exception):  # a cache of one's own may be of any kind
        keys, layer = found[0], cache.layers[layer_idx]
        length = layer.get_seq_length() if layer.is_sliding else 0
        _DROPPED.pop(keys, None)
        if isinstance(length, int):
            _DROPPED[keys] = max(0, length - keys.shape[2])
