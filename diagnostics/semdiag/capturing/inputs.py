"""Reading inputs that a user names."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from semdiag_models import InputError
from semdiag_models.checkpoint import read_plain


def read_inputs(path: Path) -> Tensor:
    """Read token ids from a file.

    Args:
        path: ``.npy``, ``.npz`` (its array ``tokens``, or its only array) or ``.pt`` (a tensor, or a
            dictionary with ``tokens``); whole numbers of shape (N, L).

    Returns:
        (N, L) int64.

    Raises:
        InputError: if the file is missing or unreadable, of another kind, holds code, or its content is not
            whole numbers of shape (N, L).
    """
    if not path.is_file():
        raise InputError(f"The inputs {path} do not exist.")
    if path.suffix == ".pt":
        content = read_plain(path)
        tokens = content.get("tokens") if isinstance(content, dict) else content
    elif path.suffix in (".npy", ".npz"):
        tokens = _read_numpy(path)
    else:
        raise InputError(
            f"Inputs come as .npy, .npz or .pt token ids of shape (N, L), or as .txt. Got {path.name}."
        )
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or not tokens.numel() or not _whole(tokens):
        what = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"{path} must hold whole token ids of shape (N, L), at least one. Got {what}.")
    return tokens.long()


def _whole(tokens: Tensor) -> bool:
    plain = tokens.layout == torch.strided and not tokens.is_meta
    return plain and not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)


def _read_numpy(path: Path) -> Tensor | None:
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return torch.from_numpy(content)
            names = content.files
            name = "tokens" if "tokens" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise InputError(f"{path} holds {', '.join(names)}: name one of them tokens.")
            return torch.from_numpy(content[name])
    except InputError:
        raise
    except Exception as error:  # on damaged files numpy raises whatever its reader stumbles over
        reason = str(error).split("\n", 1)[0][:120] or type(error).__name__
        raise InputError(f"{path} cannot be read as an array of numbers ({reason}).") from None
