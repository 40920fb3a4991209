"""Dropout at the cost of the dropped elements: it draws positions, not a random number per element."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def dropped_positions(n: int, p: float) -> Tensor:
    """Return the indices, among n, at which independent coins with probability p say "drop"."""
    enough = int(n * p + 10 * math.sqrt(n * p) + 20)
    positions = torch.empty(enough, dtype=torch.int64).geometric_(p).cumsum(0).sub_(1)
    while positions[-1] < n - 1:  # ten standard deviations away, but exactness requires it
        more = torch.empty(enough, dtype=torch.int64).geometric_(p).cumsum(0).add_(positions[-1])
        positions = torch.cat([positions, more])
    return positions[: int(torch.searchsorted(positions, n))]


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Zero each element with probability p and divide the others by 1 - p, while training."""
    if not training or p == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p)
    dropped: Tensor = _Dropout.apply(x, p)  # type: ignore[no-untyped-call]
    return dropped


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.p, drops = p, dropped_positions(x.numel(), p)
        ctx.save_for_backward(drops)
        return _zeroed(x, p, drops)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _zeroed(grad, ctx.p, *ctx.saved_tensors), None


def _zeroed(x: Tensor, p: float, drops: Tensor) -> Tensor:
    """Return x / (1 - p) with zeros at the flat positions ``drops``."""
    kept = x.contiguous() * (1 / (1 - p))
    kept.view(-1).index_fill_(0, drops, 0)
    return kept
