"""Theorem 5 for given pairs of softmax rows, with every assumption checked on the rows."""

import math

import torch
from torch import Tensor

from semdiag.mathematics.bounds.bound import Assumption, Bound, merged
from semdiag.mathematics.logarithms import float64
from semdiag.mathematics.softmax_stability import heavy_hitter_stability


def heavy_hitter_pair_stability(
    scores: Tensor,
    other: Tensor,
    selected: Tensor,
    other_selected: Tensor,
    allowed: Tensor,
    other_allowed: Tensor,
) -> Bound:
    """Return the sound ξ_h of given pairs of rows, with all assumptions of Theorem 5 checked on the rows.

    δ_h is the larger dispersion and Δ_h the smaller separation of the two rows.

    Source: docs/theory.md#heavy-hitter-stability. Deviation: δ_h and Δ_h are taken over both
    rows; with one row's values the bound can be exceeded.

    Args:
        scores: z in nats, shape (..., keys).
        other: z', same shape.
        selected: bool, unmasked keys S of z, at least one per row.
        other_selected: bool, unmasked keys S' of z'.
        allowed: bool, allowed keys of z (S and the keys that were passed over).
        other_allowed: bool, allowed keys of z'.

    Returns:
        ln ξ_h per pair, shape (...); +inf for pairs that break an assumption.

    Raises:
        ValueError: if a row selects no key.

    Example:
        >>> z, all_keys = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, True, True])
        >>> top, last = torch.tensor([True, True, False]), torch.tensor([False, True, True])
        >>> xi = heavy_hitter_pair_stability(z, z.flip(0), top, last, all_keys, all_keys).log_value.exp()
        >>> round(xi.item(), 12)  # ½ on a common set, and ½ for the swap of the least keys: 1/(kΔ)
        1.0
        >>> print(heavy_hitter_pair_stability(z, z, top, last, all_keys, all_keys).unmet[0])
        assumption not met: each row keeps its highest-scoring allowed keys (rows that do not = 1)
    """
    ends = ((scores, selected, allowed), (other, other_selected, other_allowed))
    delta = torch.maximum(*(_range(z, s) for z, s, _ in ends))
    gap = torch.minimum(*(_gap(z, s, a) for z, s, a in ends))
    keys = torch.maximum(selected.sum(dim=-1), other_selected.sum(dim=-1))
    bound = heavy_hitter_stability(delta, gap, keys)
    size_differs = selected.sum(dim=-1) != other_selected.sum(dim=-1)
    allowed_differ = (allowed != other_allowed).any(dim=-1)
    not_top = gap < 0
    checks = (
        _holds_in_all("both rows have the same number of unmasked keys", "rows that differ", size_differs),
        _holds_in_all("both rows have the same allowed keys", "rows that differ", allowed_differ),
        _holds_in_all("each row keeps its highest-scoring allowed keys", "rows that do not", not_top),
    )
    log_xi = torch.where(size_differs | allowed_differ, math.inf, bound.log_value)
    return Bound(log_xi, merged([checks, bound.assumptions]), bound.source)


def _holds_in_all(statement: str, name: str, broken: Tensor) -> Assumption:
    """Return the assumption that no row is broken."""
    count = int(broken.sum())
    return Assumption(statement, {name: count}, holds=count == 0)


def _range(scores: Tensor, selected: Tensor) -> Tensor:
    """Return the largest minus the smallest selected score."""
    low = torch.where(selected, float64(scores), math.inf).amin(dim=-1)
    return torch.where(selected, float64(scores), -math.inf).amax(dim=-1) - low


def _gap(scores: Tensor, selected: Tensor, allowed: Tensor) -> Tensor:
    """Return the smallest selected minus the largest unselected allowed score; +inf if all are selected."""
    low = torch.where(selected, float64(scores), math.inf).amin(dim=-1)
    return low - torch.where(allowed & ~selected, float64(scores), -math.inf).amax(dim=-1)
