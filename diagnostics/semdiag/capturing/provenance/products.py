"""Matrix products of queries and keys, or of weights and values; how tags pass through other operations."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.audit import Remark
from semdiag.capturing.provenance.score_history import ScoreHistory
from semdiag.capturing.provenance.softmaxes import MECHANISM, Softmaxes, find_axis
from semdiag.capturing.provenance.tags import (
    Axes,
    AxisPiece,
    Product,
    Scores,
    Softmax,
    Tags,
    Weights,
    broadcast,
    merged,
    own_axes,
    regrouped,
    selected,
    tensors,
)
from semdiag.capturing.provenance.weighted_values import UnfollowedError, WeightedProduct, attention_of
from semdiag.capturing.recording import Recorder, in_transform, is_plain, outside_all_modes

PRODUCTS = ("mm", "bmm", "baddbmm", "addmm", "addbmm", "mv", "addmv", "dot")
_ADDED = ("baddbmm", "addmm", "addbmm", "addmv")
OUTSIDE = "runs outside the model's modules: call the module itself inside the context"


class Products:
    """Tags products that make scores, and finds those that complete attention."""

    def __init__(self, recorder: Recorder, tags: Tags, softmaxes: Softmaxes) -> None:
        self._recorder, self._tags, self._softmaxes = recorder, tags, softmaxes

    def observe(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> AttentionCall | None:
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
            self._both_weights(of_a, of_b, result)
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

    def _both_weights(self, of_a: Weights, of_b: Weights, result: Tensor) -> None:
        """Handle a product of the weights of two softmaxes."""
        if of_a.softmax.suspect and of_b.softmax.suspect:
            for tag in (of_a, of_b):
                tag.softmax.refuse("its weights are multiplied with other attention weights, not with values")
        self._tags.tag_weights(result, of_a._replace(axes=None, exact=False))

    def _note_no_softmax(
        self, name: str, a: Tensor, b: Tensor, of_a: Scores | None, of_b: Scores | None, result: Tensor
    ) -> None:
        """Note a product of values with scores that met no softmax, unless the product makes scores itself."""
        made = self._tags.scores(result)
        if made is None or not self._recorder.running:  # an optimiser's, outside the model
            return
        for scores, other, axis in ((of_a, b, -1), (of_b, a, -2)):
            if scores is None or any(scores.product.fixed) or scores.product.constant:
                continue
            if self._is_weight(other) or self._tags.constant(other):
                continue
            if any(p.origin == scores.product.number and p.axis > 0 for p in scores.axes[axis]):
                self._softmaxes.without[made.product.number] = name, self._recorder.module

    def _is_weight(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed from parameters alone, or is one that its module gathered to run."""
        return self._tags.fixed(tensor) or self._recorder.holds(tensor)

    def _scored(self, a: Tensor, b: Tensor, of_a: Scores | None, of_b: Scores | None, result: Tensor) -> None:
        """Tag the result as scores, or as scores whose heads are mixed; no factor comes from a softmax."""
        fixed = self._is_weight(a), self._is_weight(b)
        for scores, other_fixed in ((of_a, fixed[1]), (of_b, fixed[0])):
            if scores is not None and other_fixed and not any(scores.product.fixed):
                axes = _remaining(scores.axes, result, scores is of_a)
                if scores.product.whole_in(axes):
                    self._tags.tag_scores(result, scores._replace(axes=axes))
                    return
        if all(fixed):
            self._tags.tag_fixed(result)
            return
        constant = self._tags.constant(a), self._tags.constant(b)
        product = Product(self._tags.number(), (result.shape[-2], result.shape[-1]), fixed, any(constant))
        shape = result.shape if result.ndim == 3 else (1, *result.shape)
        self._tags.tag_scores(result, Scores(product, own_axes(shape, product.number)[-result.ndim :]))

    def _weighted(
        self, tag: Weights, weights: Tensor, other: Tensor, result: Tensor, *, left: bool, added: bool
    ) -> AttentionCall | None:
        """Handle a product of weights with another tensor; return the attention that it completes, if any."""
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
        if axis is None or not _over_keys(softmax, axis, summed):
            if constant:
                moved = _remaining(axes, result, left)
                self._tags.tag_weights(result, tag._replace(axes=moved, exact=False))
            elif softmax.suspect:
                softmax.refuse("its softmax does not run over the axis that is summed with values")
            return None
        if tag.added_up and (constant or not (result.ndim or softmax.of_a_product)):  # a number is a statistic
            return None
        gated = softmax.keys_fixed(axis) and _by_row(softmax, weights, left)
        if gated and not constant and not _sampled(self._tags, [other]):
            return None
        whole = _whole(softmax, axis, summed)
        reason = _reason(tag, axis, whole=whole, constant=constant, added=added, numbers=not result.ndim)
        if reason is not None:
            softmax.refuse(reason)
            return None
        return self._attention(tag, axes, axis, weights, other, result, left)

    def _attention(
        self, tag: Weights, axes: Axes, axis: int, weights: Tensor, other: Tensor, result: Tensor, left: bool
    ) -> AttentionCall | None:
        """Return the attention of weights that met values; None if it cannot be described."""
        softmax = tag.softmax
        try:
            with outside_all_modes(result.device.type):
                call, remark = attention_of(
                    WeightedProduct(
                        scores=softmax.scores_over(axis),
                        key=axis,
                        history=_history(softmax),
                        product=None if softmax.tag is None else softmax.tag.axes,
                        heads=softmax.heads,
                        number=softmax.number,
                        axes=axes,
                        weights=weights.detach() if not tag.exact else None,
                        dropout=tag.dropout,
                        left=left,
                        input_shapes=self._recorder.shapes,
                    ),
                    weights.shape,
                    other.detach(),
                    result.detach(),
                    self._recorder.generator,
                )
        except UnfollowedError as error:
            softmax.refuse(str(error))
            return None
        self._softmaxes.release(softmax)
        if remark is not None:
            self._recorder.audit.remarks[Remark(self._recorder.module, remark)] += 1
        return replace(call, mechanism=MECHANISM, dropout=tag.dropout)


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


