"""Check that a captured call is complete: recompute the layer's output from it."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from semdiag.capturing.adapters.torch_functions import CORE_MECHANISM as MECHANISM
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.provenance.softmaxes import MECHANISM as BY_HAND
from semdiag.mathematics.planes import unraveled

_CHECKED_ROWS = 32  # number of random rows, over all samples, heads and queries
_DEVIATIONS = 6  # standard deviations allowed for a sum of rounding errors, taken as independent
_UNDIVIDED = 32  # largest difference of ln Σ e^z from 0, in units, where z is less a rounded logsumexp
_HALVES = torch.float16, torch.bfloat16


class Residual(NamedTuple):
    """Deviation of the attention's formula, recomputed on random rows, from the layer's output."""

    residual: float  # largest deviation, relative to the largest output of these rows
    over_rounding: float  # largest deviation in units of the possible effect of rounding on that output
    rounding: float


UNKNOWN = Residual(math.nan, math.nan, math.nan)


class _Rows(NamedTuple):
    """The formula on r rows over n keys, in the precision of the recomputation."""

    again: Tensor  # (r, Dv)
    weights: Tensor  # (r, n)
    scores: Tensor  # (r, n), before the softmax; 0 where forbidden
    products: Tensor  # (r, n), |scale| √Σ_d q_d² k_d²
    values: list[Tensor]  # r of (n, Dv)
    bias: Tensor | None  # (r, n)


def recomputation_residual(call: AttentionCall, generator: torch.Generator | None = None) -> Residual:
    """Return the deviation of the attention's formula, recomputed on random rows, from the layer's output."""
    if call.dropout:
        return UNKNOWN
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    shape = call.q.shape[:3]
    rows = math.prod(shape)
    drawn = (
        torch.randperm(rows, generator=generator)[:_CHECKED_ROWS]
        if rows <= 2**20
        else torch.randint(rows, (_CHECKED_ROWS,), generator=generator)
    )
    index, allowed = _with_keys(call, unraveled(drawn, shape, call.q.device))
    if not len(allowed):
        return Residual(0.0, 0.0, 0.0)
    recomputed = _attend(call, index, allowed)
    mixed = call.mixed[index].to(recomputed.again.dtype)
    tiny = torch.finfo(mixed.dtype).tiny  # avoids 0 / 0
    scale = mixed.abs().max().clamp(min=tiny)
    deviation = (recomputed.again - mixed).abs()
    bound = _rounding(call, recomputed, mixed).clamp(min=tiny)
    rounding = bound.amax(-1).median() / scale
    return Residual(*(float(x) for x in (deviation.max() / scale, (deviation / bound).max(), rounding)))


def _rounding(call: AttentionCall, rows: _Rows, mixed: Tensor) -> Tensor:
    """Return the possible effect of rounding, in the model and here, on outputs (r, Dv): theory.md#residual."""
    unit, sums = _units(call)
    scores, weights, products = rows.scores.abs(), rows.weights, rows.products
    top = rows.scores.masked_fill(weights == 0, -torch.inf).amax(-1, keepdim=True)
    below = (top - rows.scores).masked_fill(weights == 0, 0).nan_to_num(0)
    error = 5 * products + (4 if call.softcap is not None else 2) * scores + scores + below
    if rows.bias is not None:
        error = error + 2 * rows.bias.abs()
    error = unit * error + _DEVIATIONS * sums * _of_sums(call.q.shape[-1], products, scores)
    error = error.masked_fill(weights == 0, 0)
    mean = (weights * error).sum(-1, keepdim=True).clamp(max=50).exp()
    moved = weights * torch.expm1(error.clamp(max=50))
    undivided = (top - weights.amax(-1, keepdim=True).log()).nan_to_num(0, posinf=0)  # ln Σ e^z
    rounded = (call.mechanism == BY_HAND) & (undivided.abs() <= _UNDIVIDED * unit)
    undivided = torch.expm1(undivided.where(rounded, 0)).abs()
    keys, subnormal = weights.shape[-1], 2.0**-25 if _coarsest(call) == torch.float16 else 0.0
    bound = []
    for row, values in enumerate(rows.values):
        away = mean[row] * (moved[row] @ (values - mixed[row]).abs())
        mass = weights[row] @ values.abs()
        squares = (weights[row] ** 2 @ values**2).sqrt()
        bound.append(
            away
            + 4 * unit * mass
            + (unit + undivided[row]) * mixed[row].abs()
            + _DEVIATIONS * sums * _of_sums(keys, squares, mixed[row].abs())
            + subnormal * (values.abs().sum(0) + 1)
        )
    return torch.stack(bound)


