"""How tags of scores and weights pass through operations that are no products."""

from typing import Any, NamedTuple

from torch import Tensor

from semdiag.capturing.attention_call import Args
from semdiag.capturing.provenance.positions import Extent
from semdiag.capturing.provenance.softmaxes import find_axis
from semdiag.capturing.provenance.tags import (
    Axes,
    ScoresTag,
    Softmax,
    Tags,
    WeightsTag,
    broadcast_axes,
    regrouped,
    selected,
    tensors,
)
from semdiag.capturing.recording import is_plain

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
    inputs: list[Tensor]
    source: Tensor
    out: Tensor

    @property
    def operands(self) -> list[Tensor]:
        """The inputs beside the source."""
        return [t for t in self.inputs if t is not self.source]


def propagate(tags: Tags, name: str, args: Args, inputs: list[Tensor], result: Any) -> None:
    """Propagate tags from an operation's inputs to its outputs."""
    outputs = float_outputs(result) if inputs else []
    if name in _SHAPED:
        inputs = [t for t in inputs if tags.fixed(t)]  # only the shape of their input matters
    if not inputs:
        return
    tagged = [(t, *tag) for t in inputs if any(tag := tags.of(t))]
    _mark_sampled(tags, name, inputs, outputs)
    if not tagged and outputs and all(map(tags.fixed, inputs)):
        for out in outputs:
            tags.tag_fixed(out)
    for source, scores, weights in tagged:
        for out in outputs:
            _propagate_tags(_Step(tags, name, args, inputs, source, out), scores, weights)


