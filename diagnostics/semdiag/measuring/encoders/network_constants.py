"""Theorem 2 on the evaluated inputs of one encoder: constants of its blocks in both forms, and local bounds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semdiag.capturing.attention_call import BOUNDED, HEAVY_HITTERS
from semdiag.capturing.attention_calls import BlockCall, watch_blocks
from semdiag.mathematics.bounds import network_bounds
from semdiag.mathematics.bounds.attention_bounds import (
    HeadNorms,
    paper_attention_map_bound,
    paper_bilinear_form_bound,
)
from semdiag.mathematics.bounds.block_bounds import (
    ACTIVATION_LIPSCHITZ,
    Assumption,
    AttentionConstants,
    BlockConstants,
    Bound,
    MlpConstants,
    merged,
    normalisation_lipschitz,
    query_norm,
)
from semdiag.mathematics.spectral_norms import log, log_root_sum_squares, spectral_norm, spectral_norm_upper_bound
from semdiag.measuring.calls.collector import scored_rows
from semdiag.measuring.encoders.traces import MLP_NORM_EPS, InputTraces, LayerTrace, token_std
from semdiag.measuring.encoders.weights import BlockWeights, block_weights, embedding_scale
from semdiag_models import Encoder


@dataclass(frozen=True, eq=False)
class BlockForms:
    """One block's constants."""

    weights: BlockWeights  # weights of the block
    trace: LayerTrace  # quantities of the inputs in the block
    sound: BlockConstants  # sound constants per sample, shape (N,) and (N, H)
    paper: BlockConstants  # paper's constants for all inputs together, shape () and (H,)


@dataclass(frozen=True, eq=False)
class NetworkForms:
    """A network's constants."""

    blocks: list[BlockForms]  # forms of the blocks, first to last
    log_sound: dict[str, Tensor]  # ln λ_g by name, the largest over the samples
    # the paper's ln λ_g by name: for its W, V, P, R, and for our tensors by the chain rule
    log_paper: dict[str, Tensor]
    sound: Bound  # λ_L, the largest over the samples
    paper: Bound  # the paper's λ_L, over its W, V, P, R
    infinite: dict[str, int]  # number of samples whose sound λ_g is infinite, by name
    each: Tensor  # sound ln λ_L of every sample, shape (N,)


def network_forms(encoder: Encoder, traces: InputTraces) -> NetworkForms:
    """Combine the constants of Theorem 2 input by input, and in the paper's form for all inputs at once."""
    blocks = [_block(encoder, layer, traces) for layer in range(len(traces.layers))]
    head = spectral_norm(encoder.head.weight.detach())
    shares = torch.ones(()) if encoder.config.cls_tokens else 1 / traces.tokens.double()
    readout = network_bounds.Readout(head, traces.pooled_norm, shares)
    embedding = network_bounds.log_embedding_constant(traces.counts, embedding_scale(encoder))
    paper_readout = network_bounds.Readout(head, traces.pooled_norm.max(), shares.min())
    sound_blocks = [b.sound for b in blocks]
    paper_blocks = [b.paper for b in blocks]
    paper_bounds = network_bounds.log_paper_parameter_bounds(paper_blocks, paper_readout)
    by_tensor = network_bounds.log_parameter_bounds(sound_blocks, readout, embedding)
    sound = network_bounds.network_bound(by_tensor, merged(b.assumptions for b in sound_blocks))
    return NetworkForms(
        blocks=blocks,
        log_sound={name: value.max() for name, value in by_tensor.items()},
        log_paper=network_bounds.log_parameter_bounds(paper_blocks, paper_readout) | paper_bounds,
        sound=replace(sound, log_value=sound.log_value.max()),
        paper=network_bounds.network_bound(paper_bounds, merged(b.assumptions for b in paper_blocks)),
        infinite={name: int((value == math.inf).sum()) for name, value in by_tensor.items()},
        each=sound.log_value,
    )


