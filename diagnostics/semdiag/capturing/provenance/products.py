"""Matrix products of queries and keys, or of weights and values; how tags pass through other operations."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semdiag.capturing.adapters.fused import NotFollowedError
from semdiag.capturing.attention_call import Args, AttentionCall, Kwargs, four_axes
from semdiag.capturing.provenance.positions import Extent, Side, over_positions, projected, sums_positions
from semdiag.capturing.provenance.score_history import lowest, scores_alone
from semdiag.capturing.provenance.softmaxes import MECHANISM, Softmaxes, find_axis
from semdiag.capturing.provenance.tags import (
    Axes,
    Axis,
    AxisPiece,
    Scores,
    Tags,
    Weights,
    broadcast,
    merged,
    own_axes,
    read_axes,
    regrouped,
    selected,
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
        self._recorder, self._tags, self._softmaxes = recorder, tags, softmaxes

    def observe(self, name: str, args: Args, kwargs: Kwargs, result: Tensor) -> AttentionCall | None:
        """Observe a matrix product that has run."""
        a, b = (*args, *kwargs.values())[1:3] if name in _ADDED else args[:2]
        if not (is_plain(a) and is_plain(b)):
            return None
        (scores_a, of_a), (scores_b, of_b) = self._tags.of(a), self._tags.of(b)
        may_score = b.ndim > 1 and name != "addbmm"
        suspects = [t is not None and t.softmax.suspect for t in (of_a, of_b)]
        if any(suspects):  # beside real weights, another exponential is no candidate
            of_a, of_b = (t if suspect else None for t, suspect in zip((of_a, of_b), suspects, strict=True))
        elif may_score:
            self._scored(a, b, scores_a, scores_b, result)
            self._note_no_softmax(name, a, b, scores_a, scores_b, result)
        if of_a is not None and of_b is not None:
            for tag in (of_a, of_b):
                if of_a.softmax.suspect and of_b.softmax.suspect:
                    tag.softmax.refuse("its weights are multiplied with other attention weights, not with values")
            self._tags.tag_weights(result, of_a._replace(axes=None, exact=False))
        elif of_a is not None:
            return self._weighted(of_a, a, b, result, left=True, added=name in _ADDED)
        elif of_b is not None:
            return self._weighted(of_b, b, a, result, left=False, added=name in _ADDED)
        elif not may_score and all(map(self._tags.fixed, tensors(args))):
            self._tags.tag_fixed(result)
        return None

    def observe_entrywise(self, given: list[Tensor], result: Tensor) -> AttentionCall | None:
        """Observe an entrywise product: einsum makes one where weights of a single key meet values."""
        for source, other in (given, given[::-1]):
            tag = self._tags.weights(source)
            if tag is None or tag.axes is None or not (tag.softmax.one_key and is_plain(other)):
                continue
            if self._tags.fixed(other) or not other.is_floating_point():
                continue
            product = _one_key_product(tag.axes, source, other, result)
            if product is not None:
                axes, w, v, mixed = product
                return self._weighted(tag._replace(axes=axes), w, v, mixed, left=True, added=False)
        return None

    def _note_no_softmax(
        self, name: str, a: Tensor, b: Tensor, of_a: Scores | None, of_b: Scores | None, result: Tensor
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

    def _scored(self, a: Tensor, b: Tensor, of_a: Scores | None, of_b: Scores | None, result: Tensor) -> None:
        """Tag the result as scores, or as scores whose heads are mixed; no factor comes from a softmax."""
        fixed = self._is_weight(a), self._is_weight(b)
        for scores, other_fixed in ((of_a, fixed[1]), (of_b, fixed[0])):
            if scores is not None and other_fixed and not any(scores.fixed):
                axes = _remaining(scores.axes, result, scores is of_a)
                if scores.whole_in(axes):
                    self._tags.tag_scores(result, scores._replace(axes=axes))
                    return
        if all(fixed):
            self._tags.tag_fixed(result)
            return
        constant = self._tags.constant(a), self._tags.constant(b)
        number, sizes = self._tags.number(), (result.shape[-2], result.shape[-1])
        axes = own_axes(result.shape if result.ndim == 3 else (1, *result.shape), number)[-result.ndim :]
        rows, left = _extents(a, of_a)
        right, columns = _extents(b, of_b)
        summed = Extent(a.shape[-1], over_positions((*left, *right)))
        sides = rows, columns
        if fixed[1]:
            sides = projected(rows, sizes[1], summed)
        elif fixed[0]:
            sides = projected(columns, sizes[0], summed)[::-1]
        self._tags.tag_scores(result, Scores(number, sizes, fixed, any(constant), axes, sides, summed))

    def _weighted(
        self, tag: Weights, weights: Tensor, other: Tensor, result: Tensor, *, left: bool, added: bool
    ) -> AttentionCall | None:
        softmax, axes, axis = tag.softmax, tag.axes, tag.softmax.axis
        if softmax.done:
            return None
        constant = self._tags.fixed(other)
        if axes is None:
            if not constant and softmax.suspect:
                softmax.refuse("its weights were moved or changed by operations that are not followed")
            return None
        summed = merged(axes[-1] if left or weights.ndim == 1 else axes[-2])
        if axis is None and len(summed) == 1 and summed[0].origin == softmax.number:
            axis = summed[0].axis
            if not softmax.of_a_product:
                return None  # an exponential that is no softmax
        of_keys = any(p.origin == softmax.number and p.axis == axis for p in summed)
        if axis is None or not (of_keys or softmax.scores.shape[axis] == 1):
            if constant:
                moved = _remaining(axes, result, left)
                self._tags.tag_weights(result, tag._replace(axes=moved, exact=False))
            elif softmax.suspect:
                softmax.refuse("its softmax does not run over the axis that is summed with values")
            return None
        if tag.added_up and (constant or not (result.ndim or softmax.of_a_product)):  # a number is a statistic
            return None
        # Each row of many meets values of its own, as a gate's weights meet the outputs of experts.
        rows = weights.shape[-2 if left else -1] if weights.ndim > 1 else 1
        gated = rows == 1 and softmax.scores.ndim > 1 and softmax.scores.shape[-2] > 1 and softmax.keys_fixed(axis)
        if gated and not constant and not _sampled(self._tags, [other]):
            return None
        size = softmax.scores.shape[axis]
        all_keys, but_one = AxisPiece(softmax.number, axis, size, 1), AxisPiece(softmax.number, axis, size - 1, 0)
        whole = size == 1 or summed in ((all_keys,), (but_one,))  # all but one: that one may be a sink
        reason = _reason(tag, axis, whole=whole, constant=constant, added=added, numbers=not result.ndim)
        if self._recorder.vectorized:  # below Python, vmap's axis may be anywhere
            reason = TRANSFORMED
        if reason is not None:
            softmax.refuse(reason)
            return None
        return self._attention(tag, axis, weights, other, result, left)

    def _attention(
        self, tag: Weights, axis: int, weights: Tensor, other: Tensor, result: Tensor, left: bool
    ) -> AttentionCall | None:
        """Return the attention of weights that met values; None if it cannot be described."""
        try:
            with outside_all_modes(result.device.type):
                call, remark = self._described(tag, axis, weights.detach(), other.detach(), result.detach(), left)
        except NotFollowedError as error:
            tag.softmax.refuse(str(error))
            return None
        self._softmaxes.release(tag.softmax)
        if remark is not None:
            self._recorder.remark(remark)
        return replace(call, mechanism=MECHANISM, dropout=tag.dropout)

    def _described(
        self, tag: Weights, key: int, weights: Tensor, v: Tensor, mixed: Tensor, left: bool
    ) -> tuple[AttentionCall, str | None]:
        """Return the attention of a softmax over ``key``, and a remark or None; ``left``: the weights are."""
        softmax, scores, axes = tag.softmax, tag.softmax.scores_over(key), tag.axes or ()
        batch = axes[0] if weights.ndim == 3 else ()  # which both factors share
        rows = () if weights.ndim == 1 else axes[-2 if left else -1]  # queries, and heads that share their values
        if v.ndim == 1:
            v, mixed = v[:, None], mixed[:, None]
        elif not left:
            v, mixed, weights = v.mT, mixed.mT, weights.mT
        pieces = (*batch, *rows)
        if any(p.origin != softmax.number or p.step == 0 or p.axis == key for p in pieces):
            raise NotFollowedError("its weights were spread over other axes before they met values")
        for axis, size in enumerate(scores.shape):
            if axis != key and math.prod(p.size for p in pieces if p.axis == axis) != size:
                raise NotFollowedError("only some of its rows met values in one product")
        history = None
        if softmax.history is not None and softmax.history[1]():
            history = softmax.history[0]  # still valid
        q, product = None if history is None else history.q, None if softmax.tag is None else softmax.tag.axes
        roles, remark = read_axes(scores.shape, key, {p.axis for p in rows}, self._recorder.shapes, q, product)
        if any(p.axis == roles.query for p in batch):
            raise NotFollowedError("its queries are spread over two axes of one product")
        order = [*roles.lead] if roles.query is None else [*roles.lead, roles.query]
        s = scores.permute(*order, key)
        s = s.unsqueeze(-2) if roles.query is None else s
        heads = softmax.heads or (s.shape[1] if s.ndim == 4 else None)
        mixed = _rows_in(mixed, pieces, order, s.shape[:-1])
        v = _values_in(v, batch, rows, roles.lead, roles.query)
        if not tag.exact:
            weights = _rows_in(weights, pieces, order, s.shape[:-1])
            if weights.shape[-1] == s.shape[-1] - 1:
                return _with_sink(weights, s, v, mixed, heads, tag.dropout), remark
            if not _are_of(weights, s, tag.dropout):
                raise NotFollowedError("its weights were changed between the softmax and the values")
        usual = history is not None and order == [*range(key)] and roles.query is not None
        history = history.split(s) if history is not None and usual else None
        if history is None or not history.agrees(s, self._recorder.generator):
            history = scores_alone(s, v.shape[:-1])
        elif len(history.lead) == 3 and history.k.shape[-3] == 1 < v.shape[-3] and bool((v == v[:, :, :1]).all()):
            v = v[:, :, :1]
        return history.call(v, mixed, heads, s), remark


def _extents(factor: Tensor, tag: Scores | None) -> tuple[Side, Side]:
    """Return what the last two axes of a product's factor run over."""
    if tag is None:
        return (Extent(factor.shape[-2], None),), (Extent(factor.shape[-1], None),)
    return tag.extents(-2), tag.extents(-1)


