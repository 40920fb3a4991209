"""Scores of an attention call in strips of rows, the largest of them, and the stability constants of rows."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics import softmax_stability
from semdiag.mathematics.bounds.block_bounds import Assumption
from semdiag.mathematics.spectral_norms import Real, broadcast

_CAUSAL_STRIPS = 8  # strips per sample in long causal calls, where a strip skips the keys after its last query
_LONG = 256  # queries from which this pays
_ALL = slice(None)
_LEAST_ROWS = 128  # rows per head in a strip: with fewer, all keys would be read for little work


@dataclass(frozen=True, eq=False)
class ScoreStrip:
    """Scores of some samples and queries, without the last keys, which none of the queries may see."""

    samples: slice  # samples of the strip
    heads: slice  # heads of the strip
    queries: slice  # queries of the strip
    scores: Tensor  # (b, H, r, n) in nats, including forbidden keys; the next strip overwrites them
    spare: Tensor  # working memory of the same shape
    allowed: Tensor | None  # bool, broadcastable to (b, H, r, n), keys in A_i; None means all but ``future``
    future: Tensor | None  # (r, t) bool, which of the last t keys the causal rule forbids; None means none
    counted: Tensor | None  # (b, 1 or H, r, 1) bool, queries that count towards key loads; None means all

    def forbid_(self, value: float) -> None:
        """Overwrite the scores of forbidden keys."""
        if self.allowed is not None:
            self.scores.masked_fill_(~self.allowed, value)
        elif self.future is not None:
            self.scores[..., -self.future.shape[1] :].masked_fill_(self.future, value)

    def keys(self) -> Tensor:
        """Return the number of allowed keys n_i = |A_i|, (b, H, r) int64."""
        shape = self.scores.shape[:3]
        length = self.scores.shape[3]
        if self.allowed is not None:
            return (self.allowed.sum(-1) * (length // self.allowed.shape[3])).expand(shape)
        if self.future is not None:
            hidden = self.future.shape[1]  # of the first query; one less for each later one
            first = length - hidden
            numbers = torch.arange(first, first + shape[2], device=self.scores.device)
            return numbers.clamp(max=length).expand(shape)
        return torch.full(shape, length, device=self.scores.device)


@dataclass(frozen=True, eq=False)
class Scores:
    """The inputs of an attention call's scores z; see :func:`~..row_statistics.row_statistics`."""

    q: Tensor
    k: Tensor
    scale: float
    allowed: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    causal: bool = False
    first_query: int = 0
    queries: Tensor | None = None
    places: Tensor | None = None

    def strips(self, size: int) -> Iterator[ScoreStrip]:
        """Yield strips of whole rows, of about ``size`` scores; they share their memory: finish one first."""
        batch, all_heads = self.q.shape[:2]
        length = self.q.shape[2] if self.places is None else self.places.shape[2]
        k_length = self.k.shape[2]
        shared = all_heads // self.k.shape[1]  # query heads that share a key head stay together
        fitting = size // (shared * k_length * min(_LEAST_ROWS, length))
        heads = shared * min(self.k.shape[1], max(1, fitting))
        rows = min(length, max(1, size // (heads * k_length)))
        if self.causal and length >= _LONG:
            rows = min(rows, -(-length // _CAUSAL_STRIPS))
        samples = min(batch, max(1, size // (heads * rows * k_length))) if heads == all_heads else 1
        memory = self.q.new_empty(2, samples * heads * rows * k_length)
        for first in range(0, batch, samples):
            for head in range(0, all_heads, heads):
                for start in range(0, length, rows):
                    b = slice(first, min(first + samples, batch))
                    h = slice(head, min(head + heads, all_heads))
                    yield self._strip(b, h, slice(start, min(start + rows, length)), memory)

    def _strip(self, b: slice, h: slice, r: slice, memory: Tensor) -> ScoreStrip:
        places = None if self.places is None else self.places[b, h, r]
        visible = self._visible(r, places)
        shape = b.stop - b.start, h.stop - h.start, r.stop - r.start, visible
        scores, spare = (part[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape) for part in memory)
        # One product per key head: the queries of all heads that share it are concatenated.
        shared = self.q.shape[1] // self.k.shape[1]
        k = self.k[b, h.start // shared : h.stop // shared, :visible].flatten(0, 1)
        q = self.q[b, h, r] if places is None else rows_of(self.q[b, h], places)
        out = scores.view(len(k), -1, visible)
        q = q.reshape(len(k), -1, self.q.shape[3])
        torch.baddbmm(out, q, k.transpose(1, 2), beta=0, alpha=self.scale, out=out)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        bias, allowed = (_part(values, b, h, r, visible, places) for values in (self.bias, self.allowed))
        if bias is not None:
            scores += bias
        allowed, future = self._by_rule(allowed, r, visible, places)
        return ScoreStrip(b, h, r, scores, spare, allowed, future, self._counted(b, r, places))

    def _visible(self, r: slice, places: Tensor | None) -> int:
        """Return the number of keys, at least one, up to the last that a query of a strip may see."""
        if not self.causal:
            return self.k.shape[2]
        last = r.stop if places is None else self.k.shape[2]
        if places is not None and not places.is_cuda:  # an accelerator is not waited for
            last = int(places.max()) + 1
        return min(self.k.shape[2], max(1, self.first_query + last))

    def _by_rule(
        self, allowed: Tensor | None, r: slice, visible: int, places: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Apply the causal rule: return the allowed keys, or None for all but the last keys that it forbids."""
        if not self.causal:
            return allowed, None
        if places is not None:
            past = torch.arange(visible, device=places.device) <= self.first_query + places[..., None]
            return (past if allowed is None else allowed & past), None
        future = self._future(r, visible, self.q.device)
        if future is None or allowed is None:
            return allowed, future
        hidden = torch.nn.functional.pad(future, (visible - future.shape[1], 0))
        return allowed & ~hidden, None

    def _future(self, r: slice, visible: int, device: torch.device) -> Tensor | None:
        """Return which of the last keys lie behind each query, (r, t) bool; None if there is none."""
        start = self.first_query + r.start + 1  # the first key that a query of the strip may not see
        if start >= visible:
            return None
        keys = torch.arange(start, visible, device=device)
        last_visible = torch.arange(start - 1, start - 1 + r.stop - r.start, device=device)
        return keys > last_visible[:, None]

    def loads(self) -> Tensor:
        """Return the number of counted queries that may attend to each key, (B, H, Lk) int64."""
        batch, heads = self.q.shape[:2]
        k_length = self.k.shape[2]
        device = self.q.device
        allowed = part_of(self.allowed, _ALL, _ALL)
        counted = self.counted()
        length = self.q.shape[2] if self.places is None else self.places.shape[2]
        keys = torch.arange(k_length, device=device)
        if allowed is None and counted is None and self.causal:
            return (self.first_query + length - keys).clamp(0, length).repeat(batch, heads, 1)
        counted = torch.ones(1, 1, length, 1, dtype=torch.bool, device=device) if counted is None else counted
        places = torch.arange(length, device=device)[None, None] if self.places is None else self.places
        position = (self.first_query + places)[..., None]
        if allowed is None or allowed.shape[2] == 1:
            load = _loads_by_position(counted, position, k_length) if self.causal else counted.sum(2)
            load = load if allowed is None else allowed[:, :, 0] * load
            return load.expand(batch, heads, k_length).clone()
        return self._loads_by_row(allowed, counted, position)

    def _loads_by_row(self, allowed: Tensor, counted: Tensor, position: Tensor) -> Tensor:
        """Return the loads of a mask with a row for each query, some rows at a time."""
        batch, heads = self.q.shape[:2]
        k_length = self.k.shape[2]
        keys = torch.arange(k_length, device=allowed.device)
        load = torch.zeros(batch, heads, k_length, dtype=torch.int64, device=allowed.device)
        row = k_length * batch * (allowed.shape[1] if self.places is None else heads)
        size = max(1, (2**20 if allowed.device.type == "cpu" else 2**26) // row)
        for start in range(0, position.shape[2], size):
            part = slice(start, start + size)
            some = allowed[:, :, part] if self.places is None else rows_of(allowed, self.places[:, :, part])
            visible = some & counted[:, :, part]
            load += (visible & (keys <= position[:, :, part]) if self.causal else visible).sum(2)
        return load

    def counted(self) -> Tensor | None:
        """Return the queries that count towards key loads, (B, 1 or H, Lq, 1) bool; None means all."""
        return self._counted(_ALL, _ALL, self.places)

    def _counted(self, b: slice, r: slice, places: Tensor | None) -> Tensor | None:
        if places is None:
            return None if self.queries is None else self.queries[b, None, r, None]
        counted = places[..., None] >= 0
        return counted if self.queries is None else counted & rows_of(self.queries[b, None, :, None], places)


def _loads_by_position(counted: Tensor, position: Tensor, k_length: int) -> Tensor:
    """Return for each key how many counted queries stand at it or behind it, (B, 1 or H, Lk)."""
    standing = (counted & (position >= 0))[..., 0]
    last = position.clamp(0, k_length - 1)[..., 0].expand(standing.shape)
    ends = torch.zeros(*standing.shape[:2], k_length, dtype=torch.int64, device=counted.device)
    ends.scatter_add_(-1, last, standing.long())
    return ends.flip(-1).cumsum(-1).flip(-1)


def _part(values: Tensor | None, b: slice, h: slice, r: slice, keys: int, places: Tensor | None) -> Tensor | None:
    part = part_of(values, b, r if places is None else slice(None), keys)
    if part is None:
        return None
    part = part[:, h] if part.shape[1] > 1 else part
    return part if places is None else rows_of(part, places)


def rows_of(values: Tensor, places: Tensor) -> Tensor:
    """Return rows (b, H, r, n) of values broadcastable to (b, H, Lq, n); for negative places an arbitrary one."""
    if values.shape[2] == 1:
        return values
    sample, head = (torch.arange(length, device=values.device) for length in places.shape[:2])
    sample = sample * (values.shape[0] > 1)
    head = head * (values.shape[1] > 1)
    return values[sample[:, None, None], head[:, None], places.clamp(min=0)]


def part_of(
    values: Tensor | None, samples: slice | Tensor, queries: slice | Tensor, keys: int | None = None
) -> Tensor | None:
    """Return a part, with four axes, of a tensor broadcastable to (B, H, Lq, Lk); axes of length 1 stay whole."""
    if values is None:
        return None
    values = values[(None,) * (4 - values.ndim)]
    values = values[samples] if values.shape[0] > 1 else values
    values = values[:, :, queries] if values.shape[2] > 1 else values
    return values[..., :keys] if values.shape[3] > 1 else values


def as_mask(positions: Tensor, length: int) -> Tensor:
    """Convert key positions (..., K), -1 for none, to a mask (..., length)."""
    mask = torch.zeros(*positions.shape[:-1], length + 1, dtype=torch.bool, device=positions.device)
    return mask.scatter_(-1, positions.where(positions >= 0, length), True)[..., :-1]


_GROUPED = 1024  # the same in groups, in single precision on the CPU, where choosing is cheap
_MORE = 4  # extra choices, so that nearly equal scores rarely make a row ambiguous
_LAST = 2**31 - 1  # no position is beyond it
_LOW = int(sys.byteorder == "big")  # index of the low half of an integer


def largest_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count + 1`` largest scores of each row (..., n), and the positions of the first ``count``.

    Of equal scores the one at the lower position comes first. Long rows are cut into groups of every G-th score,
    of which only those with the largest maxima are searched. Rows in which an omitted score may be as large as a
    chosen one are sorted instead. Beyond the number of keys values are -inf and positions arbitrary.

    Example:
        >>> values, positions = largest_scores(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2)
        >>> values.tolist(), positions.tolist()
        ([[3.0, 3.0, 2.0]], [[1, 2]])
    """
    number = min(count + 1, scores.shape[-1])
    packed = scores.device.type == "cpu" and scores.dtype == torch.float32
    positions, doubtful = (_packed if packed else _compared)(scores, number)
    if doubtful is not None and bool(doubtful.any()):
        positions[doubtful] = scores[doubtful].sort(dim=-1, descending=True, stable=True).indices[:, :number]
    values = scores.gather(-1, positions)
    if number <= count:
        values = torch.nn.functional.pad(values, (0, count + 1 - number), value=-torch.inf)
        positions = torch.nn.functional.pad(positions, (0, count + 1 - number))
    return values, positions[..., :count]


def _compared(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the largest scores in descending order, and which rows ties leave ambiguous."""
    length = scores.shape[-1]
    # As many groups as members of the chosen ones, nearly: powers of two divide most lengths.
    size = 2 ** round(math.log2(length / number) / 2)
    if length >= _LONG and size > 1:
        chosen = _groups(scores, size)[0].topk(number, -1, sorted=False).indices
        positions = _members(chosen, size, length)
        positions = positions.gather(-1, scores.gather(-1, positions).topk(number, -1).indices)
    else:
        positions = scores.topk(number, -1).indices
    values = scores.gather(-1, positions)
    return positions, ((values[..., 1:] == values[..., :-1]) & (values[..., 1:] > -torch.inf)).any(-1)


def _packed(scores: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """Return the result of :func:`_compared` by packed integers, which NumPy sorts many times faster."""
    length = scores.shape[-1]
    number = count + _MORE
    if length < _LONG or length <= number:
        return _sorted(scores, None, count), None
    size = 2 ** int(math.log2(length / count) / 2)
    if length >= _GROUPED and size > 1 and number < length // size:
        maxima, rest = _groups(scores, size)
        maximum = maxima.amax(-1, keepdim=True)
        half = _half(torch.maximum(maximum, rest.amax(-1, keepdim=True)) if rest.shape[-1] else maximum)
        chosen, bound = _nearest(half, maxima, number)
        members = _members(chosen, size, length)
        candidates = scores.gather(-1, members)
        chosen, closer = _nearest(half, candidates, number)
        positions = members.gather(-1, chosen)
        bound = torch.minimum(bound, closer)
    else:
        candidates = scores
        half = _half(scores.amax(-1, keepdim=True))
        chosen, bound = _nearest(half, candidates, number)
        positions = chosen
    positions = _sorted(candidates.gather(-1, chosen), positions, count)
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
    """Return half of each row's maximum, made finite, so that rows without keys are infinitely far from it."""
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
    """Return positions of the largest scores in descending order; of equal ones the lower position first."""
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


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Constants of an attention map per query: natural logarithms, shape (..., queries); −∞ for padded queries."""

    log_weight: Tensor  # ln p̄_i, largest weight that the row can give
    log_xi: Tensor  # ln ξ_i, constant of the row against ‖z − z'‖₁
    log_row: Tensor  # ln min(s_i ξ_i, row_i), constant of the row against ‖z − z'‖_∞
    log_split: Tensor  # ln of the constant against ‖a‖_∞ of z − z' = a + b; b counts with ξ_i
    assumptions: tuple[Assumption, ...]  # assumptions of the constants


def fixed_mask_rows(dispersion: Real, keys: Real) -> AttentionRows:
    """Return the constants of rows with a fixed set of keys: full, banded, block-local, random; global tokens.

    δ_i ≥ 0 in nats is the largest over everything compared, k_i ≥ 0 the number of keys, 0 for a padded query; both
    (..., queries). Other values are a ValueError.

    Source: docs/theory.md#fixed-mask-stability and docs/theory.md#row-form. Deviation: the paper has e^δ/k.

    Example:
        >>> fixed_mask_rows([2.0, 2.0], [5, 0]).log_row
        tensor([0., -inf], dtype=torch.float64)
    """
    delta, k = broadcast(dispersion, keys)
    padded = k == 0
    arguments = delta.masked_fill(padded, 0), k.masked_fill(padded, 1)
    row = softmax_stability.fixed_mask_row_stability(*arguments).log_value
    xi = softmax_stability.fixed_mask_stability(*arguments).log_value
    weight = softmax_stability.log_largest_weight(*arguments)
    weight, xi, row = (each.masked_fill(padded, -math.inf) for each in (weight, xi, row))
    return AttentionRows(weight, xi, row, row, ())


def heavy_hitter_rows(dispersion: Real, separation: Real, keys: Real) -> AttentionRows:
    """Return the constants of rows that keep their k_i highest-scoring allowed keys (top-k).

    Arguments and errors as of :func:`fixed_mask_rows`; ``separation`` is Δ_i in nats, the smallest over everything
    compared, +inf where nothing is masked. Constants are +inf in rows with Δ_i ≤ 0.

    Source: docs/theory.md#heavy-hitter-stability and docs/theory.md#row-form. Deviation: the paper's is other.

    Example:
        >>> heavy_hitter_rows(2.0, [0.5, float("inf")], 5).log_row.exp()
        tensor([4., 1.], dtype=torch.float64)
    """
    delta, gap, k = broadcast(dispersion, separation, keys)
    padded = k == 0
    assumption = softmax_stability.positive_separation(gap[~padded])
    delta = delta.masked_fill(padded, 0)
    gap = gap.masked_fill(padded, 0)
    k = k.masked_fill(padded, 1)
    once = softmax_stability.heavy_hitter_stability
    of_row = softmax_stability.heavy_hitter_row_stability
    forms = once, of_row, softmax_stability.heavy_hitter_split_stability
    logs = softmax_stability.log_largest_weight(delta, k), *(form(delta, gap, k).log_value for form in forms)
    weight, xi, row, split = (each.masked_fill(padded, -math.inf) for each in logs)
    return AttentionRows(weight, xi, row, split, (assumption,))
