"""Operations that are no products and no softmaxes: what comes out of them is made of what went in."""

from typing import Any

from torch import Tensor

from semdiag.capturing.following.axes import Axes, broadcast, chosen, regrouped
from semdiag.capturing.following.softmaxes import prove
from semdiag.capturing.following.tags import Tags, Weights, tensors
from semdiag.capturing.recording import is_plain

_REGROUPING = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten")
_COPIES = ("clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh")
_SHAPED = ("empty_like", "rand_like", "randn_like", "new_empty", "new_empty_strided")  # takes no entries
_SAMPLED = ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
_MOVED = frozenset((*_REGROUPING, *_COPIES, "cat", "stack", "permute", "transpose"))
_DEFORMABLE = "its keys are parameters, and its values are sampled between places (deformable attention)"


def carry(tags: Tags, name: str, args: tuple[Any, ...], given: list[Tensor], result: Any) -> None:
    """Carry tags over from what went into an operation to what came out.

    Args:
        tags: of tensors.
        name: of the operation.
        args: its arguments.
        given: tensors among them, and among those given by name.
        result: what it returned.
    """
    if not given or name in _SHAPED:
        return
    if name in _SAMPLED or (name in _MOVED and _sampled(tags, given)):
        for out in _outs(result):
            tags.mark(out, "sampled")
    tagged = [(t, *tag) for t in given if any(tag := tags.of(t))]
    if not tagged:
        outs = _outs(result)
        if outs and all(map(tags.fixed, given)):
            for out in outs:
                tags.tag_fixed(out)
        return
    outs = _outs(result)
    for source, scores, weights in tagged:
        for out in outs:
            if scores is not None:
                axes, _ = _followed(name, args, scores.axes, source, out)
                if axes is scores.axes or (axes is not None and scores.product.whole_in(axes)):
                    tags.carry_scores(out, scores if axes is scores.axes else scores._replace(axes=axes))
            if weights is not None:
                _carry_weights(tags, name, args, weights, source, given, out)


def _outs(result: Any) -> list[Tensor]:
    return [t for t in tensors((result,)) if t.is_floating_point() and is_plain(t)]


def _sampled(tags: Tags, given: list[Tensor]) -> bool:
    return "sampled" in tags.marks and any(tags.marked(t, "sampled") is not None for t in given)


def _carry_weights(
    tags: Tags, name: str, args: tuple[Any, ...], tag: Weights, source: Tensor, given: list[Tensor], out: Tensor
) -> None:
    if name in ("sum", "mean") and tag.axes is not None:
        _summed(tags, tag, args, source, out)
        return
    softmax = tag.softmax
    moving = softmax.suspect and not softmax.keys_fixed(softmax.place) and not tags.fixed(softmax.scores)
    if name == "convolution" and source is args[1] and moving and not tags.fixed(args[0]):
        softmax.refuse("its weights are the kernel of a convolution")
        return
    axes, exact = (None, False) if tag.axes is None else _followed(name, args, tag.axes, source, out)
    others = [t for t in given if t is not source]
    scaled = name in ("mul", "mul_") and source.shape == out.shape and moving
    if tag.axes is None and not scaled and any(t.shape == out.shape and t.is_floating_point() for t in others):
        return  # added to a stream that has other things in it
    if axes is not None and not tag.softmax.keys_in(axes):
        if out.numel() * max(2, tag.softmax.scores.shape[tag.softmax.place or 0]) <= source.numel():
            return  # one weight of each row was chosen
        axes = None
    noise = next((kept for t in others if (kept := tags.noise(t)) is not None), None)
    dropout, spread = tag.dropout, tag.spread
    if name in ("mul", "mul_") and noise is not None:
        exact, dropout = True, 1 - (1 - tag.dropout) * noise
    elif name == "native_dropout":
        exact, dropout = True, 1 - (1 - tag.dropout) * (1 - float(args[1]))
    elif tag.logarithm and name == "exp" and tag.exact:
        exact, tag = True, tag._replace(logarithm=False)
    elif axes is not None and any(p.origin == -1 for pieces in axes for p in pieces):
        spread = spread or any(not tags.fixed(t) for t in others)
    if axes is not None and name in ("div", "div_", "mul", "mul_"):
        prove(tag.softmax, axes, out)
    sampled = tag.sampled or (name in ("mul", "mul_") and _sampled(tags, others))
    known = tags.weights(out)
    if known is None or known.softmax is tag.softmax or (softmax.suspect and not known.softmax.suspect):
        exact = exact and tag.exact
        tags.tag_weights(
            out, tag._replace(axes=axes, exact=exact, dropout=dropout, spread=spread, sampled=sampled)
        )


def _summed(tags: Tags, tag: Weights, args: tuple[Any, ...], source: Tensor, out: Tensor) -> None:
    """Weights, or weights times values element by element, summed over the keys or over other axes."""
    softmax, axes = tag.softmax, tag.axes or ((),) * source.ndim
    given = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    dims = {d % source.ndim for d in given or range(source.ndim)} if source.ndim else set()
    over = [p for d in dims for p in axes[d] if p[:2] == (softmax.number, softmax.place)]
    if over:
        sure = softmax.of_a_product or not tag.added_up  # else it may be a statistic of a router
        if tag.sampled and sure and softmax.keys_fixed(over[0].place):
            softmax.refuse(_DEFORMABLE)
        if tag.spread and sure and not softmax.done and not softmax.keys_fixed(over[0].place):
            softmax.refuse("its values are multiplied and summed one by one, not in a product")
    elif softmax.place is not None and softmax.keys_in(axes) and not softmax.keys_fixed(softmax.place):
        kept = out.ndim == source.ndim
        left = tuple(() if d in dims else pieces for d, pieces in enumerate(axes) if kept or d not in dims)
        added_up = tag.added_up or any(source.shape[d] > 1 for d in dims)
        tags.tag_weights(out, tag._replace(axes=left, exact=False, added_up=added_up))


def _followed(
    name: str, args: tuple[Any, ...], axes: Axes, source: Tensor, out: Tensor
) -> tuple[Axes | None, bool]:
    """The axes after an operation, and whether entries are what they were."""
    if name in _REGROUPING:
        found = regrouped(axes, out.shape)
        return found, found is not None
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
    found = broadcast(axes, source.shape, out.shape)
    if found is not None:
        return found, name == "expand"
    return chosen(axes, source.shape, out.shape), False
