"""Bounds of how attention responds to small changes at a point, with known weights, keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.logarithms import float64
from semdiag.mathematics.spectral_norms import spectral_norm_upper_bound

_GRAM_STEPS = 4  # overestimates a norm of width 64 by a few per cent, 14% at most
_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class AttentionAtPoint:
    """The attention on one input; heads come first, d is the width of a token, D that of a head.

    Attributes:
        weights: p, (H, L, L), query by key; 0 where a key is masked, rows of padded queries 0.
        queries: W_q u + b_q, (H, L, D).
        keys: W_k u + b_k, (H, L, D).
        values: W_v u + b_v, (H, L, D).
        query_weight: W_q, (H, D, d).
        key_weight: W_k, (H, D, d).
        value_weight: W_v, (H, D, d).
        output_weight: W_o of each head, (H, d, D).
        scale: τ / sqrt(d_head).

    Example:
        >>> eye, ones = torch.eye(2)[None].double(), torch.ones(1, 2, 2).double()
        >>> at = AttentionAtPoint(ones / 2, 0 * ones, 0 * ones, eye, eye, eye, eye, eye, 1.0)
        >>> attention_reach(at)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]], dtype=torch.float64)
        >>> attention_columns(at, 0)[1]
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]], dtype=torch.float64)
    """

    weights: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    query_weight: Tensor
    key_weight: Tensor
    value_weight: Tensor
    output_weight: Tensor
    scale: float


def covariances(weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return each query's covariance of the keys' vectors, Cov_{p_i}(x, y) = Σ_j p_ij (x_j − x̄_i) y_jᵀ.

    Source: docs/theory.md#at-a-point. Deviation: not in the paper.

    Args:
        weights: p, (..., queries, keys), rows of sum 1 or 0.
        left: x, (..., keys, m).
        right: y, (..., keys, n).

    Returns:
        (..., queries, m, n).

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> covariances(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), x, x).flatten()
        tensor([1., 0.])
    """
    # One product over the keys: that of three factors at once would hold queries × keys × m numbers.
    products = (left[..., :, None] * right[..., None, :]).flatten(-2)
    together = (weights @ products).unflatten(-1, (left.shape[-1], right.shape[-1]))
    return together - torch.einsum("...im,...in->...imn", weights @ left, weights @ right)


def attention_reach(at: AttentionAtPoint) -> Tensor:
    """Bound ‖∂(Σ_h W_o mixed_i)/∂u_l‖₂ for each query i and token l, for a fixed mask, in closed form.

    Σ_h [ p_il ‖W_oW_v‖ + s p_il ‖W_o(v_l − v̄_i)‖ ‖W_kᵀq_i‖ + [i = l] s ‖W_o Cov_{p_i}(v, k) W_q‖ ]: token l as
    value, as key and as query.

    Source: docs/theory.md#at-a-point. Deviation: not in the paper.

    Args:
        at: the attention.

    Returns:
        (L, L), query by token.
    """
    p = at.weights
    value_map = at.output_weight @ at.value_weight
    means = p @ at.values
    mapped, mapped_means = (x @ at.output_weight.mT for x in (at.values, means))
    apart = torch.cdist(mapped_means, mapped, compute_mode="donot_use_mm_for_euclid_dist")
    back = (at.queries @ at.key_weight).norm(dim=-1)
    as_key = abs(at.scale) * apart * back[..., None]
    own = at.output_weight[:, None] @ covariances(p, at.values, at.keys) @ at.query_weight[:, None]
    as_query = abs(at.scale) * spectral_norm_upper_bound(own, _GRAM_STEPS)
    norms = torch.linalg.matrix_norm(value_map, 2)[:, None, None]
    reach: Tensor = (p * (norms + as_key) + torch.diag_embed(as_query)).sum(0)
    return reach


