"""The keys that rows of a selection may choose: in the sequence, in the document, not in the future."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag_models import InputError


@dataclass(frozen=True)
class AllowedKeys:
    """The keys that each row may choose, ``first`` ≤ j < ``end``.

    Attributes:
        first: int64 (rows,).
        end: int64 (rows,).
        position: int64 (rows,), of the row's query among the keys; None if unknown, when no key is in the future.
        counts: bool (rows,), False for the rows of padded queries.
    """

    first: Tensor
    end: Tensor
    position: Tensor | None
    counts: Tensor


def allowed_keys(
    rows: tuple[int, ...],
    keys: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    documents: Tensor | None = None,
    causal: bool = False,
) -> AllowedKeys:
    """Return which keys each row may choose.

    The valid keys of a sequence are starts ≤ j < starts + lengths. If queries have positions (with ``causal`` or
    ``documents``), they are the last tokens: query i of q is at n − q + i of n keys; if there are fewer queries
    than keys, and lengths are known, at starts + lengths − q + i, so that the last query is the last valid token.
    A query at a padded position does not count.

    Args:
        rows: the dimensions before the keys, the query's last.
        keys: n.
        lengths: int64, number of valid keys of each sequence: one number; one per entry of the first dimension; or
            with as many dimensions as ``rows``, each of the same size or 1. None means all.
        starts: of the same form, the first valid key, after padding on the left. None means 0.
        documents: int64 (n,), or (batch, n) with the first of ``rows`` as the batch: the document of each token,
            negative for padding; tokens of a document are contiguous.
        causal: whether keys after the query are excluded.

    Raises:
        InputError: if these do not fit together.

    Example:
        >>> allowed_keys((3,), 4, causal=True).end.tolist()  # the last three of four tokens
        [2, 3, 4]
    """
    first = torch.zeros(rows, dtype=torch.int64) if starts is None else _spread(starts, rows, "starts")
    end = torch.full(rows, keys) if lengths is None and starts is None else first.clone()
    if lengths is not None:
        end = first + _spread(lengths, rows, "lengths")
    elif starts is not None:
        end = torch.full(rows, keys)
    if bool(((first < 0) | (end < first) | (end > keys)).any()):
        raise InputError(
            f"lengths and starts must lie within the {keys:,} keys of a row. Got valid keys from "
            f"{int(first.min())} up to {int(end.max())}: do the scores belong to the same tokens?"
        )
    if not causal and documents is None:
        return AllowedKeys(first.flatten(), end.flatten(), None, torch.ones(end.numel(), dtype=torch.bool))
    place = _places(rows, keys, end if lengths is not None else None)
    counts = (place >= first) & (place < end)
    if documents is not None:
        begin, stop = _documents(documents, rows, keys, place.clamp(0, keys - 1))
        counts &= stop > begin
        first, end = torch.maximum(first, begin), torch.minimum(end, stop)
    if causal:
        end = torch.minimum(end, place + 1)
    end = torch.maximum(first, end)
    return AllowedKeys(*(each.expand(rows).flatten() for each in (first, end, place, counts)))


def _spread(numbers: Tensor, rows: tuple[int, ...], name: str) -> Tensor:
    """Expand numbers to one per row."""
    shape = tuple(numbers.shape)
    if numbers.ndim == 1 and numbers.shape[0] == rows[0]:
        numbers = numbers.reshape(-1, *(1 for _ in rows[1:]))
    fits = numbers.ndim == len(rows) and all(map(_fits, numbers.shape, rows))
    if numbers.numel() != 1 and not fits:
        raise InputError(
            f"{name} of shape {shape} do not fit rows of shape {rows}: give one number, one for each of the first "
            f"dimension, or {len(rows)} dimensions of the same sizes or 1."
        )
    return (numbers.reshape(()) if numbers.numel() == 1 else numbers).expand(rows)


def _fits(own: int, wanted: int) -> bool:
    """Return whether a dimension can be expanded to another."""
    return own in (1, wanted)


def _places(rows: tuple[int, ...], keys: int, end: Tensor | None) -> Tensor:
    """Return the position of each row's query among the keys."""
    queries = rows[-1]
    if queries > keys:
        raise InputError(
            f"With a causal or document rule the queries are the last of the keys' tokens, but there are "
            f"{queries:,} queries and {keys:,} keys. The last dimension before the keys must be the query's."
        )
    last = torch.full(rows, keys) if end is None or queries == keys else end
    if bool((last != last[..., :1]).any()):
        raise InputError(
            "lengths differ between the queries of a sequence, so they already say which keys a query may choose. "
            "Leave out the causal and the document rule."
        )
    return last - queries + torch.arange(queries)


def _documents(documents: Tensor, rows: tuple[int, ...], keys: int, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first key and the end of each query's document; none for padding."""
    if tuple(documents.shape) not in ((keys,), (rows[0], keys)):
        raise InputError(
            f"documents must name the document of each of the {keys:,} keys to which it belongs, ({keys},) or "
            f"({rows[0]}, {keys}). Got shape {tuple(documents.shape)}."
        )
    table = documents.reshape(-1, keys)
    new = torch.ones_like(table, dtype=torch.bool)
    new[:, 1:] = table[:, 1:] != table[:, :-1]
    for own, begins in zip(table, new, strict=True):
        runs = own[begins & (own >= 0)]
        if runs.unique().numel() != runs.numel():
            raise InputError("The tokens of a document must be contiguous, but those of one are not.")
    at = torch.arange(keys).expand_as(table)
    begin = torch.where(new, at, 0).cummax(1).values
    closing = torch.cat([new[:, 1:], torch.ones_like(new[:, :1])], 1)
    stop = torch.where(closing, at + 1, keys).flip(1).cummin(1).values.flip(1)
    stop = torch.where(table < 0, begin, stop)
    batch = torch.arange(rows[0]).reshape(-1, *(1 for _ in rows[1:])) if documents.ndim == 2 else torch.tensor(0)
    return begin[batch, place], stop[batch, place]
