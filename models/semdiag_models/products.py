"""Matrix products in single precision through oneDNN.

On x86 processors torch leaves such products to MKL. On Intel's processors, and on those of other vendors without
512-bit vectors, MKL is as fast as oneDNN or faster. Where another vendor's processor has such vectors MKL leaves
them unused, and takes up to twice as long as oneDNN, which torch brings along, too. Both round as float32 does.
"""

import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Multiplications from which oneDNN's shorter products outweigh its longer calls.
_WORTHWHILE = 2**21
_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # None: torch was built without oneDNN


def made_by_intel(file: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor is Intel's.

    Args:
        file: in which Linux describes it; elsewhere Python is asked.
    """
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
    """Return whether :func:`linear` can be called, and pays: large matrices in float32 on a processor.

    Args:
        x: (..., N, D).
        weight: (..., M, D).
    """
    return (
        _PAYS
        and x.shape[-2] * weight.shape[-2] * x.shape[-1] >= _WORTHWHILE
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.compiler.is_compiling()  # which has products of its own
    )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute onto + x Wᵀ + b, where torch does not differentiate.

    Args:
        x: (N, D) float32 on a processor, as :func:`takes` says; or S of them, (S, N, D).
        weight: (M, D); or (S, M, D).
        bias: (M,), or (S, M); None: 0.
        onto: (N, M), or (S, N, M); None: 0.
        out: (S, N, M), where S products are to be written; one product has memory of its own.

    Returns:
        (N, M), or (S, N, M).

    Example:
        >>> import torch
        >>> linear(torch.ones(2, 3), torch.eye(3), torch.ones(3))
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    if x.ndim == 3:
        out = x.new_empty(*x.shape[:2], weight.shape[1]) if out is None else out
        nothing = [None] * len(x)
        added = (nothing if t is None else t for t in (bias, onto))
        for y, *parts in zip(out, x, weight, *added, strict=True):
            y.copy_(linear(*parts))
        return out
    if onto is None:
        product: Tensor = _LINEAR.default(x, weight, bias, "none", [], "")
    else:
        product = _LINEAR.binary(x, onto, weight, bias, "add")
    return product
