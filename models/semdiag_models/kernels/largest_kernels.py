"""Numba kernels for the largest scores of rows, which are read once and then stay in the nearest cache.

Imported only if Numba is installed and rows are long. Of equal scores, the one at the lower position comes first.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

_LEAST_GROUPS = 64  # fewest groups for a row's maxima
_GROUPS_PER_SCORE = 2  # ... and groups per requested score, so that few others share a group with them
_BISECTIONS = 24  # of a row's range, for a threshold: one that is too low only costs time
_STRIDES = 64  # ... for rows with infinite scores: steps that grow fourfold
_SPARE = 4  # groups beyond those needed whose maxima may reach the threshold
_LANES = 8  # numbers compared at a time

INF, HALF, ONE = np.float32(np.inf), np.float32(0.5), np.float32(1.0)
_FOUR = np.float32(4.0)
ZERO: Any = np.float32(0.0)  # Numba infers the type of a sum from its start
# Unsigned positions: Numba then skips the check for negative indices.
U: Any = np.uint64
NONE: Any = np.uint64(0)
NEXT: Any = np.uint64(1)

_OPTIONS: Any = {"error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}}

Floats = NDArray[np.float32]
Whole = NDArray[np.int32]
Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(signature: str) -> Callable[[Function], Function]:
    """Compile a function now, and cache it on disk. Sums may be reordered; infinity and NaN are respected.

    It has a single signature: with several, two processes that compile at the same time could cache one instead of
    the other, and all later ones would use it. The cache is valid until the function's file changes.
    """

    def compiled(function: Function) -> Function:
        try:
            return cast(Function, njit(signature, cache=True, nogil=True, **_OPTIONS)(function))
        except RuntimeError:  # there is no folder for the cache
            return cast(Function, njit(signature, nogil=True, **_OPTIONS)(function))

    return compiled


def part(function: Function) -> Function:
    """Compile a function to be inlined into kernels."""
    return cast(Function, njit(**_OPTIONS)(function))


def in_threads(function: Callable[[int, int], bool], number: int) -> bool:
    """Call a function on parts of a range, in as many threads as torch uses.

    Args:
        function: of the first number of a part, and the one to stop before.
        number: size of the range.

    Returns:
        Whether it is true for every part.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return function(0, number)
    ends = [number * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        return all(list(pool.map(function, ends, ends[1:])))


@torch.library.custom_op("semdiag::largest_scores", mutates_args=())
def largest_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's largest scores in descending order, like ``torch.topk``; torch can trace this operation.

    Args:
        scores: (..., n) float32 on the CPU, -inf where there is no key.
        count: at most n.

    Returns:
        Values and positions (..., count), int64.

    Example:
        >>> values, positions = largest_scores(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3)
        >>> values.tolist(), positions.tolist()
        ([[3.0, 3.0, 2.0]], [[1, 2, 3]])
    """
    rows = scores.reshape(-1, scores.shape[-1]).contiguous()
    values, positions = _memory(scores, count)
    arrays = rows.numpy(), values.view(-1, count).numpy(), positions.view(-1, count).numpy()
    if in_threads(lambda first, last: _read(first, last, *arrays), len(rows)):
        return values, positions
    best = scores.topk(count, -1)  # a score is NaN
    return best.values, best.indices


@largest_scores.register_fake
def _memory(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the memory for the results."""
    values = scores.new_empty(*scores.shape[:-1], count)
    return values, torch.empty_like(values, dtype=torch.int64)


@part
def groups_of(count: int) -> int:
    """Return the number of groups for rows of which this many scores are wanted: a power of two."""
    groups = _LEAST_GROUPS
    while groups < _GROUPS_PER_SCORE * count:
        groups *= 2
    return groups


@part
def _more(one: np.float32, other: np.float32) -> np.float32:
    return one if one > other else other


@part
def _less(one: np.float32, other: np.float32) -> np.float32:
    return one if one < other else other


@part
def extremes(row: Floats, highest: Floats, lowest: Floats, memory: Floats) -> tuple[np.float32, np.float32]:
    """Write the maxima of groups of every G-th score, G = len(highest); return the extremes; NaN goes unnoticed.

    Args:
        row: the scores.
        highest: gets the maxima.
        lowest: working memory of the same length.
        memory: working memory of the same length.

    Returns:
        The largest score and the smallest, -inf and inf of none.
    """
    groups, start = len(highest), 0
    highest[:] = -INF
    lowest[:] = INF
    while start + 4 * groups <= len(row):  # four at a time: fewer reads and writes of the results
        a, b = row[start : start + groups], row[start + groups : start + 2 * groups]
        start += 2 * groups
        c, d = row[start : start + groups], row[start + groups : start + 2 * groups]
        start += 2 * groups
        for lane in range(groups):
            highest[lane] = _more(highest[lane], _more(_more(a[lane], b[lane]), _more(c[lane], d[lane])))
            lowest[lane] = _less(lowest[lane], _less(_less(a[lane], b[lane]), _less(c[lane], d[lane])))
    while start < len(row):
        a = row[start : start + groups]
        for lane in range(len(a)):
            highest[lane] = _more(highest[lane], a[lane])
            lowest[lane] = _less(lowest[lane], a[lane])
        start += groups
    # In lanes again: sequentially, each would wait for the one before.
    half = groups // 2
    for lane in range(half):
        memory[lane] = _more(highest[lane], highest[half + lane])
        lowest[lane] = _less(lowest[lane], lowest[half + lane])
    while half > _LANES:
        half //= 2
        for lane in range(half):
            memory[lane] = _more(memory[lane], memory[half + lane])
            lowest[lane] = _less(lowest[lane], lowest[half + lane])
    high, low = memory[0], lowest[0]
    for lane in range(1, _LANES):
        high, low = _more(high, memory[lane]), _less(low, lowest[lane])
    return high, low


@part
def _reached(highest: Floats, bound: np.float32) -> Any:
    count = ZERO
    for lane in range(len(highest)):
        count += ONE if highest[lane] >= bound else ZERO
    return count


@part
def _threshold(highest: Floats, low: np.float32, high: np.float32, wanted: int) -> Any:
    """Return a number that at least ``wanted`` groups' maxima reach, so as many scores do, and few more."""
    stride = ONE
    for _ in range(_STRIDES):
        if low > -INF:
            break
        below = high - stride
        low = below if _reached(highest, below) >= wanted else low
        stride *= _FOUR
    reached = _reached(highest, low)
    for _ in range(_BISECTIONS):
        if reached <= wanted + _SPARE:
            break
        middle = HALF * low + HALF * high
        count = _reached(highest, middle)
        if count >= wanted:
            low, reached = middle, count
        else:
            high = middle
    return low


@part
def _candidates(row: Floats, highest: Floats, threshold: np.float32, lanes: Whole, where: Whole) -> Any:
    """Write the ascending positions of scores that reach the threshold; return their number. Branch-free."""
    active = count = NONE
    for lane in range(len(highest)):
        lanes[active] = lane
        active += NEXT if highest[lane] >= threshold else NONE
    start, whole = NONE, np.uint64(len(row) - len(row) % len(highest))
    while start < whole:
        for lane in range(active):
            j = start + np.uint64(lanes[lane])
            where[count] = j
            count += NEXT if row[j] >= threshold else NONE
        start += np.uint64(len(highest))
    for j in range(whole, np.uint64(len(row))):
        where[count] = j
        count += NEXT if row[j] >= threshold else NONE
    return count


@part
def _ranked(row: Floats, where: Whole, found: Floats, before: Floats, values: Floats, order: Whole) -> None:
    """Write each candidate at its rank, the number of larger ones; of equal ones the first comes first.

    Args:
        row: the scores.
        where: ascending positions of the candidates.
        found: working memory of the same length.
        before: working memory of the same length.
        values: filled with -inf; gets the largest scores in descending order.
        order: their positions.
    """
    padded = (len(where) + _LANES - 1) // _LANES * _LANES
    for i in range(len(where)):
        found[i] = row[where[i]]
    found[len(where) : padded] = -INF
    before[:padded] = ZERO
    for j in range(len(where)):
        value = found[j]
        for i in range(padded):
            before[i] += ONE if value > found[i] else ZERO
    for i in range(len(where)):
        rank = np.uint64(before[i])
        while rank < len(values) and values[rank] == found[i]:
            rank += NEXT
        if rank < len(values):
            values[rank] = found[i]
            if rank < len(order):
                order[rank] = where[i]


@part
def _inserted(row: Floats, where: Whole, values: Floats, order: Whole) -> None:
    """Do what :func:`_ranked` does by insertion: for many candidates, most of them equal."""
    held = 0
    for i in range(len(where)):
        value = row[where[i]]
        if held == len(values) and value <= values[held - 1]:
            continue
        place = min(held, len(values) - 1)
        while place > 0 and values[place - 1] < value:
            values[place] = values[place - 1]
            if place < len(order):
                order[place] = order[place - 1]
            place -= 1
        values[place] = value
        if place < len(order):
            order[place] = where[i]
        held = min(held + 1, len(values))


@part
def largest(
    row: Floats,
    low: np.float32,
    high: np.float32,
    highest: Floats,
    where: Whole,
    lanes: Whole,
    found: Floats,
    before: Floats,
    values: Floats,
    order: Whole,
) -> None:
    """Write the largest scores of a row.

    Args:
        row: the scores, without NaN.
        low: the smallest of them.
        high: the largest.
        highest: the maxima of its groups; all three from :func:`extremes`.
        where: memory for as many positions as there are scores.
        lanes: memory for as many as there are groups.
        found: memory of the same length.
        before: memory of the same length.
        values: filled with -inf; gets the largest scores in descending order.
        order: as long, or shorter; gets their positions, arbitrary for -inf.
    """
    threshold = _threshold(highest, low, high, min(len(values), len(row)))
    chosen = where[: _candidates(row, highest, threshold, lanes, where)]
    if len(chosen) <= len(highest):
        _ranked(row, chosen, found, before, values, order)
    else:
        _inserted(row, chosen, values, order)


@kernel("boolean(int64, int64, float32[:, ::1], float32[:, ::1], int64[:, ::1])")
def _read(first: int, last: int, scores: Floats, values: Floats, positions: NDArray[np.int64]) -> bool:
    """Process the rows from ``first`` to ``last``; return whether no score is NaN."""
    length, count = scores.shape[1], values.shape[1]
    groups = groups_of(count)
    highest, lowest = np.empty(groups, np.float32), np.empty(groups, np.float32)
    found, before = np.empty(groups, np.float32), np.empty(groups, np.float32)
    lanes, where = np.empty(groups, np.int32), np.empty(length, np.int32)
    order = np.empty(count, np.int32)
    for at in range(first, last):
        row = scores[at]
        odd = ZERO
        for j in range(length):
            odd += ONE if row[j] != row[j] else ZERO
        if odd > ZERO:
            return False
        high, low = extremes(row, highest, lowest, before)
        values[at][:] = -INF
        order[:] = 0
        largest(row, low, high, highest, where, lanes, found, before, values[at], order)
        positions[at][:] = order
    return True
