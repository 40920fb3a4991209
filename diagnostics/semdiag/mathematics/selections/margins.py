"""The margins of a selection, and whether rounding its scores could change it."""

import torch
from torch import Tensor

from semdiag.mathematics.selections.number_formats import NumberFormat, may_swap


@torch.no_grad()
def margins(scores: Tensor, k: int, kind: NumberFormat) -> tuple[Tensor, Tensor]:
    """Return the margin of each row's top-k, and whether it is certified.

    Formula: margin Δ = z_(k) − z_(k+1), scores in descending order. Certified: Δ > u(|z_(k)| + |z_(k+1)|) + 2η, u
        = 2^−p and η half the smallest subnormal number of the format. Then the k largest are the same keys after
        every
    score is rounded once to the format. A row that leaves out no key with a finite score, or keeps only infinite
    ones, decides nothing: its margin is +∞, and it is certified.

    Source: docs/theory.md#rounded-scores; not in the paper. Deviation: none.

    Args:
        scores: (rows, n), not NaN; -inf, or less than half the lowest number of its dtype, if a mask forbids the
            key.
        k: at least 1.
        kind: the format.

    Returns:
        float64 (rows,) and bool (rows,).

    Example:
        >>> from semdiag.mathematics.selections.number_formats import FORMATS
        >>> rows = torch.tensor([[3.0, 1.0, 2.0], [3.0, 2.0, 2.001], [3.0, 2.0, -torch.inf]])
        >>> margins(rows, 2, FORMATS["bfloat16"])[1].tolist()
        [True, False, True]
    """
    endless = torch.full((len(scores),), torch.inf, dtype=torch.float64, device=scores.device)
    if k >= scores.shape[1]:
        return endless, torch.ones_like(endless, dtype=torch.bool)
    largest = scores.topk(k + 1, 1).values
    forbidden = largest[:, k] <= torch.finfo(scores.dtype).min / 2
    last, after = largest[:, k - 1].double(), largest[:, k].double()
    idle = forbidden | ((last == torch.inf) & (after < torch.inf))
    margin = torch.where(last == after, 0.0, last - after)
    return torch.where(idle, endless, margin), idle | ~may_swap(after, last, kind)
