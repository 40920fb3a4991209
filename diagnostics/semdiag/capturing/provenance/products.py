"""Matrix products of queries and keys, or of weights and values."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from semdiag.capturing.adapters.fused import NotFollowedError
from semdiag.capturing.attention_call import Args, AttentionCall, Kwargs, four_axes
from semdiag.capturing.provenance.positions import Extent, Side, over_positions, projected, sums_positions
from semdiag.capturing.provenance.propagation import is_sampled
from semdiag.capturing.provenance.score_history import ScoreHistory, lowest, scores_alone
from semdiag.capturing.provenance.softmaxes import MECHANISM, Softmaxes
from semdiag.capturing.provenance.tags import (
    Axes,
    Axis,
    AxisPiece,
    AxisRoles,
    ScoresTag,
    Softmax,
    Tags,
    WeightsTag,
    join_pieces,
    own_axes,
    read_axes,
    tensors,
)
from semdiag.capturing.recording import TRANSFORMED, Recorder, is_plain, outside_all_modes

PRODUCTS = ("mm", "bmm", "baddbmm", "addmm", "addbmm", "mv", "addmv", "dot")
_ADDED = ("baddbmm", "addmm", "addbmm", "addmv")
_REACH = 1_000.0  # scores further above a sink hide its rounding
_OFF = 0.25  # relative errors above this are no rounding in any dtype


OUTSIDE = "runs outside the model's modules: call the module itself inside the context"


class Products:
    """Tags products that make scores, and finds those that complete attention."""

    def __init__(self, recorder: Recorder, tags: Tags, softmaxes: Softmaxes) -> None:
        self._recorder = recorder
        self._tags = tags
        self._softmaxes = softmaxes

    def observe(self, name: str, args: Args, kwargs: Kwargs, result: Tensor) -> AttentionCall | None:
        """Observe a matrix product that has run."""
        a, b = (*args, *kwargs.values())[1:3] if name in _ADDED else args[:2]
        if not (is_plain(a) and is_plain(b)):
            return None
        scores_a, of_a = self._tags.of(a)
        scores_b, of_b = self._tags.of(b)
        may_score = b.ndim > 1 and name != "addbmm"
        if _suspect(of_a) or _suspect(of_b):  # beside real weights, another exponential is no candidate
            of_a = _suspect(of_a)
            of_b = _suspect(of_b)
        elif may_score:
            self._scored(a, b, scores_a, scores_b, result)
            self._note_no_softmax(name, a, b, scores_a, scores_b, result)
        if of_a is not None and of_b is not None:
            self._weights_met(of_a, of_b, result)
        elif of_a is not None:
            return self._weighted(of_a, a, b, result, left=True, added=name in _ADDED)
        elif of_b is not None:
            return self._weighted(of_b, b, a, result, left=False, added=name in _ADDED)
        elif not may_score and all(map(self._tags.fixed, tensors(args))):
            self._tags.tag_fixed(result)
        return None

    def _weights_met(self, of_a: WeightsTag, of_b: WeightsTag, result: Tensor) -> None:
        """Handle a product of two tensors of weights."""
        if of_a.softmax.suspect and of_b.softmax.suspect:
            for tag in (of_a, of_b):
                tag.softmax.refuse("its weights are multiplied with other attention weights, not with values")
        self._tags.tag_weights(result, of_a._replace(axes=None, exact=False))

    def observe_entrywise(self, factors: list[Tensor], result: Tensor) -> AttentionCall | None:
        """Observe an entrywise product: einsum makes one where weights of a single key meet values."""
        for source, values in (factors, factors[::-1]):
            tag = self._tags.weights(source)
            if tag is None or tag.axes is None or not (tag.softmax.one_key and is_plain(values)):
                continue
            if self._tags.fixed(values) or not values.is_floating_point():
                continue
            product = _one_key_product(tag.axes, source, values, result)
            if product is not None:
                axes, w, v, mixed = product
                return self._weighted(tag._replace(axes=axes), w, v, mixed, left=True, added=False)
        return None

    def _note_no_softmax(
        self, name: str, a: Tensor, b: Tensor, of_a: ScoresTag | None, of_b: ScoresTag | None, result: Tensor
    ) -> None:
        """Note a product of values with scores that met no softmax, unless the product makes scores itself."""
        made = self._tags.scores(result)
        if made is None or not self._recorder.running:  # an optimiser's, outside the model
            return
        for scores, factor, axis in ((of_a, b, -1), (of_b, a, -2)):
            if scores is None or any(scores.fixed) or scores.constant or not scores.sides(axis):
                continue
            if self._is_weight(factor) or self._tags.constant(factor):
                continue
            stream = next((shape for shape in reversed(self._recorder.shapes) if len(shape) > 2), ())
            if sums_positions(scores.summed, made.summed, math.prod(result.shape[:-2]), stream):
                self._softmaxes.without[made.number] = name, self._recorder.module

    def _is_weight(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed from parameters alone, or is one that its module gathered to run."""
        return self._tags.fixed(tensor) or self._recorder.holds(tensor)

    def _scored(
        self, a: Tensor, b: Tensor, of_a: ScoresTag | None, of_b: ScoresTag | None, result: Tensor
    ) -> None:
        """Tag the result as scores, or as scores whose heads are mixed; no factor comes from a softmax."""
        fixed = self._is_weight(a), self._is_weight(b)
        for scores, factor_fixed in ((of_a, fixed[1]), (of_b, fixed[0])):
            if scores is not None and factor_fixed and not any(scores.fixed):
                axes = _remaining(scores.axes, result, scores is of_a)
                if scores.whole_in(axes):
                    self._tags.tag_scores(result, scores._replace(axes=axes))
                    return
        if all(fixed):
            self._tags.tag_fixed(result)
            return
        constant = self._tags.constant(a), self._tags.constant(b)
        number = self._tags.number()
        sizes = (result.shape[-2], result.shape[-1])
        axes = own_axes(result.shape if result.ndim == 3 else (1, *result.shape), number)[-result.ndim :]
        rows, left = _extents(a, of_a)
        right, columns = _extents(b, of_b)
        summed = Extent(a.shape[-1], over_positions((*left, *right)))
        sides = rows, columns
        if fixed[1]:
            sides = projected(rows, sizes[1], summed)
        elif fixed[0]:
            sides = projected(columns, sizes[0], summed)[::-1]
        self._tags.tag_scores(result, ScoresTag(number, sizes, fixed, any(constant), axes, sides, summed))

    def _weighted(
        self, tag: WeightsTag, weights: Tensor, factor: Tensor, result: Tensor, *, left: bool, added: bool
    ) -> AttentionCall | None:
        """Handle a product of weights and another factor; return the attention that it completes."""
        softmax = tag.softmax
        if softmax.done:
            return None
        constant = self._tags.fixed(factor)
        if tag.axes is None:
            if not constant and softmax.suspect:
                softmax.refuse("its weights were moved or changed by operations that are not followed")
            return None
        summed = join_pieces(tag.axes[-1] if left or weights.ndim == 1 else tag.axes[-2])
        if softmax.axis is None and not softmax.of_a_product and _is_one_axis(softmax, summed):
            return None  # an exponential that is no softmax
        axis = _summed_keys(softmax, summed)
        if axis is None:
            self._not_over_keys(tag, tag.axes, result, left, constant)
            return None
        if _is_statistic(tag, constant, result) or self._is_gate(softmax, axis, weights, factor, left):
            return None
        reason = _reason(tag, axis, summed, constant=constant, added=added, numbers=not result.ndim)
        if self._recorder.vectorized:  # below Python, vmap's axis may be anywhere
            reason = TRANSFORMED
        if reason is not None:
            softmax.refuse(reason)
            return None
        return self._attention(tag, axis, weights, factor, result, left)

    def _is_gate(self, softmax: Softmax, axis: int, weights: Tensor, factor: Tensor, left: bool) -> bool:
        """Return whether each of many rows meets values of its own, as a gate's weights meet experts' outputs."""
        rows = weights.shape[-2 if left else -1] if weights.ndim > 1 else 1
        many = softmax.scores.ndim > 1 and softmax.scores.shape[-2] > 1
        if rows != 1 or not many or not softmax.keys_fixed(axis):
            return False
        return not self._tags.fixed(factor) and not is_sampled(self._tags, [factor])

    def _not_over_keys(self, tag: WeightsTag, axes: Axes, result: Tensor, left: bool, constant: bool) -> None:
        """Handle a product that sums weights over another axis than their keys'."""
        if constant:
            self._tags.tag_weights(result, tag._replace(axes=_remaining(axes, result, left), exact=False))
        elif tag.softmax.suspect:
            tag.softmax.refuse("its softmax does not run over the axis that is summed with values")

    def _attention(
        self, tag: WeightsTag, axis: int, weights: Tensor, values: Tensor, result: Tensor, left: bool
    ) -> AttentionCall | None:
        """Return the attention of weights that met values; None if it cannot be described."""
        try:
            with outside_all_modes(result.device.type):
                call, remark = self._described(tag, axis, weights.detach(), values.detach(), result.detach(), left)
        except NotFollowedError as error:
            tag.softmax.refuse(str(error))
            return None
        self._softmaxes.release(tag.softmax)
        if remark is not None:
            self._recorder.remark(remark)
        return replace(call, mechanism=MECHANISM, dropout=tag.dropout)

    def _described(
        self, tag: WeightsTag, key: int, weights: Tensor, v: Tensor, mixed: Tensor, left: bool
    ) -> tuple[AttentionCall, str | None]:
        """Return the attention of a softmax over ``key``, and a remark or None; ``left``: the weights are."""
        softmax = tag.softmax
        scores = softmax.scores_over(key)
        axes = tag.axes or ()
        batch = axes[0] if weights.ndim == 3 else ()  # which both factors share
        rows = () if weights.ndim == 1 else axes[-2 if left else -1]  # queries, and heads that share their values
        pieces = (*batch, *rows)
        _check_rows(softmax, scores.shape, key, pieces)
        weights, v, mixed = _rows_before_columns(weights, v, mixed, left)
        history = softmax.valid_history()
        roles, remark = self._roles(softmax, key, history, batch, rows)
        order = roles.order
        s = scores.permute(*order, key)
        if roles.query is None:
            s = s.unsqueeze(-2)
        heads = softmax.heads or (s.shape[1] if s.ndim == 4 else None)
        mixed = _rows_in(mixed, pieces, order, s.shape[:-1])
        v = _values_in(v, batch, rows, roles)
        if not tag.exact:
            weights = _rows_in(weights, pieces, order, s.shape[:-1])
            if weights.shape[-1] == s.shape[-1] - 1:
                return _with_sink(weights, s, v, mixed, heads, tag.dropout), remark
            if not _are_of(weights, s, tag.dropout):
                raise NotFollowedError("its weights were changed between the softmax and the values")
        usual = order == [*range(key)] and roles.query is not None
        history, v = self._history_and_values(history if usual else None, s, v)
        return history.call(v, mixed, heads, s), remark

    def _roles(
        self, softmax: Softmax, key: int, history: ScoreHistory | None, batch: Axis, rows: Axis
    ) -> tuple[AxisRoles, str | None]:
        """Return the roles of the axes of scores, and a remark or None; ``batch`` and ``rows`` met values."""
        shape = softmax.scores.shape
        q = None if history is None else history.q
        product = None if softmax.tag is None else softmax.tag.axes
        roles, remark = read_axes(shape, key, {p.axis for p in rows}, self._recorder.shapes, q, product)
        if any(p.axis == roles.query for p in batch):
            raise NotFollowedError("its queries are spread over two axes of one product")
        return roles, remark

    def _history_and_values(
        self, history: ScoreHistory | None, s: Tensor, v: Tensor
    ) -> tuple[ScoreHistory, Tensor]:
        """Return the history of scores, or the scores alone if they are others; values of one head only once."""
        if history is not None:
            history = history.split(s)
        if history is None or not history.agrees(s, self._recorder.generator):
            return scores_alone(s, v.shape[:-1]), v
        if len(history.lead) == 3 and history.k.shape[-3] == 1 < v.shape[-3] and bool((v == v[:, :, :1]).all()):
            v = v[:, :, :1]
        return history, v


