"""Check that a captured call is complete: recompute the layer's output from it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from semdiag.capturing.adapters.torch_functions import CORE_MECHANISM as MECHANISM
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.provenance.softmaxes import MECHANISM as BY_HAND
from semdiag.mathematics.planes import unraveled
from semdiag.mathematics.score_strips import as_mask

_CHECKED_ROWS = 32  # number of random rows, over all samples, heads and queries
_LEAST_ROWS = 8  # of calls so long that more would take much memory or time
_MOST = 2**24  # numbers of these rows' keys, on a device
_MOST_HERE = 2**20  # on the CPU
_CACHED = 2**19  # on the CPU at a time
_DEVIATIONS = 6  # standard deviations allowed for a sum of rounding errors, taken as independent
_UNDIVIDED = 32  # largest difference of ln Σ e^z from 0, in units, where z is less a rounded logsumexp
_HALVES = torch.float16, torch.bfloat16


class _Rows(NamedTuple):
    """The formula on r rows over n keys, in the precision of the recomputation."""

    again: Tensor  # (r, Dv)
    weights: Tensor  # (r, n)
    scores: Tensor  # (r, n), before the softmax; 0 where forbidden
    products: Tensor  # (r, n), |scale| √Σ_d q_d² k_d²
    values: Tensor  # (r, n, Dv)
    bias: Tensor | None  # (r, n)


def residual_numbers(call: AttentionCall, generator: torch.Generator) -> Tensor:
    """Return a deviation, the same over what rounding may do, and the latter; without waiting for the device."""
    if call.dropout:
        return torch.full((3,), math.nan)
    shape = call.q.shape[:3]
    numbers_a_row = call.k.shape[2] * call.k.shape[3]
    on_device = call.q.device.type != "cpu"
    rows = math.prod(shape)
    checked = max(_LEAST_ROWS, min(_CHECKED_ROWS, (_MOST if on_device else _MOST_HERE) // numbers_a_row))
    if rows <= (2**12 if on_device else 2**20):
        places = torch.randperm(rows, generator=generator)[:checked]
    else:
        places = torch.randint(rows, (checked,), generator=generator)
    size = checked if on_device else max(1, _CACHED // numbers_a_row)
    parts = [_deviations(call, unraveled(part, shape, call.q.device)) for part in places.split(size)]  # type: ignore[no-untyped-call]
    deviation, bound, mixed, attends = (torch.cat(each) for each in zip(*parts, strict=True))
    tiny = torch.finfo(mixed.dtype).tiny  # avoids 0 / 0
    scale = mixed.abs().max().clamp(min=tiny)
    ordered = bound.amax(-1).masked_fill(~attends, torch.inf).sort().values
    middle = (attends.sum() - 1).clamp(min=0).div(2, rounding_mode="floor")  # nanmedian() would wait for it
    rounding = ordered.gather(0, middle[None])[0] / scale
    numbers_of_call = torch.stack([deviation.max() / scale, (deviation / bound.clamp(min=tiny)).max(), rounding])
    return numbers_of_call.where(attends.any(), 0)


def _deviations(call: AttentionCall, index: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return deviations, bounds and outputs of rows, (r, Dv), and which may attend to some key: others are 0."""
    keep, attends = _keys_of(call, index)
    recomputed = _attend(call, index, keep)
    mixed = call.mixed[index].to(recomputed.again.dtype)
    parts = (recomputed.again - mixed).abs(), _rounding(call, recomputed, mixed), mixed
    deviation, bound, mixed = (x.masked_fill(~attends[:, None], 0) for x in parts)
    return deviation, bound, mixed, attends


