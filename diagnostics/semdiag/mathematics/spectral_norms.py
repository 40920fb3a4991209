"""Spectral norms of weights: Γ, Υ, B_P, B_R of Theorem 2, and the conventions of the paper's code.

Weights follow torch's layout, (outputs, inputs), with heads as leading dimensions. Everything is float64.
"""

import math

import torch
from torch import Tensor

from semdiag.mathematics.logarithms import float64


def spectral_norm(matrix: Tensor) -> Tensor:
    """Return the largest singular value, by SVD: B_P = ‖W_P‖₂, B_R = ‖W_R‖₂.

    Source: paper, Thm 2 (docs/theory.md#norms). Deviation: none.

    Args:
        matrix: shape (..., m, n).

    Returns:
        ‖matrix‖₂, shape (...), float64.

    Example:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [0.0, -4.0]])).item()
        4.0
    """
    norm: Tensor = torch.linalg.matrix_norm(float64(matrix), ord=2)
    return norm


def spectral_norm_upper_bound(matrix: Tensor, iterations: int = 6) -> Tensor:
    """Bound the spectral norm of a matrix too large for an SVD from above, by Gram iteration.

    G ← G Gᵀ, repeated t times, has the singular values σ^(2^t), so ‖G‖_F^(1/2^t) ≥ σ_max, and the excess
    factor is at most rank^(1/2^(t+1)). G is divided by its Frobenius norm at each step, and the factors are kept.

    Source: Delattre et al. 2023, Gram iteration for plain matrices (docs/theory.md#norms). Deviation: not in
    the paper.

    Args:
        matrix: shape (..., m, n).
        iterations: t ≥ 0; 6 leaves at most 7% for rank 4096.

    Returns:
        An upper bound of ‖matrix‖₂ (up to rounding), shape (...), float64.

    Raises:
        ValueError: if ``iterations`` is negative.

    Example:
        >>> spectral_norm_upper_bound(torch.diag(torch.tensor([3.0, 4.0])), iterations=3).item()
        4.002...
    """
    if iterations < 0:
        raise ValueError(f"iterations must be at least 0. Got {iterations}.")
    gram = float64(matrix)
    if gram.shape[-2] > gram.shape[-1]:
        gram = gram.mT
    log_norm: Tensor = torch.zeros(gram.shape[:-2], dtype=torch.float64, device=gram.device)
    for step in range(iterations):
        size = torch.linalg.matrix_norm(gram)
        log_norm = log_norm + size.log() / 2**step
        gram = gram / torch.where(size > 0, size, 1.0)[..., None, None]
        gram = gram @ gram.mT
    remainder: Tensor = torch.linalg.matrix_norm(gram)
    return (log_norm + remainder.log() / 2.0**iterations).exp()


def product_norm(left: Tensor, right: Tensor) -> Tensor:
    """Return ‖leftᵀ right‖₂ of two matrices with few rows, without forming the product.

    With leftᵀ = Q R and rightᵀ = Q' R', the norm is ‖R R'ᵀ‖₂, of a matrix as small as the number of rows.

    Source: docs/theory.md#norms. Deviation: not in the paper.

    Args:
        left: shape (..., r, m).
        right: shape (..., r, n).

    Returns:
        The spectral norm, shape (...), float64.

    Example:
        >>> product_norm(torch.ones(1, 4), torch.ones(1, 9)).item()
        6.0...
    """
    factors = [float64(matrix) for matrix in (left, right)]
    reduced = [torch.linalg.qr(f.mT, mode="r").R if f.shape[-1] > f.shape[-2] else f.mT for f in factors]
    return spectral_norm(reduced[0] @ reduced[1].mT)


