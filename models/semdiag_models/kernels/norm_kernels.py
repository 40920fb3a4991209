"""Kernels that Numba compiles: norms of rows, forward and backward, each row read from memory once.

Imported only where Numba is installed, and where there are many rows. They run in the caller's thread alone.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from semdiag_models.kernels.largest_kernels import ONE, ZERO, Floats, U, kernel


def normalise(x: Tensor, y: Tensor, scale: Tensor, eps: float) -> None:
    """Write rows of mean 0 and variance 1, and the factors that made them so.

    Args:
        x: (..., N, D) float32 on a processor, one after the other in memory.
        y: as large; (x − mean) · scale is written here.
        scale: (..., N, 1); (variance + eps)^-½ is written here.
        eps: of the variance.

    Example:
        >>> import torch
        >>> x, y, scale = torch.tensor([[1.0, 3.0]]), torch.empty(1, 2), torch.empty(1, 1)
        >>> normalise(x, y, scale, 0.0)
        >>> y.tolist(), scale.tolist()
        ([[-1.0, 1.0]], [[1.0]])
    """
    _normalise(_rows(x), _rows(y), scale.view(-1).numpy(), eps)


def differentiate(grad: Tensor, y: Tensor, scale: Tensor, out: Tensor, *, keep: bool) -> None:
    """Write scale · (grad − mean(grad) − y · mean(grad · y)), the gradient of what was normalised.

    Args:
        grad: of the norm's output y, (..., N, D).
        y: as :func:`normalise` wrote it.
        scale: likewise.
        out: as large; it may be ``grad``.
        keep: whether what stands in ``out`` is added to it.
    """
    _differentiate(_rows(grad), _rows(y), scale.view(-1).numpy(), _rows(out), float(keep))


def _rows(x: Tensor) -> Floats:
    rows: Floats = x.view(-1, x.shape[-1]).numpy()
    return rows


@kernel("void(float32[:, ::1], float32[:, ::1], float32[::1], float32)")
def _normalise(x: Floats, y: Floats, scale: NDArray[np.float32], eps: float) -> None:
    width, share = U(x.shape[1]), ONE / np.float32(x.shape[1])
    for i in range(U(x.shape[0])):
        total = square = ZERO
        for d in range(width):
            total += x[i, d]
        mean = share * total
        for d in range(width):
            square += (x[i, d] - mean) * (x[i, d] - mean)
        scale[i] = ONE / math.sqrt(share * square + eps)
        for d in range(width):
            y[i, d] = (x[i, d] - mean) * scale[i]


@kernel("void(float32[:, ::1], float32[:, ::1], float32[::1], float32[:, ::1], float32)")
def _differentiate(grad: Floats, y: Floats, scale: NDArray[np.float32], out: Floats, keep: float) -> None:
    width, share = U(y.shape[1]), ONE / np.float32(y.shape[1])
    for i in range(U(y.shape[0])):
        total = along = ZERO
        for d in range(width):
            total += grad[i, d]
            along += grad[i, d] * y[i, d]
        mean, slope, factor = share * total, share * along, scale[i]
        for d in range(width):
            out[i, d] = keep * out[i, d] + factor * (grad[i, d] - mean - slope * y[i, d])