def _block(encoder: Encoder, layer: int, traces: InputTraces) -> BlockForms:
    weights = block_weights(encoder, layer)
    trace = traces.layers[layer]
    norms = [normalisation_lipschitz(std[:, None]) for std in (trace.attention_std, trace.mlp_std)]
    sound = BlockConstants(
        attention=_attention(weights, trace),
        mlp=MlpConstants(
            weight_in=spectral_norm(weights.mlp_in),
            weight_out=spectral_norm(weights.mlp_out),
            activation=ACTIVATION_LIPSCHITZ.get(encoder.config.activation, math.inf),
            token_norm=trace.mlp_token_norm,
            hidden_norm=trace.hidden_norm,
        ),
        tokens=traces.tokens,
        attention_norm=norms[0],
        mlp_norm=norms[1],
        pre_norm=encoder.config.norm == "pre",
        assumptions=_assumptions(encoder, trace),
    )
    return BlockForms(weights, trace, sound, _paper(encoder, weights, trace, sound))


def _attention(weights: BlockWeights, trace: LayerTrace) -> AttentionConstants:
    query = torch.cat([weights.query, weights.query_bias[..., None]], -1)
    return AttentionConstants(
        log_map=trace.log_map,
        log_form=trace.log_form,
        upsilon=weights.upsilon,
        query_weight=spectral_norm(query),
        key_weight=spectral_norm(weights.key),
        value_weight=spectral_norm(weights.value),
        value_bias=weights.value_bias.norm(dim=-1),
        output_weight=weights.whole_output,
        score_scale=abs(weights.scale),
        token_norm=trace.token_norm,
    )


def _paper(encoder: Encoder, weights: BlockWeights, trace: LayerTrace, sound: BlockConstants) -> BlockConstants:
    """Return the paper's λ_A and λ_W from the largest norms, dispersion and load and the smallest separation."""
    k = encoder.config.keys_kept
    heavy = encoder.config.attention in HEAVY_HITTERS
    xi = trace.token_norm.max()
    norms = HeadNorms(weights.gamma, weights.upsilon, xi, query_norm(xi))
    delta = trace.dispersion.amax(0)
    gap = trace.separation.amin(0) if heavy else None
    beta = torch.ones_like(delta) if k is None else trace.load.amax(0).double() / k
    tokens = float(torch.as_tensor(sound.tokens).max())
    log_map = paper_attention_map_bound(delta, norms, beta, gap)
    log_form = paper_bilinear_form_bound(delta, norms, tokens, gap)
    uncovered = trace.log_map.isinf().all(0) & (encoder.config.attention not in BOUNDED)
    attention = replace(
        sound.attention,
        log_map=log_map.log_value.masked_fill(uncovered, math.inf),
        log_form=log_form.log_value.masked_fill(uncovered, math.inf),
        query_weight=spectral_norm(weights.query),
        value_bias=torch.zeros_like(delta),
        token_norm=xi,
    )
    # The paper's assumptions that fail; that of the separation is listed already.
    unmet = [a for a in log_map.assumptions if not a.holds and "separation" not in a.statement]
    if sound.pre_norm:
        post_norm = "blocks normalise their outputs (post-norm), as in the paper's equations"
        unmet.append(Assumption(post_norm, {}, holds=False))
    if k != encoder.config.k:
        numbers_kept = {"ordinary queries": float(k or 0), "global ones": tokens}
        unmet.append(Assumption("every query keeps the same number of keys", numbers_kept, holds=False))
    return replace(
        sound,
        attention=attention,
        mlp=replace(sound.mlp, token_norm=trace.mlp_token_norm.max(), hidden_norm=trace.hidden_norm.max()),
        tokens=tokens,
        attention_norm=torch.as_tensor(sound.attention_norm).max(),
        mlp_norm=torch.as_tensor(sound.mlp_norm).max(),
        assumptions=(*sound.assumptions, *unmet),
    )


def _assumptions(encoder: Encoder, trace: LayerTrace) -> tuple[Assumption, ...]:
    """Return the assumptions of the block's constants, except those that a later assumption repeats."""
    kind = encoder.config.attention
    activation = encoder.config.activation
    broken_rows = int(trace.not_finite.sum())
    checks = [
        network_bounds.ONE_PARAMETER_VECTOR,
        Assumption("every score is finite", {"rows that are not": broken_rows}, holds=broken_rows == 0),
        Assumption(f"a bound is known for {kind} attention", {}, holds=kind in BOUNDED),
        Assumption(f"the slope of {activation} is known", {}, holds=activation in ACTIVATION_LIPSCHITZ),
        Assumption(
            "no token has constant entries before a normalisation without eps",
            {"smallest sqrt(var + eps)": min(trace.attention_std.min().item(), trace.mlp_std.min().item())},
            holds=bool((trace.attention_std > 0).all() and (trace.mlp_std > 0).all()),
        ),
    ]
    if kind in HEAVY_HITTERS:
        ties = int(trace.not_positive.sum())
        checks.append(
            Assumption(
                "the separation is positive in every row (a tie within rounding counts as 0)",
                {"smallest": trace.separation.min().item(), "rows not positive": ties},
                holds=ties == 0,
            )
        )
    return tuple(checks)


