"""Kernels that Numba compiles: a row of scores is read once from memory, and then in the nearest cache."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

_LEAST_GROUPS = 128  # of which a row's maxima are taken
_GROUPS_PER_SCORE = 4  # ... and so many for each score that is asked for: then few others stand beside them
_CHUNK = 1024  # weights that are added in single precision; the sums of chunks are added in double
_BISECTIONS = 24  # of a row's range, for a threshold: one that is too low costs time alone
_SPARE = 4  # groups beyond those needed whose maxima may reach the threshold
_LANES = 8  # candidates are compared so many at a time

# exp(x) = 2^n exp(r), n whole, |r| <= ln 2 / 2: the split of ln 2 and the polynomial of Cephes' expf.
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_BIAS, _MANTISSA = np.int32(127), np.int32(23)
_LEAST = np.float32(-87.0)  # exp of anything less counts as exp of this, 1.6e-38
_INF, _HALF, _ONE = np.float32(np.inf), np.float32(0.5), np.float32(1.0)
_ZERO: Any = np.float32(0.0)  # Numba tells the types of sums from where they begin
# Positions without a sign: Numba looks up no negative ones then.
_NONE: Any = np.uint64(0)
_NEXT: Any = np.uint64(1)

Floats = NDArray[np.float32]
Whole = NDArray[np.int32]
Function = TypeVar("Function", bound=Callable[..., Any])


def _kernel(function: Function) -> Function:
    """Compile on first use, kept on disk. Sums are taken in any order; infinity and NaN stay themselves."""

    def compiled(cache: bool) -> Any:
        return njit(cache=cache, nogil=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})(
            function
        )

    try:
        return cast(Function, compiled(cache=True))
    except RuntimeError:  # there is no folder to keep it in
        return cast(Function, compiled(cache=False))


@_kernel
def count_ranks(ranks: Whole, order: Whole, top: Floats, counted: NDArray[np.bool_]) -> None:
    """Add to ranks (B, H, K, Lk) how often each key has each rank: :func:`compiled_rows.count_ranks_`."""
    samples, heads, queries, most = order.shape
    for b in range(samples):
        for h in range(heads):
            for i in range(queries):
                if counted[b, h, i]:
                    for rank in range(most):
                        if top[b, h, i, rank] > -_INF:
                            ranks[b, h, rank, order[b, h, i, rank]] += 1


@_kernel
def _extremes(row: Floats, highest: Floats, lowest: Floats) -> tuple[np.float32, np.float32]:
    """Maxima and minima of groups of every G-th score, G = len(highest), and of them all; NaN goes unnoticed."""
    groups = len(highest)
    highest[:] = -_INF
    lowest[:] = _INF
    whole = len(row) - len(row) % groups
    for start in range(0, whole, groups):
        chunk = row[start : start + groups]
        for lane in range(groups):
            value = chunk[lane]
            highest[lane] = value if value > highest[lane] else highest[lane]
            lowest[lane] = value if value < lowest[lane] else lowest[lane]
    chunk = row[whole:]
    for lane in range(len(chunk)):
        value = chunk[lane]
        highest[lane] = value if value > highest[lane] else highest[lane]
        lowest[lane] = value if value < lowest[lane] else lowest[lane]
    # In lanes again: one after the other, each would wait for the one before.
    highs, lows = highest[:_LANES].copy(), lowest[:_LANES].copy()
    for start in range(_LANES, groups, _LANES):
        for lane in range(_LANES):
            high, low = highest[start + lane], lowest[start + lane]
            highs[lane] = high if high > highs[lane] else highs[lane]
            lows[lane] = low if low < lows[lane] else lows[lane]
    high, low = highs[0], lows[0]
    for lane in range(_LANES):
        high = highs[lane] if highs[lane] > high else high
        low = lows[lane] if lows[lane] < low else low
    return high, low


@_kernel
def _sums(row: Floats, maximum: np.float32, weights: Floats, powers: Floats, bits: Whole) -> tuple[float, float]:
    """Σ e and Σ e x of x = z - max z, e = exp(x); NaN if a score is. ``bits`` is the memory of ``powers``."""
    total = mean = 0.0
    for start in range(0, len(row), len(weights)):
        part = row[start : start + len(weights)]
        for j in range(len(part)):
            x = part[j] - maximum
            x = _LEAST if x < _LEAST else x
            n = np.floor(x * _LOG2_E + _HALF)
            r = x - n * _LN2_HIGH - n * _LN2_LOW
            p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
            weights[j] = p * (r * r) + r + _ONE
            bits[j] = (np.int32(n) + _BIAS) << _MANTISSA
        part_total = part_mean = _ZERO
        for j in range(len(part)):
            weight = weights[j] * powers[j]
            part_total += weight
            x = part[j] - maximum
            part_mean += weight * (_LEAST if x < _LEAST else x)
        total += part_total
        mean += part_mean
    return total, mean


@_kernel
def _threshold(highest: Floats, low: np.float32, high: np.float32, wanted: int) -> np.float32:
    """A number that at least ``wanted`` groups' maxima reach, so as many scores do, and hardly more."""
    reached = _ZERO
    for lane in range(len(highest)):
        reached += _ONE if highest[lane] >= low else _ZERO
    if reached < wanted:
        return low
    for _ in range(_BISECTIONS):
        if reached <= wanted + _SPARE:
            break
        middle = _HALF * low + _HALF * high
        count = _ZERO
        for lane in range(len(highest)):
            count += _ONE if highest[lane] >= middle else _ZERO
        if count >= wanted:
            low, reached = middle, count
        else:
            high = middle
    return low


