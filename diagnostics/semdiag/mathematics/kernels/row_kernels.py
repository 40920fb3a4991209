"""Row statistics as Triton kernels: two passes over q kᵀ, and no wait for the device.

The first pass keeps each row's running softmax, and the maxima of groups of G keys: the (K+1)-th largest
bounds the (K+1)-th score from below. The second appends up to K·G scores above it, and K + 1 equal ones, to rank.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from semdiag.mathematics.score_strips import Scores, part_of, rows_of

_ALL = slice(None)
_GRID = 65535  # most programs along the second axis
_MEMORY = 2**29  # bytes of group maxima, candidates and sums at a time
_NONE = tl.constexpr(-0x7F800001)  # -inf in the order of :func:`_ordered`
_NAN = tl.constexpr(0x7FC00000)
_LAST = tl.constexpr(0x7FFFFFFF)
_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _ordered(x):
    """Return whole numbers in the order of floats: -0 is 0, NaN above all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN, bits ^ ((bits >> 31) & _LAST))


@triton.jit
def _scores(
    q, q_low, k, k_low, start, last, allowed, allowed_step, bias, bias_step, k_length, scale, softcap,
    BN: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Return a tile of scores, -inf where a row may not see a key, and which keys a row may see."""
    cols = start + tl.arange(0, BN)
    at = cols[:, None] * BD + tl.arange(0, BD)[None, :]
    keys = tl.load(k + at)
    if SPLIT:  # the small terms first
        s = tl.dot(q, tl.trans(tl.load(k_low + at)), input_precision="tf32")
        s = tl.dot(q_low, tl.trans(keys), s, input_precision="tf32")
        s = tl.dot(q, tl.trans(keys), s, input_precision="tf32")
    else:
        s = tl.dot(q, tl.trans(keys))
    s = s * scale
    if SOFTCAP:
        s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (s / softcap)) + 1.0))
    present = cols < k_length
    valid = cols[None, :] <= last[:, None]
    if BIAS == 1:
        s += tl.load(bias + cols * bias_step, mask=present, other=0.0).to(tl.float32)[None, :]
    if BIAS == 2:
        s += tl.load(bias[:, None] + (cols.to(tl.int64) * bias_step)[None, :], mask=valid, other=0.0).to(
            tl.float32
        )
    if EDGE:
        if MASK == 1:
            valid = valid & (tl.load(allowed + cols * allowed_step, mask=present, other=0) != 0)[None, :]
        if MASK == 2:
            valid = valid & (
                tl.load(allowed[:, None] + (cols.to(tl.int64) * allowed_step)[None, :], mask=valid, other=0) != 0
            )
        s = tl.where(valid, s, float("-inf"))
    return s, valid


_PLAIN = [
    "head0", "tile0", "heads", "key_heads", "all_heads", "all_keys", "q_length", "k_length", "q_rows", "k_rows",
    "first_query", "scale", "softcap", "s_b", "s_h", "a_b", "a_h", "p_b", "p_h", "GROUPS", "ROOM",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def _pass(  # noqa: C901
    q, k, allowed, bias, places, spans, lse, floats, counts, groups, ranges, bounds, slots, pairs_found, sums,
    head0, tile0, heads, key_heads, all_heads, all_keys, q_length, k_length, q_rows, k_rows, first_query,
    scale, softcap, GROUPS, ROOM, s_b, s_h, a_b, a_h, a_q, a_k, p_b, p_h, p_q, p_k,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr, SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, SPANS: tl.constexpr, PLACES: tl.constexpr,
    FROM: tl.constexpr, TOP: tl.constexpr, G: tl.constexpr, RECEIVED: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """Look at all keys of a tile of rows: the first pass, or the second."""
    tiles = tl.num_programs(0)
    index = tiles - 1 - tl.program_id(0)  # the longest causal rows start first
    tile = tile0 + index
    head = head0 + tl.program_id(1)
    index = index + tl.program_id(1) * tiles
    b = head // heads
    h = head % heads
    rows = tile * BM + tl.arange(0, BM)
    inside = rows < q_length
    row = head.to(tl.int64) * q_length + rows
    buffered = index.to(tl.int64) * BM + tl.arange(0, BM)
    place = rows
    if PLACES:
        place = tl.load(places + row, mask=inside, other=0)
    last = tl.zeros([BM], tl.int32) + (k_length - 1)  # key of each row
    if CAUSAL:
        last = tl.minimum(last, first_query + place)
    last = tl.maximum(last, -1)
    least = tl.min(tl.where(inside, last, k_length), 0)
    last = tl.where(inside, last, -1)
    place = tl.maximum(place, 0).to(tl.int64)
    # What the tile sees: keys from first, all of them for each row up to all_visible_end, none from end
    first = 0
    end = tl.max(last, 0) + 1
    all_visible_end = tl.minimum(least + 1, end) // BN * BN
    if SPANS:
        span = spans + 2 * (b * s_b + h * s_h + tile)
        first = tl.minimum(tl.load(span), end)
        end = tl.minimum(end, tl.load(span + 1))
    q += (head.to(tl.int64) * q_rows + tile * BM) * BD
    k += (b * key_heads + h // (heads // key_heads)).to(tl.int64) * k_rows * BD
    at = tl.arange(0, BM)[:, None] * BD + tl.arange(0, BD)[None, :]
    k_low = k + all_keys.to(tl.int64) * k_rows * BD
    query = tl.load(q + at)
    query_low = query
    if SPLIT:
        query_low = tl.load(q + all_heads.to(tl.int64) * q_rows * BD + at)
    allowed += b.to(tl.int64) * a_b + h.to(tl.int64) * a_h
    bias += b.to(tl.int64) * p_b + h.to(tl.int64) * p_h
    allowed_rows = allowed
    bias_rows = bias
    if MASK == 2:
        allowed_rows = allowed + place * a_q
    if BIAS == 2:
        bias_rows = bias + place * p_q

    if SECOND:
        if TOP > 0:
            bound = tl.load(bounds + buffered)
            slot_row = slots + buffered * (ROOM + TOP + 1)
        if RECEIVED:
            total_row = tl.load(lse + row, mask=inside, other=float("inf"))
    maximum = tl.full([BM], float("-inf"), tl.float32)
    minimum = tl.full([BM], float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    moment = tl.zeros([BM], tl.float32)  # Σ exp(z - max) (z - max)
    visible_keys = last + 1
    if MASK > 0:
        visible_keys = tl.zeros([BM], tl.int32)
    more = tl.zeros([BM], tl.int32)
    equal = tl.zeros([BM], tl.int32)
    for EDGE in tl.static_range(FROM, 2):  # first where every row sees every key
        begin = first
        stop = all_visible_end
        if EDGE:
            if MASK == 0:
                begin = all_visible_end
            stop = end
        for start in range(begin, stop, BN):
            s, valid = _scores(
                query, query_low, k, k_low, start, last, allowed_rows, a_k, bias_rows, p_k, k_length, scale,
                softcap, BN, BD, SPLIT, SOFTCAP, MASK, BIAS, EDGE,
            )  # fmt: skip
            if not SECOND:
                if TOP > 0:
                    maxima = tl.max(tl.reshape(s, (BM, G, BN // G)), 1)
                    group = start // BN * (BN // G) + tl.arange(0, BN // G)
                    tl.store(groups + buffered[:, None] * GROUPS + group[None, :], maxima)
                    higher = tl.maximum(maximum, tl.max(maxima, 1))
                else:
                    higher = tl.maximum(maximum, tl.max(s, 1))
                if EDGE:
                    minimum = tl.minimum(minimum, tl.min(tl.where(valid, s, float("inf")), 1))
                    if MASK > 0:
                        visible_keys += tl.sum(valid.to(tl.int32), 1)
                else:
                    minimum = tl.minimum(minimum, tl.min(s, 1))
                zero = tl.where(higher == float("-inf"), 0.0, higher)
                away = s - zero[:, None]
                weight = tl.exp2(away * _LOG2E)
                product = weight * away
                if EDGE:
                    product = tl.where(valid, product, 0.0)
                fall = tl.where(maximum == float("-inf"), 0.0, maximum - zero)
                factor = tl.exp2(fall * _LOG2E)
                moment = (moment + total * fall) * factor + tl.sum(product, 1)
                total = total * factor + tl.sum(weight, 1)
                maximum = higher
            if SECOND:
                if TOP > 0:
                    cols = start + tl.arange(0, BN)
                    rest = tl.where(s >= bound[:, None], s, float("-inf"))
                    best = tl.max(rest, 1)
                    if tl.max(best, 0) > float(
                        "-inf"
                    ):  # a loop of its own would stop loads ahead of the outer one
                        while tl.max(best, 0) > float("-inf"):
                            column = tl.min(tl.where(rest == best[:, None], cols[None, :], _LAST), 1)
                            above = best > bound
                            level = (best == bound) & (equal <= TOP)
                            packed = (_ordered(best).to(tl.int64) << 32) | (column ^ _LAST).to(tl.int64)
                            tl.store(
                                slot_row + tl.where(above, more, ROOM + equal),
                                packed,
                                mask=level | (above & (more < ROOM)),
                            )
                            more += above.to(tl.int32)
                            equal += level.to(tl.int32)
                            rest = tl.where(cols[None, :] == column[:, None], float("-inf"), rest)
                            best = tl.max(rest, 1)
                if RECEIVED:
                    # A row that does not count has a sum of infinity.
                    weight = tl.exp2((s - total_row[:, None]) * _LOG2E)
                    weight = tl.where((total_row < float("inf"))[:, None], weight, 0.0)
                    tl.store(sums + index.to(tl.int64) * k_rows + start + tl.arange(0, BN), tl.sum(weight, 0))
    if SECOND and TOP > 0:
        tl.store(pairs_found + 2 * buffered, more)
        tl.store(pairs_found + 2 * buffered + 1, equal)
    if not SECOND:
        bad = tl.zeros([BM], tl.int32)
        undefined = tl.zeros([BM], tl.int32)
        # Any score that is NaN or infinite makes the moment NaN.
        if tl.max((moment != moment).to(tl.int32), 0) > 0:
            for start in range(first, end, BN):
                s, valid = _scores(
                    query, query_low, k, k_low, start, last, allowed_rows, a_k, bias_rows, p_k, k_length, scale,
                    softcap, BN, BD, SPLIT, SOFTCAP, MASK, BIAS, True,
                )  # fmt: skip
                bad += tl.sum((valid & ((tl.abs(s) == float("inf")) | (s != s))).to(tl.int32), 1)
                undefined += tl.sum((valid & (s != s)).to(tl.int32), 1)
        size = all_heads.to(tl.int64) * q_length
        tl.store(floats + row, maximum, mask=inside)
        tl.store(floats + size + row, tl.where(undefined > 0, float("nan"), minimum), mask=inside)
        tl.store(floats + 2 * size + row, 1.0 / total, mask=inside)
        tl.store(floats + 3 * size + row, tl.log(total) - moment / total, mask=inside)
        tl.store(counts + row, visible_keys, mask=inside)
        tl.store(counts + size + row, bad, mask=inside)
        if TOP > 0:
            tl.store(ranges + 2 * index, first // BN * (BN // G))
            tl.store(ranges + 2 * index + 1, tl.where(end > first, tl.cdiv(end, BN), 0) * (BN // G))


@triton.jit(do_not_specialize=["GROUPS"])
def _bounds(
    groups, ranges, bounds, GROUPS, BM: tl.constexpr, TOP: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Find the (K+1)-th largest group maximum of R rows by bisection; the lowest number if there are fewer."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    first = tl.load(ranges + 2 * (row // BM))
    end = tl.load(ranges + 2 * (row // BM) + 1)
    at = first[:, None] + tl.arange(0, SIZE)[None, :]
    x = tl.load(groups + row[:, None] * GROUPS + at, mask=at < end[:, None], other=float("-inf"))
    x = _ordered(x)
    low = tl.full([R], _NONE, tl.int32)
    high = tl.full([R], _LAST, tl.int32)
    for _ in range(32):  # at least K+1 are as large as low, unless it is -inf; fewer are as large as high
        middle = (low & high) + ((low ^ high) >> 1)
        enough = tl.sum((x >= middle[:, None]).to(tl.int32), 1) > TOP
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    bound = (low ^ ((low >> 31) & _LAST)).to(tl.float32, bitcast=True)
    tl.store(bounds + row, tl.maximum(bound, _LOWEST))


@triton.jit
def _candidates(slots, at, more, n, ROOM):
    """Load some candidates of R rows: those above the bound, then those that equal it."""
    slot = tl.where(at[None, :] < more[:, None], at[None, :], ROOM + at[None, :] - more[:, None])
    return tl.load(slots[:, None] + slot, mask=at[None, :] < n[:, None], other=-(2**63))


@triton.jit(do_not_specialize=["head0", "row0", "rows", "q_length", "size", "ROOM"])
def _ranked(
    slots, pairs_found, counts, top, keys, head0, row0, rows, q_length, size, ROOM,
    TOP: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Rank the candidates of R rows by counting those that come before each; NaN if the two passes disagree."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside = row0 + row < q_length
    local = tl.program_id(1).to(tl.int64) * rows + row
    out = (head0 + tl.program_id(1)).to(tl.int64) * q_length + row0 + row
    more = tl.load(pairs_found + 2 * local, mask=inside, other=0)
    equal = tl.load(pairs_found + 2 * local + 1, mask=inside, other=0)
    visible_keys = tl.load(counts + out, mask=inside, other=0)
    # In a row with bad scores, -inf is not listed, and there may be no room for all NaN.
    bad = tl.load(counts + size + out, mask=inside, other=0)
    fits = (bad > 0) | ((more <= ROOM) & ((more + equal > TOP) | (more + equal >= visible_keys)))
    more = tl.minimum(more, ROOM)
    n = more + equal
    slots += local * (ROOM + TOP + 1)
    top += out * (TOP + 1)
    keys += out * TOP
    most = tl.max(n, 0)
    for i in range(0, most, B):
        one = i + tl.arange(0, B)
        x = _candidates(slots, one, more, n, ROOM)
        rank = tl.zeros([R, B], tl.int32)
        for j in range(0, most, B):
            y = _candidates(slots, j + tl.arange(0, B), more, n, ROOM)
            rank += tl.sum((y[:, None, :] > x[:, :, None]).to(tl.int32), 2)
        bits = (x >> 32).to(tl.int32)
        value = (bits ^ ((bits >> 31) & _LAST)).to(tl.float32, bitcast=True)
        value = tl.where(fits[:, None], value, float("nan"))
        present = one[None, :] < n[:, None]
        tl.store(top[:, None] + rank, value, mask=present & (rank <= TOP))
        tl.store(keys[:, None] + rank, (x & _LAST).to(tl.int32) ^ _LAST, mask=present & (rank < TOP))
    rest = tl.arange(0, SIZE)[None, :]
    empty = (rest >= n[:, None]) & inside[:, None]
    nothing = tl.where(fits, float("-inf"), float("nan"))[:, None] + tl.zeros([R, SIZE], tl.float32)
    tl.store(top[:, None] + rest, nothing, mask=empty & (rest <= TOP))
    tl.store(keys[:, None] + rest, tl.zeros([R, SIZE], tl.int32), mask=empty & (rest < TOP))


@triton.jit(do_not_specialize=["heads", "q_length", "k_length"])
def _mask_spans(
    allowed, spans, heads, q_length, k_length, a_b, a_h, a_q, a_k, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Find the first block of keys that some row of a tile may see, and the end of the last."""
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    base = allowed + b.to(tl.int64) * a_b + h.to(tl.int64) * a_h + rows.to(tl.int64) * a_q
    first = k_length
    end = 0
    for start in range(0, k_length, BN):
        cols = start + tl.arange(0, BN)
        mask = (rows < q_length)[:, None] & (cols < k_length)[None, :]
        visible = tl.load(base[:, None] + (cols.to(tl.int64) * a_k)[None, :], mask=mask, other=0).to(tl.int32)
        some = tl.max(tl.max(visible, 1), 0) > 0
        first = tl.where(some, tl.minimum(first, start), first)
        end = tl.where(some, start + BN, end)
    at = spans + 2 * (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))
    tl.store(at, first)
    tl.store(at + 1, end)


