"""How steep the loss is between two parameter settings: secants on circles in random planes, and on lines."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semdiag.mathematics.planes import random_direction, random_plane
from semdiag.measuring.encoders.movable import MovableEncoder

LINES = 4  # random lines through the checkpoint for each group of tensors
GROUPS = ("qk", "value-output", "mlp-in", "mlp-out", "embedding", "head")
Row = dict[str, Any]
Loss = Callable[[Tensor], float]


def radii(largest: float, count: int = 7) -> tuple[float, ...]:
    """Return radii that double up to the largest."""
    return tuple(largest * 2.0**-power for power in range(count - 1, -1, -1))


def plane_secants(
    moved: MovableEncoder, loss: Loss, sizes: Sequence[float], planes: int, directions: int, seed: int
) -> Iterator[Row]:
    """Yield secants between all pairs of the checkpoint and evenly spaced points on circles around it."""
    generator = torch.Generator().manual_seed(seed)
    start = loss(moved.origin)
    angles = 2 * np.pi * np.arange(directions) / directions
    for draw in range(planes):
        plane = random_plane(moved.origin, moved.slices(), generator)
        for radius in sizes:
            places = radius * np.stack([np.cos(angles), np.sin(angles)], 1)
            values = np.array([start, *(loss(plane.point(float(x), float(y))) for x, y in places)])
            places = np.vstack([np.zeros(2), places])
            pairs = np.array(list(itertools.combinations(range(len(places)), 2)))
            one, other = pairs.T
            apart = torch.from_numpy(places[one] - places[other])
            distances = plane.distances(apart[:, 0], apart[:, 1]).cpu().numpy()
            changes = np.abs(values[one] - values[other])
            for distance, change in zip(distances, changes, strict=True):
                yield _row("all", draw, radius, float(distance), float(change))


def line_secants(moved: MovableEncoder, loss: Loss, sizes: Sequence[float], seed: int) -> Iterator[Row]:
    """Yield secants on random lines along which one group of tensors moves and the others stay."""
    generator = torch.Generator().manual_seed(seed)
    start = loss(moved.origin)
    for group, draw in itertools.product(GROUPS, range(LINES)):
        direction = random_direction(moved.origin, moved.slices(group), generator)
        length = float(direction.norm())
        if length == 0:
            continue
        for radius in sizes:
            ends = [loss(moved.origin + sign * radius * direction) for sign in (1, -1)]
            for end in ends:
                yield _row(group, draw, radius, radius * length, abs(end - start))
            yield _row(group, draw, radius, 2 * radius * length, abs(ends[0] - ends[1]))


def _row(group: str, draw: int, radius: float, distance: float, change: float) -> Row:
    slope = change / distance if distance > 0 else float("nan")
    return {"group": group, "draw": draw, "radius": radius, "distance": distance, "slope": slope}