def _rows_in(x: Tensor, pieces: Sequence[AxisPiece], order: Sequence[int], shape: torch.Size) -> Tensor:
    """Reorder (N, M, D) to (*shape, D); ``order`` lists the softmax's axes without the keys'."""
    width = x.shape[-1]
    x = x.reshape(*[p.size for p in pieces], width)
    return x.permute(*_sorted(pieces, order), x.ndim - 1).reshape(*shape, width)


def _values_in(v: Tensor, batch: Axis, rows: Axis, lead: Sequence[int], query: int | None) -> Tensor:
    """Reorder (N, K, D) to (*lead, K, D); ``lead`` lists the softmax's axes of samples and heads."""
    shared = tuple(p for p in rows if p.axis != query)
    kept, (length, width) = (*batch, *shared), v.shape[-2:]
    by = _sorted(kept, (*lead,) if query is None else (*lead, query))
    v = v.reshape(*[p.size for p in batch], *[1 for _ in shared], length, width)
    v = v.permute(*by, len(kept), len(kept) + 1)
    if math.prod(p.size for p in rows) > 1 and {p.axis for p in batch} & {p.axis for p in rows}:
        v = v.expand(*[kept[i].size for i in by], length, width)
    sizes = [math.prod(v.shape[j] for j, i in enumerate(by) if kept[i].axis == axis) for axis in lead]
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
    given = weights.to(dtype) * (1 - dropout)
    there = there & (given != 0) if dropout else there
    eps = max(torch.finfo(s.dtype).eps, torch.finfo(weights.dtype).eps)
    undivided = s.to(dtype).logsumexp(-1, keepdim=True).abs()
    undivided = undivided.where(undivided <= 16 * eps, 0.0)
    relative = (eps * (4 + logs.abs()) + undivided).clamp(max=_OFF)
    allowed = relative * expected + 8 * min(eps, torch.finfo(torch.float32).eps)
    return bool(there.any()) and bool((((given - expected).abs() <= allowed) | ~there).all())


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
    sink, bias, allowed = s[..., rest], s[..., keys], history.allowed
    if not bool((sink.isfinite() & (bias.amax(-1, keepdim=True) - sink < _REACH)).all()):
        raise NotFollowedError("the column that meets no value is masked in some rows")
    by_head = four_axes(sink, heads)[:1, :, :1]
    if not bool((four_axes(sink, heads) == by_head).all()):  # rows were shifted: shift each to a sink of 0
        bias, by_head = bias - sink, torch.zeros_like(by_head)
    if allowed is not None:
        allowed = allowed[..., keys]
        bias = bias.masked_fill(~allowed, 0)
    history = replace(history, bias=bias, allowed=allowed)
    return replace(history.call(v, mixed, heads), sinks=by_head.flatten())


