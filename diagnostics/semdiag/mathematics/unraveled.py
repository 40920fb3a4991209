"""Multi-dimensional indices from flat ones."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def unraveled(flat: Tensor, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Return ``torch.unravel_index`` without its argument checks, which import sympy (half a second).

    Args:
        flat: (N,) int64 on CPU, in [0, product of ``shape``).
        shape: of the tensor.
        device: of the result.

    Returns:
        For each dimension (N,) int64.

    Raises:
        ValueError: if an index is outside the tensor.

    Example:
        >>> unraveled(torch.tensor([0, 5]), (2, 3), torch.device("cpu"))
        (tensor([0, 1]), tensor([0, 2]))
    """
    return tuple(torch.from_numpy(places).to(device) for places in np.unravel_index(flat.numpy(), tuple(shape)))
