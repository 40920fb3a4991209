"""Scores, indices and lengths as a user gives them, checked where they enter."""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semdiag_models import InputError


def as_tensor(given: Any, name: str) -> Tensor:
    """Convert a tensor, an array of any byte order or a nested list into a tensor."""
    if isinstance(given, Tensor):
        if given.layout != torch.strided or given.is_meta:
            raise InputError(f"{name} must be a plain tensor that holds its numbers. Got {given.layout}.")
        return given.detach()
    try:
        array = np.asarray(given)
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
        with warnings.catch_warnings():  # torch warns of read-only arrays; nothing is written
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        kind = getattr(given, "dtype", type(given).__name__)
        raise InputError(f"{name} must be a tensor or an array of numbers. Got {kind}.") from None


def chosen_keys(given: Any) -> Tensor:
    """Return indices (..., k) with at least one row and one key."""
    indices = _whole(given, "indices")
    if indices.ndim == 0 or not indices.numel():
        raise InputError(
            f"indices must have the shape (..., k), with at least one row and one key. Got {_shape(indices)}."
        )
    return indices[None] if indices.ndim == 1 else indices


def float_scores(given: Any, indices: Tensor) -> Tensor:
    """Return scores (..., n) for the rows of ``indices`` (..., k)."""
    scores = as_tensor(given, "scores")
    if not scores.is_floating_point():
        raise InputError(
            f"scores must be floating-point numbers. Got {_kind(scores)}: are scores and indices swapped? Bits of "
            "bfloat16 are read with the format bfloat16."
        )
    scores = scores[None] if scores.ndim == 1 and len(indices) == 1 and indices.ndim == 2 else scores
    if scores.shape[:-1] != indices.shape[:-1] or not scores.numel():
        raise InputError(
            f"scores (..., n) and indices (..., k) must be of the same rows. Got {_shape(scores)} and "
            f"{_shape(indices)}."
        )
    check_k(indices.shape[-1], scores.shape[-1])
    return scores


def check_k(k: int, keys: int) -> None:
    """Check that no more keys are chosen than there are."""
    if k > keys:
        raise InputError(
            f"A row chooses k = {k:,} keys, but there are only {keys:,}. Are the scores those of the same tokens? "
            f"If the rest of each row is filled with -1, give its first {keys:,} columns."
        )


def whole_numbers(given: Any, name: str) -> Tensor | None:
    """Return whole numbers as int64; None for None."""
    return None if given is None else _whole(given, name).long().cpu()


def flat_rows(tensor: Tensor) -> Tensor:
    """Return (..., n) as (rows, n)."""
    return tensor.reshape(-1, tensor.shape[-1])


def _whole(given: Any, name: str) -> Tensor:
    tensor = as_tensor(given, name)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"{name} must be whole numbers. Got {_kind(tensor)}.")
    return tensor


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def weights_of(given: Any, indices: Tensor) -> Tensor:
    """Return weights (..., k) of the chosen keys."""
    weights = as_tensor(given, "weights")
    fits = weights.numel() == indices.numel() and weights.shape[-1] == indices.shape[-1]
    if not weights.is_floating_point() or not fits:
        raise InputError(
            f"weights must be floating-point numbers, one for each index. Got {_kind(weights)} of "
            f"{_shape(weights)} for {_shape(indices)}."
        )
    weights = weights.reshape(indices.shape).float()
    if bool((((weights < 0) | ~weights.isfinite()) & (indices >= 0)).any()):
        raise InputError("weights must be finite and not negative.")
    return weights
