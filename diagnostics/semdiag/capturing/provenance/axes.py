"""Trace which axes of which tensor each axis came from, through views and broadcasts."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class AxisPiece(NamedTuple):
    """A part of an axis that came from one axis of an earlier tensor."""

    origin: int  # number of that tensor; -1 if the entries are copies (broadcast) or come from elsewhere
    axis: int  # which of its axes
    size: int  # number of entries
    step: int  # stride along that axis between neighbouring entries; 0 if entries were selected or reordered


Axes = tuple[tuple[AxisPiece, ...], ...]  # for each axis of a tensor its pieces, slowest first


def own_axes(shape: Sequence[int], origin: int) -> Axes:
    """Return the axes of a tensor that is itself an origin; axes of length 1 have no pieces."""
    return tuple((AxisPiece(origin, i, size, 1),) if size != 1 else () for i, size in enumerate(shape))


def regrouped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Return the axes after a view to another shape; None if the view splits a piece unevenly."""
    left = [piece for pieces in axes for piece in pieces]
    groups = []
    for size in shape:
        taken: list[AxisPiece] = []
        while size > 1 and left:
            piece = left.pop(0)
            if size % piece.size == 0:
                taken.append(piece)
                size //= piece.size
            elif piece.size % size == 0:
                inner = piece.size // size
                taken.append(piece._replace(size=size, step=piece.step * inner))
                left.insert(0, piece._replace(size=inner))
                size = 1
            else:
                return None
        if size > 1:
            return None
        groups.append(tuple(taken))
    return None if left else tuple(groups)


def merged(pieces: Sequence[AxisPiece]) -> tuple[AxisPiece, ...]:
    """Join neighbouring pieces of one axis where they are contiguous."""
    joined: list[AxisPiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last[:2] == piece[:2] and last.step == piece.step * piece.size:
            joined[-1] = piece._replace(size=last.size * piece.size)
        else:
            joined.append(piece)
    return tuple(joined)


def broadcast(axes: Axes, shape: Sequence[int], result: Sequence[int]) -> Axes | None:
    """Return the axes after broadcasting to ``result``; None if ``shape`` cannot be broadcast to it."""
    if len(result) < len(shape):
        return None
    axes = ((),) * (len(result) - len(shape)) + axes
    sizes = (1,) * (len(result) - len(shape)) + tuple(shape)
    if any(size not in (1, new) for size, new in zip(sizes, result, strict=True)):
        return None
    return tuple(
        (AxisPiece(-1, i, new, 1),) if size != new else pieces
        for i, (pieces, size, new) in enumerate(zip(axes, sizes, result, strict=True))
    )


def selected(axes: Axes, shape: Sequence[int], result: Sequence[int]) -> Axes | None:
    """Return the axes after indexing or padding: an axis whose length changed is no longer whole."""
    if len(shape) != len(result):
        return None
    return tuple(
        pieces if size == new else tuple(AxisPiece(p.origin, p.axis, new, 0) for p in pieces[:1])
        for pieces, size, new in zip(axes, shape, result, strict=True)
    )


def entries(pieces: Sequence[AxisPiece]) -> int:
    """Return the number of entries of all pieces together."""
    return math.prod(piece.size for piece in pieces)
