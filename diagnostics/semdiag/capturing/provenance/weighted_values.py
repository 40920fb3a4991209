"""Turn a softmax whose result was multiplied with values into an attention call."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing.adapters.fused import with_full_rows_read
from semdiag.capturing.attention_call import Args, AttentionCall, Kwargs, described, four_axes
from semdiag.capturing.provenance.score_history import ScoreHistory, lowest, scores_alone, split_mask
from semdiag.capturing.provenance.tags import Axes, AxisPiece, entries, read_axes, read_leading
from semdiag.mathematics.planes import unraveled


@dataclass(frozen=True)
class WeightAxes:
    """Pieces of the weights' axes in a product, without the keys'."""

    batch: tuple[AxisPiece, ...]  # pieces of the batch axis, which both factors share
    rows: tuple[AxisPiece, ...]  # pieces of the weights' other axis: queries, and heads that share their values

    @classmethod
    def of(cls, axes: Axes, shape: torch.Size, left: bool) -> "WeightAxes":
        """Return the pieces from the axes and shape of the factor with the weights; ``left`` if it comes first."""
        if len(shape) == 1:
            return cls((), ())
        return cls(axes[0] if len(shape) == 3 else (), axes[-2 if left else -1])

    @property
    def pieces(self) -> tuple[AxisPiece, ...]:
        """All pieces, the slowest first."""
        return (*self.batch, *self.rows)

    def arrange_rows(self, x: Tensor, order: Sequence[int], shape: torch.Size) -> Tensor:
        """Reorder (N, M, D) to (*shape, D); ``order`` lists the softmax's axes without the keys'."""
        width = x.shape[-1]
        x = x.reshape(*[p.size for p in self.pieces], width)
        return x.permute(*_sorted(self.pieces, order), x.ndim - 1).reshape(*shape, width)

    def arrange_values(self, v: Tensor, lead: Sequence[int], query: int | None) -> Tensor:
        """Reorder (N, K, D) to (*lead, K, D); ``lead`` lists the softmax's axes of samples and heads."""
        shared = tuple(p for p in self.rows if p.axis != query)
        kept, (length, width) = (*self.batch, *shared), v.shape[-2:]
        by = _sorted(kept, (*lead,) if query is None else (*lead, query))
        v = v.reshape(*[p.size for p in self.batch], *[1 for _ in shared], length, width)
        v = v.permute(*by, len(kept), len(kept) + 1)
        if entries(self.rows) > 1 and {p.axis for p in self.batch} & {p.axis for p in self.rows}:
            v = v.expand(*[kept[i].size for i in by], length, width)
        sizes = [math.prod(v.shape[j] for j, i in enumerate(by) if kept[i].axis == axis) for axis in lead]
        return v.reshape(*sizes, length, width)


def _sorted(pieces: Sequence[AxisPiece], order: Sequence[int]) -> list[int]:
    """Return the positions of pieces in the order of axes ``order``, the slowest first within an axis."""
    rank = {axis: i for i, axis in enumerate(order)}
    return sorted(range(len(pieces)), key=lambda i: (rank[pieces[i].axis], -pieces[i].step))


_REACH = 1_000.0  # scores further above a sink hide its rounding
_OFF = 0.25  # relative errors above this are no rounding in any dtype
_CHECKED = 16  # random rows on which a history is compared with the softmax's input


class UnfollowedError(Exception):
    """Raised for attention that cannot be described; the message gives the reason."""


@dataclass(frozen=True, eq=False)
class WeightedProduct:
    """A product of a softmax's result with another tensor."""

    scores: Tensor  # the softmax's input
    key: int  # axis that the softmax normalises
    history: ScoreHistory | None  # operations from queries and keys to the scores; None if unknown
    product: Axes | None  # axes of the product of queries and keys in the scores; None if unknown
    heads: int | None  # number of heads, where the surrounding function knows it
    number: int  # number of the softmax as an origin in ``axes``
    axes: Axes  # axes of the factor that holds the weights
    weights: Tensor | None  # that factor, if its entries may differ from the softmax's; else None
    dropout: float  # probability with which weights were dropped
    left: bool  # whether the weights are the left factor
    # shapes of the first inputs of the running modules, the innermost last
    input_shapes: Sequence[tuple[int, ...]] = ()