class Tile(NamedTuple):
    """Rows and keys that a program scores at a time, its warps, tiles of keys loaded at a time, and registers."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # most of a thread where no mask needs more: fewer let more programs run at once


_TILES = (  # from large to small; the first of which two fit into a multiprocessor's memory, or one, is taken
    *(Tile(128, 64, 8, 3, 128), Tile(128, 64, 8, 2, 128), Tile(64, 64, 4, 2)),
    *(Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
)


def fitting_tile(q: Tensor) -> Tile:
    """Choose a tile by the width and the type of the queries."""
    if not q.is_cuda:
        return Tile(16, 32, 4, 1)  # Triton's interpreter, in tests
    properties: Any = torch.cuda.get_device_properties(q.device)
    memory = properties.shared_memory_per_block_optin
    row = _width(q) * (8 if q.dtype == torch.float32 else 2)
    for programs in (2, 1):  # two at once hide each other's waits
        for tile in _TILES[:3] if programs == 2 else _TILES:
            if programs * (tile.rows + tile.keys * tile.stages) * row + 8 * tile.rows * tile.keys <= memory:
                return tile
    return _TILES[-1]


def _width(q: Tensor) -> int:
    return max(16, int(triton.next_power_of_2(q.shape[3])))


def _padded(x: Tensor, rows: int) -> Tensor:
    """Return (1 or 2, B, H, rows, width), zeros where x ends; float32 as the sum of two TF32 numbers."""
    batch, heads, length, width = x.shape
    halves = 2 if x.dtype == torch.float32 else 1
    if x.dtype == torch.bfloat16 and not x.is_cuda:
        x = x.float()  # Triton's interpreter reads bfloat16 as whole numbers; these products are the same
    shape = halves, batch, heads, rows, _width(x)
    if halves == 1 and x.shape == shape[1:]:
        return x.contiguous()
    out = x.new_zeros(shape) if (length, width) != shape[3:] else x.new_empty(shape)
    filled = out[..., :length, :width]
    filled[0] = x if halves == 1 else _tf32(x)
    if halves == 2:
        filled[1] = _tf32(x - filled[0])
    return out


def _tf32(x: Tensor) -> Tensor:
    """Return x rounded to 11 binary digits, to nearest."""
    rounded = ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def _kind(values: Tensor | None) -> tuple[int, tuple[int, ...]]:
    """Return 0 for nothing, 1 for one row for all queries, 2 for a row each; and the four strides."""
    if values is None:
        return 0, (0, 0, 0, 0)
    strides = tuple(0 if n == 1 else s for n, s in zip(values.shape, values.stride(), strict=True))
    return 1 if values.shape[2] == 1 else 2, strides


def _spans(
    allowed: Tensor | None, tile: Tile, length: int, k_length: int
) -> tuple[Tensor | None, tuple[int, int]]:
    """Return between which keys a mask's tiles of rows see any, and the strides; None without a row a query."""
    kind, strides = _kind(allowed)
    if allowed is None or kind != 2 or allowed.shape[0] * allowed.shape[1] > _GRID:
        return None, (0, 0)
    batch, heads = allowed.shape[:2]
    tiles = triton.cdiv(length, tile.rows)
    spans = torch.empty(batch, heads, tiles, 2, dtype=torch.int32, device=allowed.device)
    _mask_spans[(tiles, batch * heads)](
        allowed, spans, heads, length, k_length, *strides, BM=tile.rows, BN=4 * tile.keys
    )
    return spans, (heads * tiles * (batch > 1), tiles * (heads > 1))


