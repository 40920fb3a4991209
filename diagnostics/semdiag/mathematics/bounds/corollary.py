"""Corollary 1: when does a heavy-hitter mask have a better guarantee than full attention?"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.bounds.block_bounds import Assumption, Bound, merged
from semdiag.mathematics.score_strips import AttentionRows
from semdiag.mathematics.softmax_stability import positive_separation
from semdiag.mathematics.spectral_norms import Real, float64, log, log_one_plus_inverse


@dataclass(frozen=True, eq=False)
class Condition:
    """A condition "left side < threshold", with its assumptions.

    Example:
        >>> Condition(float64([0.97, 1.2]), 1.0, (), "eq. 304").met
        tensor([ True, False])
    """

    left_side: Tensor  # float64, any shape (one entry per percentile); +inf if an assumption leaves no value
    threshold: float  # 1 for the paper's conditions, 0 for differences of logarithms
    assumptions: tuple[Assumption, ...]  # assumptions that were checked
    source: str  # equation of the paper or section of docs/theory.md

    @property
    def met(self) -> Tensor:
        """Whether the mask's guarantee is the better one by this condition; bool, same shape."""
        return self.left_side < self.threshold

    @property
    def unmet(self) -> tuple[Assumption, ...]:
        """The assumptions that do not hold."""
        return tuple(a for a in self.assumptions if not a.holds)


def paper_weight_condition(full_dispersion: Real, masked_dispersion: Real, masked_separation: Real) -> Condition:
    """Return the paper's condition for a better guarantee in the parameters W, against 1.

    δ_h/δ_s + (1/δ_s) ln(2(1 + 1/Δ_h)) < 1; the left side is +inf where δ_s = 0 or Δ_h ≤ 0. δ_s of the full model
    and δ_h of the heavy-hitter model are at the same percentiles, Δ_h at the mirrored ones (100 − p), all in nats.

    Source: paper, Cor. 1, eq. 304 (docs/theory.md#corollary). Deviation: none; percentiles are a heuristic.

    Example:
        >>> paper_weight_condition(8.61, 3.51, 0.016).left_side.item()
        0.970...
    """
    delta_s, delta_h, gap = map(float64, (full_dispersion, masked_dispersion, masked_separation))
    numerator = delta_h + math.log(2) + log_one_plus_inverse(gap.clamp(min=0))
    return _per_full_dispersion(numerator, delta_s, gap, "paper, Cor. 1, eq. 304")


def paper_input_condition(
    full_dispersion: Real, masked_dispersion: Real, masked_separation: Real, load_ratio: Real
) -> Condition:
    """Return the paper's condition for a better guarantee in the inputs X, with 2ΓΞ² = δ_s.

    δ_h/δ_s + (1/δ_s) [ ln(δ_s (1 + β)(1 + 1/Δ_h) + β) − ln(1 + δ_s) ] < 1. Arguments and result as of
    :func:`paper_weight_condition`; ``load_ratio`` is β, key load over k, at the same percentiles.

    Source: paper, Cor. 1, eq. 305 (docs/theory.md#corollary). Deviation: none.

    Example:
        >>> paper_input_condition(8.61, 3.51, 0.016, 1 / 5).left_side.item()
        0.898...
    """
    delta_s = float64(full_dispersion)
    delta_h = float64(masked_dispersion)
    gap = float64(masked_separation)
    beta = float64(load_ratio)
    log_scores = log(delta_s) + torch.log1p(beta) + log_one_plus_inverse(gap.clamp(min=0))
    numerator = delta_h + torch.logaddexp(log_scores, log(beta)) - torch.log1p(delta_s)
    return _per_full_dispersion(numerator, delta_s, gap, "paper, Cor. 1, eq. 305")


def paper_fixed_mask_control(full_dispersion: Real, masked_dispersion: Real, load_ratio: Real) -> Condition:
    """Return the control: the paper's input condition for a mask that ignores the scores, with 2ΓΞ² = δ_s.

    δ_f/δ_s + (1/δ_s) [ ln(δ_s (1 + β)/2 + β) − ln(1 + δ_s) ] < 1. If δ_f = δ_s it holds only for
    β < 1, impossible with as many queries as keys. Arguments and result as of :func:`paper_input_condition`, with
    δ_f for δ_h and the largest load for β.

    Source: paper, Thm 4 (docs/theory.md#fixed-mask-control). Deviation: written like eq. 305 for comparison.

    Example:
        >>> paper_fixed_mask_control(8.0, 8.0, 1.0).left_side.item()
        1.0
    """
    delta_s, delta_f, beta = map(float64, (full_dispersion, masked_dispersion, load_ratio))
    # δ_s(1 + β)/2 + β − (1 + δ_s) = (β − 1)(1 + δ_s/2): exactly 0 at β = 1, where rounding must not decide.
    numerator = delta_f + torch.log1p((beta - 1) * (1 + delta_s / 2) / (1 + delta_s))
    return _per_full_dispersion(numerator, delta_s, None, "paper, Thm 4")


def sound_weight_margin(masked_rows: AttentionRows, full_rows: AttentionRows) -> Condition:
    """Return the sound comparison in the parameters W, for equal norms: Σ_i min(s_i ξ_i, row_i) of mask and full.

    ln Σ_i min(2k ξ_h, max(1, 2/Δ_h)) − ln L against 0, (...), from rows (..., queries). It is ≥ 0 for k ≥ 2.

    Source: docs/theory.md#sound-comparison. Deviation: replaces eq. 304, whose full constant grows with e^δ_s.

    Example:
        >>> from semdiag.mathematics.score_strips import fixed_mask_rows, heavy_hitter_rows
        >>> full = fixed_mask_rows([90.0] * 4, 40)
        >>> sound_weight_margin(heavy_hitter_rows([1.0] * 4, 0.5, 5), full).left_side.exp()
        tensor(4., dtype=torch.float64)
    """
    margin = masked_rows.log_row.logsumexp(dim=-1) - full_rows.log_row.logsumexp(dim=-1)
    assumptions = merged([masked_rows.assumptions, full_rows.assumptions])
    return Condition(margin, 0.0, assumptions, "docs/theory.md#sound-comparison")


def sound_input_margin(masked_map: Bound, full_map: Bound) -> Condition:
    """Return the sound comparison in the inputs X, against 0: ln λ_A of the masked minus ln λ_A of the full model.

    Source: docs/theory.md#sound-comparison. Deviation: replaces eq. 305; each model keeps its own Γ, Ξ and β.

    Example:
        >>> masked, full = Bound(log(6.0), (), "a"), Bound(log(12.0), (), "b")
        >>> sound_input_margin(masked, full).met.item()
        True
    """
    margin = masked_map.log_value - full_map.log_value
    margin = torch.where(masked_map.log_value == math.inf, math.inf, margin)
    assumptions = merged([masked_map.assumptions, full_map.assumptions])
    return Condition(margin, 0.0, assumptions, "docs/theory.md#sound-comparison")


def _per_full_dispersion(numerator: Tensor, delta_s: Tensor, gap: Tensor | None, source: str) -> Condition:
    """Divide by δ_s; +inf where an assumption leaves no value."""
    stated = delta_s > 0
    numbers = {"smallest": delta_s.min().item()}
    assumptions = [Assumption("the full model's dispersion is positive", numbers, holds=bool(stated.all()))]
    if gap is not None:
        stated = stated & (gap > 0)
        assumptions.append(positive_separation(gap))
    return Condition(torch.where(stated, numerator / delta_s, math.inf), 1.0, tuple(assumptions), source)
