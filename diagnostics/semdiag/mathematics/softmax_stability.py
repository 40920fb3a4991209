"""Input-stability ξ of one softmax row: sound bounds of ‖p(z) − p(z')‖₁ / ‖z − z'‖₁, local values and secants."""

import math

import torch
from torch import Tensor

from semdiag.mathematics.bounds.block_bounds import Assumption, Bound
from semdiag.mathematics.spectral_norms import Real, broadcast, float64, log_one_plus_inverse, log_sum


def log_largest_weight(dispersion: Real, keys: Real) -> Tensor:
    """Return ln of the largest weight that a softmax row of k keys and range δ can give to one key.

    p̄(δ, k) = e^δ / (e^δ + k − 1), ln in [−ln k, 0]. Arguments and errors as of :func:`fixed_mask_stability`.

    Source: docs/theory.md#largest-weight. Deviation: the paper's e^δ/k can exceed 1.

    Example:
        >>> log_largest_weight([0.0, 1000.0], 4).exp()
        tensor([0.2500, 1.0000], dtype=torch.float64)
    """
    delta, k = _checked(dispersion, keys)
    return -torch.log1p((k - 1) * torch.exp(-delta))


def fixed_mask_stability(dispersion: Real, keys: Real) -> Bound:
    """Return ξ of a row whose set of keys does not depend on its scores: full, banded, block-local, random.

    ξ*(δ, k) = 2 p̄ (1 − p̄) if p̄(δ, k) < ½, else ½; 0 for a single key. No smaller constant holds for all rows of
    range ≤ δ. δ ≥ 0, nats, is the larger range over the k ≥ 1 unmasked keys; else a ValueError.

    Source: docs/theory.md#fixed-mask-stability. Deviation: the paper has e^δ/k.

    Example:
        >>> fixed_mask_stability([1.0, 90.0], 40).log_value.exp()
        tensor([0.1218, 0.5000], dtype=torch.float64)
        >>> fixed_mask_stability(3.0, 1).log_value.item()
        -inf
    """
    delta, k = _checked(dispersion, keys)
    log_odds = delta - torch.log(k - 1)  # ln p̄/(1 − p̄); +inf for a single key
    # 2p̄(1 − p̄) grows with p̄ up to ½: clamping the odds to ≤ 1 distinguishes the cases.
    odds = torch.clamp(log_odds, max=0.0)
    log_xi = math.log(2) + odds - 2 * torch.log1p(torch.exp(odds))
    log_xi = torch.where(k == 1, -math.inf, log_xi)
    return Bound(log_xi, (), "docs/theory.md#fixed-mask-stability")


def heavy_hitter_stability(dispersion: Real, separation: Real, keys: Real) -> Bound:
    """Return ξ of a row that keeps its k highest-scoring allowed keys (top-k).

    ξ_h = ξ*(δ_h, k) + max over 0 ≤ d ≤ δ_h of 2 p̄(d, k) / (2Δ_h + d), with δ_h the larger range and Δ_h the
    smaller separation of both rows, in nats, +inf where every allowed key is unmasked; k is the same in both rows.
    ln ξ_h is +inf where Δ_h ≤ 0, not met. Errors as of :func:`fixed_mask_stability`, for a NaN Δ too.

    Source: docs/theory.md#heavy-hitter-stability. Deviation: the paper has another form. That both rows keep their
    top-k is checked by :func:`~semdiag.mathematics.mask_stability.heavy_hitter_pair_stability`.

    Example:
        >>> bound = heavy_hitter_stability(2.0, [0.01, -0.01], 5)
        >>> bound.log_value.exp()
        tensor([20.5000,     inf], dtype=torch.float64)
        >>> print(bound.unmet[0])
        assumption not met: the separation is positive in every row (smallest = -0.01, rows not positive = 1)
    """
    delta, gap, k = _all_checked(dispersion, separation, keys)
    log_xi = log_sum(fixed_mask_stability(delta, k).log_value, _log_swap_cost(delta, gap, k))
    return Bound(log_xi, (positive_separation(gap),), "docs/theory.md#heavy-hitter-stability")