def _mark_sampled(tags: Tags, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Mark outputs that are interpolated between positions, or moved from such tensors."""
    if name in _SAMPLED or (name in _MOVED and is_sampled(tags, inputs)):
        for out in outputs:
            tags.mark(out, "sampled")


def _propagate_tags(step: _Step, scores: ScoresTag | None, weights: WeightsTag | None) -> None:
    """Propagate the tags of an input to an output."""
    if step.tags.in_model(step.out) and step.tags.fixed(step.out):  # a step of training
        return
    if scores is not None:
        _propagate_scores(step, scores)
    if weights is not None:
        _propagate_weights(step, weights)


def _propagate_scores(step: _Step, scores: ScoresTag) -> None:
    """Propagate a product's tag, while both sides of the product are in the tensor."""
    axes, _ = _axes_after(step, scores.axes)
    if axes is not None and (axes is scores.axes or scores.whole_in(axes)):
        step.tags.tag_scores(step.out, _accumulated(step, scores)._replace(axes=axes), derived=True)


def _accumulated(step: _Step, scores: ScoresTag) -> ScoresTag:
    """Return the tag of outer products after an operation: a sum of several is one over positions."""
    if scores.summed != (1, None) or step.name not in _ACCUMULATING:
        return scores
    if step.name.startswith("cum") or not all(map(step.tags.constant, step.operands)):
        return scores._replace(summed=Extent(1, True))
    return scores


def float_outputs(result: Any) -> list[Tensor]:
    """Return the plain tensors of real numbers among an operation's results."""
    return [t for t in tensors((result,)) if t.is_floating_point() and is_plain(t)]


def is_sampled(tags: Tags, inputs: list[Tensor]) -> bool:
    """Return whether one of some tensors is interpolated between positions."""
    return "sampled" in tags.marks and any(tags.marked(t, "sampled") is not None for t in inputs)


def _propagate_weights(step: _Step, tag: WeightsTag) -> None:
    """Propagate a softmax's tag, or note why it ends here."""
    softmax = tag.softmax
    if step.name in ("sum", "mean") and tag.axes is not None:
        _summed(step, tag, tag.axes)
        return
    if _is_kernel(step, softmax):
        softmax.refuse("its weights are the kernel of a convolution")
        return
    axes = None
    exact = False
    if tag.axes is not None:
        axes, exact = _axes_after(step, tag.axes)
    elif _joins_a_stream(step, softmax):
        return
    if axes is not None and not softmax.keys_in(axes):
        if _is_one_of_each_row(step, softmax):
            return
        axes = None
    if axes is not None and step.name in ("div", "div_", *_TIMES):
        find_axis(softmax, axes, step.out)
    if _takes_precedence(softmax, step.tags.weights(step.out)):
        step.tags.tag_weights(step.out, _after(step, tag._replace(axes=axes), exact))


def _is_one_of_each_row(step: _Step, softmax: Softmax) -> bool:
    """Return whether at most one weight of each row is left."""
    return step.out.numel() * max(2, softmax.scores.shape[softmax.axis or 0]) <= step.source.numel()


def _takes_precedence(softmax: Softmax, before: WeightsTag | None) -> bool:
    """Return whether a softmax's tag replaces the tag of an output, which comes from another input."""
    if before is None or before.softmax is softmax:
        return True
    return softmax.suspect and not before.softmax.suspect


def _depends_on_input(step: _Step, softmax: Softmax) -> bool:
    """Return whether a softmax is attention if it meets values: its keys or scores depend on the input."""
    return softmax.suspect and not softmax.keys_fixed(softmax.axis) and not step.tags.fixed(softmax.scores)


def _is_kernel(step: _Step, softmax: Softmax) -> bool:
    """Return whether weights are the kernel of a convolution of something that depends on the input."""
    if step.name != "convolution" or step.source is not step.args[1] or step.tags.fixed(step.args[0]):
        return False
    return _depends_on_input(step, softmax)


def _joins_a_stream(step: _Step, softmax: Softmax) -> bool:
    """Return whether weights at unknown places are added to a stream with other content."""
    if step.name in _TIMES and step.source.shape == step.out.shape and _depends_on_input(step, softmax):
        return False
    return any(t.shape == step.out.shape and t.is_floating_point() for t in step.operands)


def _after(step: _Step, tag: WeightsTag, exact: bool) -> WeightsTag:
    """Return the tag of weights after an operation; ``exact`` says whether it leaves the entries unchanged."""
    operands = step.operands
    is_product = step.name in _TIMES
    sampled = tag.sampled or (is_product and is_sampled(step.tags, operands))
    keep_probability = _keep_probability(step)
    if keep_probability is not None:
        return tag._replace(dropout=1 - (1 - tag.dropout) * keep_probability, sampled=sampled)
    if step.name == "exp" and tag.logarithm and tag.exact:
        return tag._replace(logarithm=False, sampled=sampled)
    copied = any(p.origin == -1 for pieces in tag.axes or () for p in pieces)
    spread = tag.spread or (copied and not all(map(step.tags.fixed, operands)))
    return tag._replace(exact=exact and tag.exact, spread=spread, sampled=sampled)


def _keep_probability(step: _Step) -> float | None:
    """Return the probability with which dropout keeps an entry, also where it is written out; None without."""
    if step.name == "native_dropout":
        return 1 - float(step.args[1])
    if step.name not in _TIMES:
        return None
    noise = (step.tags.marked(t, "noise") for t in step.operands)
    return next((probability for probability in noise if probability is not None), None)


def _summed(step: _Step, tag: WeightsTag, axes: Axes) -> None:
    """Handle a sum over weights, or over weights times values: over the keys or over other axes."""
    softmax = tag.softmax
    dims = _summed_dims(step)
    over_keys = [p for d in dims for p in axes[d] if p[:2] == (softmax.number, softmax.axis)]
    if over_keys:
        _refuse_sum(tag, bool(softmax.keys_fixed(over_keys[0].axis)))
    elif softmax.axis is not None and softmax.keys_in(axes) and not softmax.keys_fixed(softmax.axis):
        keeps_axes = step.out.ndim == step.source.ndim
        remaining = tuple(
            () if d in dims else pieces for d, pieces in enumerate(axes) if keeps_axes or d not in dims
        )
        added_up = tag.added_up or any(step.source.shape[d] > 1 for d in dims)
        step.tags.tag_weights(step.out, tag._replace(axes=remaining, exact=False, added_up=added_up))


def _summed_dims(step: _Step) -> set[int]:
    """Return the axes that a sum or a mean runs over."""
    ndim = step.source.ndim
    if not ndim:
        return set()
    dims = step.args[1] if len(step.args) > 1 and isinstance(step.args[1], list | tuple) else ()
    return {d % ndim for d in dims or range(ndim)}


def _refuse_sum(tag: WeightsTag, fixed: bool) -> None:
    """Refuse weights that a sum over their keys ends; ``fixed``: their keys are parameters."""
    softmax = tag.softmax
    if tag.added_up and not softmax.of_a_product:
        return  # may be a router's statistic
    if tag.sampled and fixed:
        softmax.refuse(_DEFORMABLE)
    if tag.spread and not fixed and not softmax.done:
        softmax.refuse("its values are multiplied and summed entry by entry, not in a matrix product")


def _axes_after(step: _Step, axes: Axes) -> tuple[Axes | None, bool]:
    """Return the axes after an operation, and whether the entries are unchanged."""
    name = step.name
    args = step.args
    source = step.source
    out = step.out
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
    result = broadcast_axes(axes, source.shape, out.shape)
    if result is not None:
        return result, name == "expand"
    return selected(axes, source.shape, out.shape), False
