"""Theorem 2: Lipschitz constants of the loss in all parameters, globally and at one point; in logarithms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.mathematics.bounds import block_bounds
from semdiag.mathematics.bounds.block_bounds import Assumption, BlockConstants, Bound, log_input_constant
from semdiag.mathematics.spectral_norms import Real, broadcast, float64, log, log_product, log_root_sum_squares
from semdiag.mathematics.spectral_norms import spectral_norm_upper_bound as upper_bound

CROSS_ENTROPY_LIPSCHITZ = math.sqrt(2)  # ‖softmax − one-hot‖₂ ≤ √2
ONE_PARAMETER_VECTOR = Assumption(
    "the constants are of one parameter vector: bounds of the gradient there, no Lipschitz constants of a region",
    {"parameter vectors": 1.0},
    holds=True,
)


@dataclass(frozen=True, eq=False)
class Readout:
    """Pooling, linear head and loss on top of the last block."""

    head_weight: Real  # ‖Φ‖₂
    pooled_norm: Real  # largest norm of a pooled token
    pooling: Real  # weight of each token in the pooled token: 1/L for the mean, 1 for a CLS token

    @property
    def log_token_constant(self) -> Tensor:
        """ln of the loss's Lipschitz constant in one token of the last block's output."""
        return log_product(log(CROSS_ENTROPY_LIPSCHITZ), log(self.head_weight) + log(self.pooling))


def loss_residual(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of cross-entropy in the logits, softmax − one-hot: of norm ≤ √2, and small once learned.

    Logits (..., classes) and int64 labels (...) give float64 (..., classes).

    Source: docs/theory.md#local-form. Deviation: the paper takes √2 for its norm.

    Example:
        >>> loss_residual(torch.tensor([[0.0, 0.0], [40.0, 0.0]]), torch.tensor([0, 0]))
        tensor([[-5.0000e-01,  5.0000e-01],
                [-4.2484e-18,  4.2484e-18]], dtype=torch.float64)
    """
    chances = float64(logits).softmax(-1).scatter(-1, labels[..., None], 0.0)
    return chances.scatter(-1, labels[..., None], -chances.sum(-1, keepdim=True))


def log_embedding_constant(counts: Tensor, scale: float = 1.0) -> Tensor:
    """Return ln of the change of the embedded sequence per unit (Frobenius) of the embedding table, float64 (...).

    scale · sqrt(Σ_v count_v²), of each token id's occurrences (..., vocabulary). The paper's scale is sqrt(d).

    Source: docs/theory.md#embedding. Deviation: the paper does not train an embedding in Thm 2.

    Example:
        >>> log_embedding_constant(torch.tensor([3, 4]), scale=2.0).exp()
        tensor(10.0000, dtype=torch.float64)
    """
    return log(scale) + log_root_sum_squares(log(counts))


def log_parameter_bounds(
    blocks: Sequence[BlockConstants], readout: Readout, log_embedding: Tensor | None = None
) -> dict[str, Tensor]:
    """Return ln of the constants λ_g (...) of the loss in each parameter tensor g of the network, by name.

    λ_g = √2 ‖Φ‖₂ · pooling · Π_{s>t} λ_X^(s) · λ_g^(t) for a tensor of block t ("block 0 W_q", …); √2·max‖pooled‖
    and √2 for "head weight" and "head bias"; "embedding", if its constant is given, passes through all blocks.

    Source: paper, Thm 2 (docs/theory.md#network). Deviation: every tensor and bias, not only W, V, P, R.
    """
    named = _through_network(blocks, [block_bounds.log_parameter_constants(block) for block in blocks], readout)
    if log_embedding is not None:
        through = [log_input_constant(block) for block in blocks]
        named = {"embedding": log_product(log_embedding, readout.log_token_constant, *through)} | named
    named["head weight"] = log_product(log(CROSS_ENTROPY_LIPSCHITZ), log(readout.pooled_norm))
    named["head bias"] = log(CROSS_ENTROPY_LIPSCHITZ).to(named["head weight"].device)
    return named


