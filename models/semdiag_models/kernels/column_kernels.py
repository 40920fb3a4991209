"""Kernels that Numba compiles: the largest scores of many queries side by side, all others struck out.

Imported only where Numba is installed, and where there are many queries. They run in the caller's thread alone.
"""

import numpy as np
from torch import Tensor

from semdiag_models.kernels.largest_kernels import INF, ONE, ZERO, Floats, kernel, part

_COLUMNS = 128  # queries that are looked at together: what is kept of them stays in the nearest cache


def keep_largest(scores: Tensor, count: int) -> bool:
    """Put -∞ in the place of all scores but each query's largest; what is -∞ among them, or NaN, stays.

    Args:
        scores: (keys, queries) float32 on a processor, key by key in memory.
        count: how many to keep, at most as many as there are keys.

    Returns:
        Whether these are so many: false if scores are as large as the last one kept, and stay, too.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[1.0, 5.0], [3.0, 5.0], [2.0, 4.0]])
        >>> keep_largest(scores, 1), scores.tolist()
        (False, [[-inf, 5.0], [3.0, 5.0], [-inf, -inf]])
    """
    return bool(_keep(scores.numpy(), count))


@part
def _sink(values: Floats, highest: Floats) -> None:
    """Keep the larger of both in ``highest`` and the smaller in ``values``."""
    for lane in range(len(values)):
        one, other = highest[lane], values[lane]
        highest[lane] = one if one > other else other
        values[lane] = other if one > other else one


@kernel("boolean(float32[:, ::1], int64)")
def _keep(scores: Floats, count: int) -> bool:
    highest, memory = np.empty((count, _COLUMNS), np.float32), np.empty(_COLUMNS, np.float32)
    exact = True
    for start in range(0, scores.shape[1], _COLUMNS):
        width = min(_COLUMNS, scores.shape[1] - start)
        values, bound = memory[:width], highest[count - 1, :width]
        highest[:] = -INF
        for key in range(len(scores)):
            values[:] = scores[key, start : start + width]
            for rank in range(count):
                _sink(values, highest[rank, :width])
        values[:] = ZERO
        for key in range(len(scores)):
            row = scores[key, start : start + width]
            for lane in range(width):
                values[lane] += ONE if row[lane] >= bound[lane] else ZERO
                row[lane] = -INF if row[lane] < bound[lane] else row[lane]
        for lane in range(width):
            exact &= values[lane] == count or bound[lane] == -INF
    return exact
