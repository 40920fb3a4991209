"""The axes of a softmax in a product of its weights and values, and the product's tensors in their order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.capturing.following.axes import Axes, Axis, total


@dataclass(frozen=True)
class WeightAxes:
    """What the axes of weights are made of in a product, but for that of the keys.

    Attributes:
        batch: pieces of the axis that the product shares between its factors.
        rows: pieces of the axis that the weights have alone: queries, and heads that share their values.
    """

    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]

    @classmethod
    def of(cls, axes: Axes, shape: torch.Size, left: bool) -> "WeightAxes":
        """Read them off the axes of the factor that holds the weights, and its shape; ``left`` if it is first."""
        if len(shape) == 1:
            return cls((), ())
        return cls(axes[0] if len(shape) == 3 else (), axes[-2 if left else -1])

    @property
    def pieces(self) -> tuple[Axis, ...]:
        """All of them, the slowest first."""
        return (*self.batch, *self.rows)

    def arrange_rows(self, x: Tensor, order: Sequence[int], shape: torch.Size) -> Tensor:
        """Bring (N, M, D) into (*shape, D), where ``order`` has the softmax's axes, but that of the keys."""
        width = x.shape[-1]
        x = x.reshape(*[p.size for p in self.pieces], width)
        return x.permute(*_sorted(self.pieces, order), x.ndim - 1).reshape(*shape, width)

    def arrange_values(self, v: Tensor, lead: Sequence[int], query: int | None) -> Tensor:
        """Bring (N, K, D) into (*lead, K, D), where ``lead`` has the softmax's axes of samples and heads.

        Axes of heads that share their values have one entry, unless others of these heads are in the batch.
        """
        shared = tuple(p for p in self.rows if p.place != query)
        kept, (length, width) = (*self.batch, *shared), v.shape[-2:]
        by = _sorted(kept, (*lead,) if query is None else (*lead, query))
        v = v.reshape(*[p.size for p in self.batch], *[1 for _ in shared], length, width)
        v = v.permute(*by, len(kept), len(kept) + 1)
        if total(self.rows) > 1 and {p.place for p in self.batch} & {p.place for p in self.rows}:
            v = v.expand(*[kept[i].size for i in by], length, width)
        sizes = [math.prod(v.shape[j] for j, i in enumerate(by) if kept[i].place == place) for place in lead]
        return v.reshape(*sizes, length, width)


def _sorted(pieces: Sequence[Axis], order: Sequence[int]) -> list[int]:
    """Positions of pieces, those of the first axis first; of one axis, the slowest first."""
    rank = {place: i for i, place in enumerate(order)}
    return sorted(range(len(pieces)), key=lambda i: (rank[pieces[i].place], -pieces[i].step))
