"""Scores, indices and lengths as a user gives them, checked where they enter."""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semdiag_models import InputError


def as_tensor(given: Any, name: str) -> Tensor:
    """Return the tensor of a tensor, an array or a nested list, whatever its byte order.

    Raises:
        InputError: if it holds no numbers.
    """
    if isinstance(given, Tensor):
        if given.layout != torch.strided or given.is_meta:
            raise InputError(f"{name} must be a plain tensor that holds its numbers. Got {given.layout}.")
        return given.detach()
    try:
        array = np.asarray(given)
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
        with warnings.catch_warnings():  # that it may not be written to, which nobody does
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        kind = getattr(given, "dtype", type(given).__name__)
        raise InputError(f"{name} must be a tensor or an array of numbers. Got {kind}.") from None


def chosen_keys(given: Any, name: str = "indices") -> Tensor:
    """Return indices (..., k), at least one row and one key.

    Raises:
        InputError: if they are none.
    """
    found = _whole(given, name)
    if found.ndim == 0 or not found.numel():
        raise InputError(
            f"{name} must have the shape (..., k), with at least one row and one key. Got {_shape(found)}."
        )
    return found[None] if found.ndim == 1 else found


def float_scores(given: Any, indices: Tensor, name: str = "scores") -> Tensor:
    """Return scores (..., n) for the rows of ``indices`` (..., k).

    Raises:
        InputError: if they are no floating-point numbers, of other rows, or of fewer keys than are chosen.
    """
    found = as_tensor(given, name)
    if not found.is_floating_point():
        raise InputError(
            f"{name} must be floating-point numbers. Got {_kind(found)}: are scores and indices swapped?"
        )
    found = found[None] if found.ndim == 1 and len(indices) == 1 and indices.ndim == 2 else found
    if found.shape[:-1] != indices.shape[:-1] or not found.numel():
        raise InputError(
            f"scores (..., n) and indices (..., k) must be of the same rows. Got {_shape(found)} and "
            f"{_shape(indices)}."
        )
    check_k(indices.shape[-1], found.shape[-1])
    return found


def check_k(k: int, keys: int) -> None:
    """Refuse more chosen keys than there are.

    Raises:
        InputError: if there are.
    """
    if k > keys:
        raise InputError(
            f"A row chooses k = {k:,} keys, but there are only {keys:,}. Are the scores those of the same tokens? "
            f"If the rest of each row is filled with -1, give its first {keys:,} columns."
        )


def whole_numbers(given: Any, name: str) -> Tensor | None:
    """Return whole numbers as int64; None of None.

    Raises:
        InputError: if they are none.
    """
    return None if given is None else _whole(given, name).long().cpu()


def flat_rows(tensor: Tensor) -> Tensor:
    """Return (..., n) as (rows, n)."""
    return tensor.reshape(-1, tensor.shape[-1])


def _whole(given: Any, name: str) -> Tensor:
    found = as_tensor(given, name)
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise InputError(f"{name} must be whole numbers. Got {_kind(found)}.")
    return found


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def weights_of(given: Any, indices: Tensor) -> Tensor:
    """Return weights (..., k) of the chosen keys.

    Raises:
        InputError: if they are no floating-point numbers of the same shape, or one of a chosen key is negative,
            infinite or NaN.
    """
    found = as_tensor(given, "weights")
    if not found.is_floating_point() or found.numel() != indices.numel() or found.shape[-1] != indices.shape[-1]:
        raise InputError(
            f"weights must be floating-point numbers, one for each index. Got {_kind(found)} of {_shape(found)} "
            f"for {_shape(indices)}."
        )
    found = found.reshape(indices.shape).float()
    if bool((((found < 0) | ~found.isfinite()) & (indices >= 0)).any()):
        raise InputError("weights must be finite and not negative.")
    return found
