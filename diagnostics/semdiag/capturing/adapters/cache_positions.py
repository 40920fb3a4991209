"""Where the keys stand that a Hugging Face cache hands out, of which one with a window drops the first."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from semdiag.capturing.overlapping import SharedChange


class Handed(NamedTuple):
    """What a cache handed out for one call.

    Attributes:
        keys: how many: the first of the call's.
        new: how many tokens it was given for the call.
        before: tokens before the first key, which it had dropped; None where it does not say how many it holds.
        room: keys behind the last token's, which are no tokens yet; 0 where it does not say.
    """

    keys: int
    new: int
    before: int | None
    room: int


class _Last(threading.local):
    keys: Tensor | None = None  # that a cache handed out last: a module may have made others of them since
    layer: int | None = None  # for which


_HANDED: Any = WeakTensorKeyDictionary()  # by the keys that a cache handed out
_LAST = _Last()


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


def handed_out(keys: Tensor, layer: int | None, queries: int) -> Handed | None:
    """What a cache handed out of the keys of a call.

    They are the very tensor that it gave, or that which it gave last with others behind, or were made of that one
    by the layer that asked for it, as many of as many queries: of latents, which it holds instead of keys.

    Args:
        keys: (B, Hk, Lk, D).
        layer: position by which its module asks the cache; None: not known.
        queries: Lq.

    Returns:
        None where the keys are of no cache that is watched.
    """
    found: Handed | None = _HANDED.get(keys)
    last = _LAST.keys
    if found is not None or last is None or (last.ndim, keys.ndim) != (4, 4) or len(last) != len(keys):
        return found
    found = _HANDED.get(last)
    if found is None or (found.keys, found.new, _LAST.layer) == (keys.shape[2], queries, layer):
        return found
    like = found.keys < keys.shape[2] and (last.device, last.dtype) == (keys.device, keys.dtype)
    return found if like and torch.equal(keys[:, :, : found.keys], last) else None


def forget_last() -> None:
    """A model starts: what a cache handed out last in this thread is no longer of its calls."""
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
        found = original(self, key_states, value_states, layer_idx, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _note(self, layer_idx, key_states, found)
        return found

    cache.update = update
    try:
        yield
    finally:
        cache.update = original
        forget_last()


_PATCHED = SharedChange(_patched)


def _note(cache: Any, layer_idx: int, given: Tensor, found: Any) -> None:
    """The last key is the last token's, but in a cache that still has room, which has dropped nothing."""
    with contextlib.suppress(Exception):  # a cache of one's own may be of any kind
        keys, layer = found[0], cache.layers[layer_idx]
        count, length = keys.shape[2], layer.get_seq_length()
        if isinstance(length, Tensor) and not layer.is_sliding:
            length = int(length)
        known = isinstance(length, int)
        before, room = (max(0, length - count), max(0, count - length)) if known else (None, 0)
        _HANDED[keys] = Handed(count, given.shape[2], before, room)
        _LAST.keys, _LAST.layer = keys, layer_idx