def _one_key_product(
    axes: Axes, source: Tensor, other: Tensor, result: Tensor
) -> tuple[Axes, Tensor, Tensor, Tensor] | None:
    """Return an entrywise product as a matrix product, where one axis of length 1 of the weights met values."""
    axes = ((),) * (result.ndim - source.ndim) + axes
    w, v = (t[(None,) * (result.ndim - t.ndim)] for t in (source, other))
    wide = [d for d in range(result.ndim) if w.shape[d] == 1 < v.shape[d]]
    if len(wide) != 1:
        return None
    batch = [d for d in range(result.ndim) if w.shape[d] > 1 < v.shape[d]]
    rows = [d for d in range(result.ndim) if w.shape[d] > 1 == v.shape[d]]
    order = [*batch, *rows, *wide, *(d for d in range(result.ndim) if result.shape[d] == 1)]
    n, m = (math.prod(result.shape[d] for d in dims) for dims in (batch, rows))
    pieces = tuple(p for d in batch for p in axes[d]), tuple(p for d in rows for p in axes[d]), ()
    with outside_all_modes(result.device.type):
        w, v, mixed = (t.detach().permute(order) for t in (w, v, result))
        return pieces, w.reshape(n, m, 1), v.reshape(n, 1, -1), mixed.reshape(n, m, -1)


