"""Propagate tags through operations that are neither products nor softmaxes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from semdiag.capturing.provenance.axes import Axes, broadcast, regrouped, selected
from semdiag.capturing.provenance.softmaxes import find_axis
from semdiag.capturing.provenance.tags import Scores, Softmax, Tags, Weights, tensors
from semdiag.capturing.recording import is_plain

_REGROUPING = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten")
_COPIES = ("clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh")
_SHAPED = ("empty_like", "rand_like", "randn_like", "new_empty", "new_empty_strided")  # use the shape only
_SAMPLED = ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
_TIMES = ("mul", "mul_")
_MOVED = frozenset((*_REGROUPING, *_COPIES, "cat", "stack", "permute", "transpose"))
_DEFORMABLE = "its keys are parameters, and its values are interpolated between positions (deformable attention)"


def propagate(tags: Tags, name: str, args: tuple[Any, ...], given: list[Tensor], result: Any) -> None:
    """Propagate tags from an operation's inputs to its outputs."""
    if not given or name in _SHAPED:
        return
    outputs = _float_outputs(result)
    if name in _SAMPLED or (name in _MOVED and _sampled(tags, given)):
        for out in outputs:
            tags.mark(out, "sampled")
    tagged = [(t, *tag) for t in given if any(tag := tags.of(t))]
    if not tagged and outputs and all(map(tags.fixed, given)):
        for out in outputs:
            tags.tag_fixed(out)
    for source, scores, weights in tagged:
        for out in outputs:
            if scores is not None:
                _propagate_scores(tags, name, args, scores, source, out)
            if weights is not None:
                _propagate_weights(tags, name, args, weights, source, given, out)


def _float_outputs(result: Any) -> list[Tensor]:
    return [t for t in tensors((result,)) if t.is_floating_point() and is_plain(t)]


def _sampled(tags: Tags, given: list[Tensor]) -> bool:
    return "sampled" in tags.marks and any(tags.marked(t, "sampled") is not None for t in given)


def _propagate_scores(
    tags: Tags, name: str, args: tuple[Any, ...], tag: Scores, source: Tensor, out: Tensor
) -> None:
    """Propagate a product's tag as long as both sides of the product are still in the tensor."""
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
    """Return whether a softmax would be attention if it met values: its keys or scores depend on the input."""
    return softmax.suspect and not softmax.keys_fixed(softmax.axis) and not tags.fixed(softmax.scores)


def _joins_stream(
    tags: Tags, name: str, softmax: Softmax, source: Tensor, others: list[Tensor], out: Tensor
) -> bool:
    """Return whether something computed from weights is added to a stream with other content."""
    if name in _TIMES and source.shape == out.shape and _of_inputs(tags, softmax):
        return False
    return any(t.shape == out.shape and t.is_floating_point() for t in others)


def _times_noise(tags: Tags, tag: Weights, args: tuple[Any, ...], others: list[Tensor]) -> Weights | None:
    """Recognise dropout that is written out as a product with noise."""
    kept = next((kept for t in others if (kept := tags.noise(t)) is not None), None)
    return None if kept is None else tag._replace(dropout=1 - (1 - tag.dropout) * kept)


def _dropped(tags: Tags, tag: Weights, args: tuple[Any, ...], others: list[Tensor]) -> Weights | None:
    return tag._replace(dropout=1 - (1 - tag.dropout) * (1 - float(args[1])))


def _exponential(tags: Tags, tag: Weights, args: tuple[Any, ...], others: list[Tensor]) -> Weights | None:
    """Return the tag of the weights whose logarithms went in."""
    return tag._replace(logarithm=False) if tag.logarithm and tag.exact else None


# Operations that change entries in a known way; None means that they add no knowledge.
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