def fixed_mask_row_stability(dispersion: Real, keys: Real) -> Bound:
    """Return the row form for a fixed set of keys: ‖p(z) − p(z')‖₁ ≤ min(k ξ*, 1) ‖z − z'‖_∞.

    It is 1, as k ξ* ≥ 1 for k ≥ 2; 0 for a single key. Arguments and errors as of :func:`fixed_mask_stability`.

    Source: docs/theory.md#row-form. Deviation: not in the paper, which uses ‖z − z'‖₁.

    Example:
        >>> fixed_mask_row_stability([0.0, 90.0, 5.0], [40, 40, 1]).log_value.exp()
        tensor([1., 1., 0.], dtype=torch.float64)
    """
    delta, k = broadcast(*_checked(dispersion, keys))
    log_row = torch.where(k == 1, -math.inf, torch.zeros_like(delta))
    return Bound(log_row, (), "docs/theory.md#row-form")


def heavy_hitter_row_stability(dispersion: Real, separation: Real, keys: Real) -> Bound:
    """Return the row form for a top-k set: ‖p(z) − p(z')‖₁ ≤ min(2k ξ_h, max(1, 2/Δ_h)) ‖z − z'‖_∞.

    With Δ_h = +inf it is the fixed set's min(k ξ*, 1). Arguments and errors as of :func:`heavy_hitter_stability`.

    Source: docs/theory.md#row-form. Deviation: not in the paper.

    Example:
        >>> heavy_hitter_row_stability(2.0, [0.01, float("inf")], 5).log_value.exp()
        tensor([200.0000,   1.0000], dtype=torch.float64)
    """
    delta, gap, k = _all_checked(dispersion, separation, keys)
    log_xi = heavy_hitter_stability(delta, gap, k).log_value
    log_swap = math.log(2) - torch.log(gap.clamp(min=0))
    log_row = torch.minimum(torch.log(2 * k) + log_xi, log_swap.clamp(min=0))
    return Bound(log_row, (positive_separation(gap),), "docs/theory.md#row-form")


def heavy_hitter_split_stability(dispersion: Real, separation: Real, keys: Real) -> Bound:
    """Return the row form for a top-k set whose scores change by two terms, as they do when tokens move.

    ‖p(z) − p(z')‖₁ ≤ min(2k ξ_h, 1 + 2/Δ_h) ‖a‖_∞ + ξ_h ‖b‖₁ for every z − z' = a + b; the constant of ‖a‖_∞ is
    returned. Arguments and errors as of :func:`heavy_hitter_stability`.

    Source: docs/theory.md#attention-map. Deviation: not in the paper.

    Example:
        >>> heavy_hitter_split_stability(2.0, [0.01, float("inf")], 5).log_value.exp()
        tensor([201.,   1.], dtype=torch.float64)
    """
    delta, gap, k = _all_checked(dispersion, separation, keys)
    log_xi = heavy_hitter_stability(delta, gap, k).log_value
    log_split = torch.minimum(torch.log(2 * k) + log_xi, log_one_plus_inverse(gap.clamp(min=0) / 2))
    return Bound(log_split, (positive_separation(gap),), "docs/theory.md#attention-map")


def positive_separation(separation: Real) -> Assumption:
    """Return the assumption Δ > 0 of every heavy-hitter bound: the smallest Δ in nats, and the rows at or below 0.

    Source: paper, Thm 5 (docs/theory.md#semantic-separation). Deviation: none.

    Example:
        >>> positive_separation([0.5, float("inf")]).holds
        True
    """
    gap = float64(separation)
    count = int((~(gap > 0)).sum())
    numbers = {"smallest": gap.min().item() if gap.numel() else math.inf, "rows not positive": count}
    return Assumption("the separation is positive in every row", numbers, holds=count == 0)


