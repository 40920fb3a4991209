"""Bounds for a given pair of softmax rows over the same keys, from how unevenly the scores moved."""

import math

import torch
from torch import Tensor

from semdiag.mathematics.bounds.bound import Bound
from semdiag.mathematics.logarithms import Real, float64


def weight_change_bound(score_range: Real) -> Tensor:
    """Bound the change of weights between two rows over the same keys: ‖p(z) − p(z')‖₁ ≤ 2 tanh(range(dz)/4).

    dz = z − z' over the keys. The bound is at most ‖dz‖_∞ and at most 2, and it is attained for every range.

    Source: docs/theory.md#same-set. Deviation: not in the paper.

    Args:
        score_range: max dz − min dz ≥ 0 over the keys, nats.

    Returns:
        The bound, same shape, float64. Not a logarithm.

    Example:
        >>> weight_change_bound([0.0, 0.02, 100.0])
        tensor([0.0000, 0.0100, 2.0000], dtype=torch.float64)
    """
    return 2 * torch.tanh(float64(score_range) / 4)


def same_set_stability(log_odds: Real, score_range: Real) -> Bound:
    """Return ξ of a pair of rows over the same keys: sup of 2x(1 − x) over the largest weights x between them.

    Between the rows the log odds of the largest weight stay within range(dz)/2 of the mean m of the two rows':
    ξ = 2x(1 − x) with |ln(x/(1 − x))| = max(|m| − range(dz)/2, 0).

    Source: docs/theory.md#same-set. Deviation: not in the paper.

    Args:
        log_odds: m, the mean over both rows of ln(p_max/(1 − p_max)), see
            :func:`~semdiag.mathematics.softmax_secants.log_odds_of_largest`; +inf for a single key.
        score_range: max dz − min dz ≥ 0 over the keys, nats.

    Returns:
        ln ξ per pair, in [−∞, ln ½], in the broadcast shape.

    Example:
        >>> same_set_stability([3.0, 3.0, 0.0], [0.0, 8.0, 0.0]).log_value.exp()
        tensor([0.0904, 0.5000, 0.5000], dtype=torch.float64)
    """
    away = (float64(log_odds).abs() - float64(score_range) / 2).clamp(min=0)
    log_xi = math.log(2) - away - 2 * torch.log1p(torch.exp(-away))
    return Bound(log_xi, (), "docs/theory.md#same-set")
