"""The largest scores of each row, with a stated rule for ties, and how often each key is among them."""

import math
import sys

import torch
from torch import Tensor

_LONG = 256  # row length from which a rough choice before sorting pays
_GROUPED = 1024  # the same in groups, in single precision on the CPU, where choosing is cheap
_MORE = 4  # extra choices, so that nearly equal scores rarely leave a row in doubt
_LAST = 2**31 - 1  # no position is beyond it
_LOW = int(sys.byteorder == "big")  # index of the low half of an integer


def largest_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count + 1`` largest scores of each row, and the positions of the first ``count``.

    Of equal scores the one at the lower position comes first. Long rows are cut into groups of every G-th
    score: the largest scores lie in as many groups, those with the largest maxima, so only these are searched.
        Rows
    in which an omitted score may be as large as a chosen one are sorted instead.

    Source: none; exact, whatever the grouping. Deviation: none.

    Args:
        scores: (..., n), nats; -inf where there is no key.
        count: at least 1.

    Returns:
        Values (..., count + 1), -inf beyond the number of keys, and int64 positions (..., count), arbitrary beyond
        the number of keys.

    Example:
        >>> values, positions = largest_scores(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2)
        >>> values.tolist(), positions.tolist()
        ([[3.0, 3.0, 2.0]], [[1, 2]])
    """
    kept = min(count + 1, scores.shape[-1])
    packed = scores.device.type == "cpu" and scores.dtype == torch.float32
    positions, doubtful = (_packed if packed else _compared)(scores, kept)
    if doubtful is not None and bool(doubtful.any()):
        positions[doubtful] = scores[doubtful].sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    values = scores.gather(-1, positions)
    if kept <= count:
        values = torch.nn.functional.pad(values, (0, count + 1 - kept), value=-torch.inf)
        positions = torch.nn.functional.pad(positions, (0, count + 1 - kept))
    return values, positions[..., :count]


def add_ranks_(ranks: Tensor, positions: Tensor, present: Tensor) -> None:
    """Count how often each key has each rank.

    Args:
        ranks: (b, H, K, Lk) int32, added to in place.
        positions: (b, H, r, K), position of the key of each rank.
        present: bool, same shape: what counts.
    """
    ones = present.transpose(2, 3).to(torch.int32)
    ranks.scatter_add_(-1, positions.transpose(2, 3).long(), ones)


def _compared(scores: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Return positions of the largest scores, the largest first, and which rows ties leave in doubt."""
    length = scores.shape[-1]
    # As many groups as members of the chosen ones, nearly: powers of two divide most lengths.
    size = 2 ** round(math.log2(length / kept) / 2)
    if length >= _LONG and size > 1:
        chosen = _groups(scores, size)[0].topk(kept, -1, sorted=False).indices
        positions = _members(chosen, size, length)
        positions = positions.gather(-1, scores.gather(-1, positions).topk(kept, -1).indices)
    else:
        positions = scores.topk(kept, -1).indices
    values = scores.gather(-1, positions)
    return positions, ((values[..., 1:] == values[..., :-1]) & (values[..., 1:] > -torch.inf)).any(-1)


def _packed(scores: Tensor, held: int) -> tuple[Tensor, Tensor | None]:
    """Do the same as :func:`_compared` on packed integers, which NumPy sorts many times faster."""
    length, number = scores.shape[-1], held + _MORE
    if length < _LONG or length <= number:
        return _sorted(scores, None, held), None
    size = 2 ** int(math.log2(length / held) / 2)
    if length >= _GROUPED and size > 1 and number < length // size:
        maxima, rest = _groups(scores, size)
        maximum = maxima.amax(-1, keepdim=True)
        half = _half(torch.maximum(maximum, rest.amax(-1, keepdim=True)) if rest.shape[-1] else maximum)
        chosen, bound = _nearest(half, maxima, number)
        members = _members(chosen, size, length)
        candidates = scores.gather(-1, members)
        chosen, closer = _nearest(half, candidates, number)
        positions, bound = members.gather(-1, chosen), torch.minimum(bound, closer)
    else:
        candidates, half = scores, _half(scores.amax(-1, keepdim=True))
        chosen, bound = _nearest(half, candidates, number)
        positions = chosen
    positions = _sorted(candidates.gather(-1, chosen), positions, held)
    farthest = torch.sub(half, scores.gather(-1, positions[..., -1:]), alpha=0.5)
    certain = (farthest < bound) | (bound == torch.inf) & (half < torch.inf)
    return positions, ~certain.squeeze(-1)


def _groups(scores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the maxima of groups of every G-th score (..., G), and the remaining scores at the end."""
    groups = scores.shape[-1] // size
    grouped = torch.unflatten(scores[..., : size * groups], -1, (size, groups))
    return grouped.amax(-2), scores[..., size * groups :]


def _members(chosen: Tensor, size: int, length: int) -> Tensor:
    """Return the positions (int64) of the scores in the chosen groups, and of the remaining ones."""
    groups = length // size
    rest = length - size * groups
    members = chosen.shape[-1] * size
    positions = torch.empty(*chosen.shape[:-1], members + rest, dtype=torch.int64, device=chosen.device)
    steps = groups * torch.arange(size, device=chosen.device)
    torch.add(chosen[..., None], steps, out=torch.unflatten(positions[..., :members], -1, (-1, size)))
    if rest:
        positions[..., members:] = torch.arange(length - rest, length, device=chosen.device)
    return positions


def _half(maximum: Tensor) -> Tensor:
    """Return half of a row's maximum, made finite, so that rows without keys have infinite distances from it."""
    return (0.5 * maximum).clamp_(min=torch.finfo(maximum.dtype).min)


def _nearest(half: Tensor, values: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the values nearest to each row's maximum."""
    # Distances ≥ 0 are ordered like their bits read as integers; halves of distances are finite.
    # The last bits hold the position.
    places = 2 ** (values.shape[-1] - 1).bit_length() - 1
    keys = torch.sub(half, values, alpha=0.5).view(torch.int32)
    keys.bitwise_and_(~places).bitwise_or_(torch.arange(values.shape[-1], dtype=torch.int32))
    keys.numpy().partition(number, -1)
    return (keys[..., :number] & places).long(), (keys[..., number : number + 1] & ~places).view(torch.float32)


def _sorted(scores: Tensor, positions: Tensor | None, count: int) -> Tensor:
    """Return positions of the largest scores, the largest first; of equal ones the lower position first."""
    if positions is None:
        positions = torch.arange(scores.shape[-1], dtype=torch.int32)
    numbers = torch.empty(scores.shape, dtype=torch.int64)
    halves = torch.unflatten(numbers.view(torch.int32), -1, (-1, 2))
    bits = scores.add(0.0).view(torch.int32)  # adding 0 turns -0 into 0
    # 32 bits of the score, 32 bits of the position from the end. Negative floats have the opposite order.
    torch.bitwise_xor(bits, (bits >> 31).bitwise_and_(_LAST), out=halves[..., 1 - _LOW])
    halves[..., _LOW] = _LAST - positions
    array = numbers.numpy()
    array.sort(-1)
    return torch.from_numpy(_LAST - (array[..., : -count - 1 : -1] & (2**32 - 1)))