def log_paper_parameter_bounds(blocks: Sequence[BlockConstants], readout: Readout) -> dict[str, Tensor]:
    """Return ln of the constants λ_g of the loss in the matrices of the paper's Theorem 2, by name.

    Blocks and readout as of :func:`log_parameter_bounds`; names are "block 0 W", "block 0 V", "block 0 W_P", ….

    Source: paper, Thm 2 (docs/theory.md#network). Deviation: none, if the blocks hold the paper's λ_A and λ_W.
    """
    return _through_network(
        blocks, [block_bounds.log_paper_parameter_constants(block) for block in blocks], readout
    )


def network_bound(log_parameters: dict[str, Tensor], assumptions: Sequence[Assumption] = ()) -> Bound:
    """Return λ_L = sqrt(Σ_g λ_g²), against the Euclidean norm of all parameters at once, in the broadcast shape.

    It holds only for the inputs and parameters that were measured. Without a parameter there is a ValueError.

    Source: paper, Thm 2 (docs/theory.md#network). Deviation: none.

    Example:
        >>> print(network_bound({"a": log(3.0), "b": log(4.0)}).log_value.exp())
        tensor(5.0000, dtype=torch.float64)
    """
    if not log_parameters:
        raise ValueError("A network without parameters has no Lipschitz constant in them.")
    stacked = torch.stack(broadcast(*log_parameters.values()))
    return Bound(log_root_sum_squares(stacked, dim=0), tuple(assumptions), "paper, Thm 2")


def _through_network(
    blocks: Sequence[BlockConstants], inside: Sequence[dict[str, Tensor]], readout: Readout
) -> dict[str, Tensor]:
    """Propagate each block's parameter constants through the later blocks and the readout."""
    above = readout.log_token_constant
    constants: dict[str, Tensor] = {}
    for t in reversed(range(len(blocks))):  # first block first
        constants = {
            f"block {t} {name}": log_product(above, value) for name, value in inside[t].items()
        } | constants
        above = log_product(above, log_input_constant(blocks[t]))
    return constants


_GRAM_STEPS = 4  # overestimates a norm of width 64 by a few per cent, 14% at most
_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class AttentionAtPoint:
    """The attention on one input; heads come first, d is the width of a token, D that of a head.

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

    weights: Tensor  # p, (H, L, L), query by key; 0 where a key is masked, rows of padded queries 0
    queries: Tensor  # W_q u + b_q, (H, L, D)
    keys: Tensor  # W_k u + b_k, (H, L, D)
    values: Tensor  # W_v u + b_v, (H, L, D)
    query_weight: Tensor  # W_q, (H, D, d)
    key_weight: Tensor  # W_k, (H, D, d)
    value_weight: Tensor  # W_v, (H, D, d)
    output_weight: Tensor  # W_o of each head, (H, d, D)
    scale: float  # τ / sqrt(d_head)


def covariances(weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return each query's covariance of the keys' vectors, Cov_{p_i}(x, y) = Σ_j p_ij (x_j − x̄_i) y_jᵀ.

    p (..., queries, keys), rows of sum 1 or 0, x (..., keys, m) and y (..., keys, n) give (..., queries, m, n).

    Source: docs/theory.md#at-a-point. Deviation: not in the paper.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> covariances(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), x, x).flatten()
        tensor([1., 0.])
    """
    # One product over the keys: that of three factors at once would hold queries × keys × m numbers.
    products = (left[..., :, None] * right[..., None, :]).flatten(-2)
    mixed = weights @ products
    together = mixed.reshape(*mixed.shape[:-1], left.shape[-1], right.shape[-1])
    return together - torch.einsum("...im,...in->...imn", weights @ left, weights @ right)