def attention_columns(at: AttentionAtPoint, token: int) -> Tensor:
    """Return the derivative of every query's attention output in one token's input, for a fixed mask.

    Source: docs/theory.md#at-a-point. Deviation: not in the paper.

    Args:
        at: the attention.
        token: l.

    Returns:
        (L, d, d), ∂(Σ_h W_o mixed_i)/∂u_l by query i.
    """
    p = at.weights[:, :, token]
    means = at.weights @ at.values
    apart = (at.values[:, token, None] - means) @ at.output_weight.mT
    back = at.scale * at.queries @ at.key_weight
    as_value = torch.einsum("hi,hab->iab", p, at.output_weight @ at.value_weight)
    as_key = torch.einsum("hi,hia,hib->iab", p, apart, back)
    row = covariances(at.weights[:, token, None], at.values, at.keys)[:, 0]
    columns = as_value + as_key
    columns[token] += at.scale * (at.output_weight @ row @ at.query_weight).sum(0)
    return columns


def score_gradient_sums(
    weights: Tensor,
    query_key_value: tuple[Tensor, Tensor, Tensor],
    tokens: Tensor,
    cotangents: Tensor,
    scale: float,
) -> Tensor:
    """Bound the gradient in W_q, b_q and W_k from the gradient g_i of the loss in each head's mixed values.

    |s| Σ_i ‖Cov_{p_i}(k, v)‖ ‖g_i‖ times ‖u_i‖ for W_q and 1 for b_q; |s| Σ_i ‖q_i‖ ‖Cov_{p_i}(u, v)‖ ‖g_i‖ for
    W_k. ‖C‖ is replaced by ‖C Cᵀ‖_F^(1/2) ≥ ‖C‖, plus the possible effect of rounding on C.

    Source: docs/theory.md#at-a-point. Deviation: not in the paper.

    Args:
        weights: p, (B, H, L, L), rows of padded queries 0.
        query_key_value: each (B, H, L, D).
        tokens: u, (B, L, d).
        cotangents: g, (B, H, L, D).
        scale: s = τ / sqrt(d_head).

    Returns:
        (3, H): of W_q, b_q and W_k, head by head, summed over queries and inputs.

    Example:
        >>> p, x = torch.full((1, 1, 2, 2), 0.5), torch.tensor([[[[1.0], [3.0]]]])
        >>> score_gradient_sums(p, (x, x, x), x[0], torch.ones(1, 1, 2, 1), 1.0)[:, 0]  # a variance of 1
        tensor([4.0000, 2.0000, 4.0000], dtype=torch.float64)
    """
    p, u, g = float64(weights), float64(tokens), float64(cotangents)
    q, k, v = (float64(x) for x in query_key_value)
    each = abs(scale) * g.norm(dim=-1)
    of_keys, of_tokens = (each * covariance_norms(p, x, v) for x in (k, u[:, None].expand(-1, p.shape[1], -1, -1)))
    sizes = u.norm(dim=-1)[:, None]
    return torch.stack([of_keys * sizes, of_keys, of_tokens * q.norm(dim=-1)]).sum((1, 3))


def covariance_norms(weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Bound each query's ‖Cov_{p_i}(x, y)‖₂ from above by ‖C Cᵀ‖_F^(1/2) plus the possible effect of rounding.

    Source: docs/theory.md#at-a-point. Deviation: not in the paper.

    Args:
        weights: p, (..., queries, keys), rows of sum 1 or 0.
        left: x, (..., keys, m).
        right: y, (..., keys, n).

    Returns:
        (..., queries).

    Example:
        >>> x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
        >>> covariance_norms(torch.full((1, 2), 0.5).double(), x, x)
        tensor([1.0000], dtype=torch.float64)
    """
    moments = covariances(weights, left, right)
    largest = left.norm(dim=-1).amax(-1) * right.norm(dim=-1).amax(-1)
    norms: Tensor = (moments @ moments.mT).square().sum((-2, -1)).pow(0.25)
    # Roundings of sums over the keys, and a few more.
    rounding: Tensor = (16 + weights.shape[-1]) * _EPS * largest[..., None]
    return norms + rounding
