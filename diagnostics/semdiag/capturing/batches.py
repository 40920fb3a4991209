"""Batches of any model: tensors, dictionaries of tensors, or tuples of arguments."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from semdiag_models import InputError

Batch = Tensor | Mapping[str, Any] | Sequence[Any]
# Arguments that mark padding: true or 1 where a token is real; in the second group where it is not.
_REAL = ("attention_mask", "decoder_attention_mask")
_PADDED = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")


def call(model: nn.Module, batch: Batch) -> Any:
    """Run a model on a batch: a dictionary as keyword arguments, a tuple or list as positional ones.

    Args:
        model: any module.
        batch: its input.

    Returns:
        What the model returns.
    """
    if isinstance(batch, Tensor):
        return model(batch)
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def samples_of(batch: Batch) -> int:
    """Number of samples of a batch: the length of its first tensor; 0 if it holds none.

    Args:
        batch: a tensor, a dictionary or a tuple.

    Example:
        >>> samples_of({"input_ids": torch.zeros(3, 7), "use_cache": False})
        3
    """
    return next((len(t) for t in _tensors(batch) if t.ndim), 0)


def longest(batch: Batch) -> int:
    """Length of a batch: the second axis of its first tensor that has one, as of token ids (N, L); else 1.

    Args:
        batch: a tensor, a dictionary or a tuple.
    """
    return next((t.shape[1] for t in _tensors(batch) if t.ndim > 1), 1)


def split(batches: Batch | Iterable[Batch], size: int) -> list[Batch]:
    """Cut what a user gives into batches of at most ``size`` samples; what is cut already stays as it is.

    Args:
        batches: one tensor or dictionary of tensors, to be cut along their first axis; or an iterable of
            batches.
        size: samples in a batch.

    Returns:
        Batches that hold at least one sample.

    Raises:
        InputError: if it is none of these.

    Example:
        >>> [len(batch) for batch in split(torch.zeros(5, 2), 2)]
        [2, 2, 1]
    """
    if isinstance(batches, Tensor):
        cut: list[Batch] = list(torch.split(batches, size)) if batches.ndim else []
    elif isinstance(batches, Mapping):
        whole = samples_of(batches)
        cut = [_part(batches, slice(i, i + size), whole) for i in range(0, whole, size)]
    elif isinstance(batches, Iterable) and not isinstance(batches, str | bytes):
        cut = list(batches)
    else:
        cut = [None]  # type: ignore[list-item]  # refused below
    wrong = [batch for batch in cut if not isinstance(batch, Tensor | Mapping | tuple | list)]
    if wrong:
        raise InputError(
            "Inputs are a tensor, a dictionary of tensors (keyword arguments), or a list of batches, each a "
            f"tensor, a dictionary or a tuple of arguments. Got {type(wrong[0]).__name__}."
        )
    return [batch for batch in cut if samples_of(batch)]


def first_samples(batches: Iterable[Batch], count: int) -> list[Batch]:
    """The first samples of batches.

    Args:
        batches: from :func:`split`.
        count: of samples; batches that are tuples of arguments are not cut, and stay whole.

    Returns:
        Batches with ``count`` samples together, or all there are.
    """
    found: list[Batch] = []
    for batch in batches:
        missing = count - sum(map(samples_of, found))
        if missing <= 0:
            break
        found.append(batch if isinstance(batch, tuple | list) else split(batch, missing)[0])
    return found


def repeated(batch: Batch, times: int) -> Batch:
    """Every sample of a batch several times: all of them, then all of them again.

    Args:
        batch: a tensor, a dictionary or a tuple.
        times: how often.

    Example:
        >>> repeated(torch.tensor([[1], [2]]), 2).tolist()
        [[1], [2], [1], [2]]
    """
    size = samples_of(batch)

    def again(value: Any) -> Any:
        own = isinstance(value, Tensor) and value.ndim and len(value) == size
        return torch.cat([value] * times) if own else value

    return _each(batch, again)


def _each(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    """A batch of the same kind, with every value changed."""
    if isinstance(batch, Tensor):
        found: Batch = change(batch)
    elif isinstance(batch, Mapping):
        found = {name: change(value) for name, value in batch.items()}
    else:
        found = tuple(change(value) for value in batch)
    return found


def _part(batch: Mapping[str, Any], rows: slice, whole: int) -> dict[str, Any]:
    """The rows of every tensor that has one entry per sample; everything else as it is."""
    return {
        name: value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == whole else value
        for name, value in batch.items()
    }


def moved(batch: Batch, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
    """Move the tensors of a batch to a device; floating-point ones also to a dtype.

    Args:
        batch: a tensor, a dictionary or a tuple.
        device: where the model is.
        dtype: of the model; None leaves it.

    Returns:
        A batch of the same kind.
    """

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    return _each(batch, one)


def real_tokens(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Which tokens of a batch are real, from the usual arguments of the model.

    Read are ``attention_mask`` and ``decoder_attention_mask`` (1 or true: real) and the ``key_padding_mask``
    of PyTorch's own layers (true: padding), by name or by position in ``model.forward``.

    Args:
        model: whose signature names positional arguments.
        batch: a tensor, a dictionary or a tuple.

    Returns:
        (B, L) bool by argument; empty where nothing marks padding.

    Example:
        >>> real_tokens(nn.Identity(), {"attention_mask": torch.tensor([[1, 1, 0]])})["attention_mask"].tolist()
        [[True, True, False]]
    """
    arguments = _arguments(model, batch)
    found = {}
    for name in (*_REAL, *_PADDED):
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.ndim == 2:
            padded = value.bool() if value.dtype == torch.bool else value != 0
            found[name] = padded if name in _REAL else ~padded
    ids = arguments.get("decoder_input_ids")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        found.setdefault("decoder_attention_mask", torch.ones_like(ids, dtype=torch.bool))
    return found


def real_queries(real: Mapping[str, Tensor], module: str, shape: tuple[int, int], first: int) -> Tensor | None:
    """Which queries of an attention call are real tokens.

    Args:
        real: from :func:`real_tokens`.
        module: name of the attention module; in one of a decoder, the decoder's own arguments count if there
            are any.
        shape: (B, Lq) of the call.
        first: position of its first query.

    Returns:
        (B, Lq) bool; None if no argument has one entry per query, so that nothing is known.

    Example:
        >>> real = {"attention_mask": torch.tensor([[True, True, False]])}
        >>> real_queries(real, "encoder.layer.0", (1, 3), 0).tolist()
        [[True, True, False]]
        >>> real_queries(real, "pool", (1, 1), 0) is None
        True
    """
    decoders = {name: mask for name, mask in real.items() if name.startswith(("decoder", "tgt"))}
    others = {name: mask for name, mask in real.items() if name not in decoders}
    for mask in (decoders if decoders and "decoder" in module else others).values():
        if len(mask) == shape[0] and mask.shape[1] == (first + shape[1] if first else shape[1]):
            return mask[:, mask.shape[1] - shape[1] :]
    return None


def _arguments(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    values = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    try:
        return inspect.signature(model.forward).bind_partial(*values).arguments
    except (TypeError, ValueError):  # the call itself will say what is wrong
        return {}


def _tensors(batch: Batch) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch
    return [value for value in values if isinstance(value, Tensor)]
