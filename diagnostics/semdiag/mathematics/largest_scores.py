"""The largest scores of each row, with a stated rule for ties, and how often each key is among them."""

import math
import sys

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LONG = 256  # scores of a row from which on groups pay
_LAST = 2**31 - 1  # no position is beyond it
_LOW = int(sys.byteorder == "big")  # which half of a whole number is the low one


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
    # As many groups as members of the chosen ones, nearly: powers of two divide most lengths.
    size = 2 ** round(math.log2(length / found) / 2)
    packed = scores.device.type == "cpu" and scores.dtype == torch.float32
    if length >= _LONG and size > 1:
        positions = _grouped(scores, found, size, packed)
    else:
        positions = _largest(scores, None, found, packed)
    values = scores.gather(-1, positions)
    tied = (values[..., 1:] == values[..., :-1]) & (values[..., 1:] > -torch.inf)
    if packed:  # which orders equals by position: only one that is as large as the first left out can be hidden
        tied = tied[..., count - 1 :]
    tied = tied.any(-1)
    if bool(tied.any()):
        positions[tied] = scores[tied].sort(dim=-1, descending=True, stable=True).indices[:, :found]
    if found <= count:
        values = torch.nn.functional.pad(values, (0, count + 1 - found), value=-torch.inf)
        positions = torch.nn.functional.pad(positions, (0, count + 1 - found))
    return values, positions[..., :count]


def add_ranks_(ranks: Tensor, positions: Tensor, present: Tensor) -> None:
    """Count how often each key has each rank.

    Args:
        ranks: (b, H, K, Lk) int32, added to in place.
        positions: (b, H, r, K) int64, position of the key of each rank.
        present: bool, same shape: what counts.
    """
    ones = present.transpose(2, 3).to(torch.int32)
    ranks.scatter_add_(-1, positions.transpose(2, 3), ones)


def _grouped(scores: Tensor, count: int, size: int, packed: bool) -> Tensor:
    """Positions of the largest scores through the maxima of groups; what fills no group is searched, too."""
    length = scores.shape[-1]
    groups = length // size
    maxima = torch.unflatten(scores[..., : size * groups], -1, (size, groups)).amax(-2)
    chosen = _some_of_the_largest(maxima, count, packed)
    members = chosen[..., None] + groups * torch.arange(size, device=scores.device, dtype=chosen.dtype)
    rest = torch.arange(size * groups, length, device=scores.device, dtype=chosen.dtype)
    candidates = torch.cat([members.flatten(-2), rest.expand(*scores.shape[:-1], -1)], -1)
    return _largest(scores.gather(-1, candidates.long()), candidates, count, packed)


def _some_of_the_largest(scores: Tensor, count: int, packed: bool) -> Tensor:
    """Positions of the largest scores, in any order."""
    if not packed:
        return scores.topk(count, -1, sorted=False).indices
    numbers = _numbers(scores, torch.arange(scores.shape[-1], dtype=torch.int32))
    first = numbers.shape[-1] - count
    numbers.partition(first, -1)
    return _LAST - torch.from_numpy(numbers[..., first:].view(np.int32)[..., _LOW::2])


def _largest(scores: Tensor, positions: Tensor | None, count: int, packed: bool) -> Tensor:
    """Positions of the largest scores, the largest first; packed: of equals the lower position first."""
    if not packed:
        best = scores.topk(count, -1).indices
        return best if positions is None else positions.gather(-1, best)
    if positions is None:
        positions = torch.arange(scores.shape[-1], dtype=torch.int32)
    numbers = _numbers(scores, positions)
    first = numbers.shape[-1] - count
    numbers.partition(first, -1)
    best_numbers = np.sort(numbers[..., first:], -1)[..., ::-1]
    return torch.from_numpy(_LAST - (best_numbers & (2**32 - 1)))


def _numbers(scores: Tensor, positions: Tensor) -> NDArray[np.int64]:
    """Scores as whole numbers: 32 bits of the score in its order, 32 bits of the position from the end.

    NumPy sorts whole numbers with vector instructions, several times faster than topk.
    """
    numbers = torch.empty(scores.shape, dtype=torch.int64)
    halves = torch.unflatten(numbers.view(torch.int32), -1, (-1, 2))
    bits = scores.add(0.0).view(torch.int32)  # adding 0 turns -0 into 0
    # Negative floats are ordered the wrong way round.
    torch.bitwise_xor(bits, (bits >> 31).bitwise_and_(_LAST), out=halves[..., 1 - _LOW])
    halves[..., _LOW] = _LAST - positions
    array: NDArray[np.int64] = numbers.numpy()
    return array
