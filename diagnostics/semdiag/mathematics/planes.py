"""Planes in parameter space: along random directions as long as each tensor, or through three points."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Plane:
    """The points origin + x · first + y · second.

    Attributes:
        origin: (n,), all parameters in one vector.
        first: (n,), the direction of x.
        second: (n,), the direction of y.
    """

    origin: Tensor
    first: Tensor
    second: Tensor

    def point(self, x: float, y: float) -> Tensor:
        """Return the parameters at (x, y), shape (n,)."""
        return self.origin + x * self.first + y * self.second

    def distances(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the Euclidean length of x · first + y · second.

        Args:
            x: (...), on any device.
            y: (...), on the same device.

        Returns:
            (...) float64, ≥ 0, in units of the parameters.
        """
        first, second = self.first.double(), self.second.double()
        one, both, other = (float(a.dot(b)) for a, b in ((first, first), (first, second), (second, second)))
        x, y = x.double(), y.double()
        return (x**2 * one + 2 * x * y * both + y**2 * other).clamp(min=0).sqrt()


def random_direction(origin: Tensor, tensors: Sequence[slice], generator: torch.Generator) -> Tensor:
    """Return a Gaussian direction whose part in each tensor has that tensor's norm.

    Moving along it by r changes every tensor by r times its Frobenius norm, whatever its scale.

    Source: docs/theory.md#empirical. Deviation: none (the paper also scales tensor by tensor).

    Args:
        origin: (n,), all parameters in one vector.
        tensors: where each tensor lies in it.
        generator: on the CPU; the same draw whatever the device and precision of the origin.

    Returns:
        (n,); zero for a zero tensor, and outside the tensors.

    Example:
        >>> origin = torch.tensor([3.0, 4.0, 0.0, 0.0])
        >>> d = random_direction(origin, [slice(0, 2), slice(2, 4)], torch.Generator().manual_seed(0))
        >>> round(d[:2].norm().item(), 4), d[2:].any().item()
        (5.0, False)
    """
    drawn = _gaussian(origin, generator)
    return _as_long_as(origin, drawn, tensors)


def random_plane(origin: Tensor, tensors: Sequence[slice], generator: torch.Generator) -> Plane:
    """Return a plane through the origin along two of :func:`random_direction`, orthogonal in every tensor.

    A circle in (x, y) is then a circle in parameter space: the distance is hypot(x, y) · ‖origin‖. A tensor of
    a single number has no orthogonal direction; the second one does not move it.

    Source: docs/theory.md#empirical. Deviation: the second direction is made orthogonal to the first.

    Args:
        origin: (n,), all parameters in one vector.
        tensors: where each tensor lies in it.
        generator: on the CPU.
    """
    first = random_direction(origin, tensors, generator)
    drawn = _gaussian(origin, generator)
    for part in tensors:
        square = first[part].dot(first[part])
        if part.stop - part.start == 1:
            drawn[part] = 0
        elif square > 0:
            drawn[part] -= drawn[part].dot(first[part]) / square * first[part]
    return Plane(origin, first, _as_long_as(origin, drawn, tensors))


def plane_through(origin: Tensor, one: Tensor, other: Tensor) -> tuple[Plane, list[tuple[float, float]]]:
    """Return the plane through three points, in coordinates with the origin's length as unit.

    Source: docs/theory.md#empirical. Deviation: not in the paper.

    Args:
        origin: (n,), the point at (0, 0).
        one: (n,), which lies on the x axis.
        other: (n,), a third point.

    Returns:
        The plane, and the coordinates of ``one`` and ``other``.

    Raises:
        ValueError: if the points lie on a line.

    Example:
        >>> plane, places = plane_through(*torch.tensor([[0.0, 2.0], [4.0, 2.0], [0.0, 8.0]]))
        >>> places
        [(2.0, 0.0), (0.0, 3.0)]
    """
    length = float(origin.norm()) or 1.0
    along = one - origin
    across = other - origin
    distance = float(along.norm())
    if distance == 0:
        raise ValueError("Three points on a line span no plane: the first two coincide.")
    first = along / distance
    x = float(across.dot(first))
    across = across - x * first
    height = float(across.norm())
    if height <= 1e-6 * float((other - origin).norm()):
        raise ValueError("Three points on a line span no plane: two coincide, or all three are collinear.")
    plane = Plane(origin, first * length, across / height * length)
    return plane, [(distance / length, 0.0), (x / length, height / length)]


def _gaussian(origin: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(origin.shape, generator=generator, dtype=torch.float64).to(origin)


def _as_long_as(origin: Tensor, drawn: Tensor, tensors: Sequence[slice]) -> Tensor:
    """Scale each tensor's part to that tensor's norm."""
    scaled = torch.zeros_like(origin)
    for part in tensors:
        length = drawn[part].norm()
        if length > 0:
            scaled[part] = drawn[part] * (origin[part].norm() / length)
    return scaled
