"""Number formats and rounded scores: an engine's scores, their possible error, and the sets that survive it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.mask_stability import TopSet
from semdiag_files import unknown_name


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format."""

    name: str  # torch's name of the format
    digits: int  # p, number of digits of the significand, with the implicit leading one
    exponent: int  # exponent of the smallest normal number, 2^exponent
    largest: float  # largest finite number

    @property
    def overflow(self) -> float:
        """The smallest number that rounds above the largest finite one: half a unit in the last place above it."""
        return self.largest + 2.0 ** (math.frexp(self.largest)[1] - 1 - self.digits)


FORMATS: dict[str, NumberFormat] = {
    name: NumberFormat(name, digits, exponent, torch.finfo(getattr(torch, name)).max)
    for name, digits, exponent in (
        *(("float64", 53, -1022), ("float32", 24, -126), ("bfloat16", 8, -126)),
        *(("float16", 11, -14), ("float8_e4m3fn", 4, -6), ("float8_e5m2", 3, -14)),
    )
}
_SHORT = {
    "fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16",
    "fp8-e4m3": "float8_e4m3fn", "fp8-e5m2": "float8_e5m2",
}  # fmt: skip


def number_format(name: str) -> NumberFormat:
    """Return a format by torch's name ("bfloat16") or by a short name ("bf16"); an unknown one is an InputError.

    Source: docs/theory.md#rounded-scores. Deviation: none.

    Example:
        >>> number_format("bf16").digits
        8
    """
    full_name = str(name).removeprefix("torch.")
    if (full_name := _SHORT.get(full_name, full_name)) not in FORMATS:
        raise unknown_name("number format", str(name), [*FORMATS, *_SHORT])
    return FORMATS[full_name]


def may_swap(lower: Tensor, higher: Tensor, kind: NumberFormat, engines: int = 1) -> Tensor:
    """Return whether rounding to a format may make the lower of two scores equal to or larger than the higher one.

    Formula: h − l ≤ u(|h| + |l|) + 2η, where u = 2^−p and η is half the smallest subnormal number. A score that
    rounds above the largest finite number counts as that number. Where another engine chose by its own rounding
    (``engines`` is 2): h − l ≤ 2(u(|h| + |l|) + 2η). Scores (...) are not NaN; bool (...).

    Source: docs/theory.md#rounded-scores; not in the paper. Deviation: none.

    Example:
        >>> one = torch.tensor(1.0, dtype=torch.float64)
        >>> may_swap(one, one + torch.tensor([2**-9, 2**-6]), FORMATS["bfloat16"]).tolist()
        [True, False]
    """
    lower = lower.double()
    higher = higher.double()
    beyond = (lower >= kind.overflow) | (higher <= -kind.overflow)
    finite = lower.isfinite() & higher.isfinite()
    low, high = (score.clamp(-kind.largest, kind.largest) for score in (lower, higher))
    unit = 2.0**-kind.digits
    error = engines * (unit * low.abs() + unit * high.abs() + 2.0 ** (kind.exponent - kind.digits + 1))
    return (lower == higher) | beyond | finite & (high - low <= error)


def last_places(difference: Tensor, score: Tensor, kind: NumberFormat) -> Tensor:
    """Return differences of scores (...) in units of the last place of a score (...) in a format, float64.

    Formula: difference / 2^(max(⌊log₂|score|⌋, e) − p + 1), e the smallest normal number's exponent.

    Source: docs/theory.md#rounded-scores; not in the paper. Deviation: none.

    Example:
        >>> last_places(torch.tensor(0.25), torch.tensor(3.0), FORMATS["float8_e4m3fn"]).item()
        1.0
    """
    return difference.double() / _last_place(score.double().clamp(-kind.largest, kind.largest), kind)


_UNIT = 2.0**-24  # unit roundoff of float32, in which products are added
_TINY = 2.0**-150  # half of float32's smallest subnormal number
_WIDEST = 2**20  # width of a head, so that γ stays below 1/2
_SCALES = 2.0**-126, 2.0**126  # normal numbers in float32, with room for the product
_OWN = 1 + 2.0**-30  # covers the rounding of a bound in float64


def rounded(values: Tensor, kind: NumberFormat) -> Tensor:
    """Return finite numbers (...) rounded once to a format: to nearest, ties to even, with subnormals, saturating.

    Formula: t · round(x'/t), x' = clamp(x, −M, M), t the last place of x', M the largest finite number; float64.

    Source: docs/theory.md#rounded-operands; not in the paper. Deviation: none.

    Example:
        >>> rounded(torch.tensor([1.05, 2**-10, 1000.0]), FORMATS["float8_e4m3fn"]).tolist()
        [1.0, 0.0, 448.0]
    """
    values = values.double().clamp(-kind.largest, kind.largest)
    place = _last_place(values, kind)
    return torch.round(values / place) * place


