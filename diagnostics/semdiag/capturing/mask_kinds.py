"""Kinds of attention, as the tables name them."""

import numpy as np
import pandas as pd
from torch import Tensor

# A query attends to every key its mask allows. Models of others are one of these three: every key, those up to its
# own position, or another set that ignores the scores.
DENSE = ("full", "causal", "masked")
# Models whose attention alone is known: nothing of their task, data or training.
FOREIGN_SOURCES = ("hugging face", "factory", "module")


def foreign(models: pd.DataFrame) -> "pd.Series[bool]":
    """Whether each model is somebody else's, of which the attention alone is known.

    Args:
        models: the table of :class:`~semdiag.measurement.measurements.Measurements`.
    """
    return models["source"].isin(FOREIGN_SOURCES)


def mask_kind(keys: Tensor, queries: Tensor | None) -> str:
    """Tell the kind of a mask by how many keys its queries may attend to.

    Args:
        keys: (B, H, Lq) int64, n_i.
        queries: (B, Lq) bool, false for padded queries; None means all count.

    Returns:
        ``full`` if all queries of a sample have the same number, ``causal`` if each has one more than the query
        before it, else ``masked``; ``full`` where a sample has one query only.

    Example:
        >>> import torch
        >>> mask_kind(torch.tensor([[[1, 2, 3]]]), None), mask_kind(torch.tensor([[[3, 3, 3]]]), None)
        ('causal', 'full')
        >>> mask_kind(torch.tensor([[[1, 2, 2]]]), None)
        'masked'
    """
    counts = keys.cpu().numpy()
    real = np.ones((counts.shape[0], counts.shape[2]), bool) if queries is None else queries.cpu().numpy()
    both = (real[:, 1:] & real[:, :-1])[:, None, :]
    steps = np.broadcast_to(both, counts[..., 1:].shape)
    rises = np.diff(counts, axis=-1)[steps]
    if not rises.any():
        return "full"
    return "causal" if (rises == 1).all() else "masked"


def joint_kind(kinds: set[str]) -> str:
    """One word for a model whose layers may differ.

    Args:
        kinds: of its layers.

    Returns:
        Their kind if they have one in common, else ``masked``.
    """
    return next(iter(kinds)) if len(kinds) == 1 else "masked"