def _over_keys(softmax: Softmax, axis: int, summed: tuple[AxisPiece, ...]) -> bool:
    """Return whether a product sums over the softmax's axis, or that axis has length 1."""
    of_keys = any(p.origin == softmax.number and p.axis == axis for p in summed)
    return of_keys or softmax.scores.shape[axis] == 1


def _whole(softmax: Softmax, axis: int, summed: tuple[AxisPiece, ...]) -> bool:
    """Return whether a product sums over all keys in order, or over all but one, which may be a sink."""
    size = softmax.scores.shape[axis]
    all_keys, but_one = AxisPiece(softmax.number, axis, size, 1), AxisPiece(softmax.number, axis, size - 1, 0)
    return size == 1 or summed in ((all_keys,), (but_one,))


def _history(softmax: Softmax) -> ScoreHistory | None:
    """Return the history of the scores, if still valid and not from a transform (``torch.func.grad``)."""
    if softmax.history is None or not softmax.history[1]():
        return None
    history = softmax.history[0]
    return None if in_transform(history.q) else history


def _by_row(softmax: Softmax, weights: Tensor, left: bool) -> bool:
    """Return whether each row of many meets values of its own, as a gate's weights meet the outputs of experts."""
    rows = weights.shape[-2 if left else -1] if weights.ndim > 1 else 1
    return rows == 1 and softmax.scores.ndim > 1 and softmax.scores.shape[-2] > 1


def _reason(tag: Weights, axis: int, *, whole: bool, constant: bool, added: bool, numbers: bool) -> str | None:
    """Return why weights that met values are not captured; None if they can be."""
    softmax = tag.softmax
    fixed = softmax.keys_fixed(axis)
    if tag.added_up:
        return "its weights were summed or averaged over rows or heads before they met values"
    if softmax.outside:
        return OUTSIDE
    if not whole:
        return "its values meet only a part of its weights"
    if fixed is None:
        return "its scores are not followed to a product of queries and keys"
    if fixed:
        return "its keys are parameters (a codebook, a router, learned keys), not made of the input"
    if constant and softmax.scores.shape[axis] == 1:
        return "it has one key, and its values cannot be told from other factors of its weights"
    if constant:
        return "its values are parameters, not made of the input"
    if added:
        return "something is added to its values in the same operation"
    if numbers:
        return "its values are single numbers, and only one row is computed"
    return None