def attention_reach(at: AttentionAtPoint) -> Tensor:
    """Bound ‖∂(Σ_h W_o mixed_i)/∂u_l‖₂ for each query i and token l, (L, L), for a fixed mask, in closed form.

    Σ_h [ p_il ‖W_oW_v‖ + s p_il ‖W_o(v_l − v̄_i)‖ ‖W_kᵀq_i‖ + [i = l] s ‖W_o Cov_{p_i}(v, k) W_q‖ ].

    Source: docs/theory.md#at-a-point. Deviation: rounding is allowed for: of a product of matrices whose sums have
    n terms, the error is at most γ_n times the product of their Frobenius norms (Higham, Accuracy and Stability,
    ch. 3).
    """
    p = at.weights
    heads, tokens, width = at.values.shape
    terms = 2 * (tokens + 2 * width + 2 * at.output_weight.shape[1] + heads + 16)  # of all sums on the way, twice
    gamma = terms * _EPS / (1 - terms * _EPS)
    out, query, key, value = (
        torch.linalg.matrix_norm(weight)
        for weight in (at.output_weight, at.query_weight, at.key_weight, at.value_weight)
    )
    of_values, of_keys, of_queries = (x.norm(dim=-1, keepdim=True) for x in (at.values, at.keys, at.queries))
    mean_values = p @ of_values
    value_map = at.output_weight @ at.value_weight
    means = p @ at.values
    mapped, mapped_means = (x @ at.output_weight.mT for x in (at.values, means))
    apart = torch.cdist(mapped_means, mapped, compute_mode="donot_use_mm_for_euclid_dist")
    apart += gamma * out[:, None, None] * (mean_values + of_values.mT)
    back = (at.queries @ at.key_weight).norm(dim=-1, keepdim=True) + gamma * of_queries * key[:, None, None]
    as_key = abs(at.scale) * apart * back
    gradient = at.output_weight[:, None] @ covariances(p, at.values, at.keys) @ at.query_weight[:, None]
    spread = (p @ (of_values * of_keys) + mean_values * (p @ of_keys))[..., 0]
    as_query = abs(at.scale) * (upper_bound(gradient, _GRAM_STEPS) + gamma * (out * query)[:, None] * spread)
    norms = (torch.linalg.matrix_norm(value_map, 2) + gamma * out * value)[:, None, None]
    reach: Tensor = (p * (norms + as_key) + torch.diag_embed(as_query)).sum(0)
    return reach * (1 + gamma)


def attention_columns(at: AttentionAtPoint, token: int) -> Tensor:
    """Return ∂(Σ_h W_o mixed_i)/∂u_l by query i, (L, d, d), for one token l and a fixed mask.

    Source: docs/theory.md#at-a-point. Deviation: not in the paper.
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
    """Bound the gradient in W_q, b_q and W_k, (3, H), from that of the loss in each head's mixed values, g_i.

    |s| Σ_i ‖Cov_{p_i}(k, v)‖ ‖g_i‖ times ‖u_i‖ for W_q and 1 for b_q; |s| Σ_i ‖q_i‖ ‖Cov_{p_i}(u, v)‖ ‖g_i‖ for
    W_k, summed over queries and inputs. ‖C‖ is bounded by :func:`covariance_norms`. p is (B, H, L, L), rows of
    padded queries 0; q, k, v and g are (B, H, L, D), u (B, L, d); s = τ / sqrt(d_head).

    Source: docs/theory.md#at-a-point. Deviation: not in the paper.

    Example:
        >>> p, x = torch.full((1, 1, 2, 2), 0.5), torch.tensor([[[[1.0], [3.0]]]])
        >>> score_gradient_sums(p, (x, x, x), x[0], torch.ones(1, 1, 2, 1), 1.0)[:, 0]  # a variance of 1
        tensor([4.0000, 2.0000, 4.0000], dtype=torch.float64)
    """
    p = float64(weights)
    u = float64(tokens)
    g = float64(cotangents)
    q, k, v = (float64(x) for x in query_key_value)
    each = abs(scale) * g.norm(dim=-1)
    of_keys, of_tokens = (each * covariance_norms(p, x, v) for x in (k, u[:, None].expand(-1, p.shape[1], -1, -1)))
    sizes = u.norm(dim=-1)[:, None]
    return torch.stack([of_keys * sizes, of_keys, of_tokens * q.norm(dim=-1)]).sum((1, 3))


def covariance_norms(weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Bound each query's ‖Cov_{p_i}(x, y)‖₂ from above by ‖C Cᵀ‖_F^(1/2) plus the possible effect of rounding.

    Arguments as of :func:`covariances`; (..., queries).

    Source: docs/theory.md#at-a-point. Deviation: not in the paper.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
        >>> covariance_norms(torch.full((1, 2), 0.5).double(), x, x)
        tensor([1.0000], dtype=torch.float64)
    """
    moments = covariances(weights, left, right)
    largest = left.norm(dim=-1).amax(-1) * right.norm(dim=-1).amax(-1)
    norms: Tensor = (moments @ moments.mT).square().sum((-2, -1)).pow(0.25)
    # of the sums over the keys, and of a few further operations
    rounding: Tensor = (16 + weights.shape[-1]) * _EPS * largest[..., None]
    return norms + rounding
