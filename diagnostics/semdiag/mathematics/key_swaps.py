"""The weight that a key takes along when it leaves a top-k set, per change of the scores that this needs."""

import math

import torch
from torch import Tensor

from semdiag.mathematics.logarithms import broadcast

_NEWTON_STEPS = 4  # from a start within 20%: quadratic convergence, exact to rounding for any t


def log_swap_cost(dispersion: Tensor, separation: Tensor, keys: Tensor) -> Tensor:
    """Return, as a logarithm, the largest change of weights per unit of ‖z − z'‖₁ from swapping one key.

    max over 0 ≤ d ≤ δ of 2 p̄(d, k) / (2Δ + d): a key d above the least kept one has weight at most p̄(d, k), and
    it and its successor must together move by 2Δ + d.

    Source: docs/theory.md#heavy-hitter-stability. Deviation: not in the paper.

    Args:
        dispersion: δ ≥ 0 in nats.
        separation: Δ in nats, +inf where nothing is masked.
        keys: k ≥ 1.

    Returns:
        ln of the maximum, in the broadcast shape; +inf for Δ ≤ 0, −inf for Δ = +inf.

    Example:
        >>> at_once = log_swap_cost(torch.tensor(0.0), torch.tensor(0.5), torch.tensor(4.0))
        >>> at_once.exp().item()  # 1/(kΔ)
        0.5
        >>> log_swap_cost(torch.tensor(9.0), torch.tensor(0.5), torch.tensor(4.0)).exp().item()
        0.5...
    """
    delta, gap, k = broadcast(dispersion, separation, keys)
    gap = gap.clamp(min=0)
    inner = torch.minimum(_stationary_height(gap, k), delta)
    none, some, most = (_log_cost(height, gap, k) for height in (delta.new_zeros(()), inner, delta))
    return torch.maximum(torch.maximum(none, some), most)


def _log_cost(height: Tensor, gap: Tensor, keys: Tensor) -> Tensor:
    """Return ln of 2 p̄(d, k) / (2Δ + d) for keys d above the least kept one."""
    return math.log(2) - torch.log1p((keys - 1) * torch.exp(-height)) - torch.log(2 * gap + height)


def _stationary_height(gap: Tensor, keys: Tensor) -> Tensor:
    """Return the local maximum d, the larger root of e^d = (k − 1)(2Δ + d − 1); 0 if there is none."""
    excess = 2 * gap - 2 + torch.log(keys - 1)  # u; −inf for a single key
    exists = (excess > 0) & (excess < math.inf)
    u = torch.where(exists, excess, 1.0)
    x = 1 + torch.sqrt(2 * u) + u
    for _ in range(_NEWTON_STEPS):
        x *= torch.log(x).add_(u).div_(x - 1)  # x − (x − ln x − t) / (1 − 1/x)
    return torch.where(exists, (x + 1 - 2 * torch.where(exists, gap, 0.0)).clamp(min=0), 0.0)
