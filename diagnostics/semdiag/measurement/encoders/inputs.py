"""Inputs of semdiag's own encoders, checked before anything runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from semdiag.capturing.batches import Batch
from semdiag.measurement.calls.collector import MAX_QUERIES
from semdiag_models import Encoder, InputError


def checked_tokens(encoder: Encoder, batches: Sequence[Batch], k: Sequence[int]) -> list[Tensor]:
    """Check that an encoder takes these inputs, and that what is measured fits in memory.

    Args:
        encoder: the model.
        batches: token ids (N, L), at least one sample each.
        k: counterfactual numbers of heavy hitters.

    Returns:
        The batches as int64.

    Raises:
        InputError: if they are no token ids, a token id or a length does not fit the model, all are PAD, a k is
            not in 1 … length, or there would be more than 20 million queries.
    """
    config = encoder.config
    tokens = []
    for batch in batches:
        if not isinstance(batch, Tensor):
            raise InputError(f"Inputs must be whole token ids of shape (N, L). Got {type(batch).__name__}.")
        if batch.ndim != 2 or batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool:
            raise InputError(
                f"Inputs must be whole token ids of shape (N, L). Got {batch.dtype} {tuple(batch.shape)}."
            )
        if not 1 <= batch.shape[1] <= config.length:
            raise InputError(
                f"The model takes inputs of length 1 to {config.length}. Got length {batch.shape[1]}."
            )
        low, high = int(batch.min()), int(batch.max())
        if low < 0 or high >= config.vocabulary_size:
            wrong = low if low < 0 else high
            raise InputError(
                f"Token id {wrong} is out of range: the model knows 0 to {config.vocabulary_size - 1}."
            )
        tokens.append(batch.to(torch.int64))
    padding_counts = config.pad_as_token or config.extra_tokens
    if not padding_counts and all(bool((batch == config.pad_id).all()) for batch in tokens):
        raise InputError("There is no query to measure: every token of the inputs is PAD.")
    longest = max(batch.shape[1] for batch in tokens)
    wrong_k = [value for value in k if not 1 <= value <= longest]
    if wrong_k:
        raise InputError(f"k must lie in 1 … {longest}, the length of the inputs. Got k={wrong_k[0]}.")
    positions = sum(len(batch) * (batch.shape[1] + config.extra_tokens) for batch in tokens)
    queries = positions * config.blocks * config.heads
    if queries > MAX_QUERIES:
        most = max(1, MAX_QUERIES // ((longest + config.extra_tokens) * config.blocks * config.heads))
        raise InputError(
            f"{queries:,} queries are more than the {MAX_QUERIES:,} kept. Use --samples {most} or fewer."
        )
    return tokens
