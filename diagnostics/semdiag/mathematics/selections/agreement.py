"""How far two selections of the same rows agree."""

import torch
from torch import Tensor


def without_repeats(indices: Tensor) -> Tensor:
    """Replace repeated and negative indices in each row by -1.

    Args:
        indices: int64 (rows, k).

    Example:
        >>> without_repeats(torch.tensor([[4, 2, 4, -1]])).tolist()
        [[4, 2, -1, -1]]
    """
    ordered, places = indices.sort(dim=1, stable=True)
    again = torch.zeros_like(indices, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return indices.masked_fill(torch.zeros_like(again).scatter_(1, places, again) | (indices < 0), -1)


def places_in(keys: Tensor, others: Tensor) -> Tensor:
    """Return the position of each key among the other row's keys, -1 if it is absent.

    Args:
        keys: int64 (rows, k), distinct in a row, -1 for none.
        others: int64 (rows, m), distinct in a row, -1 for none.

    Example:
        >>> places_in(torch.tensor([[4, 2, -1]]), torch.tensor([[7, 4, -1]])).tolist()
        [[1, -1, -1]]
    """
    ordered, places = others.sort(dim=1)
    at = torch.searchsorted(ordered.contiguous(), keys.contiguous()).clamp(max=others.shape[1] - 1)
    return places.gather(1, at).where((ordered.gather(1, at) == keys) & (keys >= 0), -1)


def overlaps(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the overlap of each row's two sets of keys, and how far their common keys moved.

    Formula: |A ∩ B| / max(|A|, |B|), 1 if both are empty; and the mean of |place in A − place in B| over A ∩ B,
    NaN if that is empty.

    Source: not in the paper. Deviation: none.

    Args:
        first: int64 (rows, k), A, distinct in a row, -1 for none.
        second: int64 (rows, k), B, likewise.

    Returns:
        Overlap in [0, 1] and displacement ≥ 0, float64 (rows,).

    Example:
        >>> [part.tolist() for part in overlaps(torch.tensor([[4, 2]]), torch.tensor([[7, 4]]))]
        [[0.5], [1.0]]
    """
    at = places_in(first, second)
    common = at >= 0
    number = common.sum(1)
    larger = torch.maximum((first >= 0).sum(1), (second >= 0).sum(1))
    moved = (at - torch.arange(first.shape[1])).abs().masked_fill(~common, 0).sum(1)
    overlap = torch.where(larger > 0, number.double() / larger, 1.0)
    return overlap, moved.double() / number


def weight_lost(first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
    r"""Return the share of A's weight on keys outside B.

    Formula: Σ_{A \ B} w_j / Σ_A w_j; NaN where A has no weight.

    Source: not in the paper. Deviation: none.

    Args:
        first: int64 (rows, k), A, distinct in a row, -1 for none.
        second: int64 (rows, k), B, likewise.
        weights: (rows, k) ≥ 0, of A's keys.

    Example:
        >>> weight_lost(torch.tensor([[4, 2]]), torch.tensor([[7, 4]]), torch.tensor([[3.0, 1.0]])).tolist()
        [0.25]
    """
    own = weights.double().masked_fill(first < 0, 0)
    return own.masked_fill(places_in(first, second) >= 0, 0).sum(1) / own.sum(1)
