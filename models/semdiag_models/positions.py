"""Sinusoidal positions."""

import math

import torch
from torch import Tensor


def sinusoids(length: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return positions: sines in even channels, cosines in odd ones, base 10000."""
    if torch.empty(()).is_meta:
        return torch.empty(length, width, dtype=dtype)
    channels = torch.arange(0, width, 2, dtype=dtype)
    angle = torch.arange(length)[:, None] * torch.exp(channels * (-math.log(10000) / width))
    return torch.stack([angle.sin(), angle.cos()], -1).view(length, width)
