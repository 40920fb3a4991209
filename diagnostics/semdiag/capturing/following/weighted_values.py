"""From a softmax whose result has met values in a product to the attention call that they are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall, four_axes, mask_axes
from semdiag.capturing.following.axes import Axes
from semdiag.capturing.following.readings import read_axes
from semdiag.capturing.following.score_history import ScoreHistory, scores_alone
from semdiag.capturing.following.weight_axes import WeightAxes
from semdiag.capturing.fully_masked import as_the_softmax_saw, swallowing
from semdiag.capturing.score_masks import lowest, split_mask
from semdiag.mathematics.unraveled import unraveled

_REACH = 1_000.0  # above a sink the scores' own rounding is lost
_OFF = 0.25  # weights that are further from a softmax's, relatively, are others in any precision
_CHECKED = 16  # rows of scores, drawn at random, on which a history is checked against the softmax's input


class UnfollowedError(Exception):
    """An attention that cannot be described; the message says why."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """A softmax's result in a product.

    Attributes:
        scores: the softmax's input.
        key: its axis that the softmax runs over.
        history: how the scores came from queries and keys, if that is known.
        product: the axes of that product in the scores; None if it is not known.
        heads: number of heads, where the surrounding function says it.
        number: origin of ``axes`` that belong to the softmax.
        axes: of the factor that holds the weights.
        weights: that factor, if it is not sure that its entries are the softmax's; None if it is.
        dropout: probability with which weights were dropped.
        left: whether the weights are the left factor.
        given: shapes of the first inputs of the modules that are running, the innermost last.
    """

    scores: Tensor
    key: int
    history: ScoreHistory | None
    product: Axes | None
    heads: int | None
    number: int
    axes: Axes
    weights: Tensor | None
    dropout: float
    left: bool
    given: Sequence[tuple[int, ...]] = ()


def attention_of(
    found: Weighted, shape: torch.Size, other: Tensor, result: Tensor, generator: torch.Generator
) -> tuple[AttentionCall, str | None]:
    """Describe the attention; its module, layer, occurrence and mechanism are not known here.

    Args:
        found: the weights.
        shape: of the factor that holds them.
        other: the other factor, the values.
        result: the product.
        generator: draws the rows on which a history is checked.

    Returns:
        The attention; what to remark on which of its axes are samples, heads and queries, None if nothing.

    Raises:
        UnfollowedError: if the axes of the weights are not all there, or their entries are not the softmax's.
    """
    v, mixed, weights = _upright(found, other, result)
    axes = WeightAxes.of(found.axes, shape, found.left)
    _check_all_there(found, axes)
    reading, remark = read_axes(found, {p.place for p in axes.rows})
    if any(p.place == reading.query for p in axes.batch):
        raise UnfollowedError("its queries are spread over two axes of one product")
    order = [*reading.lead] if reading.query is None else [*reading.lead, reading.query]
    s = found.scores.permute(*order, found.key)
    s = s.unsqueeze(-2) if reading.query is None else s
    mixed = axes.arrange_rows(mixed, order, s.shape[:-1])
    v = axes.arrange_values(v, reading.lead, reading.query)
    if weights is not None:
        weights = axes.arrange_rows(weights, order, s.shape[:-1])
        if weights.shape[-1] == s.shape[-1] - 1:
            return _with_sink(weights, s, v, mixed, found), remark
        if not _are_of(weights, s, found.dropout):
            raise UnfollowedError("its weights were changed between the softmax and the values")
    history = found.history if order == [*range(found.key)] and reading.query is not None else None
    if history is None or not _agrees(history, s, generator):
        history = scores_alone(s, v.shape[:-1])
    elif len(history.lead) == 3 and history.k.shape[-3] == 1 < v.shape[-3] and bool((v == v[:, :, :1]).all()):
        v = v[:, :, :1]
    history, allowed, full = as_the_softmax_saw(history, s, history.left(s))
    heads = found.heads or (s.shape[1] if s.ndim == 4 else None)
    return history.call(v, mixed, allowed, heads, full), remark


def _upright(found: Weighted, other: Tensor, result: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values (…, K, D), their product (…, M, D) and weights (…, M, K), if given, as if these were on the left."""
    weights = found.weights
    if other.ndim == 1:
        return other[:, None], result[:, None], weights
    if not found.left:
        return other.mT, result.mT, None if weights is None else weights.mT
    return other, result, weights


def _check_all_there(found: Weighted, axes: WeightAxes) -> None:
    """Raise UnfollowedError unless the pieces are all those of the softmax's axes, but for that of the keys."""
    if any(p.origin != found.number or p.step == 0 or p.place == found.key for p in axes.pieces):
        raise UnfollowedError("its weights were spread over other axes before they met values")
    for place, size in enumerate(found.scores.shape):
        if place != found.key and math.prod(p.size for p in axes.pieces if p.place == place) != size:
            raise UnfollowedError("only some of its rows met values in one product")


