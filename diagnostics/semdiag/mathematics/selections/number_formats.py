"""Number formats of engines, and what rounding a score to one of them can change."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag_models.errors import unknown_name


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format.

    Attributes:
        name: torch's name.
        digits: p, of the significand, with the implicit leading one.
        exponent: of the smallest normal number, 2^exponent.
        largest: the largest finite number.
    """

    name: str
    digits: int
    exponent: int
    largest: float

    @property
    def overflow(self) -> float:
        """The smallest number that rounds above the largest finite one: half a unit in the last place above it."""
        return self.largest + 2.0 ** (math.frexp(self.largest)[1] - 1 - self.digits)


FORMATS: dict[str, NumberFormat] = {
    "float64": NumberFormat("float64", 53, -1022, torch.finfo(torch.float64).max),
    "float32": NumberFormat("float32", 24, -126, torch.finfo(torch.float32).max),
    "bfloat16": NumberFormat("bfloat16", 8, -126, torch.finfo(torch.bfloat16).max),
    "float16": NumberFormat("float16", 11, -14, 65504.0),
    "float8_e4m3fn": NumberFormat("float8_e4m3fn", 4, -6, 448.0),
    "float8_e5m2": NumberFormat("float8_e5m2", 3, -14, 57344.0),
}
_SHORT = {
    "fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16",
    "fp8-e4m3": "float8_e4m3fn", "fp8-e5m2": "float8_e5m2",
}  # fmt: skip


def number_format(name: str) -> NumberFormat:
    """Return a format by torch's name or a short one.

    Source: docs/theory.md#rounded-scores; digits and exponents are those of ``torch.finfo``. Deviation: none.

    Args:
        name: like "bfloat16" or "bf16".

    Raises:
        InputError: if there is none.

    Example:
        >>> number_format("bf16").digits
        8
    """
    known = str(name).removeprefix("torch.")
    known = _SHORT.get(known, known)
    if known not in FORMATS:
        raise unknown_name("number format", str(name), [*FORMATS, *_SHORT])
    return FORMATS[known]


def may_swap(lower: Tensor, higher: Tensor, kind: NumberFormat, engines: int = 1) -> Tensor:
    """Return whether rounding to a format may make the lower of two scores equal to or larger than the higher one.

    Formula: h − l ≤ u(|h| + |l|) + 2η, where u = 2^−p and η is half the smallest subnormal number. A score that
    rounds above the largest finite number counts as that number; two such scores may always swap. If one engine
    rounded h and l, and another one chose, which rounded the same scores itself:
    h − l ≤ 2(u(|h| + |l|) + 2η).

    Source: docs/theory.md#rounded-scores; not in the paper. Deviation: none.

    Args:
        lower: scores (...), not NaN.
        higher: scores (...) that are not smaller.
        kind: the format to which the engine rounded its scores.
        engines: 1 if these scores were rounded, 2 if they are themselves rounded.

    Returns:
        bool (...).

    Example:
        >>> one = torch.tensor(1.0, dtype=torch.float64)
        >>> may_swap(one, one + torch.tensor([2**-9, 2**-6]), FORMATS["bfloat16"]).tolist()
        [True, False]
    """
    lower, higher = lower.double(), higher.double()
    beyond = (lower >= kind.overflow) | (higher <= -kind.overflow)
    finite = lower.isfinite() & higher.isfinite()
    low, high = (score.clamp(-kind.largest, kind.largest) for score in (lower, higher))
    unit = 2.0**-kind.digits
    error = engines * (unit * low.abs() + unit * high.abs() + 2.0 ** (kind.exponent - kind.digits + 1))
    return (lower == higher) | beyond | finite & (high - low <= error)


def last_places(difference: Tensor, score: Tensor, kind: NumberFormat) -> Tensor:
    """Return a difference of scores in units of the last place of a score in a format.

    Formula: difference / 2^(max(⌊log₂|score|⌋, e) − p + 1), e the exponent of the smallest normal number. A score
    above the largest finite number counts as that number.

    Source: docs/theory.md#rounded-scores; not in the paper. Deviation: none.

    Args:
        difference: (...); infinities and NaN stay.
        score: (...), not NaN.
        kind: the format.

    Returns:
        float64 (...).

    Example:
        >>> last_places(torch.tensor(0.25), torch.tensor(3.0), FORMATS["float8_e4m3fn"]).item()
        1.0
    """
    size = score.double().abs().clamp(max=kind.largest)
    exponent = torch.frexp(size).exponent.sub(1).clamp(min=kind.exponent)
    exponent = torch.where(size > 0, exponent, kind.exponent)
    return torch.ldexp(difference.double(), kind.digits - 1 - exponent)