@dataclass(frozen=True, eq=False)
class BlockAtPoint:
    """One block at one input, with its L tokens that are not padding."""

    attention: network_bounds.AttentionAtPoint  # attention at this input
    tokens: Tensor  # (L, d), the attention's input
    mlp_tokens: Tensor  # (L, d), the MLP's input
    hidden: Tensor  # (L, mlp width), input of the MLP's second matrix
    weights: BlockWeights  # weights of the block
    pre_norm: bool  # whether it normalises the inputs of its parts rather than their outputs
    streams: Tensor  # (2, L, d), inputs of the two normalisations
    eps: tuple[float, float]  # eps of the two normalisations
    slopes: Tensor  # (L, mlp width), σ' of the MLP's hidden units
    activation: float  # λ_σ, the largest possible slope

    @property
    def after_attention(self) -> Tensor:
        """(L, d, d), derivative of each output token in what attention adds to the residual stream."""
        first, second = self.norm_jacobians.unbind()
        eye = torch.eye(first.shape[-1]).to(first)
        mlp = self.weights.mlp_out * self.slopes[:, None] @ self.weights.mlp_in  # W_R diag(σ') W_P of each token
        return eye + mlp @ second if self.pre_norm else second @ (eye + mlp) @ first

    @property
    def norm_jacobians(self) -> Tensor:
        """(2, L, d, d) derivatives of the two parameter-free normalisations, (P − c cᵀ/(d s²))/s, c centred."""
        centred = self.streams - self.streams.mean(-1, keepdim=True)
        std = self.stds[..., None, None]
        width = centred.shape[-1]
        project = torch.eye(width).to(centred) - 1 / width
        outer: Tensor = centred[..., :, None] * centred[..., None, :]
        return (project - outer / (width * std.square())) / std

    @property
    def stds(self) -> Tensor:
        """(2, L) sqrt(var + eps) of each token before the two normalisations."""
        return torch.stack([token_std(x, eps) for x, eps in zip(self.streams, self.eps, strict=True)])