class _Groups(NamedTuple):
    """Groups of keys, whose maxima bound the scores to be ranked."""

    size: int  # keys of a group
    number: int  # groups of a row
    room: int  # most scores of a row above its bound


def _groups(tile: Tile, k_length: int, top: int) -> _Groups:
    """Choose the groups that take the least memory."""
    blocks = triton.cdiv(k_length, tile.keys)
    if not top:
        return _Groups(1, blocks * tile.keys, 0)
    powers = [2**i for i in range(2, 1 + tile.keys.bit_length() - 1)]
    size = min(powers, key=lambda g: 6 * blocks * tile.keys // g + 8 * min(top * g, k_length))
    return _Groups(size, blocks * (tile.keys // size), min(top * size, k_length))


class _Memory(NamedTuple):
    """Memory that the passes over some tiles share; one number each if nothing is ranked."""

    maxima: Tensor  # of each row's groups
    ranges: Tensor  # the first group of each tile, and the end of its last
    bounds: Tensor  # of each row
    slots: Tensor  # candidates of each row
    pairs_found: Tensor  # number of candidates of each row above its bound, and of those that equal it


def _memory(q: Tensor, tile: Tile, tiles: int, groups: _Groups, top: int) -> _Memory:
    """Return memory for some tiles."""
    if not top:
        return _Memory(*[q.new_empty(1)] * 5)
    rows = tiles * tile.rows
    return _Memory(
        torch.empty(rows * groups.number, device=q.device),
        torch.empty(2 * tiles, dtype=torch.int32, device=q.device),
        torch.empty(rows, device=q.device),
        torch.empty(rows * (groups.room + top + 1), dtype=torch.int64, device=q.device),
        torch.empty(2 * rows, dtype=torch.int32, device=q.device),
    )


class _Passes:
    """The two passes over the scores of an attention call, some tiles at a time, and the results of all rows."""

    def __init__(self, scores: Scores, tile: Tile, top: int, received: bool) -> None:
        q = scores.q if scores.places is None else rows_of(scores.q, scores.places)
        batch, heads, self.length, _ = q.shape
        k_length = scores.k.shape[2]
        self.tile = tile
        self.top = top
        self.received = received
        self.heads = batch * heads
        self.tiles = triton.cdiv(self.length, tile.rows)
        self.k_rows = triton.cdiv(k_length, tile.keys) * tile.keys
        self.together = (
            1 if q.is_cuda else tile.rows
        )  # rows that a program ranks; the interpreter starts it slowly
        split = q.dtype == torch.float32
        device = q.device
        q = _padded(q, self.tiles * tile.rows)
        k = _padded(scores.k, self.k_rows)
        self.nothing = q.new_empty(1)
        self.floats = torch.empty(4, batch, heads, self.length, device=device)
        self.counts = torch.empty(2, batch, heads, self.length, dtype=torch.int32, device=device)
        self.best = self.floats[0, ..., None]
        if top:
            self.best = torch.empty(batch, heads, self.length, top + 1, device=device)
        self.order = torch.empty(batch, heads, self.length, top, dtype=torch.int32, device=device)

        allowed = part_of(scores.allowed, _ALL, _ALL)
        allowed = None if allowed is None else allowed.view(torch.uint8)
        bias = part_of(scores.bias, _ALL, _ALL)
        masked, mask_strides = _kind(allowed)
        biased, bias_strides = _kind(bias)
        places = None if scores.places is None else scores.places.to(torch.int32).contiguous()
        spans, span_strides = _spans(allowed if places is None else None, tile, self.length, k_length)

        self.groups = _groups(tile, k_length, top)
        self._choose_parts()
        self.memory = _memory(q, tile, self.some_heads * self.some_tiles, self.groups, top)
        self._tensors = [q, k, *(self.nothing if x is None else x for x in (allowed, bias, places, spans))]
        self._numbers = (
            *(heads, scores.k.shape[1], self.heads, batch * scores.k.shape[1], self.length, k_length),
            *(q.shape[-2], k.shape[-2], scores.first_query, scores.scale, scores.softcap or 1.0),
            *(self.groups.number, self.groups.room, *span_strides, *mask_strides, *bias_strides),
        )
        self._constants = {
            "BM": tile.rows, "BN": tile.keys, "BD": q.shape[-1], "SPLIT": split, "G": self.groups.size, "TOP": top,
            "SOFTCAP": scores.softcap is not None, "CAUSAL": scores.causal, "MASK": masked, "BIAS": biased,
            "SPANS": spans is not None, "PLACES": places is not None, "FROM": int(masked > 0),
            "num_warps": tile.warps, "num_stages": tile.stages,
            "maxnreg": None if masked or biased else tile.registers,
        }  # fmt: skip

    def _choose_parts(self) -> None:
        """Choose how many heads and tiles of rows the passes look at together, by the memory that they need."""
        of_row = 4 * self.groups.number + 8 * (self.groups.room + self.top + 1) if self.top else 0
        of_tile = self.tile.rows * of_row + 4 * self.k_rows * self.received  # bytes, with sums of its columns
        most = max(1, _MEMORY // of_tile) if of_tile else self.heads * self.tiles
        self.some_heads = min(self.heads, max(1, most // self.tiles), _GRID)
        self.some_tiles = min(self.tiles, most)

    def parts(self) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Yield the first head and the first tile of each part, and its numbers of tiles and of heads."""
        for head in range(0, self.heads, self.some_heads):
            for tile in range(0, self.tiles, self.some_tiles):
                grid = min(self.tiles - tile, self.some_tiles), min(self.heads - head, self.some_heads)
                yield head, tile, grid

    def run(
        self,
        second: bool,
        head: int,
        first: int,
        grid: tuple[int, int],
        lse: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:
        """Run a pass over a part, from a head and a tile on; the second sums the weights of keys by ``lse``."""
        lse = self.nothing if lse is None else lse
        sums = self.nothing if sums is None else sums
        _pass[grid](
            *(*self._tensors, lse, self.floats, self.counts, *self.memory, sums, head, first, *self._numbers),
            **self._constants,
            SECOND=second,
            RECEIVED=second and self.received,
        )

    def find_bounds(self, grid: tuple[int, int]) -> None:
        """Find a bound below the scores to be ranked, for each row of a part."""
        groups = self.groups.number
        rows = grid[0] * grid[1] * self.tile.rows
        size = triton.next_power_of_2(groups)
        _bounds[(rows // self.together,)](
            self.memory.maxima, self.memory.ranges, self.memory.bounds, groups, BM=self.tile.rows, TOP=self.top,
            SIZE=size, R=self.together, num_warps=1 if size <= 1024 else 4,
        )  # fmt: skip

    def rank(self, head: int, first: int, grid: tuple[int, int]) -> None:
        """Rank the candidates of each row of a part, from a head and a tile on."""
        rows = grid[0] * self.tile.rows
        _ranked[(rows // self.together, grid[1])](
            self.memory.slots, self.memory.pairs_found, self.counts, self.best, self.order, head,
            first * self.tile.rows, rows, self.length, self.heads * self.length, self.groups.room, TOP=self.top,
            SIZE=triton.next_power_of_2(self.top + 1), R=self.together,
            B=min(64, triton.next_power_of_2(self.top + 16)), num_warps=1,
        )  # fmt: skip

    def log_sum_exp(self, sinks: Tensor | None, counted: Tensor | None) -> Tensor:
        """Return each row's logsumexp from the first pass; infinity for rows that do not count."""
        lse = self.floats[0] - self.floats[2].log()
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float()[:, None])
        counts = lse.isfinite() if counted is None else lse.isfinite() & counted[..., 0]
        return lse.where(counts, torch.inf)


def kernel_rows(
    scores: Scores, top: int, sinks: Tensor | None, received: bool, tile: Tile | None = None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    r"""Return the rows of strip statistics with their order, loads (B, H, Lk) int64, and the weights received.

    Largest error of a score z, with S = \|scale\| Σ \|q_d\| \|k_d\|: γ S + u \|z\| in half precision, else
    (γ + 3 · 2^-22) S + u \|z\|: a number is the sum of two of 11 digits up to 2^-22, and of the four products the
    least is left out, again 2^-22, which is below γ for every width. For sums on tensor cores γ = n v / (1 - n v)
    with v = 2^-23 and n = 2 D, in float32 6 D; u = 2^-24. A soft cap c adds 2^-21 c.
    """
    tile = fitting_tile(scores.q) if tile is None else tile
    passes = _Passes(scores, tile, top, received)
    counted = scores.counted()
    weights = torch.zeros(passes.heads, passes.k_rows * received, device=scores.q.device)
    for head, first, grid in passes.parts():
        passes.run(False, head, first, grid)
        if not (top or received):
            continue
        lse = None
        sums = None
        if received:
            lse = passes.log_sum_exp(sinks, counted)
            sums = torch.zeros(grid[1], grid[0], passes.k_rows, device=scores.q.device)
        if top:
            passes.find_bounds(grid)
        passes.run(True, head, first, grid, lse, sums)
        if top:
            passes.rank(head, first, grid)
        if sums is not None:
            weights[head : head + grid[1]] += sums.sum(1)
    floats = passes.floats
    counts = passes.counts
    rows = {"keys": counts[0].long(), "non_finite": counts[1].long(), "top": passes.best, "minimum": floats[1]}
    rows |= {"largest_weight": floats[2], "entropy": floats[3]} | ({"order": passes.order} if top else {})
    return rows, scores.loads(), weights[:, : scores.k.shape[2]].unflatten(0, scores.q.shape[:2])
