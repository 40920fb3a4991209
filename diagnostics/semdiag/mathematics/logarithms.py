"""Arithmetic on natural logarithms: exp(δ) overflows at δ = 710, and real checkpoints go far enough."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Real: TypeAlias = Tensor | float | Sequence[float]


def float64(value: Real) -> Tensor:
    """Convert a number, a sequence of numbers or a tensor of any dtype to a float64 tensor.

    Args:
        value: the number(s); a tensor keeps its device, which must support float64 (CPU or CUDA).

    Returns:
        The same values, float64.

    Example:
        >>> float64([1, 2])
        tensor([1., 2.], dtype=torch.float64)
    """
    return torch.as_tensor(value, dtype=torch.float64)


def broadcast(*values: Real) -> tuple[Tensor, ...]:
    """Convert numbers and tensors to float64 and one shape.

    Args:
        values: to be combined elementwise.

    Returns:
        One float64 tensor per value, all of the broadcast shape and on one device: that of the first that is not
        on the CPU, where numbers and constants are made.

    Example:
        >>> broadcast([1.0, 2.0], 5)[1]
        tensor([5., 5.], dtype=torch.float64)
    """
    tensors = [float64(value) for value in values]
    shape = np.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    return tuple(tensor.to(device).expand(shape) for tensor in tensors)


def log(value: Real) -> Tensor:
    """Return the natural logarithm in float64, with ln 0 = −inf.

    Args:
        value: non-negative number(s).

    Returns:
        ln value, same shape.

    Example:
        >>> log([0.0, 1.0])
        tensor([-inf, 0.], dtype=torch.float64)
    """
    return float64(value).log()


def log_sum(*terms: Tensor) -> Tensor:
    """Return the logarithm of a sum of terms given by their logarithms, elementwise: ln Σ exp(term).

    Args:
        terms: natural logarithms, at least one; −inf stands for 0.

    Returns:
        The logarithm of the sum, in the broadcast shape.

    Example:
        >>> log_sum(log(1.0), log(2.0), log(0.0)).exp()
        tensor(3.0000, dtype=torch.float64)
    """
    total = terms[0]
    for term in terms[1:]:
        total = torch.logaddexp(total, term)
    return total


def log_product(*factors: Tensor) -> Tensor:
    """Return the logarithm of a product of constants given by their logarithms, with 0 · ∞ = 0.

    A constant 0 means that nothing moves; then nothing moves afterwards either, whatever the other constants are.

    Args:
        factors: natural logarithms, at least one; −inf stands for 0 and +inf for no guarantee.

    Returns:
        The logarithm of the product, in the broadcast shape.

    Example:
        >>> log_product(float64([-math.inf, 1.0]), float64(math.inf))
        tensor([-inf, inf], dtype=torch.float64)
    """
    total = factors[0]
    for factor in factors[1:]:
        nothing = (total == -math.inf) | (factor == -math.inf)
        total = torch.where(nothing, -math.inf, total + factor)
    return total


def log_one_plus_inverse(value: Tensor) -> Tensor:
    """Return ln(1 + 1/x), even if 1/x overflows; 0 at x = +inf and +inf at x = 0.

    Args:
        value: x ≥ 0, float64.

    Returns:
        ln(1 + 1/x), same shape.

    Example:
        >>> log_one_plus_inverse(float64([1e-9, 1.0, float("inf")]))
        tensor([20.7233,  0.6931,  0.0000], dtype=torch.float64)
    """
    return torch.logaddexp(torch.zeros_like(value), -value.log())


def log_root_sum_squares(values: Tensor, dim: int = -1) -> Tensor:
    """Return the root of the sum of squares of constants given by their logarithms: ln sqrt(Σ exp(2·value)).

    Args:
        values: natural logarithms.
        dim: the dimension to sum over.

    Returns:
        The logarithm of the root of the sum of squares, without that dimension.

    Example:
        >>> log_root_sum_squares(log([3.0, 4.0])).exp()
        tensor(5.0000, dtype=torch.float64)
    """
    return 0.5 * torch.logsumexp(2 * values, dim=dim)


def log_one_plus(log_value: Tensor) -> Tensor:
    """Return ln(1 + x) for a quantity given by ln x, as for a residual connection.

    Args:
        log_value: ln x, float64.

    Returns:
        ln(1 + x), same shape.

    Example:
        >>> log_one_plus(float64([-float("inf"), 1000.0]))
        tensor([   0., 1000.], dtype=torch.float64)
    """
    return torch.logaddexp(torch.zeros_like(log_value), log_value)
