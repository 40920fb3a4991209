"""The paper's input-stability constants, and where they are indeed upper bounds."""

import math

import torch
from torch import Tensor

from semdiag.mathematics.bounds.bound import Assumption, Bound
from semdiag.mathematics.logarithms import Real, float64, log_one_plus_inverse
from semdiag.mathematics.softmax_stability import (
    fixed_mask_stability,
    heavy_hitter_stability,
    positive_separation,
)


def paper_fixed_mask_stability(dispersion: Real, keys: Real) -> Bound:
    """Return the paper's ξ of full attention (k = n) and of masks that ignore the input: ξ = e^δ / k.

    Source: paper, the ξ of standard and of input-agnostic sparse attention
    (docs/theory.md#paper-stability). Deviation: none. As an ℓ1 constant it is exceeded below
    :func:`paper_form_threshold` (docs/theory.md#where-the-paper-form-fails), which the returned assumption says.

    Args:
        dispersion: δ ≥ 0 in nats, over the unmasked keys.
        keys: k ≥ 1, number of unmasked keys.

    Returns:
        ln ξ = δ − ln k per entry.

    Raises:
        ValueError: if δ < 0 or NaN, or k is not an integer ≥ 1.

    Example:
        >>> bound = paper_fixed_mask_stability([1.0, 90.0], 40)
        >>> bound.log_value
        tensor([-2.6889, 86.3111], dtype=torch.float64)
        >>> bound.unmet[0].measured["rows below the sound form"]
        1
    """
    sound = fixed_mask_stability(dispersion, keys).log_value
    log_xi = float64(dispersion) - torch.log(float64(keys))
    return Bound(log_xi, (_not_below(log_xi, sound),), "paper, ξ of standard attention")


def paper_heavy_hitter_stability(dispersion: Real, separation: Real, keys: Real) -> Bound:
    """Return the paper's ξ of heavy-hitter masks: ξ_h = (e^δ_h / k)(1 + 1/Δ_h).

    Source: paper, Thm 5 (docs/theory.md#paper-stability). Deviation: none.

    Args:
        dispersion: δ_h ≥ 0 in nats, over the unmasked keys.
        separation: Δ_h in nats; +inf where every allowed key is unmasked.
        keys: k ≥ 1, number of unmasked keys.

    Returns:
        ln ξ_h per entry; +inf where Δ_h ≤ 0, with the assumption reported as not met.

    Raises:
        ValueError: if δ < 0 or NaN, Δ is NaN, or k is not an integer ≥ 1.

    Example:
        >>> paper_heavy_hitter_stability(2.0, 0.01, 5).log_value.exp().item()
        149.2589...
    """
    sound = heavy_hitter_stability(dispersion, separation, keys).log_value
    log_xi = log_paper_heavy_hitter(dispersion, separation, keys)
    assumptions = (positive_separation(separation), _not_below(log_xi, sound))
    return Bound(log_xi, assumptions, "paper, Thm 5")


def log_paper_heavy_hitter(dispersion: Real, separation: Real, keys: Real) -> Tensor:
    """Return ln ξ_h of :func:`paper_heavy_hitter_stability`, without checks and assumptions.

    Source: paper, Thm 5 (docs/theory.md#paper-stability). Deviation: none.

    Args:
        dispersion: δ_h ≥ 0 in nats.
        separation: Δ_h in nats.
        keys: k ≥ 1.

    Example:
        >>> log_paper_heavy_hitter(2.0, 0.01, 5).exp().item()
        149.2589...
    """
    gap = float64(separation).clamp(min=0)
    return float64(dispersion) - torch.log(float64(keys)) + log_one_plus_inverse(gap)


def paper_form_threshold(keys: Real) -> Tensor:
    """Return the dispersion below which some pairs of rows of n keys exceed e^δ/n.

    The largest δ with e^δ/n < ξ*(δ, n), that is e^δ < sqrt(2n(n − 1)) − (n − 1).

    Source: docs/theory.md#where-the-paper-form-fails. Deviation: not in the paper.

    Args:
        keys: n ≥ 1, number of unmasked keys.

    Returns:
        The threshold in nats; 0 for n ≤ 2, where the paper's form is never exceeded.

    Raises:
        ValueError: if n < 1.

    Example:
        >>> paper_form_threshold([40, 600])
        tensor([2.8248, 5.5167], dtype=torch.float64)
    """
    n = float64(keys)
    if not bool((n >= 1).all()):
        raise ValueError(f"A softmax row has at least one key. Got {n.min().item()}.")
    # sqrt(2n(n−1)) − (n−1) written as a quotient of sums, which does not cancel.
    reach = (n - 1) * (n + 1) / (torch.sqrt(2 * n * (n - 1)) + n - 1)
    return torch.where(n <= 2, 0.0, torch.log(reach.clamp(min=1.0)))


def _not_below(log_paper: Tensor, log_sound: Tensor) -> Assumption:
    """Return whether the paper's constant is at least the sound one, as an upper bound must be."""
    below = ~(log_paper >= log_sound - 1e-12)
    ratio = torch.where(below, log_sound - log_paper, 0.0).exp()
    return Assumption(
        "the paper's form is not below the sound form (as an ℓ1 constant)",
        {
            "rows below the sound form": int(below.sum()),
            "sound over paper, at most": ratio.max().item() if ratio.numel() else math.nan,
        },
        holds=not bool(below.any()),
    )