def attention_of(
    weighted: WeightedProduct, shape: torch.Size, other: Tensor, result: Tensor, generator: torch.Generator
) -> tuple[AttentionCall, str | None]:
    """Return the attention without module, layer, occurrence and mechanism, which are unknown here."""
    v, mixed, weights = other, result, weighted.weights  # (…, K, D), (…, M, D) and (…, M, K)
    if other.ndim == 1:
        v, mixed = v[:, None], mixed[:, None]
    elif not weighted.left:
        v, mixed, weights = v.mT, mixed.mT, None if weights is None else weights.mT
    axes = WeightAxes.of(weighted.axes, shape, weighted.left)
    _check_all_there(weighted, axes)
    history, rows = weighted.history, {p.axis for p in axes.rows}
    q = None if history is None else history.q
    roles, remark = read_axes(
        weighted.scores.shape, weighted.key, rows, weighted.input_shapes, q, weighted.product
    )
    if any(p.axis == roles.query for p in axes.batch):
        raise UnfollowedError("its queries are spread over two axes of one product")
    order = [*roles.lead] if roles.query is None else [*roles.lead, roles.query]
    s = weighted.scores.permute(*order, weighted.key)
    s = s.unsqueeze(-2) if roles.query is None else s
    mixed = axes.arrange_rows(mixed, order, s.shape[:-1])
    v = axes.arrange_values(v, roles.lead, roles.query)
    if weights is not None:
        weights = axes.arrange_rows(weights, order, s.shape[:-1])
        if weights.shape[-1] == s.shape[-1] - 1:
            return _with_sink(weights, s, v, mixed, weighted), remark
        if not _are_of(weights, s, weighted.dropout):
            raise UnfollowedError("its weights were changed between the softmax and the values")
    usual = history is not None and order == [*range(weighted.key)] and roles.query is not None
    history = history.split(s) if history is not None and usual else None
    if history is None or not _agrees(history, s, generator):
        history = scores_alone(s, v.shape[:-1])
    elif len(history.lead) == 3 and history.k.shape[-3] == 1 < v.shape[-3] and bool((v == v[:, :, :1]).all()):
        v = v[:, :, :1]
    history, allowed, full = with_full_rows_read(history, s)
    heads = weighted.heads or (s.shape[1] if s.ndim == 4 else None)
    return history.call(v, mixed, allowed, heads, full), remark


def _check_all_there(weighted: WeightedProduct, axes: WeightAxes) -> None:
    """Raise UnfollowedError unless the pieces cover the softmax's axes, without the keys'."""
    if any(p.origin != weighted.number or p.step == 0 or p.axis == weighted.key for p in axes.pieces):
        raise UnfollowedError("its weights were spread over other axes before they met values")
    for axis, size in enumerate(weighted.scores.shape):
        if axis != weighted.key and math.prod(p.size for p in axes.pieces if p.axis == axis) != size:
            raise UnfollowedError("only some of its rows met values in one product")


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


