"""How softmax rows actually respond: the local constant, and secants."""

import math

import torch
from torch import Tensor

from semdiag.mathematics.logarithms import float64


def local_stability(scores: Tensor, selected: Tensor) -> Tensor:
    """Return the local ξ_loc of each row, as a logarithm: the ℓ1 → ℓ1 norm of the softmax Jacobian at the row.

    ξ_loc = max_j 2 p_j (1 − p_j) ≤ ξ*(δ, k). The largest weight attains the maximum; 1 − p_j is summed over the
    other weights, so that it stays accurate if p_j rounds to 1.

    Source: docs/theory.md#local-stability. Deviation: not in the paper.

    Args:
        scores: z in nats, shape (..., keys); entries that are not selected are ignored (−inf is fine).
        selected: bool, shape (..., keys), at least one True per row.

    Returns:
        ln ξ_loc, shape (...), float64, in [−∞, ln ½]; −∞ for a single key.

    Raises:
        ValueError: if a row selects no key.

    Example:
        >>> rows = torch.tensor([[0.0, 0.0, 5.0], [900.0, 0.0, 0.0]])
        >>> local_stability(rows, torch.tensor([[True, True, False], [True, True, True]]))
        tensor([-6.9315e-01, -8.9861e+02], dtype=torch.float64)
    """
    log_top, log_others = _largest_and_others(scores, selected)
    return math.log(2) + log_top + log_others - 2 * torch.logaddexp(log_top, log_others)


def log_odds_of_largest(scores: Tensor, selected: Tensor) -> Tensor:
    """Return the log odds of each row's largest weight, ln(p_max/(1 − p_max)), accurate even if p_max rounds to 1.

    Source: docs/theory.md#same-set. Deviation: none.

    Args:
        scores: z in nats, shape (..., keys).
        selected: bool, shape (..., keys), at least one True per row.

    Returns:
        In nats, shape (...), float64; +inf for a single key.

    Raises:
        ValueError: if a row selects no key.

    Example:
        >>> rows = torch.tensor([[0.0, 0.0, 0.0], [900.0, 0.0, 0.0]])
        >>> log_odds_of_largest(rows, torch.ones(2, 3, dtype=torch.bool)).tolist()
        [-0.693147..., 899.306852...]
    """
    log_top, log_others = _largest_and_others(scores, selected)
    return log_top - log_others


def local_stability_of_weight(largest: Tensor) -> Tensor:
    """Return ξ_loc = 2p(1 − p) from the largest weight p of each row.

    Source: docs/theory.md#local-stability. Deviation: if p rounds to 1, it is 0;
    :func:`local_stability` has no such limit.

    Args:
        largest: p, in [0, 1].

    Returns:
        ξ_loc, in [0, ½], of the same shape. Not a logarithm.

    Example:
        >>> local_stability_of_weight(torch.tensor([0.7, 1.0]))
        tensor([0.4200, 0.0000])
    """
    return 2 * largest * (1 - largest)


def masked_softmax(scores: Tensor, selected: Tensor) -> Tensor:
    """Return attention weights: p = softmax of z over the selected keys, zero elsewhere.

    Source: docs/theory.md#attention-call. Deviation: none.

    Args:
        scores: z in nats, shape (..., keys).
        selected: bool, shape (..., keys), at least one True per row.

    Returns:
        p, shape (..., keys), float64.

    Raises:
        ValueError: if a row selects no key.

    Example:
        >>> masked_softmax(torch.tensor([0.0, 0.0, 5.0]), torch.tensor([True, True, False]))
        tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """
    return torch.softmax(_masked(scores, selected), dim=-1)


def weight_change(scores: Tensor, other: Tensor, selected: Tensor, other_selected: Tensor) -> Tensor:
    """Return ‖p(z) − p(z')‖₁, each row with its own mask.

    Source: docs/theory.md#fixed-mask-stability. Deviation: none.

    Args:
        scores: z in nats, shape (..., keys).
        other: z', same shape.
        selected: bool, keys in the softmax of z.
        other_selected: bool, keys in the softmax of z'.

    Returns:
        The change, shape (...), float64, in [0, 2].

    Raises:
        ValueError: if a row selects no key.

    Example:
        >>> z, both = torch.zeros(2), torch.tensor([True, True])
        >>> weight_change(z, z, both, torch.tensor([True, False])).item()
        1.0
    """
    return (masked_softmax(scores, selected) - masked_softmax(other, other_selected)).abs().sum(dim=-1)


