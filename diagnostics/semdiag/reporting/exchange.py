"""Swap two folders atomically, if the system supports it."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = -100  # AT_FDCWD: paths are relative to the working folder
_SWAP = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_CALLS: dict[str, Callable[[Any, bytes, bytes], int]] = {
    "renameat2": lambda call, one, other: call(_HERE, one, _HERE, other, _SWAP),  # Linux, glibc from 2.28 on
    "renamex_np": lambda call, one, other: call(one, other, _SWAP),  # macOS
}


def exchange(one: Path, other: Path) -> bool:
    """Swap two folders, so that neither name is ever missing."""
    if os.name == "nt":
        return False
    library = ctypes.CDLL(None)
    for name, swap in _CALLS.items():
        if hasattr(library, name):
            return swap(getattr(library, name), os.fsencode(one), os.fsencode(other)) == 0
    return False
