"""Map the axes of a product of weights and values to the axes of the softmax."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.capturing.provenance.axes import Axes, AxisPiece, entries


@dataclass(frozen=True)
class WeightAxes:
    """The pieces of the weights' axes in a product, without the keys'."""

    batch: tuple[AxisPiece, ...]  # pieces of the batch axis, which both factors share
    rows: tuple[AxisPiece, ...]  # pieces of the weights' own axis: queries, and heads that share their values

    @classmethod
    def of(cls, axes: Axes, shape: torch.Size, left: bool) -> "WeightAxes":
        """Read them from the axes and shape of the factor with the weights; ``left`` if it comes first."""
        if len(shape) == 1:
            return cls((), ())
        return cls(axes[0] if len(shape) == 3 else (), axes[-2 if left else -1])

    @property
    def pieces(self) -> tuple[AxisPiece, ...]:
        """All pieces, the slowest first."""
        return (*self.batch, *self.rows)

    def arrange_rows(self, x: Tensor, order: Sequence[int], shape: torch.Size) -> Tensor:
        """Reorder (N, M, D) to (*shape, D); ``order`` lists the softmax's axes without the keys'."""
        width = x.shape[-1]
        x = x.reshape(*[p.size for p in self.pieces], width)
        return x.permute(*_sorted(self.pieces, order), x.ndim - 1).reshape(*shape, width)

    def arrange_values(self, v: Tensor, lead: Sequence[int], query: int | None) -> Tensor:
        """Reorder (N, K, D) to (*lead, K, D); ``lead`` lists the softmax's axes of samples and heads."""
        shared = tuple(p for p in self.rows if p.axis != query)
        kept, (length, width) = (*self.batch, *shared), v.shape[-2:]
        by = _sorted(kept, (*lead,) if query is None else (*lead, query))
        v = v.reshape(*[p.size for p in self.batch], *[1 for _ in shared], length, width)
        v = v.permute(*by, len(kept), len(kept) + 1)
        if entries(self.rows) > 1 and {p.axis for p in self.batch} & {p.axis for p in self.rows}:
            v = v.expand(*[kept[i].size for i in by], length, width)
        sizes = [math.prod(v.shape[j] for j, i in enumerate(by) if kept[i].axis == axis) for axis in lead]
        return v.reshape(*sizes, length, width)


def _sorted(pieces: Sequence[AxisPiece], order: Sequence[int]) -> list[int]:
    """Return the positions of pieces sorted by ``order``, and within an axis the slowest first."""
    rank = {axis: i for i, axis in enumerate(order)}
    return sorted(range(len(pieces)), key=lambda i: (rank[pieces[i].axis], -pieces[i].step))