def _remaining(axes: Axes, result: Tensor, left: bool) -> Axes:
    """Return the axes of a product's result; the other factor's have no origin."""
    new = (AxisPiece(-1, 0, result.shape[-1 if left else -2], 1),)
    if left:
        return (*axes[:-1], new)
    return (*axes[:-2], new, axes[-1])


_REGROUPING = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten")
_COPIES = ("clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh")
# only the shape of their input matters
_SHAPED = ("empty_like", "rand_like", "randn_like", "new_empty", "new_empty_strided")
_SAMPLED = ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
_TIMES = ("mul", "mul_")
_MOVED = frozenset((*_REGROUPING, *_COPIES, "cat", "stack", "permute", "transpose"))
_DEFORMABLE = "its keys are parameters, and its values are interpolated between positions (deformable attention)"


def propagate(tags: Tags, name: str, args: tuple[Any, ...], given: list[Tensor], result: Any) -> None:
    """Propagate tags from an operation's inputs to its outputs."""
    outputs = float_outputs(result) if given else []
    if name in _SHAPED:
        given = [t for t in given if tags.fixed(t)]  # noise for weights, and room for more of them
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
            if scores is not None:
                _propagate_scores(tags, name, args, scores, source, out)
            if weights is not None:
                _propagate_weights(tags, name, args, weights, source, given, out)


def float_outputs(result: Any) -> list[Tensor]:
    """Return the plain tensors of real numbers among an operation's results."""
    return [t for t in tensors((result,)) if t.is_floating_point() and is_plain(t)]


def _sampled(tags: Tags, given: list[Tensor]) -> bool:
    return "sampled" in tags.marks and any(tags.marked(t, "sampled") is not None for t in given)


def _propagate_scores(
    tags: Tags, name: str, args: tuple[Any, ...], tag: Scores, source: Tensor, out: Tensor
) -> None:
    """Propagate a product's tag while both sides of the product are in the tensor."""
    axes, _ = _axes_after(name, args, tag.axes, source, out)
    if axes is tag.axes:
        tags.derive_scores(out, tag)
    elif axes is not None and tag.product.whole_in(axes):
        tags.derive_scores(out, tag._replace(axes=axes))


def _propagate_weights(
    tags: Tags, name: str, args: tuple[Any, ...], tag: Weights, source: Tensor, given: list[Tensor], out: Tensor
) -> None:
    """Propagate a softmax's tag, or note why it ends here."""
    softmax = tag.softmax
    if name in ("sum", "mean") and tag.axes is not None:
        _summed(tags, tag, tag.axes, args, source, out)
        return
    if name == "convolution" and source is args[1] and not tags.fixed(args[0]) and _of_inputs(tags, softmax):
        softmax.refuse("its weights are the kernel of a convolution")
        return
    others = [t for t in given if t is not source]
    axes, exact = None, False
    if tag.axes is not None:
        axes, exact = _axes_after(name, args, tag.axes, source, out)
    elif _joins_stream(tags, name, softmax, source, others, out):
        return
    if axes is not None and not softmax.keys_in(axes):
        if _picks_one_per_row(softmax, source, out):
            return
        axes = None
    if axes is not None and name in ("div", "div_", *_TIMES):
        find_axis(softmax, axes, out)
    before = tags.weights(out)
    if before is None or before.softmax is softmax or (softmax.suspect and not before.softmax.suspect):
        tags.tag_weights(out, _after(tags, name, args, tag._replace(axes=axes), exact, others))


def _after(
    tags: Tags, name: str, args: tuple[Any, ...], tag: Weights, exact: bool, others: list[Tensor]
) -> Weights:
    """Return the tag of weights after an operation; ``exact`` says whether it leaves the entries unchanged."""
    known = _KNOWN_ENTRIES[name](tags, tag, args, others) if name in _KNOWN_ENTRIES else None
    sampled = tag.sampled or (name in _TIMES and _sampled(tags, others))
    if known is not None:
        return known._replace(sampled=sampled)
    spread = tag.spread
    if tag.axes is not None and any(p.origin == -1 for pieces in tag.axes for p in pieces):
        spread = spread or not all(map(tags.fixed, others))
    return tag._replace(exact=exact and tag.exact, spread=spread, sampled=sampled)