def _rounding(call: AttentionCall, rows: _Rows, mixed: Tensor) -> Tensor:
    """Return the possible effect of rounding, in the model and here, on outputs (r, Dv): theory.md#residual."""
    unit, sums = _units(call)
    scores = rows.scores.abs()
    weights = rows.weights
    products = rows.products
    top = rows.scores.masked_fill(weights == 0, -torch.inf).amax(-1, keepdim=True)
    depth = (top - rows.scores).masked_fill(weights == 0, 0).nan_to_num(0)
    error = 5 * products + (4 if call.softcap is not None else 2) * scores + scores + depth
    if rows.bias is not None:
        error = error + 2 * rows.bias.abs()
    error = unit * error + _DEVIATIONS * sums * _of_sums(call.q.shape[-1], products, scores)
    error = error.masked_fill(weights == 0, 0)
    mean = (weights * error).sum(-1, keepdim=True).clamp(max=50).exp()
    moved = weights * torch.expm1(error.clamp(max=50))
    undivided = (top - weights.amax(-1, keepdim=True).log()).nan_to_num(0, posinf=0)  # ln Σ e^z
    rounded = (call.mechanism == BY_HAND) & (undivided.abs() <= _UNDIVIDED * unit)
    undivided = torch.expm1(undivided.where(rounded, 0)).abs()
    keys = weights.shape[-1]
    subnormal = 2.0**-25 if _coarsest(call) == torch.float16 else 0.0
    sizes = rows.values.abs()
    moved_outputs = mean * _weighted(moved, (rows.values - mixed[:, None]).abs())
    squares = _weighted(weights**2, rows.values**2).sqrt()
    return (
        moved_outputs
        + 4 * unit * _weighted(weights, sizes)
        + (unit + undivided) * mixed.abs()
        + _DEVIATIONS * sums * _of_sums(keys, squares, mixed.abs())
        + subnormal * (sizes.sum(1) + 1)
    )


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    return (weights[:, None] @ values)[:, 0]


def _of_sums(terms: int, squares: Tensor, total: Tensor) -> Tensor:
    """Return √Σ_i S_i² of partial sums S_i of n terms in random order: a share i/n of the total, and a walk."""
    return math.sqrt(terms) * (squares + total / math.sqrt(3))


def _coarsest(call: AttentionCall) -> torch.dtype:
    """Return the least precise dtype of the call: under autocast, that of its output."""
    return max((x.dtype for x in (call.q, call.k, call.v, call.mixed)), key=lambda dtype: torch.finfo(dtype).eps)


def _units(call: AttentionCall) -> tuple[float, float]:
    """Return the unit roundoffs of numbers, and of the sums in products."""
    unit = torch.finfo(_coarsest(call)).eps / 2
    single = torch.finfo(torch.float32).eps / 2
    if call.mechanism != MECHANISM:  # many models compute the softmax in float32, whatever their dtype
        unit = max(unit, single)
    sums = min(unit, single)
    precision = torch.get_float32_matmul_precision()
    device = call.q.device.type
    if unit <= single and call.q.dtype == torch.float32:
        if precision == "medium":
            unit = 2.0**-8  # products of float32 numbers may run in bfloat16
        elif device != "cpu" and (precision == "high" or torch.backends.cuda.matmul.allow_tf32):
            unit = 2.0**-11  # or in TF32
    return unit, sums


def _keys_of(call: AttentionCall, index: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the keys of rows (r, n), and the real rows that have one: others may hold NaN."""
    sample, _, query = index
    full = (*call.q.shape[:3], call.k.shape[2])
    keep = torch.ones(len(query), full[3], dtype=torch.bool, device=call.q.device)
    if call.allowed is not None:
        keep = keep & call.allowed.expand(full)[index]
    if call.causal:
        keep = keep & (torch.arange(full[3], device=keep.device) <= call.first_query + query[:, None])
    some = keep.any(-1)
    if call.queries is not None:  # a layer may return anything for padding
        some = some & call.queries[sample, query]
    return keep & some[:, None], some


def _attend(call: AttentionCall, index: tuple[Tensor, ...], keep: Tensor) -> _Rows:
    """Return the formula on some rows, which may attend to the keys ``keep``."""
    sample, head, _ = index
    dtype = torch.float32 if call.q.dtype in _HALVES else call.q.dtype
    full = (*call.q.shape[:3], call.k.shape[2])
    shared = head.div(call.q.shape[1] // call.k.shape[1], rounding_mode="floor")
    queries = (call.q[index].to(dtype) * call.scale)[..., None]
    keys = call.k[sample, shared].to(dtype)
    scores = (keys @ queries)[..., 0]
    products = (keys**2 @ queries**2)[..., 0].sqrt()
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    bias = None if call.bias is None else call.bias.expand(full)[index].to(dtype)
    if bias is not None:
        scores = scores + bias
    if call.selected is not None:
        keep = keep & as_mask(call.selected[index], full[3])
    masked = scores.masked_fill(~keep, torch.finfo(dtype).min)
    if call.sinks is not None:
        masked = torch.cat([masked, call.sinks.to(dtype)[head][:, None]], -1)
    weights = masked.softmax(-1)[:, : full[3]]
    weights = weights * keep
    values = call.v[sample, shared].to(dtype)
    again = _weighted(weights, values)
    return _Rows(again, weights, scores.masked_fill(~keep, 0), products, values, bias)