def _checked(dispersion: Real, keys: Real) -> tuple[Tensor, Tensor]:
    delta = float64(dispersion)
    k = float64(keys)
    if not bool((delta >= 0).all()):
        raise ValueError(f"A dispersion must be at least 0. Got {delta.min().item()}.")
    if not bool(((k >= 1) & (k == k.floor())).all()):
        raise ValueError(f"A softmax row must have a whole number of keys, at least 1. Got {k.min().item()}.")
    return delta, k


def _all_checked(dispersion: Real, separation: Real, keys: Real) -> tuple[Tensor, Tensor, Tensor]:
    delta, k = _checked(dispersion, keys)
    gap = float64(separation)
    if bool(gap.isnan().any()):
        raise ValueError("A separation is NaN. If nothing is masked, write it as +inf.")
    return delta, gap, k


def local_stability(scores: Tensor, selected: Tensor) -> Tensor:
    """Return ln ξ_loc of each row: the ℓ1 → ℓ1 norm of the softmax Jacobian at the row.

    ξ_loc = max_j 2 p_j (1 − p_j) ≤ ξ*(δ, k), attained by the largest weight, accurate even if that rounds to 1.
    Scores in nats, selected keys: (..., keys). −∞ for a single key; a row without keys is a ValueError.

    Source: docs/theory.md#local-stability. Deviation: not in the paper.

    Example:
        >>> rows = torch.tensor([[0.0, 0.0, 5.0], [900.0, 0.0, 0.0]])
        >>> local_stability(rows, torch.tensor([[True, True, False], [True, True, True]]))
        tensor([-6.9315e-01, -8.9861e+02], dtype=torch.float64)
    """
    log_top, log_others = _largest_and_others(scores, selected)
    return math.log(2) + log_top + log_others - 2 * torch.logaddexp(log_top, log_others)


def log_odds_of_largest(scores: Tensor, selected: Tensor) -> Tensor:
    """Return the log odds of each row's largest weight, ln(p_max/(1 − p_max)), accurate even if p_max rounds to 1.

    Arguments and errors as of :func:`local_stability`; nats, +inf for a single key.

    Source: docs/theory.md#same-set. Deviation: none.

    Example:
        >>> rows = torch.tensor([[0.0, 0.0, 0.0], [900.0, 0.0, 0.0]])
        >>> log_odds_of_largest(rows, torch.ones(2, 3, dtype=torch.bool)).tolist()
        [-0.693147..., 899.306852...]
    """
    log_top, log_others = _largest_and_others(scores, selected)
    return log_top - log_others


def local_stability_of_weight(largest: Tensor) -> Tensor:
    """Return ξ_loc = 2p(1 − p), in [0, ½], from the largest weight p of each row; not a logarithm.

    Source: docs/theory.md#local-stability. Deviation: 0 if p rounds to 1, unlike :func:`local_stability`.

    Example:
        >>> local_stability_of_weight(torch.tensor([0.7, 1.0]))
        tensor([0.4200, 0.0000])
    """
    return 2 * largest * (1 - largest)


def weight_change(scores: Tensor, other_scores: Tensor, selected: Tensor, other_selected: Tensor) -> Tensor:
    """Return ‖p(z) − p(z')‖₁, each row with its own mask; (...), float64, in [0, 2].

    z and z' in nats, and bools for the keys of each, are (..., keys). A row without keys is a ValueError.

    Source: docs/theory.md#fixed-mask-stability. Deviation: none.

    Example:
        >>> z, both = torch.zeros(2), torch.tensor([True, True])
        >>> weight_change(z, z, both, torch.tensor([True, False])).item()
        1.0
    """
    change = _masked(scores, selected).softmax(-1) - _masked(other_scores, other_selected).softmax(-1)
    return change.abs().sum(dim=-1)


