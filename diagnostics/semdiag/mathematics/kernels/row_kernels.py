"""Row statistics as Triton kernels: two passes over q kᵀ, and no wait for the device.

The first pass keeps each row's running softmax, and the maxima of groups of G keys: the (K+1)-th largest
bounds the (K+1)-th score from below. The second appends up to K·G scores above it, and K + 1 equal ones, to rank.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

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


def kernel_rows(
    scores: Scores, top: int, sinks: Tensor | None, received: bool, tile: Tile | None = None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    r"""Return the rows of strip statistics with their order, loads (B, H, Lk) int64, and the weights received.

    Largest error of a score z, with S = \|scale\| Σ \|q_d\| \|k_d\|: γ S + u \|z\| in half precision, else
    (γ + 3 · 2^-22) S + u \|z\|: a number is the sum of two of 11 digits up to 2^-22, and of the four products the
    least is left out, again 2^-22, which is below γ for every width. For sums on tensor cores γ = n v / (1 - n v)
    with v = 2^-23 and n = 2 D, in float32 6 D; u = 2^-24. A soft cap c adds 2^-21 c.
    """
    q = scores.q if scores.places is None else rows_of(scores.q, scores.places)
    tile = fitting_tile(q) if tile is None else tile
    batch, heads, length, _ = q.shape
    k_length = scores.k.shape[2]
    device = q.device
    n = batch * heads
    tiles = triton.cdiv(length, tile.rows)
    blocks = triton.cdiv(k_length, tile.keys)
    split = q.dtype == torch.float32
    q = _padded(q, tiles * tile.rows)
    k = _padded(scores.k, blocks * tile.keys)
    allowed = part_of(scores.allowed, _ALL, _ALL)
    allowed = None if allowed is None else allowed.view(torch.uint8)
    bias = part_of(scores.bias, _ALL, _ALL)
    masked, a = _kind(allowed)
    biased, p = _kind(bias)
    nothing = q.new_empty(1)
    spans = nothing
    s = (0, 0)
    of_batch, of_heads = (0, 0) if allowed is None else allowed.shape[:2]
    if allowed is not None and of_batch * of_heads <= _GRID and masked == 2 and scores.places is None:
        spans = torch.empty(of_batch, of_heads, tiles, 2, dtype=torch.int32, device=device)
        s = of_heads * tiles * (of_batch > 1), tiles * (of_heads > 1)
        _mask_spans[(tiles, of_batch * of_heads)](
            allowed, spans, of_heads, length, k_length, *a, BM=tile.rows, BN=4 * tile.keys
        )
    places = nothing if scores.places is None else scores.places.to(torch.int32).contiguous()
    floats = torch.empty(4, batch, heads, length, device=device)
    counts = torch.empty(2, batch, heads, length, dtype=torch.int32, device=device)
    best = torch.empty(batch, heads, length, top + 1, device=device) if top else floats[0, ..., None]
    order = torch.empty(batch, heads, length, top, dtype=torch.int32, device=device)
    weights = torch.zeros(n, blocks * tile.keys * received, device=device)
    counted = scores.counted()

    # Memory of a row: maxima of groups, and candidates; of a tile: sums of its columns
    size = 1
    room = 0
    if top:
        powers = [2**i for i in range(2, 1 + tile.keys.bit_length() - 1)]
        size = min(powers, key=lambda g: 6 * blocks * tile.keys // g + 8 * min(top * g, k_length))
        room = min(top * size, k_length)
    groups = blocks * (tile.keys // size)
    of_tile = tile.rows * (4 * groups + 8 * (room + top + 1)) * bool(top) + 4 * blocks * tile.keys * received
    at_once = max(1, _MEMORY // max(1, of_tile)) if of_tile else n * tiles
    some_heads = min(n, max(1, at_once // tiles), _GRID)
    some_tiles = min(tiles, at_once)
    most = some_heads * some_tiles * tile.rows
    memory = [q.new_empty(1)] * 6
    if top:
        memory[:5] = [
            torch.empty(most * groups, device=device),
            torch.empty(2 * some_heads * some_tiles, dtype=torch.int32, device=device),
            torch.empty(most, device=device),
            torch.empty(most * (room + top + 1), dtype=torch.int64, device=device),
            torch.empty(2 * most, dtype=torch.int32, device=device),
        ]
    sizes = heads, scores.k.shape[1], n, batch * scores.k.shape[1], length, k_length, q.shape[-2], k.shape[-2]
    constants = {
        "BM": tile.rows, "BN": tile.keys, "BD": q.shape[-1], "SPLIT": split, "SOFTCAP": scores.softcap is not None,
        "CAUSAL": scores.causal, "MASK": masked, "BIAS": biased, "SPANS": spans is not nothing,
        "PLACES": scores.places is not None, "FROM": int(masked > 0), "TOP": top, "G": size,
        "num_warps": tile.warps, "num_stages": tile.stages,
        "maxnreg": None if masked or biased else tile.registers,
    }  # fmt: skip
    tensors = [q, k, *(nothing if x is None else x for x in (allowed, bias)), places, spans]
    numbers = [scores.first_query, scores.scale, scores.softcap or 1.0, groups, room, *s, *a, *p]
    together = 1 if q.is_cuda else tile.rows  # rows of a program that ranks; the interpreter is slow to start one

    def run(second: bool, lse: Tensor, first: int, head: int, grid: tuple[int, int]) -> None:
        _pass[grid](
            *(*tensors, lse, floats, counts, *memory, head, first, *sizes, *numbers),
            **constants,
            SECOND=second,
            RECEIVED=second and received,
        )

    for head in range(0, n, some_heads):
        for first in range(0, tiles, some_tiles):
            grid = min(tiles - first, some_tiles), min(n - head, some_heads)
            run(False, nothing, first, head, grid)
            if not (top or received):
                continue
            lse = nothing
            if received:
                lse = floats[0] - floats[2].log()
                lse = lse if sinks is None else torch.logaddexp(lse, sinks.float()[:, None])
                lse = lse.where(lse.isfinite() if counted is None else lse.isfinite() & counted[..., 0], torch.inf)
                memory[5] = torch.zeros(grid[1], grid[0], blocks * tile.keys, device=device)
            rows = grid[0] * tile.rows
            if top:
                span = triton.next_power_of_2(groups)
                _bounds[(rows * grid[1] // together,)](
                    memory[0], memory[1], memory[2], groups, BM=tile.rows, TOP=top, SIZE=span, R=together,
                    num_warps=1 if span <= 1024 else 4,
                )  # fmt: skip
            run(True, lse, first, head, grid)
            if top:
                _ranked[(rows // together, grid[1])](
                    memory[3], memory[4], counts, best, order, head, first * tile.rows, rows, length, n * length,
                    room, TOP=top, SIZE=triton.next_power_of_2(top + 1), R=together,
                    B=min(64, triton.next_power_of_2(top + 16)), num_warps=1,
                )  # fmt: skip
            if received:
                weights[head : head + grid[1]] += memory[5].sum(1)
    rows = {"keys": counts[0].long(), "non_finite": counts[1].long(), "top": best, "minimum": floats[1]}
    rows |= {"largest_weight": floats[2], "entropy": floats[3]} | ({"order": order} if top else {})
    return rows, scores.loads(), weights[:, :k_length].unflatten(0, (batch, heads))
