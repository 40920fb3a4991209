"""Check inputs of semdiag's own encoders before anything runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from semdiag.capturing.batches import Batch
from semdiag_models import Encoder, InputError


def fitting(k: Sequence[int], longest: int, what: str) -> list[int]:
    """Return those of several k that do not exceed the number of keys."""
    fits = [value for value in k if value <= longest]
    if min(k) < 1 or not fits:
        raise InputError(f"k must lie in 1 … {longest}, {what}. Got k={min(k)}.")
    return fits


def checked_tokens(encoder: Encoder, batches: Sequence[Batch], k: Sequence[int]) -> list[Tensor]:
    """Return an encoder's inputs as int64, after checking them."""
    config = encoder.config
    tokens = [checked_batch(encoder, batch) for batch in batches]
    padding_counts = config.pad_as_token or config.extra_tokens
    if not padding_counts and all(bool((batch == config.pad_id).all()) for batch in tokens):
        raise InputError("There is no query to measure: all input tokens are PAD.")
    longest = max(batch.shape[1] for batch in tokens)
    if k:
        fitting(k, longest, "the length of the inputs")
    return tokens


def checked_batch(encoder: Encoder, batch: Batch) -> Tensor:
    """Return a batch of an encoder's inputs as int64, after checking it."""
    config = encoder.config
    if not isinstance(batch, Tensor):
        raise InputError(f"Inputs must be whole token ids of shape (N, L). Got {type(batch).__name__}.")
    if batch.ndim != 2 or batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool:
        raise InputError(
            f"Inputs must be whole token ids of shape (N, L). Got {batch.dtype} {tuple(batch.shape)}."
        )
    if not 1 <= batch.shape[1] <= config.length:
        raise InputError(f"The model takes inputs of length 1 to {config.length}. Got length {batch.shape[1]}.")
    low, high = int(batch.min()), int(batch.max())
    if low < 0 or high >= config.vocabulary_size:
        wrong = low if low < 0 else high
        raise InputError(f"Token id {wrong} is out of range: the model knows 0 to {config.vocabulary_size - 1}.")
    return batch.to(torch.int64)
