"""The largest scores of each row, with a stated rule for ties, and how often each key is among them."""

import math

import torch
from torch import Tensor


def largest_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest scores of each row and where they stand.

    Of equal scores the one at the lower position comes first. Long rows are cut into groups of every G-th
    score: the ``count`` largest scores lie in the ``count`` groups with the largest maxima, so only those
    groups are searched. Ties could hide in the other groups; the rows that have any are sorted instead.

    Source: none; exact, whatever the grouping. Deviation: none.

    Args:
        scores: (..., n); -inf where there is no key. Never NaN for an order to be meaningful.
        count: at least 1.

    Returns:
        Values and int64 positions, (..., count) each; -inf and any position beyond the number of keys.

    Example:
        >>> values, positions = largest_scores(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3)
        >>> values.tolist(), positions.tolist()
        ([[3.0, 3.0, 2.0]], [[1, 2, 3]])
    """
    length = scores.shape[-1]
    found = min(count, length)
    size = math.isqrt(length // found)  # of a group: as many groups as members of the chosen ones
    values, positions = _grouped(scores, found, size) if size > 1 else scores.topk(found, -1)
    tied = ((values[..., 1:] == values[..., :-1]) & (values[..., 1:] > -torch.inf)).any(-1)
    if bool(tied.any()):
        positions[tied] = scores[tied].sort(dim=-1, descending=True, stable=True).indices[:, :found]
    if found < count:
        values = torch.nn.functional.pad(values, (0, count - found), value=-torch.inf)
        positions = torch.nn.functional.pad(positions, (0, count - found))
    return values, positions


def add_ranks_(ranks: Tensor, positions: Tensor, present: Tensor) -> None:
    """Count how often each key has each rank.

    Args:
        ranks: (b, H, K, Lk) int64, added to in place.
        positions: (b, H, r, K) int64, position of the key of each rank.
        present: bool, same shape: what counts.
    """
    ones = present.transpose(2, 3).to(torch.int64)
    ranks.scatter_add_(-1, positions.transpose(2, 3), ones)


def _grouped(scores: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """The largest scores through the maxima of groups of ``size``; what fills no group is searched too."""
    length = scores.shape[-1]
    groups = length // size
    maxima = scores[..., : size * groups].unflatten(-1, (size, groups)).amax(-2)
    chosen = maxima.topk(count, -1, sorted=False).indices
    members = chosen[..., None] + groups * torch.arange(size, device=scores.device)
    rest = torch.arange(size * groups, length, device=scores.device).expand(*scores.shape[:-1], -1)
    candidates = torch.cat([members.flatten(-2), rest], -1)
    best = scores.gather(-1, candidates).topk(count, -1)
    return best.values, candidates.gather(-1, best.indices)