def _reason(tag: Weights, axis: int, *, whole: bool, constant: bool, added: bool, numbers: bool) -> str | None:
    fixed = tag.softmax.keys_fixed(axis)
    reasons = {
        "its weights were summed or averaged over rows or heads before they met values": tag.added_up,
        OUTSIDE: tag.softmax.outside,
        "its values meet only a part of its weights": not whole,
        "its scores are not followed to a product of queries and keys": fixed is None,
        "its keys are parameters (a codebook, a router, learned keys), not made of the input": fixed,
        "it has one key, and its values cannot be told from other factors of its weights": constant
        and tag.softmax.scores.shape[axis] == 1,
        "its values are parameters, not made of the input": constant,
        "something is added to its values in the same operation": added,
        "its values are single numbers, and only one row is computed": numbers,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _remaining(axes: Axes, result: Tensor, left: bool) -> Axes:
    """Return the axes of a product's result; the other factor's have no origin."""
    new = (AxisPiece(-1, 0, result.shape[-1 if left else -2], 1),)
    return (*axes[:-1], new) if left else (*axes[:-2], new, axes[-1])


_REGROUPING = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten")
_COPIES = ("clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh")
_SHAPED = ("empty_like", "rand_like", "randn_like", "new_empty", "new_empty_strided")
_SAMPLED = ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
_TIMES = ("mul", "mul_")
_ACCUMULATING = ("cumsum", "cumsum_", "add", "add_", "sub", "sub_", "lerp", "lerp_", "addcmul", "addcmul_")
_MOVED = frozenset((*_REGROUPING, *_COPIES, "cat", "stack", "permute", "transpose"))
_DEFORMABLE = "its keys are parameters, and its values are interpolated between positions (deformable attention)"


class _Step(NamedTuple):
    tags: Tags
    name: str
    args: Args
    given: list[Tensor]
    source: Tensor
    out: Tensor

    @property
    def others(self) -> list[Tensor]:
        return [t for t in self.given if t is not self.source]


def propagate(tags: Tags, name: str, args: Args, given: list[Tensor], result: Any) -> None:
    """Propagate tags from an operation's inputs to its outputs."""
    outputs = float_outputs(result) if given else []
    if name in _SHAPED:
        given = [t for t in given if tags.fixed(t)]  # only the shape of their input matters
    if not given:
        return
    if name in _SAMPLED or (name in _MOVED and _sampled(tags, given)):
        for out in outputs:
            tags.mark(out, "sampled")
    tagged = [(t, *tag) for t in given if any(tag := tags.of(t))]
    if not tagged and outputs and all(map(tags.fixed, given)):
        for out in outputs:
            tags.tag_fixed(out)
    for source, scores, weights in tagged:
        for out in outputs:
            if tags.own(out) and tags.fixed(out):  # a step of training
                continue
            step = _Step(tags, name, args, given, source, out)
            if scores is not None:  # while both sides of the product are in the tensor
                axes, _ = _axes_after(step, scores.axes)
                if axes is not None and (axes is scores.axes or scores.whole_in(axes)):
                    tags.tag_scores(out, _accumulated(step, scores)._replace(axes=axes), derived=True)
            if weights is not None:
                _propagate_weights(step, weights)


def _accumulated(step: _Step, scores: Scores) -> Scores:
    """Return the tag of outer products after an operation: a sum of several is one over positions."""
    if scores.summed != (1, None) or step.name not in _ACCUMULATING:
        return scores
    if step.name.startswith("cum") or not all(map(step.tags.constant, step.others)):
        return scores._replace(summed=Extent(1, True))
    return scores


def float_outputs(result: Any) -> list[Tensor]:
    """Return the plain tensors of real numbers among an operation's results."""
    return [t for t in tensors((result,)) if t.is_floating_point() and is_plain(t)]


def _sampled(tags: Tags, given: list[Tensor]) -> bool:
    return "sampled" in tags.marks and any(tags.marked(t, "sampled") is not None for t in given)


def _propagate_weights(step: _Step, tag: Weights) -> None:
    """Propagate a softmax's tag, or note why it ends here."""
    softmax, tags, name, source, out = tag.softmax, step.tags, step.name, step.source, step.out
    if name in ("sum", "mean") and tag.axes is not None:
        _summed(step, tag, tag.axes)
        return
    # It is attention if it meets values: its keys or scores depend on the input.
    of_inputs = softmax.suspect and not softmax.keys_fixed(softmax.axis) and not tags.fixed(softmax.scores)
    if name == "convolution" and source is step.args[1] and not tags.fixed(step.args[0]) and of_inputs:
        softmax.refuse("its weights are the kernel of a convolution")
        return
    axes, exact = None, False
    if tag.axes is not None:
        axes, exact = _axes_after(step, tag.axes)
    elif not (name in _TIMES and source.shape == out.shape and of_inputs) and any(
        t.shape == out.shape and t.is_floating_point() for t in step.others
    ):
        return  # added to a stream with other content
    if axes is not None and not softmax.keys_in(axes):
        if out.numel() * max(2, softmax.scores.shape[softmax.axis or 0]) <= source.numel():
            return  # one weight of each row was selected
        axes = None
    if axes is not None and name in ("div", "div_", *_TIMES):
        find_axis(softmax, axes, out)
    before = tags.weights(out)
    if before is None or before.softmax is softmax or (softmax.suspect and not before.softmax.suspect):
        tags.tag_weights(out, _after(step, tag._replace(axes=axes), exact))


def _after(step: _Step, tag: Weights, exact: bool) -> Weights:
    """Return the tag of weights after an operation; ``exact`` says whether it leaves the entries unchanged."""
    tags, name, others = step.tags, step.name, step.others
    sampled = tag.sampled or (name in _TIMES and _sampled(tags, others))
    noise = (kept for t in others if (kept := tags.marked(t, "noise")) is not None) if name in _TIMES else iter(())
    kept = 1 - float(step.args[1]) if name == "native_dropout" else next(noise, None)  # dropout may be written out
    if kept is not None:
        return tag._replace(dropout=1 - (1 - tag.dropout) * kept, sampled=sampled)
    if name == "exp" and tag.logarithm and tag.exact:
        return tag._replace(logarithm=False, sampled=sampled)
    copied = any(p.origin == -1 for pieces in tag.axes or () for p in pieces)
    spread = tag.spread or (copied and not all(map(tags.fixed, others)))
    return tag._replace(exact=exact and tag.exact, spread=spread, sampled=sampled)


def _summed(step: _Step, tag: Weights, axes: Axes) -> None:
    """Handle a sum over weights, or over weights times values: over the keys or over other axes."""
    softmax, source, out = tag.softmax, step.source, step.out
    given = step.args[1] if len(step.args) > 1 and isinstance(step.args[1], list | tuple) else ()
    dims = {d % source.ndim for d in given or range(source.ndim)} if source.ndim else set()
    over = [p for d in dims for p in axes[d] if p[:2] == (softmax.number, softmax.axis)]
    if over:
        fixed = softmax.keys_fixed(over[0].axis)
        if tag.added_up and not softmax.of_a_product:
            return  # may be a router's statistic
        if tag.sampled and fixed:
            softmax.refuse(_DEFORMABLE)
        if tag.spread and not fixed and not softmax.done:
            softmax.refuse("its values are multiplied and summed entry by entry, not in a matrix product")
    elif softmax.axis is not None and softmax.keys_in(axes) and not softmax.keys_fixed(softmax.axis):
        kept = out.ndim == source.ndim
        left = tuple(() if d in dims else pieces for d, pieces in enumerate(axes) if kept or d not in dims)
        added_up = tag.added_up or any(source.shape[d] > 1 for d in dims)
        step.tags.tag_weights(out, tag._replace(axes=left, exact=False, added_up=added_up))


def _axes_after(step: _Step, axes: Axes) -> tuple[Axes | None, bool]:
    """Return the axes after an operation, and whether the entries are unchanged."""
    name, args, source, out = step.name, step.args, step.source, step.out
    if name in _REGROUPING:
        result = regrouped(axes, out.shape)
        return result, result is not None
    if name in _COPIES or out is source:
        return axes, name in _COPIES
    if name == "permute":
        return tuple(axes[d] for d in args[1]), True
    if name in ("transpose", "t"):
        if len(axes) < 2:
            return axes, True
        i, j = (args[1], args[2]) if name == "transpose" else (0, 1)
        order = list(axes)
        order[i], order[j] = order[j], order[i]
        return tuple(order), True
    if source.shape == out.shape:
        return axes, name in ("expand", "slice", "narrow")
    result = broadcast(axes, source.shape, out.shape)
    if result is not None:
        return result, name == "expand"
    return selected(axes, source.shape, out.shape), False
