"""How far a block's output moves per unit of its input at a point: by its exact Jacobian, and in closed form."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.capturing.block_calls import BlockCall
from semdiag.mathematics.bounds.layer_constants import ACTIVATION_LIPSCHITZ
from semdiag.mathematics.bounds.point_bounds import AttentionAtPoint, attention_columns, attention_reach
from semdiag.mathematics.spectral_norms import spectral_norm
from semdiag.measuring.calls.scored_rows import scored_rows
from semdiag.measuring.encoders.weights import BlockWeights, block_weights
from semdiag_models import Encoder

_MLP_NORM_EPS = 1e-5


@dataclass(frozen=True, eq=False)
class BlockAtPoint:
    """One block at one input, with its L tokens that are not padding."""

    attention: AttentionAtPoint  # at this input
    tokens: Tensor  # (L, d), the attention's input
    mlp_tokens: Tensor  # (L, d), the MLP's
    hidden: Tensor  # (L, mlp width), input of the MLP's second matrix
    weights: BlockWeights  # of the block
    pre_norm: bool  # whether it normalises the inputs of its parts rather than their outputs
    streams: Tensor  # (2, L, d), inputs of the two normalisations
    eps: tuple[float, float]  # of the two normalisations
    slopes: Tensor  # (L, mlp width), σ' of the MLP's hidden units
    activation: float  # λ_σ, the largest possible slope

    @property
    def after_attention(self) -> Tensor:
        """(L, d, d), derivative of each output token in what attention adds to the residual stream."""
        first, second = self.norm_jacobians
        eye = torch.eye(first.shape[-1]).to(first)
        mlp = self.mlp_out @ self.weights.mlp_in
        return eye + mlp @ second if self.pre_norm else second @ (eye + mlp) @ first

    @property
    def mlp_out(self) -> Tensor:
        """(L, d, mlp width), W_R diag(σ') of each token."""
        return self.weights.mlp_out * self.slopes[:, None]

    @property
    def norm_jacobians(self) -> tuple[Tensor, Tensor]:
        """Derivatives of the two normalisations at each token, (L, d, d)."""
        first, second = (_norm_jacobians(x, eps) for x, eps in zip(self.streams, self.eps, strict=True))
        return first, second

    @property
    def stds(self) -> tuple[Tensor, Tensor]:
        """(L,) sqrt(var + eps) of each token before the two normalisations."""
        first, second = (_std(x, eps) for x, eps in zip(self.streams, self.eps, strict=True))
        return first, second


def blocks_at_points(encoder: Encoder, call: BlockCall, valid: Tensor | None) -> list[BlockAtPoint]:
    """Return one pass of a batch through one block, split by sample."""
    weights, attention = block_weights(encoder, call.layer), call.attention
    block = encoder.blocks[call.layer]
    pre_norm = encoder.config.norm == "pre"
    seen = (call.stream, call.middle) if pre_norm else (call.middle, call.end)
    before = (call.mlp_tokens @ weights.mlp_in.mT + weights.mlp_in_bias).detach().requires_grad_(True)
    with torch.enable_grad():
        (slopes,) = torch.autograd.grad(block.activation(before).sum(), before)  # type: ignore[operator]
    p = scored_rows(attention).weights
    blocks = []
    for sample in range(len(p)):
        kept = torch.arange(p.shape[-1], device=p.device) if valid is None else valid[sample].nonzero()[:, 0]
        blocks.append(
            BlockAtPoint(
                attention=AttentionAtPoint(
                    weights=p[sample][:, kept][:, :, kept],
                    queries=attention.q[sample][:, kept],
                    keys=attention.k[sample][:, kept],
                    values=attention.v[sample][:, kept],
                    query_weight=weights.query,
                    key_weight=weights.key,
                    value_weight=weights.value,
                    output_weight=weights.output,
                    scale=weights.scale,
                ),
                tokens=call.tokens[sample, kept],
                mlp_tokens=call.mlp_tokens[sample, kept],
                hidden=call.hidden[sample, kept],
                weights=weights,
                pre_norm=pre_norm,
                streams=torch.stack([x[sample, kept] for x in seen]),
                eps=(float(block.attention_norm_eps), _MLP_NORM_EPS),  # type: ignore[arg-type]
                slopes=slopes[sample, kept],
                activation=ACTIVATION_LIPSCHITZ.get(encoder.config.activation, math.inf),
            )
        )
    return blocks


def log_point_constant(at: BlockAtPoint) -> float:
    """Return a block's constant at one input in closed form, in the norm Σ_tokens ‖·‖₂."""
    if not len(at.slopes):
        return -math.inf
    first, second = at.stds
    mlp = spectral_norm(at.weights.mlp_in) * spectral_norm(at.weights.mlp_out) * at.activation
    reach = attention_reach(at.attention)
    if at.pre_norm:
        passed = 1 + mlp / second
        return float((passed + passed @ reach / first).max().log())
    passed = (1 + mlp) / (second * first)
    return float((passed + passed @ reach).max().log())


def log_exact_constant(at: BlockAtPoint) -> float:
    """Return the largest column sum of a block's Jacobian at one input, max_l Σ_i ‖∂Z_i/∂X_l‖₂, for a fixed mask."""
    if not len(at.slopes):
        return -math.inf
    first, after = at.norm_jacobians[0], at.after_attention
    eye = torch.eye(first.shape[-1]).to(first)
    tokens = range(len(first))

    def column(token: int) -> Tensor:
        moved = attention_columns(at.attention, token)
        moved = moved @ first[token] if at.pre_norm else moved
        moved[token] += eye
        return after @ moved

    reach = torch.stack([torch.linalg.matrix_norm(column(token)).sum() for token in tokens])
    largest = torch.zeros(())
    for token in reach.argsort(descending=True).tolist():
        if reach[token] <= largest:
            break
        largest = torch.maximum(largest.to(reach), torch.linalg.matrix_norm(column(token), 2).sum())
    return float(largest.log())


def _std(x: Tensor, eps: float) -> Tensor:
    """Return sqrt(var + eps) of each token."""
    return (x.var(-1, unbiased=False) + eps).sqrt()


def _norm_jacobians(x: Tensor, eps: float) -> Tensor:
    """Return derivatives of a parameter-free normalisation, (P − c cᵀ/(d s²))/s with c centred, (L, d, d)."""
    centred, std = x - x.mean(-1, keepdim=True), _std(x, eps)[:, None, None]
    width = x.shape[-1]
    project = torch.eye(width).to(x) - 1 / width
    return (project - centred[:, :, None] * centred[:, None] / (width * std.square())) / std