def score_change(
    scores: Tensor, other: Tensor, selected: Tensor, other_selected: Tensor, order: float = 1
) -> Tensor:
    """Return ‖z − z'‖ over the keys of either row, S ∪ S'.

    Source: docs/theory.md#heavy-hitter-stability, whose proof uses these keys only. Deviation: the
    paper sums over all keys, which can only make the distance larger and the secant smaller.

    Args:
        scores: z in nats, shape (..., keys).
        other: z', same shape.
        selected: bool, keys used by z.
        other_selected: bool, keys used by z'.
        order: 1 for the sum, ``math.inf`` for the largest entry.

    Returns:
        The distance in nats, shape (...), float64.

    Raises:
        ValueError: if ``order`` is neither 1 nor infinity.

    Example:
        >>> z = torch.tensor([0.0, 1.0, -math.inf])
        >>> used = torch.tensor([True, True, False])
        >>> score_change(z, torch.tensor([0.5, 1.5, 9.0]), used, used).item()
        1.0
    """
    used = selected | other_selected
    change = torch.where(used, (float64(scores) - float64(other)).abs(), 0.0)
    if order == 1:
        return change.sum(dim=-1)
    if order == math.inf:
        return change.amax(dim=-1)
    raise ValueError(f"order must be 1 or infinity. Got order={order}.")


def score_range_change(scores: Tensor, other: Tensor, selected: Tensor, other_selected: Tensor) -> Tensor:
    """Return how unevenly the scores moved: max − min of z − z' over the keys of either row, S ∪ S'.

    Adding a number to all scores of a row changes neither the weights nor this range.

    Source: docs/theory.md#same-set. Deviation: none.

    Args:
        scores: z in nats, shape (..., keys).
        other: z', same shape.
        selected: bool, keys used by z.
        other_selected: bool, keys used by z'.

    Returns:
        The range in nats, shape (...), float64; 0 if no key is used.

    Example:
        >>> z, used = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([True, True, True])
        >>> score_range_change(z, torch.tensor([5.0, 6.0, 7.5]), used, used).item()
        0.5
    """
    used = selected | other_selected
    change = float64(scores) - float64(other)
    high, low = (torch.where(used, sign * change, -math.inf).amax(dim=-1) for sign in (1, -1))
    return torch.where(used.any(dim=-1), high + low, 0.0)


def softmax_secant(
    scores: Tensor, other: Tensor, selected: Tensor, other_selected: Tensor, order: float = 1
) -> Tensor:
    """Return the secant ξ̂ = ‖p − p'‖₁ / ‖z − z'‖, a lower bound of any valid ξ (order 1) or row constant (∞).

    Source: docs/theory.md#secants. Deviation: not in the paper.

    Args:
        scores: z in nats, shape (..., keys).
        other: z', same shape.
        selected: bool, keys used by z.
        other_selected: bool, keys used by z'.
        order: order of the norm of the scores, 1 or ``math.inf``.

    Returns:
        ξ̂, shape (...), float64; NaN for equal rows (no secant through one point).

    Raises:
        ValueError: if a row selects no key, or ``order`` is neither 1 nor infinity.

    Example:
        >>> all_keys = torch.tensor([True, True])
        >>> softmax_secant(torch.zeros(2), torch.tensor([0.1, 0.0]), all_keys, all_keys).item()
        0.4995...
    """
    distance = score_change(scores, other, selected, other_selected, order)
    return weight_change(scores, other, selected, other_selected) / distance


def _largest_and_others(scores: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest selected score, and logsumexp of the others; −inf if there are none."""
    z = _masked(scores, selected)
    top = z.argmax(dim=-1, keepdim=True)
    return z.gather(-1, top).squeeze(-1), torch.logsumexp(z.scatter(-1, top, -math.inf), dim=-1)


def _masked(scores: Tensor, selected: Tensor) -> Tensor:
    """Replace the scores of keys that are not selected by −inf."""
    if not bool(selected.any(dim=-1).all()):
        raise ValueError("A row selects no key, so it has no softmax. Leave padded queries out.")
    return torch.where(selected, float64(scores), -math.inf)
