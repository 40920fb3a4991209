"""Where compiled kernels take part in attention: over long rows in single precision, if Numba is installed."""

import importlib
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

LONG = 256  # tokens from which on kernels outweigh the half second that Numba takes to start


def kernels_for(name: str, rows: Tensor) -> ModuleType | None:
    """Kernels by the name of their module, if they take such rows.

    Args:
        name: of a module of ``semdiag_models``.
        rows: (..., L, D), of tokens.

    Returns:
        None for few tokens, in another precision than float32, on accelerators, for a compiler, and without Numba.
    """
    takes = rows.shape[-2] >= LONG and rows.dtype == torch.float32 and rows.device.type == "cpu"
    return _imported(name) if takes and not torch.compiler.is_compiling() else None


@lru_cache
def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"semdiag_models.{name}")
    except ImportError:
        return None