def _suspect(tag: WeightsTag | None) -> WeightsTag | None:
    """Return a tag of weights that are attention if they meet values; else None."""
    return tag if tag is not None and tag.softmax.suspect else None


def _is_one_axis(softmax: Softmax, summed: Axis) -> bool:
    """Return whether a product sums over one axis of a softmax alone."""
    return len(summed) == 1 and summed[0].origin == softmax.number


def _summed_keys(softmax: Softmax, summed: Axis) -> int | None:
    """Return the axis of a softmax's keys, if a product sums over it or it has length 1; else None."""
    axis = softmax.axis
    if axis is None and _is_one_axis(softmax, summed):
        axis = summed[0].axis
    if axis is None or softmax.scores.shape[axis] == 1:
        return axis
    return axis if any(p.origin == softmax.number and p.axis == axis for p in summed) else None


def _is_statistic(tag: WeightsTag, constant: bool, result: Tensor) -> bool:
    """Return whether added up weights meet constants, or make a single number."""
    return tag.added_up and (constant or not (result.ndim or tag.softmax.of_a_product))


def _rows_before_columns(weights: Tensor, v: Tensor, mixed: Tensor, left: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors and the result of a product as those of weights (…, rows, keys) with values."""
    if v.ndim == 1:
        return weights, v[:, None], mixed[:, None]
    return (weights, v, mixed) if left else (weights.mT, v.mT, mixed.mT)


def _check_rows(softmax: Softmax, shape: torch.Size, key: int, pieces: Axis) -> None:
    """Check that all rows of a softmax met values, and in one product."""
    if any(p.origin != softmax.number or p.step == 0 or p.axis == key for p in pieces):
        raise NotFollowedError("its weights were spread over other axes before they met values")
    for axis, size in enumerate(shape):
        if axis != key and math.prod(p.size for p in pieces if p.axis == axis) != size:
            raise NotFollowedError("only some of its rows met values in one product")


def _extents(factor: Tensor, tag: ScoresTag | None) -> tuple[Side, Side]:
    """Return what the last two axes of a product's factor run over."""
    if tag is None:
        return (Extent(factor.shape[-2], None),), (Extent(factor.shape[-1], None),)
    return tag.extents(-2), tag.extents(-1)


def _rows_in(x: Tensor, pieces: Sequence[AxisPiece], order: Sequence[int], shape: torch.Size) -> Tensor:
    """Reorder (N, M, D) to (*shape, D); ``order`` lists the softmax's axes without the keys'."""
    width = x.shape[-1]
    x = x.reshape(*[p.size for p in pieces], width)
    return x.permute(*_sorted(pieces, order), x.ndim - 1).reshape(*shape, width)


def _values_in(v: Tensor, batch: Axis, rows: Axis, roles: AxisRoles) -> Tensor:
    """Reorder (N, K, D) to (*lead, K, D), the softmax's axes of samples and heads before the keys'."""
    shared = tuple(p for p in rows if p.axis != roles.query)
    remaining = (*batch, *shared)
    length, width = v.shape[-2:]
    by = _sorted(remaining, roles.order)
    v = v.reshape(*[p.size for p in batch], *[1 for _ in shared], length, width)
    v = v.permute(*by, len(remaining), len(remaining) + 1)
    if math.prod(p.size for p in rows) > 1 and {p.axis for p in batch} & {p.axis for p in rows}:
        v = v.expand(*[remaining[i].size for i in by], length, width)
    sizes = [math.prod(v.shape[j] for j, i in enumerate(by) if remaining[i].axis == axis) for axis in roles.lead]
    return v.reshape(*sizes, length, width)


def _sorted(pieces: Sequence[AxisPiece], order: Sequence[int]) -> list[int]:
    """Return the positions of pieces in the order of axes ``order``, the slowest first within an axis."""
    rank = {axis: i for i, axis in enumerate(order)}
    return sorted(range(len(pieces)), key=lambda i: (rank[pieces[i].axis], -pieces[i].step))


def _are_of(weights: Tensor, s: Tensor, dropout: float, keys: slice = slice(None)) -> bool:
    """Return whether finite weights are the softmax of the scores, or its entries at some keys, up to rounding."""
    dtype = torch.promote_types(torch.float32, torch.promote_types(s.dtype, weights.dtype))
    logs = s.to(dtype).log_softmax(-1)[..., keys]
    expected = logs.exp()
    there = (s > lowest(s.dtype)).any(-1, keepdim=True) & expected.isfinite()
    probabilities = weights.to(dtype) * (1 - dropout)
    if dropout:
        there = there & (probabilities != 0)
    eps = max(torch.finfo(s.dtype).eps, torch.finfo(weights.dtype).eps)
    undivided = s.to(dtype).logsumexp(-1, keepdim=True).abs()
    undivided = undivided.where(undivided <= 16 * eps, 0.0)
    relative = (eps * (4 + logs.abs()) + undivided).clamp(max=_OFF)
    allowed = relative * expected + 8 * min(eps, torch.finfo(torch.float32).eps)
    return bool(there.any()) and bool((((probabilities - expected).abs() <= allowed) | ~there).all())


def _with_sink(
    weights: Tensor, s: Tensor, v: Tensor, mixed: Tensor, heads: int | None, dropout: float
) -> AttentionCall:
    """Return attention whose first or last column meets no value: a further logit in the denominator."""
    ends = (slice(None, -1), slice(-1, None)), (slice(1, None), slice(0, 1))
    keys, rest = next((end for end in ends if _are_of(weights, s, dropout, end[0])), (None, None))
    if keys is None or rest is None:
        raise NotFollowedError("its values meet only a part of its weights")
    history = scores_alone(s, v.shape[:-1])
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    sink = s[..., rest]
    bias = s[..., keys]
    allowed = history.allowed
    if not bool((sink.isfinite() & (bias.amax(-1, keepdim=True) - sink < _REACH)).all()):
        raise NotFollowedError("the column that meets no value is masked in some rows")
    by_head = four_axes(sink, heads)[:1, :, :1]
    if not bool((four_axes(sink, heads) == by_head).all()):  # rows were shifted: shift each to a sink of 0
        bias = bias - sink
        by_head = torch.zeros_like(by_head)
    if allowed is not None:
        allowed = allowed[..., keys]
        bias = bias.masked_fill(~allowed, 0)
    history = replace(history, bias=bias, allowed=allowed)
    return replace(history.call(v, mixed, heads), sinks=by_head.flatten())


def _one_key_product(
    axes: Axes, source: Tensor, values: Tensor, result: Tensor
) -> tuple[Axes, Tensor, Tensor, Tensor] | None:
    """Return an entrywise product as a matrix product, where one axis of length 1 of the weights met values."""
    axes = ((),) * (result.ndim - source.ndim) + axes
    w, v = (t[(None,) * (result.ndim - t.ndim)] for t in (source, values))
    columns = _axes_longer(w, v, in_weights=False, in_values=True)
    if len(columns) != 1:
        return None
    batch = _axes_longer(w, v, in_weights=True, in_values=True)
    rows = _axes_longer(w, v, in_weights=True, in_values=False)
    order = [*batch, *rows, *columns, *_axes_longer(w, v, in_weights=False, in_values=False)]
    n, m = (math.prod(result.shape[d] for d in dims) for dims in (batch, rows))
    pieces = tuple(p for d in batch for p in axes[d]), tuple(p for d in rows for p in axes[d]), ()
    with outside_all_modes(result.device.type):
        w, v, mixed = (t.detach().permute(order) for t in (w, v, result))
        return pieces, w.reshape(n, m, 1), v.reshape(n, 1, -1), mixed.reshape(n, m, -1)


def _axes_longer(weights: Tensor, values: Tensor, *, in_weights: bool, in_values: bool) -> list[int]:
    """Return the axes that are longer than 1 in these factors of an entrywise product, and in no other."""
    sizes = enumerate(zip(weights.shape, values.shape, strict=True))
    return [d for d, (w, v) in sizes if (w > 1) == in_weights and (v > 1) == in_values]


def _reason(tag: WeightsTag, axis: int, summed: Axis, *, constant: bool, added: bool, numbers: bool) -> str | None:
    """Return why weights that met values over an axis are not captured; None if they are."""
    softmax = tag.softmax
    fixed = softmax.keys_fixed(axis)
    size = softmax.scores.shape[axis]
    all_keys = AxisPiece(softmax.number, axis, size, 1)
    but_one = AxisPiece(softmax.number, axis, size - 1, 0)  # that one may be a sink
    whole_axis = size == 1 or summed in ((all_keys,), (but_one,))
    reasons = {
        "its weights were summed or averaged over rows or heads before they met values": tag.added_up,
        OUTSIDE: softmax.outside,
        "its values meet only a part of its weights": not whole_axis,
        "its scores are not followed to a product of queries and keys": fixed is None,
        "its keys are parameters (a codebook, a router, learned keys), not made of the input": fixed,
        "it has one key, and its values cannot be told from other factors of its weights": constant and size == 1,
        "its values are parameters, not made of the input": constant,
        "something is added to its values in the same operation": added,
        "its values are single numbers, and only one row is computed": numbers,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _remaining(axes: Axes, result: Tensor, left: bool) -> Axes:
    """Return the axes of a product's result; the other factor's have no origin."""
    new = (AxisPiece(-1, 0, result.shape[-1 if left else -2], 1),)
    return (*axes[:-1], new) if left else (*axes[:-2], new, axes[-1])