def _rounding_error(size: Tensor, kind: NumberFormat) -> Tensor:
    """Return e(x), how far :func:`rounded` can move a number of size at most x."""
    size = size.double()
    error = torch.maximum(_last_place(size.clamp(max=kind.largest), kind) / 2, size - kind.largest)
    return torch.where(size == 0, 0.0, error)


def rounded_scores(q: Tensor, k: Tensor, scale: float, kind: NumberFormat) -> Tensor:
    """Return an engine's scores in nats: operands in a format, sums in float32, then the score in the format.

    Formula: fl(fl₃₂(c · Σ_d fl(q_d) fl(k_d))), float64; NaN where :func:`score_error` is inf, with its arguments.

    Source: docs/theory.md#rounded-operands; not in the paper. Deviation: none.

    Example:
        >>> rounded_scores(torch.tensor([[1.05]]), torch.tensor([[2.0]]), 1.0, FORMATS["float8_e4m3fn"]).item()
        2.0
    """
    sums = rounded(q, kind).float() @ rounded(k, kind).float().mT
    return rounded((sums * scale).double(), kind)


def score_error(q: Tensor, k: Tensor, scale: float, kind: NumberFormat, truncated: bool = True) -> Tensor:
    """Return how far an engine's scores can be from c q·k, in any order of summation, float64 (..., Lq, Lk), nats.

    Formula: E + e(|c q·k| + E), with E = |c| Σ(|q|b + a(|k| + b)) + γ|c| Σ(|q| + a)(|k| + b) + 2(m|c| + 1)t,
    a = e(q), b = e(k), γ = nu/(1 − nu). Accumulation in float32, rounded to nearest: n = D + 4, m = D, u = 2^−24,
    t = 2^−150. Truncated, as on tensor cores, which also cut addends at the last place of the largest:
    n = 2D + 4, m = 2D, u = 2^−23, t = 2^−149; it is not smaller, and covers both. An engine that accumulates in
    fp16 or bf16 can exceed it.

    Queries (..., Lq, D) and keys (..., Lk, D) are finite. The error is inf if unknown: a number is not finite, a
    sum can exceed float32's largest number, the head is wider than 2^20, |c| is neither zero nor between 2^−126
    and 2^126, or the format is finer than float32.

    Source: docs/theory.md#rounded-operands (γ: Higham, Accuracy and Stability, ch. 3). Deviation: none.

    Example:
        >>> error = score_error(torch.tensor([[1.05]]), torch.tensor([[2.0]]), 1.0, FORMATS["float8_e4m3fn"])
        >>> round(error.item(), 3)
        0.389
    """
    width = q.shape[-1]
    c = abs(scale)
    if width > _WIDEST or not (c == 0 or _SCALES[0] <= c <= _SCALES[1]) or 2.0**-kind.digits < _UNIT:
        return q.new_full((*q.shape[:-1], k.shape[-2]), torch.inf, dtype=torch.float64)
    terms, coarser = (2 * width, 2) if truncated else (width, 1)
    lost = (terms + 4) * coarser * _UNIT
    gamma = lost / (1 - lost)
    queries = q.double().abs()
    keys = k.double().abs().mT
    a = _rounding_error(queries, kind)
    b = _rounding_error(keys, kind)
    operands = queries @ b + a @ (keys + b)
    largest = (queries + a) @ (keys + b)
    summed = c * (operands + gamma * largest) + 2 * (terms * c + 1) * coarser * _TINY
    score = (scale * (q.double() @ k.double().mT)).abs()
    error = (summed + _rounding_error((score + summed) * _OWN, kind)) * _OWN
    return torch.where(largest * max(c, 1.0) < 2.0**127, error, torch.inf)


def _last_place(values: Tensor, kind: NumberFormat) -> Tensor:
    """Return the spacing of the format around each value, which is at most the largest finite number."""
    power = torch.where(values == 0, 0.0, values / (2 * torch.frexp(values).mantissa))  # 2^⌊log₂|x|⌋, exactly
    return power.clamp(min=2.0**kind.exponent) * 2.0 ** (1 - kind.digits)


def survives_rounding(scores: Tensor, error: Tensor, before: TopSet) -> Tensor:
    """Return whether each row keeps its set under all changes of its scores within their errors, bool (...).

    Formula: min_S (z − E) > max_{A∖S} (z + E), z (..., L) float64, -inf where a key is not allowed, E ≥ 0. It
    holds wherever Δ > 2 max E. False decides nothing: such a row may keep its set or change it.

    Source: docs/theory.md#rounded-operands; not in the paper. Deviation: none.

    Example:
        >>> from semdiag.mathematics.mask_stability import top_set
        >>> z = torch.tensor([[3.0, 0.0, 2.5, 1.0]], dtype=torch.float64)
        >>> [survives_rounding(z, torch.full_like(z, e), top_set(z, 2)).item() for e in (0.7, 0.8)]
        [True, False]
    """
    error = torch.where(scores.isfinite(), error, 0.0)
    lowest = (scores - error).gather(-1, before.positions).amin(-1)
    return lowest > (scores + error + before.outside).amax(-1)
