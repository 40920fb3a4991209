"""Arithmetic with logarithms, spectral norms of weights (Γ, Υ, B_P, B_R of Theorem 2), and norms of Jacobians."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Real: TypeAlias = Tensor | float | Sequence[float]


def float64(value: Real) -> Tensor:
    """Convert numbers to a float64 tensor; a tensor keeps its device, which must support float64."""
    return torch.as_tensor(value, dtype=torch.float64)


def broadcast(*values: Real) -> tuple[Tensor, ...]:
    """Convert numbers to float64 tensors of one shape, on the device of the first that is not on the CPU."""
    tensors = [float64(value) for value in values]
    shape = np.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    return tuple(tensor.to(device).expand(shape) for tensor in tensors)


def log(value: Real) -> Tensor:
    """Return the natural logarithm in float64, with ln 0 = −inf."""
    return float64(value).log()


def log_sum(*terms: Tensor) -> Tensor:
    """Return ln Σ exp(term) elementwise, of at least one term; −inf stands for 0."""
    return reduce(torch.logaddexp, terms)


def log_product(*factors: Tensor) -> Tensor:
    """Return the logarithm of a product from those of its factors, with 0 · ∞ = 0: nothing moves."""
    total = factors[0]
    for factor in factors[1:]:
        nothing = (total == -math.inf) | (factor == -math.inf)
        total = torch.where(nothing, -math.inf, total + factor)
    return total


def log_one_plus_inverse(value: Tensor) -> Tensor:
    """Return ln(1 + 1/x), even if 1/x overflows; 0 at x = +inf and +inf at x = 0."""
    return torch.logaddexp(torch.zeros_like(value), -value.log())


def log_root_sum_squares(values: Tensor, dim: int = -1) -> Tensor:
    """Return ln sqrt(Σ exp(2·value)) along a dimension."""
    return 0.5 * torch.logsumexp(2 * values, dim=dim)


def log_one_plus(log_value: Tensor) -> Tensor:
    """Return ln(1 + x) from ln x, as for a residual connection."""
    return torch.logaddexp(torch.zeros_like(log_value), log_value)


def spectral_norm(matrix: Tensor) -> Tensor:
    """Return the largest singular value of (..., m, n), by SVD, float64 (...): B_P = ‖W_P‖₂, B_R = ‖W_R‖₂.

    Source: paper, Thm 2 (docs/theory.md#norms). Deviation: none.

    Example:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [0.0, -4.0]])).item()
        4.0
    """
    norm: Tensor = torch.linalg.matrix_norm(float64(matrix), ord=2)
    return norm


def spectral_norm_upper_bound(matrix: Tensor, iterations: int = 6) -> Tensor:
    """Bound the spectral norm of (..., m, n), too large for an SVD, from above, by Gram iteration; float64 (...).

    G ← G Gᵀ, repeated t times, has the singular values σ^(2^t), so ‖G‖_F^(1/2^t) ≥ σ_max, by a factor of at most
    rank^(1/2^(t+1)): 7% for t = 6 and rank 4096. A negative t is a ValueError.

    Source: Delattre et al. 2023, Gram iteration (docs/theory.md#norms). Deviation: not in the paper.

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
        scale = torch.where(size > 0, size, 1.0)[..., None, None]
        gram = gram.div_(scale) if step else gram / scale  # new memory takes as long as the product
        gram = gram @ gram.mT
    remainder: Tensor = torch.linalg.matrix_norm(gram)
    return (log_norm + remainder.log() / 2.0**iterations).exp()


def _product_norm(left: Tensor, right: Tensor) -> Tensor:
    """Return ‖leftᵀ right‖₂ of two matrices (..., r, m) and (..., r, n) of few rows, without their product."""
    # ‖R R'ᵀ‖₂ with leftᵀ = Q R and rightᵀ = Q' R': docs/theory.md#norms
    factors = [float64(matrix) for matrix in (left, right)]
    reduced = [torch.linalg.qr(f.mT, mode="r").R if f.shape[-1] > f.shape[-2] else f.mT for f in factors]
    return spectral_norm(reduced[0] @ reduced[1].mT)


def _with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [W b] in float64: the weight with its bias as a further column, the map of (u, 1)."""
    if bias is None:
        return float64(weight)
    return torch.cat([float64(weight), float64(bias)[..., None]], dim=-1)


def score_scale(head_width: int, inverse_temperature: float = 1.0) -> float:
    """Return the factor of the scores, τ / sqrt(d_head).

    Source: docs/theory.md#attention-call. Deviation: none.

    Example:
        >>> score_scale(64)
        0.125
    """
    return inverse_temperature / math.sqrt(head_width)


def bilinear_form_norm(
    query_weight: Tensor, key_weight: Tensor, query_bias: Tensor | None, scale: float
) -> Tensor:
    """Return Γ_h, float64 (...), the norm of the form that scores a query against a key.

    Γ_h = scale · ‖[W_q b_q]ᵀ W_k‖₂, W_q and W_k (..., d_head, d), b_q (..., d_head) or None, scale τ /
    sqrt(d_head). b_k adds a constant to each row and cancels in δ, Δ and p.

    Source: paper, Thm 2 (docs/theory.md#norms). Deviation: the paper has no biases.

    Example:
        >>> eye = torch.eye(4)
        >>> bilinear_form_norm(2 * eye, 3 * eye, None, score_scale(4)).item()
        3.0
    """
    return abs(scale) * _product_norm(_with_bias(query_weight, query_bias), key_weight)


def value_output_norm(output_weight: Tensor, value_weight: Tensor) -> Tensor:
    """Return Υ_h = ‖W_o^h W_v^h‖₂, the gain of a head on an average of tokens; b_v passes through unchanged.

    W_o (..., d, d_head) and W_v (..., d_head, d) per head give float64 (...).

    Source: paper, Thm 2 (docs/theory.md#norms). Deviation: the paper has one matrix V for both.

    Example:
        >>> value_output_norm(2 * torch.eye(3), 5 * torch.eye(3)).item()
        10.0
    """
    return _product_norm(float64(output_weight).mT, value_weight)


def paper_code_bilinear_norm(
    query_weight: Tensor, query_bias: Tensor | None, key_weight: Tensor, key_bias: Tensor | None, scale: float
) -> Tensor:
    """Return Γ as the paper's released code computes it: scale · ‖[W_q b_q]ᵀ [W_k b_k]‖₂.

    Arguments and result as of :func:`bilinear_form_norm`.

    Source: paper's released code (docs/theory.md#paper-code-norms). Deviation: none; ours leaves b_k out.

    Example:
        >>> paper_code_bilinear_norm(torch.eye(4), None, torch.eye(4), None, score_scale(4)).item()
        0.5
    """
    return abs(scale) * _product_norm(_with_bias(query_weight, query_bias), _with_bias(key_weight, key_bias))


def paper_code_layer_norm(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ‖[W b]‖₂, as the paper's released code computes V (W_v, without W_o), P (W_1) and R (W_2).

    Source: paper's released code (docs/theory.md#paper-code-norms). Deviation: none; ours has W_o W_v for V, no b.

    Example:
        >>> paper_code_layer_norm(3 * torch.eye(1), 4 * torch.ones(1)).item()
        5.0
    """
    return spectral_norm(_with_bias(weight, bias))


_ITERATIONS = 50
_LANCZOS_STEPS = 16
_TOLERANCE = 1e-4  # relative growth at which an iteration counts as settled


@dataclass(frozen=True, eq=False)
class JacobianNorm:
    """A norm of a Jacobian, found by iteration."""

    value: Tensor  # (N,), largest ratio ‖J x‖ / ‖x‖ found: a lower bound of the norm
    settled: Tensor  # (N,) bool, whether the last step grew the value by less than the fraction 1e-4


def token_jacobian_norm(
    jvp: Callable[[Tensor], Tensor],
    vjp: Callable[[Tensor], Tensor],
    start: Tensor,
    iterations: int = _ITERATIONS,
) -> JacobianNorm:
    """Bound the norm of N linear maps between token matrices from below, in the theory's norm Σ_tokens ‖·‖₂.

    Power iteration for this pair of norms, whose maximum has a single nonzero token: y = J x; its dual vectors
    y_i / ‖y_i‖ are mapped by Jᵀ; the token with the longest image becomes the next x. No step lowers the value.
    ``jvp`` maps x (N, L, d) to J x (N, L', d'), ``vjp`` y to Jᵀ y; ``start`` is the first x, not zero.

    Source: docs/theory.md#empirical (Boyd, The power method for lᵖ norms, 1974). Deviation: not in the paper.

    Example:
        >>> matrix = torch.tensor([[3.0, 0.0], [0.0, 1.0]])  # one token of width 2
        >>> norm = token_jacobian_norm(lambda x: x @ matrix.T, lambda y: y @ matrix, torch.ones(1, 1, 2))
        >>> round(norm.value.item(), 4)
        3.0
    """
    x = start / start.norm(dim=-1).sum(-1)[:, None, None]
    best = torch.zeros_like(x[:, 0, 0])
    settled = torch.zeros_like(best, dtype=torch.bool)
    for _ in range(iterations):
        y = jvp(x)
        lengths = y.norm(dim=-1)
        value = lengths.sum(-1)
        settled = value <= best * (1 + _TOLERANCE)
        best = torch.maximum(best, value)
        if bool(settled.all()):
            break
        back = vjp(y / lengths.clamp(min=torch.finfo(y.dtype).tiny)[..., None])
        longest, token = back.norm(dim=-1).max(-1, keepdim=True)
        ahead = (torch.arange(x.shape[1], device=x.device) == token) & (longest > 0)
        x = torch.where(ahead[..., None], back / longest[..., None], 0.0)
    return JacobianNorm(best, settled)


def jacobian_spectral_norm(
    jvp: Callable[[Tensor], Tensor],
    vjp: Callable[[Tensor], Tensor],
    start: Tensor,
    steps: int = _LANCZOS_STEPS,
) -> JacobianNorm:
    """Bound the spectral norms of linear maps J from below, for many independent blocks at once.

    Golub and Kahan's bidiagonalisation of each block, with full reorthogonalisation:
    α_j w_j = Jᵀ u_j − β_j w_{j−1} and β_{j+1} u_{j+1} = J w_j − α_j u_j. The largest singular value of the matrix
    of α and β never exceeds ‖J‖₂ and never falls with a step.
    ``jvp`` maps w (*blocks, n) to J w (*blocks, m), ``vjp`` u to Jᵀ u; ``start`` is the first u, not zero.

    Source: docs/theory.md#gain (Golub and Kahan 1965). Deviation: not in the paper.

    Example:
        >>> matrix = torch.tensor([[3.0, 0.0], [4.0, 1.0]])
        >>> norm = jacobian_spectral_norm(lambda w: w @ matrix.T, lambda u: u @ matrix, torch.ones(1, 2))
        >>> norm.value.round(decimals=3), torch.linalg.matrix_norm(matrix, 2).round(decimals=3)
        (tensor([5.0640]), tensor(5.0640))
    """

    def fresh(vector: Tensor, earlier: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the direction in which a vector leaves the earlier ones, and how far; zeros if it is rounding."""
        rounding = 100 * torch.finfo(vector.dtype).eps * vector.norm(dim=-1, keepdim=True)
        for basis in (torch.stack(earlier, -2),) * 2 if earlier else ():  # twice is enough
            vector = vector - ((basis @ vector[..., None]).mT @ basis)[..., 0, :]
        size: Tensor = vector.norm(dim=-1, keepdim=True)
        size = size.where(size > rounding, 0.0)
        return torch.where(size > 0, vector / size, 0.0), size[..., 0]

    u, _ = fresh(start, [])
    lefts = [u]
    rights = list[Tensor]()
    matrix = start.new_zeros(*start.shape[:-1], steps + 1, steps)
    for step in range(steps):
        w, matrix[..., step, step] = fresh(vjp(lefts[-1]), rights)
        rights.append(w)
        u, matrix[..., step + 1, step] = fresh(jvp(w), lefts)
        lefts.append(u)
    value = torch.linalg.matrix_norm(matrix, 2)
    before = torch.linalg.matrix_norm(matrix[..., :-1, :-1], 2) if steps > 1 else torch.zeros_like(value)
    return JacobianNorm(value, value <= before * (1 + _TOLERANCE))
