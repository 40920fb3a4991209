"""Matrix products in single precision through oneDNN."""

import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Multiplications from which oneDNN's faster products outweigh its slower calls.
_WORTHWHILE = 2**21
_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # None if torch was built without oneDNN


def made_by_intel(file: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor is Intel's."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            said = lines.read(4096)
    except OSError:
        said = platform.processor()
    return "GenuineIntel" in said


def _pays() -> bool:
    """Return whether oneDNN's products are faster here than torch's own."""
    if _LINEAR is None:
        return False
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return True
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not made_by_intel()


_PAYS = _pays()


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether :func:`linear` can be called, and pays: large matrices in float32 on a processor."""
    return (
        _PAYS
        and x.shape[-2] * weight.shape[-2] * x.shape[-1] >= _WORTHWHILE
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.compiler.is_compiling()  # a compiler has its own products
    )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute onto + x Wᵀ + b, without autograd."""
    if x.ndim == 3:
        out = x.new_empty(*x.shape[:2], weight.shape[1]) if out is None else out
        nothing = [None] * len(x)
        added = (nothing if t is None else t for t in (bias, onto))
        for y, *parts in zip(out, x, weight, *added, strict=True):
            y.copy_(linear(*parts))
        return out
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        weight = weight.contiguous()  # else oneDNN takes a thousand times as long
    if onto is None:
        product: Tensor = _LINEAR.default(x, weight, bias, "none", [], "")
    else:
        product = _LINEAR.binary(x, onto, weight, bias, "add")
    return product
