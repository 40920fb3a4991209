"""Batches of any model: a tensor, a dictionary of tensors, or a tuple of arguments, dictionaries among them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing.inputs.unnamed_labels import refuse_unnamed_labels
from semdiag_models import InputError

Batch = Tensor | Mapping[str, Any] | Sequence[Any]


def call(model: nn.Module, batch: Batch) -> Any:
    """Run a model on a batch: a dictionary as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    refuse_unnamed_labels(model, batch)
    return model(*batch)


def samples_of(batch: Batch) -> int:
    """Return the number of samples: the length of a batch's first tensor with several axes, else of its first."""
    lengths = [(t.ndim == 1, len(t)) for t in tensors(batch) if t.ndim]
    return min(lengths, key=lambda entry: entry[0], default=(True, 0))[1]


def only_token_ids(batch: Batch) -> bool:
    """Return whether a batch consists of token ids (N, L) and their masks: integers or bools on two axes."""
    several = [t for t in tensors(batch) if t.ndim > 1]
    return bool(several) and not any(t.ndim > 2 or t.is_floating_point() or t.is_complex() for t in several)


def longest(batch: Batch) -> int:
    """Return the length of a batch of token ids: its tensors' largest second axis, the decoder's included; else 1."""
    return max((t.shape[1] for t in tensors(batch) if t.ndim > 1), default=1)


def each(batches: Batch | Iterable[Batch], size: int) -> Iterator[Batch]:
    """Yield a user's inputs in batches of at most ``size`` samples; inputs that are batches already are not cut."""
    cut: Iterable[Any]
    if isinstance(batches, Tensor):
        cut = torch.split(batches, size) if batches.ndim else ()
    elif isinstance(batches, Mapping):
        whole = samples_of(batches)
        cut = (_part(batches, slice(i, i + size), whole) for i in range(0, whole, size))
    elif isinstance(batches, Iterable) and not isinstance(batches, str | bytes):
        cut = batches
    else:
        cut = (batches,)  # refused below
    for batch in cut:
        if not isinstance(batch, Tensor | Mapping | tuple | list) or not tensors(batch):
            raise InputError(
                "Inputs are a tensor, a dictionary of tensors (keyword arguments), or a list of batches, each a "
                "tensor, a dictionary or a tuple of arguments. Got "
                f"{type(batch).__name__}{' without a tensor' * isinstance(batch, Mapping | tuple | list)}."
            )
        if samples_of(batch):
            yield batch


def split(batches: Batch | Iterable[Batch], size: int) -> list[Batch]:
    """Return all batches of :func:`each`."""
    return list(each(batches, size))


def first_samples(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    """Yield the first samples of batches, and read none beyond them."""
    for batch in batches:
        part = batch if isinstance(batch, tuple | list) else next(each(batch, count))
        yield part
        count -= samples_of(part)
        if count <= 0:
            return


def without_first(batches: Iterable[Batch], count: int) -> list[Batch]:
    """Return the batches without what :func:`first_samples` yields."""
    rest_of: list[Batch] = []
    for batch in batches:
        size = samples_of(batch)
        if count <= 0:
            rest_of.append(batch)
        elif count < size:
            rest = slice(count, size)
            rest_of.append(batch[rest] if isinstance(batch, Tensor) else _part(batch, rest, size))  # type: ignore[arg-type]
        count -= size
    return rest_of


def with_tensor(batch: Batch, old: Tensor, new: Tensor) -> Batch:
    """Return the batch with one of its tensors replaced."""
    return _map_values(batch, lambda value: new if value is old else value)


def repeated(batch: Batch, times: int) -> Batch:
    """Return a batch repeated along its samples: all of them, then all of them again."""
    size = samples_of(batch)

    def again(value: Any) -> Any:
        own = isinstance(value, Tensor) and value.ndim and len(value) == size
        return torch.cat([value] * times) if own else value

    return _map_values(batch, again)


def _map_values(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    """Apply a function to every value of a batch."""
    if isinstance(batch, Tensor):
        result: Batch = change(batch)
        return result
    if isinstance(batch, Mapping):
        return {name: _map_value(value, change) for name, value in batch.items()}
    return tuple(_map_value(value, change) for value in batch)


def _map_value(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to a value, or to the values of a dictionary."""
    return _map_values(value, change) if isinstance(value, Mapping) else change(value)


def _part(batch: Mapping[str, Any], rows: slice, whole: int) -> Batch:
    """Return some rows of every tensor that has one entry per sample; all else is unchanged."""

    def own(value: Any) -> Any:
        return value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == whole else value

    return _map_values(batch, own)


def moved(batch: Batch, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
    """Move the tensors of a batch to a device; floating-point ones also to a dtype."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    return _map_values(batch, one)


def tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch, in its order."""
    return [value for _, value in entries(batch) if isinstance(value, Tensor)]


def entries(batch: Batch) -> list[tuple[str | int, Any]]:
    """Return the values of a batch by name or position, in order; a dictionary inside contributes its own entries."""
    if isinstance(batch, Tensor):
        return [(0, batch)]
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return [
        entry
        for name, value in named
        for entry in (entries(value) if isinstance(value, Mapping) else [(name, value)])
    ]
