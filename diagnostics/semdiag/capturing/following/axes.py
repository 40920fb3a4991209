"""Where the axes of a tensor come from: followed through views, so that every entry keeps its place."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Axis(NamedTuple):
    """A piece of an axis of some tensor.

    Attributes:
        origin: number of that tensor; -1 where the axis is nobody's.
        place: which of its axes.
        size: entries.
        step: distance along that axis from one entry to the next; 0 where entries were chosen or moved.
    """

    origin: int
    place: int
    size: int
    step: int


Axes = tuple[tuple[Axis, ...], ...]  # what each axis of a tensor is made of, the slowest piece first


def fresh(shape: Sequence[int], origin: int) -> Axes:
    """The axes of a tensor that is an origin itself; axes of one entry are made of nothing."""
    return tuple((Axis(origin, i, size, 1),) if size != 1 else () for i, size in enumerate(shape))


def regrouped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """The axes after a view of another shape; None if pieces cannot be told apart in it.

    Example:
        >>> regrouped(fresh((2, 3, 4), 0), (6, 4))[0]
        (Axis(origin=0, place=0, size=2, step=1), Axis(origin=0, place=1, size=3, step=1))
    """
    left = [piece for pieces in axes for piece in pieces]
    found = []
    for size in shape:
        taken: list[Axis] = []
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
        found.append(tuple(taken))
    return None if left else tuple(found)


def merged(pieces: Sequence[Axis]) -> tuple[Axis, ...]:
    """Pieces that follow each other on one axis, as one."""
    found: list[Axis] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last and last[:2] == piece[:2] and last.step == piece.step * piece.size:
            found[-1] = piece._replace(size=last.size * piece.size)
        else:
            found.append(piece)
    return tuple(found)


def broadcast(axes: Axes, shape: Sequence[int], result: Sequence[int]) -> Axes | None:
    """The axes of a tensor that was broadcast to a shape; None if it is not."""
    if len(result) < len(shape):
        return None
    axes = ((),) * (len(result) - len(shape)) + axes
    sizes = (1,) * (len(result) - len(shape)) + tuple(shape)
    if any(size not in (1, new) for size, new in zip(sizes, result, strict=True)):
        return None
    return tuple(
        (Axis(-1, i, new, 1),) if size != new else pieces
        for i, (pieces, size, new) in enumerate(zip(axes, sizes, result, strict=True))
    )


def chosen(axes: Axes, shape: Sequence[int], result: Sequence[int]) -> Axes | None:
    """The axes after some entries were chosen, moved or added: those whose length changed are no longer whole."""
    if len(shape) != len(result):
        return None
    return tuple(
        pieces if size == new else tuple(Axis(p.origin, p.place, new, 0) for p in pieces[:1])
        for pieces, size, new in zip(axes, shape, result, strict=True)
    )


def total(pieces: Sequence[Axis]) -> int:
    """Number of entries of pieces together."""
    return math.prod(piece.size for piece in pieces)