@_kernel
def _candidates(row: Floats, highest: Floats, threshold: np.float32, lanes: Whole, where: Whole) -> Any:
    """Positions, rising, of the scores that reach the threshold; returns how many. No branch to mispredict."""
    active = count = _NONE
    for lane in range(len(highest)):
        lanes[active] = lane
        active += _NEXT if highest[lane] >= threshold else _NONE
    start, whole = _NONE, np.uint64(len(row) - len(row) % len(highest))
    while start < whole:
        for lane in range(active):
            j = start + np.uint64(lanes[lane])
            where[count] = j
            count += _NEXT if row[j] >= threshold else _NONE
        start += np.uint64(len(highest))
    for j in range(whole, np.uint64(len(row))):
        where[count] = j
        count += _NEXT if row[j] >= threshold else _NONE
    return count


@_kernel
def _ranked(row: Floats, where: Whole, found: Floats, before: Floats, values: Floats, order: Whole) -> None:
    """Each candidate goes where its rank says, the number of larger ones; of equals the first one first.

    Args:
        row: the scores.
        where: rising positions of the candidates.
        found: memory for as many.
        before: likewise.
        values: filled with -inf; the largest scores in falling order.
        order: their positions.
    """
    padded = (len(where) + _LANES - 1) // _LANES * _LANES
    for i in range(len(where)):
        found[i] = row[where[i]]
    found[len(where) : padded] = -_INF
    before[:padded] = _ZERO
    for j in range(len(where)):
        value = found[j]
        for i in range(padded):
            before[i] += _ONE if value > found[i] else _ZERO
    for i in range(len(where)):
        rank = np.uint64(before[i])
        while rank < len(values) and values[rank] == found[i]:
            rank += _NEXT
        if rank < len(values):
            values[rank] = found[i]
            if rank < len(order):
                order[rank] = where[i]


@_kernel
def _inserted(row: Floats, where: Whole, values: Floats, order: Whole) -> None:
    """As :func:`_ranked`, one after the other: for many candidates, most of them equal."""
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


@_kernel
def read_rows(
    scores: Floats,
    allowed: NDArray[np.bool_] | None,
    first: int,
    last: int,
    offsets: tuple[int, int, int],
    order: Whole | None,
    keys: NDArray[np.int64],
    top: Floats,
    minimum: Floats,
    largest_weight: Floats,
    mean: Floats,
) -> bool:
    """Read some rows of a strip.

    Args:
        scores: (b, H, r, n).
        allowed: of the same shape; None means the first keys of each row, as many as ``keys`` says.
        first: the first row to be read, of b · H · r.
        last: the row to stop before.
        offsets: at which sample, head and query the strip begins; the following arrays are of all (B, H, Lq).
        order: (B, H, Lq, K) positions of the keys of the largest scores; None without K.
        keys: number of keys.
        top: (B, H, Lq, K+1) the largest scores in falling order, -inf beyond the number of keys.
        minimum: smallest score.
        largest_weight: 1 / Σ exp(z - max z).
        mean: Σ p z of the weights p.

    Returns:
        Whether all scores of the rows are finite; reading stops at the first row of which one is not.
    """
    heads, queries, length = scores.shape[1:]
    most = top.shape[3]
    groups = _LEAST_GROUPS
    while groups < _GROUPS_PER_SCORE * most:
        groups *= 2
    highest, lowest = np.empty(groups, np.float32), np.empty(groups, np.float32)
    found, before = np.empty(groups, np.float32), np.empty(groups, np.float32)
    weights, powers = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.float32)
    bits = powers.view(np.int32)
    lanes = np.empty(groups, np.int32)
    seen = np.empty(length, np.float32)
    where, places = np.empty(length, np.int32), np.empty(length, np.int32)
    finite = True
    for at in range(first, last):
        b, h, i = at // (heads * queries), at // queries % heads, at % queries
        to = b + offsets[0], h + offsets[1], i + offsets[2]
        row = scores[b, h, i, : keys[to]]
        if allowed is not None:
            count = _NONE
            for j in range(length):
                seen[count] = scores[b, h, i, j]
                places[count] = j
                count += _NEXT if allowed[b, h, i, j] else _NONE
            row = seen[:count]
        high, low = _extremes(row, highest, lowest)
        total, shift = _sums(row, high, weights, powers, bits)
        if len(row) and not (high < _INF and low > -_INF and total < _INF):
            finite = False
            break
        minimum[to] = low
        largest_weight[to] = 1.0 / total
        mean[to] = high + shift / total
        if order is None:
            top[to][0] = high
            continue
        top[to][:] = -_INF
        threshold = _threshold(highest, low, high, min(most, len(row)))
        chosen = where[: _candidates(row, highest, threshold, lanes, where)]
        if len(chosen) <= groups:
            _ranked(row, chosen, found, before, top[to], order[to])
        else:
            _inserted(row, chosen, top[to], order[to])
        if allowed is not None:
            for rank in range(min(order.shape[3], len(row))):
                order[to][rank] = places[order[to][rank]]
    return finite
