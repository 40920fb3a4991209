"""The local form of Theorem 2: propagate the residual of the loss back token by token, at one point."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from semdiag.capturing.block_calls import BlockCall, watch_blocks
from semdiag.mathematics.bounds.network_bounds import CROSS_ENTROPY_LIPSCHITZ, loss_residual
from semdiag.mathematics.bounds.point_bounds import attention_reach, covariance_norms
from semdiag.mathematics.logarithms import log, log_root_sum_squares
from semdiag.mathematics.spectral_norms import spectral_norm, spectral_norm_upper_bound
from semdiag.measuring.encoders.point_jacobians import BlockAtPoint, blocks_at_points
from semdiag.measuring.encoders.weights import embedding_scale
from semdiag_models import Encoder

_SCORES = 2**20  # scores of one pass, at most (or one sample's)
_GRAM_STEPS = 3  # overestimates a norm of width 64 by a few per cent, 30% at most
_ROUNDING = 4 * torch.finfo(torch.float64).eps  # of softmax − one-hot in a measured gradient
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class LocalBounds:
    """Bounds of the gradient of the mean loss at one parameter vector; natural logarithms."""

    tensors: dict[str, float]  # by name, as in :func:`~semdiag.measuring.encoders.weights.named_tensors`
    network: float  # of all parameters together
    any_residual: float  # the same with the largest possible residual, √2, for every input


def local_bounds(encoder: Encoder, tokens: Tensor, labels: Tensor | None) -> LocalBounds:
    """Bound the gradient of the mean cross-entropy in every tensor, while no mask changes."""
    length = tokens.shape[1] + encoder.config.extra_tokens
    per_pass = max(1, _SCORES // (encoder.config.heads * length**2))
    head = encoder.head.weight.detach()
    largest = spectral_norm(head)
    sums: dict[str, list[Tensor]] = {}
    for start in range(0, len(tokens), per_pass):
        part = slice(start, start + per_pass)
        for sample, (logits, pooled, inside) in enumerate(_propagate_back(encoder, tokens[part])):
            residual = worst = torch.full_like(largest, CROSS_ENTROPY_LIPSCHITZ)
            pooled_gradient = worst * largest
            if labels is not None:
                gradient = loss_residual(logits, labels[start + sample])
                residual = (gradient.norm() + _ROUNDING).clamp(max=CROSS_ENTROPY_LIPSCHITZ)
                pooled_gradient = (gradient @ head).norm() + _ROUNDING * largest
            ends = {"head.weight": pooled.norm(), "head.bias": torch.ones_like(largest)}
            for name, value in ends.items():
                sums.setdefault(name, []).append(value * torch.stack([residual, worst]))
            for name, value in inside.items():
                sums.setdefault(name, []).append(value * torch.stack([pooled_gradient, worst * largest]))
    means = {name: torch.stack(values).mean(0) for name, values in sums.items()}
    known, unknown = log_root_sum_squares(log(torch.stack(list(means.values()))), dim=0).tolist()
    return LocalBounds({name: float(log(value[0])) for name, value in means.items()}, known, unknown)


def _propagate_back(encoder: Encoder, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensors]]:
    """Yield each input's logits, pooled token, and gradient bound of each tensor, per gradient norm there."""
    calls: list[BlockCall] = []
    seen: list[Tensor] = []
    handle = encoder.head.register_forward_hook(lambda head, inputs, logits: seen.extend((inputs[0], logits)))
    try:
        with torch.no_grad(), watch_blocks(encoder, calls.append):
            encoder(tokens)
    finally:
        handle.remove()
    valid, ids = encoder.valid(tokens), encoder.sequence(tokens)
    blocks = [blocks_at_points(encoder, call, valid) for call in calls]
    for sample, (pooled, logits) in enumerate(zip(*seen, strict=True)):
        counted = ids[sample] if valid is None else ids[sample][valid[sample]]
        gradients = torch.full_like(counted, 1.0, dtype=torch.float64) / len(counted)
        if encoder.config.cls_tokens:
            gradients = torch.zeros_like(gradients).index_fill(0, torch.tensor(0, device=ids.device), 1.0)
        bounds: Tensors = {}
        for layer in reversed(range(len(blocks))):
            inside, gradients = _through_block(blocks[layer][sample], gradients)
            bounds |= {f"blocks.{layer}.{name}": value for name, value in inside.items()}
        rows = torch.zeros(encoder.embedding.num_embeddings).to(gradients).index_add(0, counted, gradients)
        bounds["embedding.weight"] = embedding_scale(encoder) * rows.norm()
        yield logits, pooled, bounds


def _through_block(at: BlockAtPoint, gradients: Tensor) -> tuple[Tensors, Tensor]:
    """Bound the gradients in a block's tensors and in its input tokens by those in its output tokens, (L,)."""
    attention, (first, second) = at.attention, at.stds
    mlp = gradients if at.pre_norm else gradients / second
    mlp_in = spectral_norm(at.weights.mlp_out) * at.slopes.abs().amax(-1) * mlp
    attended = spectral_norm_upper_bound(at.after_attention, _GRAM_STEPS) * gradients
    mixed = attention.weights @ attention.values
    averages = (attention.weights @ at.tokens).norm(dim=-1)
    mapped = attention.values @ attention.output_weight.mT
    inputs = at.tokens.expand(len(mapped), -1, -1)
    as_query, as_key = (
        abs(attention.scale) * covariance_norms(attention.weights, x, mapped) * attended
        for x in (attention.keys, inputs)
    )
    sizes, out = at.tokens.norm(dim=-1), at.weights.whole_output
    bounds = {
        "attention.q.weight": (as_query * sizes).sum(-1).norm(),
        "attention.q.bias": as_query.sum(-1).norm(),
        "attention.k.weight": (as_key * attention.queries.norm(dim=-1)).sum(-1).norm(),
        "attention.k.bias": torch.zeros_like(out),
        "attention.v.weight": out * (averages.amax(0) * attended).sum(),
        "attention.v.bias": out * attended.sum(),
        "attention.out.weight": (mixed.square().sum((0, 2)).sqrt() * attended).sum(),
        "attention.out.bias": attended.sum(),
        "expand.weight": (mlp_in * at.mlp_tokens.norm(dim=-1)).sum(),
        "expand.bias": mlp_in.sum(),
        "contract.weight": (mlp * at.hidden.norm(dim=-1)).sum(),
        "contract.bias": mlp.sum(),
    }
    reached = attended @ attention_reach(attention)
    return bounds, attended + (reached / first if at.pre_norm else reached)
