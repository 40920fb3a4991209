"""Theorem 2 on the evaluated inputs of one encoder: the constants of its blocks, in both forms."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semdiag.capturing.attention_kinds import BOUNDED, HEAVY_HITTERS
from semdiag.mathematics.bounds.attention_bounds import HeadNorms
from semdiag.mathematics.bounds.block_bounds import AttentionConstants, BlockConstants, MlpConstants
from semdiag.mathematics.bounds.bound import Assumption, Bound
from semdiag.mathematics.bounds.layer_constants import ACTIVATION_LIPSCHITZ, normalisation_lipschitz, query_norm
from semdiag.mathematics.bounds.network_bounds import (
    ONE_PARAMETER_VECTOR,
    Readout,
    log_embedding_constant,
    log_paper_parameter_bounds,
    log_parameter_bounds,
    network_assumptions,
    network_bound,
)
from semdiag.mathematics.bounds.paper_attention_bounds import paper_attention_map_bound, paper_bilinear_form_bound
from semdiag.mathematics.spectral_norms import spectral_norm
from semdiag.measuring.encoders.traces import InputTraces, LayerTrace
from semdiag.measuring.encoders.weights import BlockWeights, block_weights, embedding_scale
from semdiag_models import Encoder

POST_NORM = Assumption("blocks normalise their outputs (post-norm), as in the paper's equations", {}, holds=False)


@dataclass(frozen=True, eq=False)
class BlockForms:
    """One block's constants."""

    weights: BlockWeights  # of the block
    trace: LayerTrace  # what the inputs showed
    sound: BlockConstants  # per sample, shape (N,) and (N, H)
    paper: BlockConstants  # for all inputs together, shape () and (H,)


@dataclass(frozen=True, eq=False)
class NetworkForms:
    """A network's constants."""

    blocks: list[BlockForms]  # first to last
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
    readout = Readout(head, traces.pooled_norm, shares)
    embedding = log_embedding_constant(traces.counts, embedding_scale(encoder))
    whole = Readout(head, traces.pooled_norm.max(), shares.min())
    paper_blocks = [b.paper for b in blocks]
    own = log_paper_parameter_bounds(paper_blocks, whole)
    carried = log_parameter_bounds(paper_blocks, whole)
    sound_blocks = [b.sound for b in blocks]
    by_tensor = log_parameter_bounds(sound_blocks, readout, embedding)
    sound = network_bound(by_tensor, network_assumptions(sound_blocks))
    return NetworkForms(
        blocks=blocks,
        log_sound={name: value.max() for name, value in by_tensor.items()},
        log_paper=carried | own,
        sound=replace(sound, log_value=sound.log_value.max()),
        paper=network_bound(own, network_assumptions(paper_blocks)),
        infinite={name: int((value == math.inf).sum()) for name, value in by_tensor.items()},
        each=sound.log_value,
    )


def _block(encoder: Encoder, layer: int, traces: InputTraces) -> BlockForms:
    weights, trace = block_weights(encoder, layer), traces.layers[layer]
    norms = [_normalisation(std) for std in (trace.attention_std, trace.mlp_std)]
    slope = ACTIVATION_LIPSCHITZ.get(encoder.config.activation, math.inf)
    sound = BlockConstants(
        attention=_attention(weights, trace),
        mlp=_mlp(weights, slope, trace.mlp_token_norm, trace.hidden_norm),
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


def _mlp(weights: BlockWeights, slope: float, token_norm: Tensor, hidden_norm: Tensor) -> MlpConstants:
    return MlpConstants(
        weight_in=spectral_norm(weights.mlp_in),
        weight_out=spectral_norm(weights.mlp_out),
        activation=slope,
        token_norm=token_norm,
        hidden_norm=hidden_norm,
    )


def _paper(encoder: Encoder, weights: BlockWeights, trace: LayerTrace, sound: BlockConstants) -> BlockConstants:
    """Return the paper's λ_A and λ_W from the largest norms, dispersion and load and the smallest separation."""
    k, heavy = encoder.config.keys_kept, encoder.config.attention in HEAVY_HITTERS
    xi = trace.token_norm.max()
    norms = HeadNorms(weights.gamma, weights.upsilon, xi, query_norm(xi, query_bias=True))
    delta = trace.dispersion.amax(0)
    gap = trace.separation.amin(0) if heavy else None
    beta = torch.ones_like(delta) if k is None else trace.load.amax(0).double() / k
    tokens = float(torch.as_tensor(sound.tokens).max())
    log_map = paper_attention_map_bound(delta, norms, beta, gap)
    log_form = paper_bilinear_form_bound(delta, norms, tokens, gap)
    uncovered = trace.log_map.isinf().all(0) if not _covered(encoder) else torch.zeros_like(delta).bool()
    attention = replace(
        sound.attention,
        log_map=log_map.log_value.masked_fill(uncovered, math.inf),
        log_form=log_form.log_value.masked_fill(uncovered, math.inf),
        query_weight=spectral_norm(weights.query),
        value_bias=torch.zeros_like(delta),
        token_norm=xi,
    )
    slope = sound.mlp.activation
    return BlockConstants(
        attention=attention,
        mlp=_mlp(weights, slope, trace.mlp_token_norm.max(), trace.hidden_norm.max()),
        tokens=tokens,
        attention_norm=torch.as_tensor(sound.attention_norm).max(),
        mlp_norm=torch.as_tensor(sound.mlp_norm).max(),
        pre_norm=sound.pre_norm,
        assumptions=(*sound.assumptions, *_only_unmet(log_map.assumptions), *_papers_own(encoder, tokens)),
    )


def _normalisation(std: Tensor) -> Tensor:
    """Return λ_LN of each sample; +inf if a token's entries are all equal and eps is 0."""
    constant = ~(std > 0)
    lipschitz = normalisation_lipschitz(torch.where(constant, 1.0, std)[:, None])
    return torch.where(constant, math.inf, lipschitz)


def _covered(encoder: Encoder) -> bool:
    return encoder.config.attention in BOUNDED


def _assumptions(encoder: Encoder, trace: LayerTrace) -> tuple[Assumption, ...]:
    """Return the assumptions of the block's constants, except those that a later Assumption repeats."""
    kind, activation = encoder.config.attention, encoder.config.activation
    bad = int(trace.not_finite.sum())
    checks = [
        ONE_PARAMETER_VECTOR,
        Assumption("every score is finite", {"rows that are not": bad}, holds=bad == 0),
        Assumption(f"a bound is known for {kind} attention", {}, holds=_covered(encoder)),
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


def _papers_own(encoder: Encoder, tokens: float) -> tuple[Assumption, ...]:
    """Return the further assumptions of the paper's form that this encoder does not meet."""
    config, unmet = encoder.config, []
    if config.norm != "post":
        unmet.append(POST_NORM)
    if config.keys_kept != config.k:
        kept = {"ordinary queries": float(config.keys_kept or 0), "global ones": tokens}
        unmet.append(Assumption("every query keeps the same number of keys", kept, holds=False))
    return tuple(unmet)


def _only_unmet(assumptions: tuple[Assumption, ...]) -> tuple[Assumption, ...]:
    """Return the paper's assumptions that fail, except the separation's, which is already listed."""
    return tuple(a for a in assumptions if not a.holds and "separation" not in a.statement)
