"""The local form: λ_A and λ_M of the gradient at one parameter vector, from the weights that its rows have."""

import torch
from torch import Tensor

from semdiag.mathematics.attention_rows import AttentionRows
from semdiag.mathematics.bounds.attention_bounds import HeadNorms
from semdiag.mathematics.bounds.bound import Assumption, Bound
from semdiag.mathematics.logarithms import float64, log, log_product, log_sum

ONE_PARAMETER_VECTOR = Assumption(
    "the constants are of one parameter vector: bounds of the gradient there, no Lipschitz constants of a region",
    {"parameter vectors": 1.0},
    holds=True,
)


def local_rows(weights: Tensor) -> AttentionRows:
    """What infinitesimal changes of the scores do to given softmax rows, while no mask changes.

    With J = diag(p) − ppᵀ: ‖Jv‖₁ ≤ max_j 2p_j(1 − p_j)‖v‖₁, and ‖Jv‖₁ ≤ row ‖v‖_∞ with row = 4p_max(1 − p_max)
    if p_max ≥ ½, else 1.

    Source: docs/theory.md#local-form. Deviation: not in the paper.

    Args:
        weights: p, shape (..., queries, keys), 0 where a key is masked; a row of zeros is left out.

    Returns:
        The rows' constants, shape (..., queries).

    Example:
        >>> rows = local_rows(torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.3, 0.3], [0.0, 0.0, 0.0]]))
        >>> rows.log_row.exp()
        tensor([0.3600, 1.0000, 0.0000], dtype=torch.float64)
    """
    p = float64(weights)
    spread = (2 * p * _others(p)).amax(-1)
    largest = p.amax(-1)
    row = torch.where(largest >= 0.5, 2 * spread, (largest > 0).double())
    log_row = log(row)
    return AttentionRows(log(largest), log(spread), log_row, log_row, (ONE_PARAMETER_VECTOR,))


def local_attention_map_bound(weights: Tensor, norms: HeadNorms) -> Bound:
    """Norm of the Jacobian of u ↦ (Σ_j p_ij u_j)_i at one input, tokens measured by the sum of their 2-norms.

    λ_A,loc = max_l [ Σ_i p_il + Ξ( ΓΞ row_l + ΓΞ̃ Σ_i 2p_il(1 − p_il) ) ]: token l as value, as query and as key.

    Source: docs/theory.md#local-form. Deviation: not in the paper.

    Args:
        weights: p, shape (..., L, L), query by key, 0 where a key is masked; rows of padded queries are zeros.
        norms: Γ, Ξ, Ξ̃ of shape (...) or broadcasting to it.

    Returns:
        ln λ_A,loc, shape (...); it rests on masks that do not change nearby.

    Example:
        >>> norms = HeadNorms(gamma=0.5, upsilon=1.0, token=2.0, query=2.0)
        >>> local_attention_map_bound(torch.full((4, 4), 0.25), norms).log_value.exp().item()
        6.0...
    """
    p = float64(weights)
    as_value = log(p.sum(-2))
    as_query = log_product((log(norms.gamma) + 2 * log(norms.token))[..., None], local_rows(p).log_row)
    as_key = log_product(norms.log_form_reach[..., None], log((2 * p * _others(p)).sum(-2)))
    log_map = log_sum(as_value, as_query, as_key).amax(-1)
    return Bound(log_map, (ONE_PARAMETER_VECTOR,), "docs/theory.md#local-form")


def _others(p: Tensor) -> Tensor:
    """1 − p_j; of the largest weight the sum of the others, which does not cancel."""
    first = torch.zeros_like(p, dtype=torch.bool).scatter(-1, p.argmax(-1, keepdim=True), True)
    rest = p.masked_fill(first, 0.0).sum(-1, keepdim=True)
    return torch.where(first, rest, 1 - p)
