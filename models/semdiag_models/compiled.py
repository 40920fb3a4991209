"""Use compiled kernels instead of torch's operations for many rows in float32, if Numba is installed."""

import importlib
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

# Number of rows from which kernels outweigh Numba's start of half a second, by module.
LEAST = {"largest_kernels": 256, "selected_kernels": 256}


def kernels_for(name: str, rows: Tensor) -> ModuleType | None:
    """Return a module of kernels if they can take such rows.

    Args:
        name: a key of ``LEAST``.
        rows: (..., N, D).

    Returns:
        None for few rows, for other dtypes than float32, on accelerators, under a compiler, and without Numba.
    """
    takes = rows.shape[-2] >= LEAST[name] and rows.dtype == torch.float32 and rows.device.type == "cpu"
    return _imported(name) if takes and not torch.compiler.is_compiling() else None


@lru_cache
def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"semdiag_models.kernels.{name}")
    except ImportError:
        return None
