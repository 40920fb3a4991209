"""Percentiles: of numbers, of rows of a tensor, and of groups of a table."""

import math

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor

PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
COLUMNS = ("queries", "mean", *(f"p{p}" for p in PERCENTILES), "undefined", "not_positive")


def percentiles(values: ArrayLike) -> dict[str, float | int]:
    """Return count, mean and percentiles of the finite values, linearly interpolated."""
    numbers = summaries(torch.from_numpy(np.array(values, dtype=np.float64).reshape(1, -1)))[0].tolist()
    counts = ("queries", "undefined", "not_positive")
    return {n: int(x) if n in counts else x for n, x in zip(COLUMNS, numbers, strict=True)}


def summaries(values: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Return the COLUMNS of each row of (rows, n), float64, of which the first ``sizes`` count; None: all."""
    rows, length = values.shape
    sizes = torch.full((rows,), length, device=values.device) if sizes is None else sizes
    finite = values.isfinite() & (torch.arange(length, device=values.device) < sizes[:, None])
    counts = finite.sum(1)
    ordered = values.where(finite, math.inf) if length else values.new_full((rows, 1), math.inf)
    if values.device.type == "cpu":  # many times faster there
        ordered = torch.from_numpy(np.sort(ordered.numpy(), 1))
    else:
        ordered = ordered.sort(1).values
    last = (counts - 1).clamp(min=0)[:, None]
    place = torch.tensor([p / 100 for p in PERCENTILES], dtype=torch.float64, device=values.device) * last
    rank_below = place.floor().long()
    low = ordered.gather(1, rank_below)
    high = ordered.gather(1, torch.minimum(rank_below + 1, last))
    part = place - rank_below
    # Interpolate from the nearer end: bit for bit as numpy.percentile does.
    cuts = torch.where(part < 0.5, low + (high - low) * part, high - (high - low) * (1 - part))
    mean = values.where(finite, 0).sum(1) / counts
    ends = torch.stack([sizes - counts, (finite & (values <= 0)).sum(1)], 1)
    return torch.cat([torch.stack([sizes, mean], 1), cuts.masked_fill(counts[:, None] == 0, math.nan), ends], 1)


def rank_error(sample_size: int) -> float:
    """Return by how much the ranks of percentiles of a sample may be off, all at once, with 99% confidence."""
    return min(1.0, math.sqrt(math.log(2 / 0.01) / (2 * sample_size)))  # Dvoretzky, Kiefer, Wolfowitz and Massart


def percentile_rows(rows: pd.DataFrame, quantity: str, *by: str) -> pd.DataFrame:
    """Return percentiles of a quantity in every group of rows, in the order of their first rows."""
    groups = rows.groupby([*by], sort=False)[quantity]
    return pd.DataFrame([{**dict(zip(by, key, strict=True)), **percentiles(group)} for key, group in groups])
