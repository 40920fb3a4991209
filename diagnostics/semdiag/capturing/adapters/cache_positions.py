"""Positions of the keys that a Hugging Face cache returns; one with a window has dropped the first."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from semdiag.capturing.overlapping import SharedChange


class CachedKeys(NamedTuple):
    """What a cache returned for one call."""

    keys: int  # number of keys; they are the first of the call's
    new: int  # number of tokens that the call added
    before: int | None  # tokens before the first key, which the cache has dropped
    room: int  # keys after the last token's, which are no tokens yet; 0 if the cache does not tell its length


class _Last(threading.local):
    keys: Tensor | None = None  # returned by a cache last; the module may have changed them since
    layer: int | None = None


_RETURNED: Any = WeakTensorKeyDictionary()  # by the keys that a cache returned
_LAST = _Last()


@contextlib.contextmanager
def watched_caches() -> Iterator[None]:
    """Record, inside the context, how many tokens came before the first key whenever a cache returns keys."""
    if hasattr(_cache(), "update"):
        with _PATCHED.held():
            yield
    else:  # transformers is not imported
        yield


def cached_keys(keys: Tensor, layer: int | None, queries: int) -> CachedKeys | None:
    """Return what a cache returned of a call's keys."""
    known: CachedKeys | None = _RETURNED.get(keys)
    last = _LAST.keys
    if known is not None or last is None or (last.ndim, keys.ndim) != (4, 4) or len(last) != len(keys):
        return known
    known = _RETURNED.get(last)
    if known is None or (known.keys, known.new, _LAST.layer) == (keys.shape[2], queries, layer):
        return known
    like = known.keys < keys.shape[2] and (last.device, last.dtype) == (keys.device, keys.dtype)
    return known if like and torch.equal(keys[:, :, : known.keys], last) else None


def forget_last() -> None:
    """Forget the last keys of a cache in this thread: a model starts, and they are none of its calls'."""
    _LAST.keys = None


def _cache() -> Any:
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    cache = _cache()
    original = cache.update

    def update(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(self, key_states, value_states, layer_idx, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _note(self, layer_idx, key_states, result)
        return result

    cache.update = update
    try:
        yield
    finally:
        cache.update = original
        forget_last()


_PATCHED = SharedChange(_patched)


def _note(cache: Any, layer_idx: int, given: Tensor, result: Any) -> None:
    """Record what a cache returned; its last key is the last token's unless the cache has unused room."""
    with contextlib.suppress(Exception):  # custom caches may raise anything
        keys, layer = result[0], cache.layers[layer_idx]
        count, length = keys.shape[2], layer.get_seq_length()
        if isinstance(length, Tensor) and not layer.is_sliding:
            length = int(length)
        known = isinstance(length, int)
        before, room = (max(0, length - count), max(0, count - length)) if known else (None, 0)
        _RETURNED[keys] = CachedKeys(count, given.shape[2], before, room)
        _LAST.keys, _LAST.layer = keys, layer_idx
