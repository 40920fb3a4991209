"""A kernel that Numba compiles: all statistics of a row of scores, read once from memory.

Imported only if Numba is installed.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from semdiag_models.kernels.largest_kernels import (
    HALF,
    INF,
    NEXT,
    NONE,
    ONE,
    ZERO,
    Floats,
    Whole,
    extremes,
    groups_of,
    kernel,
    largest,
    part,
)  # fmt: skip

_CHUNK = 1024  # weights added in single precision; sums of chunks are added in double precision

# exp(x) = 2^n exp(r), n whole, |r| <= ln 2 / 2: the split of ln 2 and the polynomial of Cephes' expf.
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_BIAS, _MANTISSA = np.int32(127), np.int32(23)
_LEAST = np.float32(-87.0)  # exp of anything less counts as exp of this, 1.6e-38


@kernel("void(int32[:, :, :, ::1], int32[:, :, :, ::1], float32[:, :, :, ::1], boolean[:, :, :])")
def count_ranks(ranks: Whole, order: Whole, top: Floats, counted: NDArray[np.bool_]) -> None:
    """Count how often each key has each rank, into ranks (B, H, K, Lk): :func:`compiled_rows.count_ranks_`."""
    samples, heads, queries, most = order.shape
    for b in range(samples):
        for h in range(heads):
            for i in range(queries):
                if counted[b, h, i]:
                    for rank in range(most):
                        if top[b, h, i, rank] > -INF:
                            ranks[b, h, rank, order[b, h, i, rank]] += 1


def _bits_as_float(context: Any, bits: Any) -> Any:
    """Return the single-precision number with these 32 bits."""

    def instruction(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), instruction


_as_float: Any = intrinsic(_bits_as_float)


@part
def _sums(row: Floats, maximum: np.float32) -> tuple[float, float]:
    """Return Σ e and Σ e x of x = z - max z, e = exp(x); NaN if a score is NaN."""
    total = mean = 0.0
    for start in range(0, len(row), _CHUNK):
        part = row[start : start + _CHUNK]
        part_total = part_mean = ZERO
        for j in range(len(part)):
            x = part[j] - maximum
            x = _LEAST if x < _LEAST else x
            n = np.floor(x * _LOG2_E + HALF)
            r = x - n * _LN2_HIGH - n * _LN2_LOW
            p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
            power = _as_float((np.int32(n) + _BIAS) << _MANTISSA)
            weight = (p * (r * r) + r + ONE) * power
            part_total += weight
            part_mean += weight * x
        total += part_total
        mean += part_mean
    return total, mean


@kernel(
    "boolean(float32[:, :, :, ::1], optional(boolean[:, :, :, :]), int64, int64, UniTuple(int64, 3),"
    " int32[:, :, :, ::1], int64[:, :, ::1], float32[:, :, :, ::1], float32[:, :, ::1], float32[:, :, ::1],"
    " float32[:, :, ::1])"
)
def read_rows(
    scores: Floats,
    allowed: NDArray[np.bool_] | None,
    first: int,
    last: int,
    offsets: tuple[int, int, int],
    order: Whole,
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
        first: the first of the b · H · r rows to read.
        last: the row to stop before.
        offsets: sample, head and query at which the strip begins; the arrays below cover all (B, H, Lq).
        order: (B, H, Lq, K) positions of the keys with the largest scores; of any shape if K = 0.
        keys: number of keys.
        top: (B, H, Lq, K+1) the largest scores in descending order, -inf beyond the number of keys.
        minimum: smallest score.
        largest_weight: 1 / Σ exp(z - max z).
        mean: Σ p z of the weights p.

    Returns:
        Whether all scores are finite; reading stops at the first row with one that is not.
    """
    heads, queries, length = scores.shape[1:]
    most = top.shape[3]
    groups = groups_of(most)
    highest, lowest = np.empty(groups, np.float32), np.empty(groups, np.float32)
    found, before = np.empty(groups, np.float32), np.empty(groups, np.float32)
    lanes = np.empty(groups, np.int32)
    seen = np.empty(length, np.float32)
    where, places = np.empty(length, np.int32), np.empty(length, np.int32)
    finite = True
    for at in range(first, last):
        b, h, i = at // (heads * queries), at // queries % heads, at % queries
        to = b + offsets[0], h + offsets[1], i + offsets[2]
        row = scores[b, h, i, : keys[to]]
        if allowed is not None:
            count = NONE
            for j in range(length):
                seen[count] = scores[b, h, i, j]
                places[count] = j
                count += NEXT if allowed[b, h, i, j] else NONE
            row = seen[:count]
        high, low = extremes(row, highest, lowest, before)
        total, shift = _sums(row, high)
        if len(row) and not (high < INF and low > -INF and total < INF):
            finite = False
            break
        minimum[to] = low
        largest_weight[to] = 1.0 / total
        mean[to] = high + shift / total
        if most == 1:
            top[to][0] = high
            continue
        top[to][:] = -INF
        largest(row, low, high, highest, where, lanes, found, before, top[to], order[to])
        if allowed is not None:
            for rank in range(min(most - 1, len(row))):
                order[to][rank] = places[order[to][rank]]
    return finite
