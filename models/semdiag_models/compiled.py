"""Where compiled kernels take over from torch's operations: many rows in float32, where Numba is installed."""

import importlib
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

# Rows from which on kernels outweigh the half second that Numba takes to start, by the name of their module.
LEAST = {"largest_kernels": 256, "selected_kernels": 256}


def kernels_for(name: str, rows: Tensor) -> ModuleType | None:
    """Return kernels by the name of their module, if they take such rows.

    Args:
        name: a key of ``LEAST``.
        rows: (..., N, D).

    Returns:
        None for few rows, in another precision than float32, on accelerators, for a compiler, and without Numba.
    """
    takes = rows.shape[-2] >= LEAST[name] and rows.dtype == torch.float32 and rows.device.type == "cpu"
    return _imported(name) if takes and not torch.compiler.is_compiling() else None


@lru_cache
def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"semdiag_models.kernels.{name}")
    except ImportError:
        return None
