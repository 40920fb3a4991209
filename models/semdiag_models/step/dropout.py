"""Draw the dropout of a whole step at once, as positions."""

from itertools import accumulate

import torch
from torch import Tensor

from semdiag_models.dropout import dropped_positions
from semdiag_models.random_state import RandomState, drawing_from

Place = tuple[str, int]  # name and layer


class Drops:
    """Dropped elements of one step, as flat positions by place.

    Args:
        p: probability that an element is dropped; 0 drops and draws nothing.
        sizes: number of elements of one encoder at each place, in drawing order.
        weights: the same for each layer's attention weights, which come last.
        states: of the random generators, one per encoder, advanced by draws; None means the global ones.
        encoders: their number; at each place their elements are concatenated.
        device: of the elements.

    Attributes:
        weights: by layer, then by encoder: positions among the encoder's own attention weights.
    """

    def __init__(
        self,
        p: float,
        sizes: dict[Place, int],
        weights: list[int],
        states: list[RandomState] | None,
        encoders: int,
        device: torch.device,
    ) -> None:
        self._positions: dict[Place, Tensor] = {}
        self.weights: list[list[Tensor]] = []
        self._factor = 1 / (1 - p)
        if p == 0:
            return
        own = list(sizes.values())
        ends = list(accumulate(own + weights))
        drawn = []
        for e in range(encoders):
            with drawing_from(states, e, device):
                positions = dropped_positions(ends[-1], p)
            parts = positions.tensor_split(torch.searchsorted(positions, torch.tensor(ends[:-1])).tolist())
            for j, part in enumerate(parts):
                first = e * own[j] if j < len(own) else 0  # first of the encoder's elements here
                part.sub_((ends[j - 1] if j else 0) - first)
            drawn.append([part.to(device) for part in parts])
        by_place = list(zip(*drawn, strict=True))
        for place, parts in zip(sizes, by_place[: len(own)], strict=True):
            self._positions[place] = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.weights = [list(parts) for parts in by_place[len(own) :]]

    def drop(self, x: Tensor, place: Place, out: Tensor | None = None) -> Tensor:
        """Return x / (1 - p) with zeros where the step drops, in place or in ``out``."""
        drops = self._positions.get(place)
        if drops is None:
            return x
        out = torch.mul(x, self._factor, out=x if out is None else out)
        out.view(-1).index_fill_(0, drops, 0)
        return out