def score_change(
    scores: Tensor, other_scores: Tensor, selected: Tensor, other_selected: Tensor, order: float = 1
) -> Tensor:
    """Return ‖z − z'‖ in nats over the keys of either row, S ∪ S'.

    Arguments as of :func:`weight_change`; ``order`` 1 is the sum, ``math.inf`` the largest; else a ValueError.

    Source: docs/theory.md#heavy-hitter-stability. Deviation: the paper sums over all keys.

    Example:
        >>> z = torch.tensor([0.0, 1.0, -math.inf])
        >>> used = torch.tensor([True, True, False])
        >>> score_change(z, torch.tensor([0.5, 1.5, 9.0]), used, used).item()
        1.0
    """
    used = selected | other_selected
    change = torch.where(used, (float64(scores) - float64(other_scores)).abs(), 0.0)
    if order == 1:
        return change.sum(dim=-1)
    if order == math.inf:
        return change.amax(dim=-1)
    raise ValueError(f"order must be 1 or infinity. Got order={order}.")


def score_range_change(scores: Tensor, other_scores: Tensor, selected: Tensor, other_selected: Tensor) -> Tensor:
    """Return the unevenness of the scores' change: max − min of z − z', nats, over the keys of either row.

    The same number added to all scores changes nothing; 0 without keys. Arguments as of :func:`weight_change`.

    Source: docs/theory.md#same-set. Deviation: none.

    Example:
        >>> z, used = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([True, True, True])
        >>> score_range_change(z, torch.tensor([5.0, 6.0, 7.5]), used, used).item()
        0.5
    """
    used = selected | other_selected
    change = float64(scores) - float64(other_scores)
    high, low = (torch.where(used, sign * change, -math.inf).amax(dim=-1) for sign in (1, -1))
    return torch.where(used.any(dim=-1), high + low, 0.0)


def _largest_and_others(scores: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest selected score, and logsumexp of the others; −inf if there are none."""
    z = _masked(scores, selected)
    top = z.argmax(dim=-1, keepdim=True)
    return z.gather(-1, top).squeeze(-1), torch.logsumexp(z.scatter(-1, top, -math.inf), dim=-1)


def _masked(scores: Tensor, selected: Tensor) -> Tensor:
    if not bool(selected.any(dim=-1).all()):
        raise ValueError("A row selects no key, so it has no softmax. Leave padded queries out.")
    return torch.where(selected, float64(scores), -math.inf)


_NEWTON_STEPS = 4  # from a start within 20%: quadratic convergence, exact to rounding for any t


def _log_swap_cost(dispersion: Tensor, separation: Tensor, keys: Tensor) -> Tensor:
    """Return ln κ, the cost of swapping a key: κ = max over 0 ≤ d ≤ δ of 2 p̄(d, k) / (2Δ + d); 0 for Δ = +inf."""
    delta, gap, k = broadcast(dispersion, separation, keys)
    gap = gap.clamp(min=0)
    inner = torch.minimum(_stationary_height(gap, k), delta)
    none, some, most = (  # ln of 2 p̄(d, k) / (2Δ + d) for keys d above the least kept one
        math.log(2) - torch.log1p((k - 1) * torch.exp(-height)) - torch.log(2 * gap + height)
        for height in (delta.new_zeros(()), inner, delta)
    )
    return torch.maximum(torch.maximum(none, some), most)


def _stationary_height(gap: Tensor, keys: Tensor) -> Tensor:
    """Return d of the local maximum, the larger root of e^d = (k − 1)(2Δ + d − 1); 0 if there is none."""
    excess = 2 * gap - 2 + torch.log(keys - 1)  # u; −inf for a single key
    exists = (excess > 0) & (excess < math.inf)
    u = torch.where(exists, excess, 1.0)
    x = 1 + torch.sqrt(2 * u) + u
    for _ in range(_NEWTON_STEPS):
        x *= torch.log(x).add_(u).div_(x - 1)  # x − (x − ln x − t) / (1 − 1/x)
    return torch.where(exists, (x + 1 - 2 * torch.where(exists, gap, 0.0)).clamp(min=0), 0.0)