def _of_sums(terms: int, squares: Tensor, total: Tensor) -> Tensor:
    """Return √Σ_i S_i² of partial sums S_i of n terms in random order: a share i/n of the total, and a walk."""
    return math.sqrt(terms) * (squares + total / math.sqrt(3))


def _coarsest(call: AttentionCall) -> torch.dtype:
    """Return the least precise dtype of the call: under autocast, that of its output."""
    return max((x.dtype for x in (call.q, call.k, call.v, call.mixed)), key=lambda dtype: torch.finfo(dtype).eps)


def _units(call: AttentionCall) -> tuple[float, float]:
    """Return the unit roundoffs of numbers, and of the sums in products."""
    unit, single = torch.finfo(_coarsest(call)).eps / 2, torch.finfo(torch.float32).eps / 2
    if call.mechanism != MECHANISM:  # many models compute the softmax in float32, whatever their dtype
        unit = max(unit, single)
    sums = min(unit, single)
    precision, device = torch.get_float32_matmul_precision(), call.q.device.type
    if unit <= single and call.q.dtype == torch.float32:
        if precision == "medium":
            unit = 2.0**-8  # products of float32 numbers may run in bfloat16
        elif device != "cpu" and (precision == "high" or torch.backends.cuda.matmul.allow_tf32):
            unit = 2.0**-11  # or in TF32
    return unit, sums


def _with_keys(call: AttentionCall, index: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the real rows that may attend to some key, and these keys (r, n): others may hold NaN."""
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
    return tuple(places[some] for places in index), keep[some]


def _attend(call: AttentionCall, index: tuple[Tensor, ...], keep: Tensor) -> _Rows:
    """Return the formula on some rows, which may attend to the keys ``keep``."""
    sample, head, _ = index
    dtype = torch.float32 if call.q.dtype in _HALVES else call.q.dtype
    full = (*call.q.shape[:3], call.k.shape[2])
    shared = head // (call.q.shape[1] // call.k.shape[1])
    places = list(zip(sample.tolist(), shared.tolist(), strict=True))
    queries = call.q[index].to(dtype) * call.scale
    scores = _products((call.k[at].to(dtype) for at in places), queries)
    products = _products((call.k[at].to(dtype) ** 2 for at in places), queries**2).sqrt()
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    bias = None if call.bias is None else call.bias.expand(full)[index].to(dtype)
    if bias is not None:
        scores = scores + bias
    if call.selected is not None:
        chosen = call.selected[index]
        mask = torch.zeros(len(keep), full[3] + 1, dtype=torch.bool, device=keep.device)
        keep = keep & mask.scatter(-1, chosen.where(chosen >= 0, full[3]), True)[:, :-1]
    masked = scores.masked_fill(~keep, torch.finfo(dtype).min)
    if call.sinks is not None:
        weights = torch.cat([masked, call.sinks.to(dtype)[head][:, None]], -1).softmax(-1)[..., :-1]
    else:
        weights = masked.softmax(-1)
    weights, values = weights * keep, [call.v[at].to(dtype) for at in places]
    again = _products((value.T for value in values), weights)
    return _Rows(again, weights, scores.masked_fill(~keep, 0), products, values, bias)


def _products(matrices: Iterable[Tensor], vectors: Tensor) -> Tensor:
    """Multiply r matrices (n, m) by r vectors (r, m), one by one to avoid copies: (r, n)."""
    return torch.stack([matrix @ vector for matrix, vector in zip(matrices, vectors, strict=True)])