def _picks_one_per_row(softmax: Softmax, source: Tensor, out: Tensor) -> bool:
    """Return whether one weight of each row was selected."""
    return out.numel() * max(2, softmax.scores.shape[softmax.axis or 0]) <= source.numel()


def _of_inputs(tags: Tags, softmax: Softmax) -> bool:
    """Return whether a softmax is attention if it meets values: its keys or scores depend on the input."""
    return softmax.suspect and not softmax.keys_fixed(softmax.axis) and not tags.fixed(softmax.scores)


def _joins_stream(
    tags: Tags, name: str, softmax: Softmax, source: Tensor, others: list[Tensor], out: Tensor
) -> bool:
    """Return whether a tensor computed from weights is added to a stream with other content."""
    if name in _TIMES and source.shape == out.shape and _of_inputs(tags, softmax):
        return False
    return any(t.shape == out.shape and t.is_floating_point() for t in others)


def _times_noise(tags: Tags, tag: Weights, args: tuple[Any, ...], others: list[Tensor]) -> Weights | None:
    """Recognise dropout written as a product with noise."""
    kept = next((kept for t in others if (kept := tags.noise(t)) is not None), None)
    return None if kept is None else tag._replace(dropout=1 - (1 - tag.dropout) * kept)


def _dropped(tags: Tags, tag: Weights, args: tuple[Any, ...], others: list[Tensor]) -> Weights | None:
    return tag._replace(dropout=1 - (1 - tag.dropout) * (1 - float(args[1])))


def _exponential(tags: Tags, tag: Weights, args: tuple[Any, ...], others: list[Tensor]) -> Weights | None:
    """Return the tag of weights from the tag of their logarithms."""
    return tag._replace(logarithm=False) if tag.logarithm and tag.exact else None


# Operations that change entries in a known way; None adds no knowledge.
_KNOWN_ENTRIES: dict[str, Callable[[Tags, Weights, tuple[Any, ...], list[Tensor]], Weights | None]] = {
    **dict.fromkeys(_TIMES, _times_noise),
    "native_dropout": _dropped,
    "exp": _exponential,
}


def _summed(tags: Tags, tag: Weights, axes: Axes, args: tuple[Any, ...], source: Tensor, out: Tensor) -> None:
    """Handle a sum over weights, or over weights times values: over the keys or over other axes."""
    softmax = tag.softmax
    given = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    dims = {d % source.ndim for d in given or range(source.ndim)} if source.ndim else set()
    over = [p for d in dims for p in axes[d] if p[:2] == (softmax.number, softmax.axis)]
    if over:
        _summed_over_keys(tag, over[0].axis)
    elif softmax.axis is not None and softmax.keys_in(axes) and not softmax.keys_fixed(softmax.axis):
        kept = out.ndim == source.ndim
        left = tuple(() if d in dims else pieces for d, pieces in enumerate(axes) if kept or d not in dims)
        added_up = tag.added_up or any(source.shape[d] > 1 for d in dims)
        tags.tag_weights(out, tag._replace(axes=left, exact=False, added_up=added_up))


def _summed_over_keys(tag: Weights, axis: int) -> None:
    """Note why attention that weights its values entry by entry is not captured."""
    softmax, fixed = tag.softmax, tag.softmax.keys_fixed(axis)
    if tag.added_up and not softmax.of_a_product:
        return  # may be a router's statistic
    if tag.sampled and fixed:
        softmax.refuse(_DEFORMABLE)
    if tag.spread and not fixed and not softmax.done:
        softmax.refuse("its values are multiplied and summed entry by entry, not in a matrix product")


def _axes_after(
    name: str, args: tuple[Any, ...], axes: Axes, source: Tensor, out: Tensor
) -> tuple[Axes | None, bool]:
    """Return the axes after an operation, and whether the entries are unchanged."""
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
        order = list(range(len(axes)))
        order[i], order[j] = order[j], order[i]
        return tuple(axes[d] for d in order), True
    if source.shape == out.shape:
        return axes, name in ("expand", "slice", "narrow")
    result = broadcast(axes, source.shape, out.shape)
    if result is not None:
        return result, name == "expand"
    return selected(axes, source.shape, out.shape), False