def _with_sink(weights: Tensor, s: Tensor, v: Tensor, mixed: Tensor, weighted: WeightedProduct) -> AttentionCall:
    """Return attention whose first or last column meets no value: a further logit in the denominator."""
    ends = (slice(None, -1), slice(-1, None)), (slice(1, None), slice(0, 1))
    keys, rest = next((end for end in ends if _are_of(weights, s, weighted.dropout, end[0])), (None, None))
    if keys is None or rest is None:
        raise UnfollowedError("its values meet only a part of its weights")
    heads = weighted.heads or (s.shape[1] if s.ndim == 4 else None)
    history = scores_alone(s, v.shape[:-1])
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    sink, bias, allowed = s[..., rest], s[..., keys], history.allowed
    if not bool((sink.isfinite() & (bias.amax(-1, keepdim=True) - sink < _REACH)).all()):
        raise UnfollowedError("the column that meets no value is masked in some rows")
    by_head = four_axes(sink, heads)[:1, :, :1]
    if not bool((four_axes(sink, heads) == by_head).all()):  # rows were shifted: shift each to a sink of 0
        bias, by_head = bias - sink, torch.zeros_like(by_head)
    if allowed is not None:
        allowed = allowed[..., keys]
        bias = bias.masked_fill(~allowed, 0)
    history = replace(history, bias=bias, allowed=allowed)
    return replace(history.call(v, mixed, allowed, heads), sinks=by_head.flatten())


def _agrees(history: ScoreHistory, s: Tensor, generator: torch.Generator) -> bool:
    """Return whether a history reproduces the softmax's input on random rows, up to a constant per row."""
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
        return not bool(given[allowed].isfinite().all())  # a non-finite score comes from the model
    eps = history.rounding(s)
    return bool((spread <= (8 * eps + 56 * min(eps, torch.finfo(torch.float32).eps)) * size).all())


SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_FLASH = (*SDPA[:3], *SDPA[4:])


def fused_call(name: str, args: Args, kwargs: Kwargs, result: Any) -> AttentionCall | None:
    """Return fused attention from the arguments of its operation; None for an unknown operation."""
    if name != "_scaled_dot_product_flash_attention_for_cpu":
        return None
    return sdpa_call(dict(zip(_FLASH, args, strict=False)) | kwargs, result[0], None, ())[0]


def sdpa_call(
    given: dict[str, Any], mixed: Tensor, heads: int | None, shapes: Sequence[tuple[int, ...]]
) -> tuple[AttentionCall, tuple[int, ...], str | None]:
    """Return a call by torch's names of arguments; the order of its axes before the queries; a remark, or None."""
    q, k, v = (given[name].detach() for name in SDPA[:3])
    mask, causal, first, mixed = given.get("attn_mask"), bool(given.get("is_causal")), 0, mixed.detach()
    biases = sys.modules.get("torch.nn.attention.bias")  # None unless already imported, which takes a second
    if biases is not None and isinstance(mask, biases.CausalBias):
        causal = True
        first = k.shape[-2] - q.shape[-2] if mask.variant == biases.CausalVariant.LOWER_RIGHT else 0
        mask = None
    allowed, bias, forbidding, full = (None,) * 4 if mask is None else split_mask(mask)
    order, remark = tuple(range(mixed.ndim - 2)), None
    if given.get("enable_gqa"):
        count = math.lcm(k.shape[-3], v.shape[-3])
        k, v = (x if x.shape[-3] == count else x.repeat_interleave(count // x.shape[-3], -3) for x in (k, v))
        samples = mixed.shape[:-3] or (1,)  # the first of three axes is the heads'
        q, k, v, mixed = (x.expand(*samples, *x.shape[-3:]) for x in (q, k, v, mixed))
    else:
        lead = mixed.shape[:-2]
        q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
        if len(lead) > 2:  # (B, H, windows, L, D) or (B, windows, H, L, D)
            order, remark = read_leading(q, k.shape[-2], shapes)
            q, k, v, mixed = (x.permute(*order, -2, -1) for x in (q, k, v, mixed))
            masks = (None if x is None else x.expand(*lead, *x.shape[-2:]) for x in (allowed, bias, full))
            allowed, bias, full = (None if x is None else x.permute(*order, -2, -1) for x in masks)
    call = described(
        q, k, v, mixed, scale=given.get("scale"), heads=heads, full=full, fused=True, allowed=allowed, bias=bias,
        causal=causal, first_query=first, mechanism="scaled_dot_product_attention", forbidding=forbidding,
        dropout=float(given.get("dropout_p") or 0.0),
    )  # fmt: skip
    return call, order, remark
