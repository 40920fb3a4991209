"""Random planes in parameter space, with each tensor's part as long as the tensor; unravelled indices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Plane:
    """The points origin + x · first + y · second."""

    origin: Tensor  # (n,), vector of all parameters
    first: Tensor  # (n,), direction of x
    second: Tensor  # (n,), direction of y

    def point(self, x: float, y: float) -> Tensor:
        """Return the parameters at (x, y), shape (n,)."""
        return self.origin + x * self.first + y * self.second

    def distances(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the Euclidean lengths (...) of x · first + y · second, float64, in the parameters' unit."""
        first = self.first.double()
        second = self.second.double()
        first_square, product, second_square = (
            float(a.dot(b)) for a, b in ((first, first), (first, second), (second, second))
        )
        x = x.double()
        y = y.double()
        return (x**2 * first_square + 2 * x * y * product + y**2 * second_square).clamp(min=0).sqrt()


def random_direction(origin: Tensor, tensors: Sequence[slice], generator: torch.Generator) -> Tensor:
    """Return a Gaussian direction (n,) whose part in each tensor has the tensor's norm; zero outside the tensors.

    Moving along it by r changes every tensor by r times its Frobenius norm. The generator is on the CPU, so that
    draws depend on neither the device nor the precision of the origin, the vector of all parameters.

    Source: docs/theory.md#empirical. Deviation: none (the paper also scales tensor by tensor).

    Example:
        >>> origin = torch.tensor([3.0, 4.0, 0.0, 0.0])
        >>> d = random_direction(origin, [slice(0, 2), slice(2, 4)], torch.Generator().manual_seed(0))
        >>> round(d[:2].norm().item(), 4), d[2:].any().item()
        (5.0, False)
    """
    return _as_long_as(origin, _gaussian(origin, generator), tensors)


def random_plane(origin: Tensor, tensors: Sequence[slice], generator: torch.Generator) -> Plane:
    """Return a plane through the origin along two of :func:`random_direction`, orthogonal in every tensor.

    The distance from the origin is hypot(x, y) · ‖origin‖. The second direction leaves tensors of a single number.

    Source: docs/theory.md#empirical. Deviation: the second direction is made orthogonal to the first.
    """
    first = random_direction(origin, tensors, generator)
    direction = _gaussian(origin, generator)
    for part in tensors:
        square = first[part].dot(first[part])
        if part.stop - part.start == 1:
            direction[part] = 0
        elif square > 0:
            direction[part] -= direction[part].dot(first[part]) / square * first[part]
    return Plane(origin, first, _as_long_as(origin, direction, tensors))


def _gaussian(origin: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(origin.shape, generator=generator, dtype=torch.float64).to(origin)


def _as_long_as(origin: Tensor, direction: Tensor, tensors: Sequence[slice]) -> Tensor:
    scaled = torch.zeros_like(origin)
    for part in tensors:
        length = direction[part].norm()
        if length > 0:
            scaled[part] = direction[part] * (origin[part].norm() / length)
    return scaled


def unraveled(flat: Tensor, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Return ``torch.unravel_index`` without its argument checks, which import sympy (half a second)."""
    places = np.unravel_index(flat.numpy(), tuple(shape))
    return tuple(torch.from_numpy(each).to(device, non_blocking=True) for each in places)
