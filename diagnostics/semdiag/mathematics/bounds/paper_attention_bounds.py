"""λ_A and λ_W in the paper's form: one δ, one Δ and one load ratio for all queries, and no biases."""

import math

import torch
from torch import Tensor

from semdiag.mathematics.bounds.attention_bounds import HeadNorms
from semdiag.mathematics.bounds.bound import Assumption, Bound
from semdiag.mathematics.logarithms import Real, float64, log, log_one_plus_inverse, log_sum
from semdiag.mathematics.softmax_stability import positive_separation


def paper_attention_map_bound(
    dispersion: Real, norms: HeadNorms, load_ratio: Real = 1.0, separation: Real | None = None
) -> Bound:
    """Return the paper's constant of the attention map in its input.

    Full attention (β = 1) and fixed masks: e^δ [β + ΓΞ²(1 + β)];
    heavy-hitter masks: e^δ_h [β + 2ΓΞ²(1 + β)(1 + 1/Δ_h)].

    Source: paper, Thm 2 with Thm 4 (fixed masks) and Thm 5 (docs/theory.md#paper-attention). Deviation: none;
    its ξ is not an ℓ1 constant everywhere (docs/theory.md#where-the-paper-form-fails).

    Args:
        dispersion: δ in nats, largest over the queries (or a percentile of theirs).
        norms: Γ and Ξ.
        load_ratio: β = max_j l_j / k; 1 for full attention.
        separation: Δ_h in nats, smallest over the queries; None for masks that ignore the scores.

    Returns:
        ln λ_A, in the broadcast shape; +inf where Δ_h ≤ 0.

    Example:
        >>> norms = HeadNorms(gamma=0.5, upsilon=1.0, token=1.0, query=1.0)
        >>> paper_attention_map_bound(0.0, norms).log_value.exp().item()
        2.0
    """
    log_beta = log(load_ratio)
    log_scores = log(norms.gamma) + 2 * log(norms.token) + torch.log1p(float64(load_ratio))
    log_factor, assumptions = _mask_factor(separation)
    log_map = float64(dispersion) + log_sum(log_beta, log_scores + log_factor)
    return Bound(log_map, (*assumptions, _no_query_bias(norms)), "paper, Thm 2")


def paper_bilinear_form_bound(
    dispersion: Real, norms: HeadNorms, tokens: Real, separation: Real | None = None
) -> Bound:
    """Return the paper's constant of the attention outputs in W, the score form.

    Full attention and fixed masks: ΥΞ³L e^δ; heavy-hitter masks: 2ΥΞ³L e^δ_h (1 + 1/Δ_h).

    Source: paper, Thm 2 with Thm 4 (fixed masks) and Thm 5 (docs/theory.md#paper-attention). Deviation: none.

    Args:
        dispersion: δ in nats, largest over the queries (or a percentile of theirs).
        norms: Υ and Ξ.
        tokens: L.
        separation: Δ_h in nats, smallest over the queries; None for masks that ignore the scores.

    Returns:
        ln λ_W, in the broadcast shape; +inf where Δ_h ≤ 0.

    Example:
        >>> norms = HeadNorms(gamma=0.5, upsilon=1.0, token=2.0, query=2.0)
        >>> paper_bilinear_form_bound(0.0, norms, tokens=4).log_value.exp()
        tensor(32.0000, dtype=torch.float64)
    """
    log_factor, assumptions = _mask_factor(separation)
    log_form = log(norms.upsilon) + 3 * log(norms.token) + log(tokens) + float64(dispersion) + log_factor
    return Bound(log_form, (*assumptions, _no_query_bias(norms)), "paper, Thm 2")


def _mask_factor(separation: Real | None) -> tuple[Tensor, tuple[Assumption, ...]]:
    """Return ln 2(1 + 1/Δ_h) for heavy-hitter masks, 0 for fixed ones."""
    if separation is None:
        return float64(0.0), ()
    gap = float64(separation)
    log_factor = math.log(2) + log_one_plus_inverse(gap.clamp(min=0))
    return log_factor, (positive_separation(gap),)


def _no_query_bias(norms: HeadNorms) -> Assumption:
    """Return the norms without a query bias, Ξ̃ = Ξ, as in the paper's formulas."""
    return Assumption(
        "the query projection has no bias", {}, holds=bool((float64(norms.query) == float64(norms.token)).all())
    )
