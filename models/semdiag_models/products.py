"""Matrix products in single precision through oneDNN.

On x86 processors torch leaves such products to MKL, which on those of another vendor than Intel's takes about
twice as long as oneDNN, which torch brings along, too. Both round as float32 does.
"""

from typing import Any

import torch
from torch import Tensor

# Multiplications from which oneDNN's shorter products outweigh its longer calls.
_WORTHWHILE = 2**21
_AVAILABLE = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # this torch has been built with oneDNN
_LINEAR: Any = torch.ops.mkldnn._linear_pointwise if _AVAILABLE else None


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`linear` can be called, and pays: large matrices in float32 on an x86 processor."""
    return (
        x.numel() * weight.shape[0] >= _WORTHWHILE
        and x.ndim == weight.ndim == 2
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and _AVAILABLE
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """Compute onto + x Wᵀ + b, where torch does not differentiate.

    Args:
        x: (N, D) float32 on a processor, as :func:`takes` says.
        weight: (M, D).
        bias: (M,); None: 0.
        onto: (N, M); None: 0.

    Returns:
        (N, M).

    Example:
        >>> import torch
        >>> linear(torch.ones(2, 3), torch.eye(3), torch.ones(3))
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    if onto is None:
        y: Tensor = _LINEAR.default(x, weight, bias, "none", [], "")
    else:
        y = _LINEAR.binary(x, onto, weight, bias, "add")
    return y
