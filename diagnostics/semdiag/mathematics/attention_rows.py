"""Per-query constants of the softmax rows of an attention map: ln p̄_i, ln ξ_i, ln min(s_i ξ_i, row_i)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.bounds.bound import Assumption
from semdiag.mathematics.logarithms import Real, broadcast
from semdiag.mathematics.softmax_stability import (
    fixed_mask_row_stability,
    fixed_mask_stability,
    heavy_hitter_row_stability,
    heavy_hitter_split_stability,
    heavy_hitter_stability,
    log_largest_weight,
    positive_separation,
)

Constants = tuple[Tensor, Tensor, Tensor, Tensor]  # the tensors of AttentionRows


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Constants per query of an attention map: natural logarithms, shape (..., queries); −∞ for padded queries.

    Attributes:
        log_weight: ln p̄_i, the largest weight that the row can give.
        log_xi: ln ξ_i, constant of the row against ‖z − z'‖₁.
        log_row: ln min(s_i ξ_i, row_i), constant of the row against ‖z − z'‖_∞.
        log_split: ln of the constant against ‖a‖_∞ if z − z' = a + b and b counts with ξ_i: equal to ``log_row``,
            except for heavy hitters, where 1 + 2/Δ_i replaces max(1, 2/Δ_i).
        assumptions: of the constants.
    """

    log_weight: Tensor
    log_xi: Tensor
    log_row: Tensor
    log_split: Tensor
    assumptions: tuple[Assumption, ...]


def fixed_mask_rows(dispersion: Real, keys: Real) -> AttentionRows:
    """Return the constants of rows with a fixed set of keys: full, banded, block-local, random; global tokens.

    Source: docs/theory.md#fixed-mask-stability and docs/theory.md#row-form. Deviation: the paper has e^δ/k.

    Args:
        dispersion: δ_i ≥ 0 in nats, shape (..., queries), the larger over everything compared.
        keys: k_i, shape (..., queries); 0 marks a padded query, which is left out.

    Returns:
        The rows' constants.

    Raises:
        ValueError: if a dispersion is negative or NaN, or a number of keys is not an integer ≥ 0.

    Example:
        >>> fixed_mask_rows([2.0, 2.0], [5, 0]).log_row
        tensor([0., -inf], dtype=torch.float64)
    """
    delta, k = broadcast(dispersion, keys)

    def constants(d: Tensor, n: Tensor) -> Constants:
        row = fixed_mask_row_stability(d, n).log_value
        return log_largest_weight(d, n), fixed_mask_stability(d, n).log_value, row, row

    return AttentionRows(*_where_attended(k, constants, delta), assumptions=())


def heavy_hitter_rows(dispersion: Real, separation: Real, keys: Real) -> AttentionRows:
    """Return the constants of rows that keep their k_i highest-scoring allowed keys (top-k).

    Source: docs/theory.md#heavy-hitter-stability and docs/theory.md#row-form. Deviation: the paper's ξ_h is
    :func:`~semdiag.mathematics.paper_stability.paper_heavy_hitter_stability`.

    Args:
        dispersion: δ_i ≥ 0 in nats, shape (..., queries), the larger over everything compared.
        separation: Δ_i in nats, the smaller; +inf where nothing is masked.
        keys: k_i, shape (..., queries); 0 marks a padded query, which is left out.

    Returns:
        The rows' constants; +inf in rows with Δ_i ≤ 0.

    Raises:
        ValueError: if a dispersion is negative or NaN, a separation NaN, or a number of keys no integer ≥ 0.

    Example:
        >>> heavy_hitter_rows(2.0, [0.5, float("inf")], 5).log_row.exp()
        tensor([4., 1.], dtype=torch.float64)
    """
    delta, gap, k = broadcast(dispersion, separation, keys)

    def constants(d: Tensor, n: Tensor, g: Tensor) -> Constants:
        row, split = heavy_hitter_row_stability(d, g, n), heavy_hitter_split_stability(d, g, n)
        xi = heavy_hitter_stability(d, g, n)
        return log_largest_weight(d, n), xi.log_value, row.log_value, split.log_value

    assumption = positive_separation(gap[k != 0])
    return AttentionRows(*_where_attended(k, constants, delta, gap), assumptions=(assumption,))


def key_sums(log_values: Tensor, selected: Tensor) -> Tensor:
    """Sum over the queries that use a key, ln Σ_{i : l ∈ S_i} value_i: a key load with weights.

    Source: docs/theory.md#attention-map. Deviation: none.

    Args:
        log_values: ln value_i, shape (..., queries).
        selected: bool, shape (..., queries, keys): l ∈ S_i.

    Returns:
        shape (..., keys), float64; −∞ for keys that no query uses.

    Example:
        >>> key_sums(torch.zeros(2), torch.tensor([[True, True], [True, False]])).exp()
        tensor([2., 1.])
    """
    return torch.where(selected, log_values[..., None], -math.inf).logsumexp(dim=-2)


def _where_attended(keys: Tensor, constants: Callable[..., Constants], *rows: Tensor) -> Constants:
    """Return the constants of rows with keys; −∞ (no contribution) for the others."""
    padded = keys == 0
    delta, *rest = (torch.where(padded, 0.0, row) for row in rows)
    weight, xi, row, split = constants(delta, torch.where(padded, 1.0, keys), *rest)
    nothing = -math.inf
    return (
        torch.where(padded, nothing, weight),
        torch.where(padded, nothing, xi),
        torch.where(padded, nothing, row),
        torch.where(padded, nothing, split),
    )
