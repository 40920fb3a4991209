"""The largest scores of each row, with a stated rule for ties, and how often each key is among them."""

import math

import numpy as np
import torch
from torch import Tensor

_LONG = 256  # scores of a row from which on groups pay
_LOW = 2**32 - 1


def largest_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count + 1`` largest scores of each row and where the first ``count`` of them stand.

    Of equal scores the one at the lower position comes first. Long rows are cut into groups of every G-th
    score: the largest scores lie in as many groups, those with the largest maxima, so only these are searched.
    Where equal scores are found others could hide in the remaining groups: such rows are sorted instead.

    Source: none; exact, whatever the grouping. Deviation: none.

    Args:
        scores: (..., n), nats; -inf where there is no key.
        count: at least 1.

    Returns:
        Values (..., count + 1), -inf beyond the number of keys, and int64 positions (..., count), where any
        position stands beyond the number of keys.

    Example:
        >>> values, positions = largest_scores(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2)
        >>> values.tolist(), positions.tolist()
        ([[3.0, 3.0, 2.0]], [[1, 2]])
    """
    length = scores.shape[-1]
    found = min(count + 1, length)
    size = math.isqrt(length // found)  # of a group: as many groups as members of the chosen ones
    grouped = length >= _LONG and size > 1
    values, positions = _grouped(scores, found, size) if grouped else _largest(scores, found)
    tied = ((values[..., 1:] == values[..., :-1]) & (values[..., 1:] > -torch.inf)).any(-1)
    if bool(tied.any()):
        positions[tied] = scores[tied].sort(dim=-1, descending=True, stable=True).indices[:, :found]
    if found <= count:
        values = torch.nn.functional.pad(values, (0, count + 1 - found), value=-torch.inf)
        positions = torch.nn.functional.pad(positions, (0, count + 1 - found))
    return values, positions[..., :count]


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
    _, chosen = _largest(maxima, count)
    members = chosen[..., None] + groups * torch.arange(size, device=scores.device)
    rest = torch.arange(size * groups, length, device=scores.device).expand(*scores.shape[:-1], -1)
    candidates = torch.cat([members.flatten(-2), rest], -1)
    values, places = _largest(scores.gather(-1, candidates), count)
    return values, candidates.gather(-1, places)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores and their positions, in any order among equals."""
    if scores.device.type != "cpu" or scores.dtype != torch.float32:
        best = scores.topk(count, -1)
        return best.values, best.indices
    # NumPy sorts whole numbers with vector instructions, several times faster than topk: number = (score as an
    # ordered whole number, 32 bits; position, 32 bits). Negative floats are ordered the wrong way round.
    bits = scores.view(torch.int32).to(torch.int64)
    bits ^= (bits >> 31) & (2**31 - 1)
    bits = bits.mul_(2**32).add_(torch.arange(scores.shape[-1]))
    first = scores.shape[-1] - count
    numbers = bits.numpy()
    numbers.partition(first, -1)
    best_numbers = np.sort(numbers[..., first:], -1)[..., ::-1] & _LOW
    positions = torch.from_numpy(best_numbers)
    return scores.gather(-1, positions), positions