def _are_of(weights: Tensor, s: Tensor, dropout: float, keys: slice = slice(None)) -> bool:
    """Whether weights are the softmax of scores, or its entries of some keys, up to rounding: all finite ones.

    exp(z) / Σ rounds by eps/2 at each step, relative to w, and exp of a rounded log w by eps/2 · |log w|: up to
    eps/2 · (4 + |log w|) together, of which twice is allowed. Where z is less a rounded logsumexp, exp(z) is not
    divided any more: its rows then sum to exp(logsumexp z), which is 1 up to rounding.
    """
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


def _with_sink(weights: Tensor, s: Tensor, v: Tensor, mixed: Tensor, found: Weighted) -> AttentionCall:
    """Describe attention whose first or last column meets no value: one more logit in the denominator.

    Raises:
        UnfollowedError: if another column is left out, or the sink is no score or out of reach.
    """
    ends = (slice(None, -1), slice(-1, None)), (slice(1, None), slice(0, 1))
    keys, rest = next((end for end in ends if _are_of(weights, s, found.dropout, end[0])), (None, None))
    if keys is None or rest is None:
        raise UnfollowedError("its values meet only a part of its weights")
    heads = found.heads or (s.shape[1] if s.ndim == 4 else None)
    history = scores_alone(s, v.shape[:-1])
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    sink, bias, allowed = s[..., rest], s[..., keys], history.allowed
    if not bool((sink.isfinite() & (bias.amax(-1, keepdim=True) - sink < _REACH)).all()):
        raise UnfollowedError("the column that meets no value is masked in some rows")
    by_head = four_axes(sink, heads)[:1, :, :1]
    if not bool((four_axes(sink, heads) == by_head).all()):  # rows were shifted: to where their sinks are 0
        bias, by_head = bias - sink, torch.zeros_like(by_head)
    if allowed is not None:
        allowed = allowed[..., keys]
        bias = bias.masked_fill(~allowed, 0)
    history = replace(history, bias=bias, allowed=allowed)
    return replace(history.call(v, mixed, allowed, heads), sinks=by_head.flatten())


def _agrees(history: ScoreHistory, s: Tensor, generator: torch.Generator) -> bool:
    """Whether a history gives the scores that the softmax saw, up to a constant in each row, on random rows.

    Each rounding changes the difference of two scores of a row by up to eps · the largest: eight steps in the
    dtype of the scores are allowed, and 64 in float32 or better, where the order of the product's sum shows.
    """
    if history.lead != s.shape[:-2] or not s.numel() or (history.q.shape[-2], history.k.shape[-2]) != s.shape[-2:]:
        return False
    where = torch.randint(math.prod(s.shape[:-1]), (_CHECKED,), generator=generator)
    index = unraveled(where, s.shape[:-1], s.device)
    scores, allowed = history.rows(index)
    given = s[index].to(scores.dtype)
    low = given.masked_fill(~allowed, -torch.inf).amax(-1, keepdim=True)
    some = allowed.any(-1)
    steep = given - low <= -9_000
    if bool((~allowed & ~steep & some[:, None] & (given > lowest(s.dtype))).any()):
        return False
    off = (scores - given).masked_fill(~allowed, torch.nan)[some]
    if not off.numel():
        return True
    size = torch.maximum(given.masked_fill(~allowed, 0).abs().amax(), scores.masked_fill(~allowed, 0).abs().amax())
    size = torch.maximum(size, history.reach(index))
    spread = off.nan_to_num(nan=-torch.inf).amax(-1) - off.nan_to_num(nan=torch.inf).amin(-1)
    if not bool(spread.isfinite().all()):
        return not bool(given[allowed].isfinite().all())  # a score that is not finite is the model's
    eps = history.rounding(s)
    return bool((spread <= (8 * eps + 56 * min(eps, torch.finfo(torch.float32).eps)) * size).all())


def fused_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> AttentionCall | None:
    """Describe a fused attention by the arguments of its operation; None if it is not known how."""
    if name != "_scaled_dot_product_flash_attention_for_cpu":
        return None
    given = dict(zip(("query", "key", "value", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    q, k, v = (given[part].detach() for part in ("query", "key", "value"))
    mask, scale, mixed = given.get("attn_mask"), given.get("scale"), result[0].detach()
    allowed, bias, forbidding, full = (None,) * 4 if mask is None else split_mask(mask)
    lead = mixed.shape[:-2]
    call = AttentionCall(
        module="",
        layer=0,
        q=four_axes(q),
        k=four_axes(k),
        v=four_axes(v),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        allowed=None if allowed is None else mask_axes(allowed, lead),
        queries=None,
        selected=None,
        mixed=four_axes(mixed),
        bias=None if bias is None else mask_axes(bias, lead),
        causal=bool(given.get("is_causal")),
        mechanism="scaled_dot_product_attention",
        dropout=float(given.get("dropout_p") or 0.0),
        forbidding=forbidding,
    )
    return swallowing(call, None if full is None else mask_axes(full, lead), fused=True)