def with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [W b]: the weight with its bias as a further column, the map of (u, 1).

    Source: paper's released code (docs/theory.md#norms). Deviation: none.

    Args:
        weight: shape (..., m, n).
        bias: shape (..., m), or None for a layer without bias.

    Returns:
        shape (..., m, n + 1), or the weight unchanged; float64.

    Example:
        >>> with_bias(torch.zeros(2, 3), torch.ones(2)).shape
        torch.Size([2, 4])
    """
    if bias is None:
        return float64(weight)
    return torch.cat([float64(weight), float64(bias)[..., None]], dim=-1)


def score_scale(head_width: int, inverse_temperature: float = 1.0) -> float:
    """Return the factor of the scores, τ / sqrt(d_head).

    Source: docs/theory.md#attention-call. Deviation: none.

    Args:
        head_width: d_head, rows of one head's W_q.
        inverse_temperature: τ.

    Returns:
        The factor.

    Example:
        >>> score_scale(64)
        0.125
    """
    return inverse_temperature / math.sqrt(head_width)


def bilinear_form_norm(
    query_weight: Tensor, key_weight: Tensor, query_bias: Tensor | None, scale: float
) -> Tensor:
    """Return Γ_h, the norm of the form that scores a query against a key.

    Γ_h = scale · ‖[W_q b_q]ᵀ W_k‖₂. b_k adds a constant to each row and cancels in δ, Δ and p.

    Source: paper, Thm 2 (docs/theory.md#norms). Deviation: the paper has no biases; its code includes b_k,
    see :func:`paper_code_bilinear_norm`.

    Args:
        query_weight: W_q per head, shape (..., d_head, d).
        key_weight: W_k per head, shape (..., d_head, d).
        query_bias: b_q per head, shape (..., d_head), or None.
        scale: τ / sqrt(d_head), see :func:`score_scale`.

    Returns:
        Γ_h, shape (...), float64.

    Example:
        >>> eye = torch.eye(4)
        >>> bilinear_form_norm(2 * eye, 3 * eye, None, score_scale(4)).item()
        3.0
    """
    return abs(scale) * product_norm(with_bias(query_weight, query_bias), key_weight)


def value_output_norm(output_weight: Tensor, value_weight: Tensor) -> Tensor:
    """Return Υ_h = ‖W_o^h W_v^h‖₂, the gain of a head on an average of tokens; b_v passes through unchanged.

    Source: paper, Thm 2 (docs/theory.md#norms). Deviation: the paper has one matrix V for both.

    Args:
        output_weight: W_o per head, shape (..., d, d_head).
        value_weight: W_v per head, shape (..., d_head, d).

    Returns:
        Υ_h, shape (...), float64.

    Example:
        >>> value_output_norm(2 * torch.eye(3), 5 * torch.eye(3)).item()
        10.0
    """
    return product_norm(float64(output_weight).mT, value_weight)


def paper_code_bilinear_norm(
    query_weight: Tensor, query_bias: Tensor | None, key_weight: Tensor, key_bias: Tensor | None, scale: float
) -> Tensor:
    """Return Γ as the paper's released code computes it: scale · ‖[W_q b_q]ᵀ [W_k b_k]‖₂.

    Source: paper's released code (docs/theory.md#paper-code-norms). Deviation: none; ours leaves b_k out.

    Args:
        query_weight: W_q, shape (..., d_head, d).
        query_bias: b_q, shape (..., d_head), or None.
        key_weight: W_k, shape (..., d_head, d).
        key_bias: b_k, shape (..., d_head), or None.
        scale: τ / sqrt(d_head).

    Returns:
        The norm, shape (...), float64.

    Example:
        >>> paper_code_bilinear_norm(torch.eye(4), None, torch.eye(4), None, score_scale(4)).item()
        0.5
    """
    return abs(scale) * product_norm(with_bias(query_weight, query_bias), with_bias(key_weight, key_bias))


def paper_code_layer_norm(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ‖[W b]‖₂, as the paper's released code computes V (W_v, without W_o), P (W_1) and R (W_2).

    Source: paper's released code (docs/theory.md#paper-code-norms). Deviation: none; ours leaves b out
    and takes W_o W_v for V.

    Args:
        weight: shape (..., m, n).
        bias: shape (..., m), or None.

    Returns:
        The norm, shape (...), float64.

    Example:
        >>> paper_code_layer_norm(3 * torch.eye(1), 4 * torch.ones(1)).item()
        5.0
    """
    return spectral_norm(with_bias(weight, bias))