def blocks_at_points(encoder: Encoder, call: BlockCall, valid: Tensor | None) -> list[BlockAtPoint]:
    """Return one pass of a batch through one block, split by sample."""
    weights = block_weights(encoder, call.layer)
    attention = call.attention
    block = encoder.blocks[call.layer]
    pre_norm = encoder.config.norm == "pre"
    streams = (call.stream, call.middle) if pre_norm else (call.middle, call.end)
    hidden_before = (call.mlp_tokens @ weights.mlp_in.mT + weights.mlp_in_bias).detach().requires_grad_(True)
    with torch.enable_grad():
        (slopes,) = torch.autograd.grad(block.activation(hidden_before).sum(), hidden_before)  # type: ignore[operator]
    p = scored_rows(attention).weights
    blocks = []
    for sample in range(len(p)):
        real = torch.arange(p.shape[-1], device=p.device) if valid is None else valid[sample].nonzero()[:, 0]
        blocks.append(
            BlockAtPoint(
                attention=network_bounds.AttentionAtPoint(
                    weights=p[sample][:, real][:, :, real],
                    queries=attention.q[sample][:, real],
                    keys=attention.k[sample][:, real],
                    values=attention.v[sample][:, real],
                    query_weight=weights.query,
                    key_weight=weights.key,
                    value_weight=weights.value,
                    output_weight=weights.output,
                    scale=weights.scale,
                ),
                tokens=call.tokens[sample, real],
                mlp_tokens=call.mlp_tokens[sample, real],
                hidden=call.hidden[sample, real],
                weights=weights,
                pre_norm=pre_norm,
                streams=torch.stack([x[sample, real] for x in streams]),
                eps=(float(block.attention_norm_eps), MLP_NORM_EPS),  # type: ignore[arg-type]
                slopes=slopes[sample, real],
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
    reach = network_bounds.attention_reach(at.attention)
    if at.pre_norm:
        passed = 1 + mlp / second
        return float((passed + passed @ reach / first).max().log())
    passed = (1 + mlp) / (second * first)
    return float((passed + passed @ reach).max().log())


def log_exact_constant(at: BlockAtPoint) -> float:
    """Return the largest column sum of a block's Jacobian at one input, Σ_i ‖∂Z_i/∂X_l‖₂, under a fixed mask."""
    if not len(at.slopes):
        return -math.inf
    first = at.norm_jacobians[0]
    after_attention = at.after_attention
    eye = torch.eye(first.shape[-1]).to(first)
    tokens = range(len(first))

    def column(token: int) -> Tensor:
        moved = network_bounds.attention_columns(at.attention, token)
        moved = moved @ first[token] if at.pre_norm else moved
        moved[token] += eye
        return after_attention @ moved

    reach = torch.stack([torch.linalg.matrix_norm(column(token)).sum() for token in tokens])
    largest = torch.zeros(())
    for token in reach.argsort(descending=True).tolist():
        if reach[token] <= largest:
            break
        largest = torch.maximum(largest.to(reach), torch.linalg.matrix_norm(column(token), 2).sum())
    return float(largest.log())


_SCORES = 2**20  # largest number of scores in one pass (or one sample's)
_GRAM_STEPS = 3  # overestimates a norm of width 64 by a few per cent, 30% at most
_ROUNDING = 4 * torch.finfo(torch.float64).eps  # rounding of softmax − one-hot in a measured gradient
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class LocalBounds:
    """Bounds of the gradient of the mean loss at one parameter vector; natural logarithms."""

    tensors: dict[str, float]  # bounds by name, as in :func:`~semdiag.measuring.encoders.weights.named_tensors`
    network: float  # bound for all parameters together


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
            residual = torch.full_like(largest, network_bounds.CROSS_ENTROPY_LIPSCHITZ)
            pooled_gradient = residual * largest
            if labels is not None:
                gradient = network_bounds.loss_residual(logits, labels[start + sample])
                residual = (gradient.norm() + _ROUNDING).clamp(max=network_bounds.CROSS_ENTROPY_LIPSCHITZ)
                pooled_gradient = (gradient @ head).norm() + _ROUNDING * largest
            bounds = {"head.weight": pooled.norm() * residual, "head.bias": residual}
            for name, value in (
                bounds | {name: value * pooled_gradient for name, value in inside.items()}
            ).items():
                sums.setdefault(name, []).append(value)
    means = {name: torch.stack(values).mean(0) for name, values in sums.items()}
    network = float(log_root_sum_squares(log(torch.stack(list(means.values()))), dim=0))
    return LocalBounds({name: float(log(value)) for name, value in means.items()}, network)


def _propagate_back(encoder: Encoder, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensors]]:
    """Yield each input's logits, pooled token, and gradient bound of each tensor, per gradient norm there."""
    calls: list[BlockCall] = []
    head_calls: list[Tensor] = []
    hook = encoder.head.register_forward_hook(lambda head, inputs, logits: head_calls.extend((inputs[0], logits)))
    with hook, torch.no_grad(), watch_blocks(encoder, calls.append):
        encoder(tokens)
    valid = encoder.valid(tokens)
    ids = encoder.sequence(tokens)
    blocks = [blocks_at_points(encoder, call, valid) for call in calls]
    for sample, (pooled, logits) in enumerate(zip(*head_calls, strict=True)):
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
    attention = at.attention
    first, second = at.stds
    mlp = gradients if at.pre_norm else gradients / second
    mlp_in = spectral_norm(at.weights.mlp_out) * at.slopes.abs().amax(-1) * mlp
    attended = spectral_norm_upper_bound(at.after_attention, _GRAM_STEPS) * gradients
    mixed = attention.weights @ attention.values
    averages = (attention.weights @ at.tokens).norm(dim=-1)
    mapped = attention.values @ attention.output_weight.mT
    inputs = at.tokens.expand(len(mapped), -1, -1)
    as_query, as_key = (
        abs(attention.scale) * network_bounds.covariance_norms(attention.weights, x, mapped) * attended
        for x in (attention.keys, inputs)
    )
    sizes = at.tokens.norm(dim=-1)
    out = at.weights.whole_output
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
    reached = attended @ network_bounds.attention_reach(attention)
    return bounds, attended + (reached / first if at.pre_norm else reached)
