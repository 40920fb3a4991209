"""Which axes of products run over positions, and which over features: what tells attention from other products."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Extent(NamedTuple):
    """An axis of a product, or a part of one."""

    size: int
    positions: bool | None  # whether it runs over positions; False: over features; None: unknown


Side = tuple[Extent, ...]  # the parts of an axis, the slowest first


def over_positions(extents: Iterable[Extent]) -> bool | None:
    """Return whether an axis runs over positions, by all that is known of it: one sign of positions is enough."""
    evidence = {extent.positions for extent in extents}
    if True in evidence:
        return True
    return False if False in evidence else None


def extent_of(side: Side, size: int, step: int) -> Extent:
    """Return the extent of ``size`` entries of an axis, ``step`` apart; 0: entries that were selected."""
    covered = []
    below = 1
    for extent in reversed(side):
        above = below * extent.size
        if step == 0 or (below < step * size and step < above):
            covered.append(extent)
        below = above
    return Extent(size, over_positions(covered))


def projected(rows: Side, columns: int, summed: Extent) -> tuple[Side, Side]:
    """Return the sides of a projection: rows are positions, columns features, unless more is known."""
    known_rows = tuple(Extent(extent.size, extent.positions is not False) for extent in rows)
    return known_rows, (Extent(columns, bool(summed.positions)),)


def sums_positions(first: Extent, second: Extent, matrices: int, stream: Sequence[int]) -> bool:
    """Return whether one of the sums of two chained products may run over positions.

    Attention sums over its keys: in the second product, or, if it is linear, in the first. Products that sum over
    heads, streams or coordinates alone mix no positions. Where no projection tells what an axis is, sizes do.

    Args:
        first: the axis that the first product sums over.
        second: the axis of the first product that the second one sums over.
        matrices: number of matrices in the batch of the second product.
        stream: shape (samples, length, …, width) of the running module's input; () if unknown.
    """
    if first.positions or second.positions:
        return True
    samples, length, width = (stream[0], stream[1], stream[-1]) if len(stream) > 2 else (0, 0, 0)
    of_tokens = length > 1 and matrices % (samples * length) == 0
    if of_tokens and first.size == second.size > 1:
        return False  # square matrices of each token are transforms
    if of_tokens and first.size != length and (first.size == 1 or width % first.size == 0):
        first = Extent(first.size, False)  # each token with itself, or parts of its width
    unknown = [extent.size for extent in (first, second) if extent.positions is None]
    return any(size != width or size in (samples, length) for size in unknown)
