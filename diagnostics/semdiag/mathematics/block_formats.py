"""Number formats with scales, as indexers store keys: a scale a row, or one for each block of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.rounding import FORMATS, NumberFormat, number_format, rounded
from semdiag_files import InputError, unknown_name

FLOAT4 = NumberFormat("float4_e2m1fn", 2, 0, 6.0)  # 0, 1/2, 1, 3/2, 2, 3, 4, 6


@dataclass(frozen=True)
class ScaledFormat:
    """Numbers in a format times a scale."""

    numbers: NumberFormat | None  # None: whole numbers from -127 to 127
    block: int  # how many share a scale; 0: a whole row
    power: bool  # whether the scale is a power of two
    below: bool = False  # whether that power may leave the largest number above the format's, where it saturates


SCALED = {
    "mxfp4": ScaledFormat(FLOAT4, 32, True, below=True),
    "mxfp8": ScaledFormat(FORMATS["float8_e4m3fn"], 32, True, below=True),
    "fp8-row": ScaledFormat(FORMATS["float8_e4m3fn"], 0, False),
    "fp8-block": ScaledFormat(FORMATS["float8_e4m3fn"], 128, False),
    "fp8-block-power": ScaledFormat(FORMATS["float8_e4m3fn"], 128, True),
    "int8-row": ScaledFormat(None, 0, False),
}


def quantised(values: Tensor, name: str) -> Tensor:
    """Return values (..., D) rounded to a format with scales, or to a plain one, in their own dtype.

    Formula: s · fl(x / s), one s for each block along the last axis. MX formats: s = 2^(⌊log₂ max|x|⌋ − e), e the
    exponent of the largest number; else s = max|x| / M, or the next power of two above it.

    Source: OCP Microscaling Formats 1.0, 6.3; DeepSeek-V3, 3.3.2. Deviation: none.

    Raises:
        InputError: for an unknown name.

    Example:
        >>> quantised(torch.tensor([[6.0, 5.1, 0.2, -0.3]]), "mxfp4").tolist()
        [[6.0, 6.0, 0.0, -0.5]]
    """
    if name not in SCALED:
        try:
            return rounded(values, number_format(name)).to(values.dtype)
        except InputError:
            raise unknown_name("number format", name, [*FORMATS, *SCALED]) from None
    kind = SCALED[name]
    width = values.shape[-1]
    block = kind.block or width
    filled = torch.nn.functional.pad(values.double(), (0, -width % block))
    filled = filled.reshape(*values.shape[:-1], -1, block)
    scale = _scale(filled.abs().amax(-1, keepdim=True), kind)
    ratio = filled / scale
    numbers = ratio.round().clamp(-127, 127) if kind.numbers is None else rounded(ratio, kind.numbers)
    return (numbers * scale).flatten(-2)[..., :width].to(values.dtype)


def _scale(largest: Tensor, kind: ScaledFormat) -> Tensor:
    """Return the scale of blocks with these largest sizes; 1 of a block of zeros."""
    limit = 127.0 if kind.numbers is None else kind.numbers.largest
    exponent = torch.frexp(largest).exponent - 1  # ⌊log₂ max|x|⌋
    if kind.below:
        scale = torch.ldexp(
            torch.ones_like(largest), exponent - int(torch.frexp(torch.tensor(limit)).exponent) + 1
        )
    elif kind.power:
        ratio = torch.frexp(largest / limit)
        scale = torch.ldexp(torch.ones_like(largest), ratio.exponent - (ratio.mantissa == 0.5).int())
    else:
        scale = (largest / limit).float().double()
    return torch.where(largest > 0, scale, 1.0)


def with_scales(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return stored numbers (..., D) times their scales (..., B), one for each of B equal blocks, in float64.

    Raises:
        InputError: if the scales do not fit the numbers, or are not finite and positive.

    Example:
        >>> with_scales(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[10.0, 0.5]])).tolist()
        [[10.0, 20.0, 1.5, 2.0]]
    """
    fits = scales.ndim == numbers.ndim and scales.shape[:-1] == numbers.shape[:-1] and scales.shape[-1] > 0
    if not fits or numbers.shape[-1] % scales.shape[-1]:
        raise InputError(
            f"scales must have the shape of the numbers, with one for each equal block of the last axis. Got "
            f"{tuple(scales.shape)} for {tuple(numbers.shape)}."
        )
    sizes = scales.double()
    if not bool((sizes.isfinite() & (sizes > 0)).all()):
        raise InputError("scales must be finite and positive.")
    blocks = numbers.double().reshape(*scales.shape, -1)
    return (blocks * sizes[..., None]).flatten(-2)


def operands(numbers: Tensor, name: str, format: str, scales: Tensor | None = None) -> Tensor:
    """Return queries or keys (..., D) as an engine multiplies them, in float64.

    Stored numbers are multiplied by their ``scales``; without these they are rounded to ``format`` if it has
    scales. Whole numbers e as scales stand for the powers of two 2^(e - 127).

    Raises:
        InputError: if numbers are packed bytes, or scales do not fit.

    Example:
        >>> stored = torch.tensor([[2, -127]], dtype=torch.int8)
        >>> operands(stored, "k", "int8-row", torch.tensor([[128]], dtype=torch.uint8)).tolist()
        [[4.0, -254.0]]
    """
    if numbers.dtype == torch.uint8:
        raise InputError(f"{name} are bytes: of numbers that are packed, give these themselves.")
    if scales is not None:
        sizes = scales if scales.is_floating_point() else torch.exp2(scales.double() - 127)
        return with_scales(numbers, sizes)
    return quantised(numbers.double(), format) if format in SCALED else numbers.double()
