"""Theorem 2 against a reference network: every parameter tensor moved alone, and all of them at once.

The network is written out in plain torch, for many parameter settings at once (first dimension). The path
from θ to θ' moves one tensor after the other; each step is held against that tensor's λ_g with constants
over the two ends of the step, and the whole path against sqrt(Σ λ_g²).
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from semdiag.mathematics.bounds.attention_bounds import HeadNorms, attention_map_bound, bilinear_form_bound
from semdiag.mathematics.bounds.block_bounds import (
    ACTIVATION_LIPSCHITZ,
    AttentionConstants,
    BlockConstants,
    MlpConstants,
    merged,
    normalisation_lipschitz,
    query_norm,
)
from semdiag.mathematics.bounds.network_bounds import (
    Readout,
    log_embedding_constant,
    log_parameter_bounds,
    network_bound,
)
from semdiag.mathematics.score_strips import fixed_mask_rows, heavy_hitter_rows
from semdiag.mathematics.spectral_norms import (
    bilinear_form_norm,
    paper_code_layer_norm,
    score_scale,
    spectral_norm,
    value_output_norm,
)

CASES, LENGTH, WIDTH, HEADS, HEAD, HIDDEN, VOCABULARY, K, EPS = 60, 6, 4, 2, 3, 5, 3, 2, 1e-5
TAU = 1.5
ACTIVATION = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "mish": torch.nn.functional.mish,
}
SHAPES = {
    "W_q": (HEADS * HEAD, WIDTH),
    "b_q": (HEADS * HEAD,),
    "W_k": (HEADS * HEAD, WIDTH),
    "b_k": (HEADS * HEAD,),
    "W_v": (HEADS * HEAD, WIDTH),
    "b_v": (HEADS * HEAD,),
    "W_o": (WIDTH, HEADS * HEAD),
    "b_o": (WIDTH,),
    "W_P": (HIDDEN, WIDTH),
    "b_P": (HIDDEN,),
    "W_R": (WIDTH, HIDDEN),
    "b_R": (WIDTH,),
}
POSITIONS = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Net:
    blocks: int
    pre_norm: bool
    activation: str
    mask: str  # full, topk, band


@dataclass(frozen=True)
class Trace:
    """What one block sees, and the weights it has."""

    weights: Parameters
    tokens: Tensor  # at the attention's input
    scores: Tensor
    selected: Tensor
    std: tuple[Tensor, Tensor]
    mlp_tokens: Tensor
    hidden: Tensor


def allowed(mask: str) -> Tensor:
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
    return ((i - j).abs() <= 1) | (i == 0) | (j == 0) if mask == "band" else (i >= 0) & (j >= 0)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.mT + bias[:, None, :]


def normalise(x: Tensor) -> tuple[Tensor, Tensor]:
    centred = x - x.mean(-1, keepdim=True)
    std = (centred.square().mean(-1) + EPS).sqrt()
    return centred / std[..., None], std


def attend(net: Net, w: Parameters, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (linear(u, w[f"W_{x}"], w[f"b_{x}"]).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for x in "qkv")
    scores = TAU / math.sqrt(HEAD) * q @ k.mT
    selected = allowed(net.mask).expand(scores.shape)
    if net.mask == "topk":
        best = scores.topk(K, dim=-1).indices
        selected = torch.zeros_like(selected).scatter(-1, best, True)
    mixed = torch.softmax(scores.masked_fill(~selected, -math.inf), -1) @ v
    return linear(mixed.transpose(1, 2).flatten(-2), w["W_o"], w["b_o"]), scores, selected


def run_block(net: Net, w: Parameters, x: Tensor) -> tuple[Tensor, Trace]:
    tokens, std_1 = normalise(x) if net.pre_norm else (x, None)
    attended, scores, selected = attend(net, w, tokens)
    y = x + attended
    if net.pre_norm:
        mlp_tokens, std_2 = normalise(y)
    else:
        y, std_1 = normalise(y)
        mlp_tokens = y
    hidden = ACTIVATION[net.activation](linear(mlp_tokens, w["W_P"], w["b_P"]))
    z = y + linear(hidden, w["W_R"], w["b_R"])
    if not net.pre_norm:
        z, std_2 = normalise(z)
    return z, Trace(w, tokens, scores, selected, (std_1, std_2), mlp_tokens, hidden)


def forward(net: Net, parameters: Parameters, ids: Tensor) -> tuple[Tensor, list[Trace], Tensor]:
    x = 2.0 * parameters["embedding"][:, ids] + POSITIONS  # repeated ids must not tie
    traces = []
    for t in range(net.blocks):
        weights = {name: parameters[f"block {t} {name}"] for name in SHAPES}
        x, trace = run_block(net, weights, x)
        traces.append(trace)
    pooled = x.mean(1)
    logits = (parameters["head weight"] @ pooled[..., None])[..., 0] + parameters["head bias"]
    return -torch.log_softmax(logits, -1)[:, 1], traces, pooled


def heads(w: Parameters, name: str) -> Tensor:
    if name == "W_o":
        return w[name].unflatten(-1, (HEADS, HEAD)).movedim(-2, 1)
    return w[name].unflatten(1, (HEADS, HEAD))


def largest(ends: tuple[Trace, Trace], measure) -> Tensor:
    return torch.maximum(*(measure(end) for end in ends))


def rows_over(net: Net, ends: tuple[Trace, Trace]):
    def high(e: Trace, where: Tensor) -> Tensor:
        return e.scores.masked_fill(~where, -math.inf).amax(-1)

    def low(e: Trace, where: Tensor) -> Tensor:
        return e.scores.masked_fill(~where, math.inf).amin(-1)

    delta = largest(ends, lambda e: high(e, e.selected) - low(e, e.selected))
    keys = ends[0].selected.sum(-1)
    if net.mask != "topk":
        return fixed_mask_rows(delta, keys)
    return heavy_hitter_rows(delta, -largest(ends, lambda e: high(e, ~e.selected) - low(e, e.selected)), keys)


def constants(net: Net, ends: tuple[Trace, Trace]) -> BlockConstants:
    rows = rows_over(net, ends)
    token = largest(ends, lambda e: e.tokens.norm(dim=-1).amax(-1))
    per_end = [
        HeadNorms(
            bilinear_form_norm(*(heads(e.weights, n) for n in ("W_q", "W_k", "b_q")), score_scale(HEAD, TAU)),
            value_output_norm(heads(e.weights, "W_o"), heads(e.weights, "W_v")),
            token[:, None],
            query_norm(token[:, None]),
        )
        for e in ends
    ]
    norms = max_norms(*per_end)
    attention = AttentionConstants(
        log_map=attention_map_bound(rows, ends[0].selected | ends[1].selected, norms).log_value,
        log_form=bilinear_form_bound(rows, norms).log_value,
        upsilon=norms.upsilon,
        query_weight=largest(
            ends, lambda e: paper_code_layer_norm(heads(e.weights, "W_q"), heads(e.weights, "b_q"))
        ),
        key_weight=largest(ends, lambda e: spectral_norm(heads(e.weights, "W_k"))),
        value_weight=largest(ends, lambda e: spectral_norm(heads(e.weights, "W_v"))),
        value_bias=largest(ends, lambda e: heads(e.weights, "b_v").norm(dim=-1)),
        output_weight=largest(ends, lambda e: spectral_norm(e.weights["W_o"])),
        score_scale=score_scale(HEAD, TAU),
        token_norm=token,
    )
    mlp = MlpConstants(
        weight_in=largest(ends, lambda e: spectral_norm(e.weights["W_P"])),
        weight_out=largest(ends, lambda e: spectral_norm(e.weights["W_R"])),
        activation=ACTIVATION_LIPSCHITZ[net.activation],
        token_norm=largest(ends, lambda e: e.mlp_tokens.norm(dim=-1).amax(-1)),
        hidden_norm=largest(ends, lambda e: e.hidden.norm(dim=-1).amax(-1)),
    )
    norm_1, norm_2 = (normalisation_lipschitz(torch.cat([e.std[n] for e in ends], -1)) for n in (0, 1))
    return BlockConstants(attention, mlp, LENGTH, norm_1, norm_2, net.pre_norm, rows.assumptions)


def max_norms(a, b):
    values = {f: torch.maximum(getattr(a, f), getattr(b, f)) for f in ("gamma", "upsilon", "token", "query")}
    return type(a)(**values)


def bounds_over(net: Net, ids: Tensor, here, there) -> dict[str, Tensor]:
    blocks = [constants(net, ends) for ends in zip(here[1], there[1], strict=True)]
    head = torch.maximum(*(spectral_norm(end[3]["head weight"]) for end in (here, there)))
    pooled = torch.maximum(*(end[2].norm(dim=-1) for end in (here, there)))
    counts = torch.bincount(ids, minlength=VOCABULARY)
    return log_parameter_bounds(blocks, Readout(head, pooled, 1 / LENGTH), log_embedding_constant(counts, 2.0))


def random_parameters(net: Net, generator: torch.Generator) -> Parameters:
    shapes = {f"block {t} {name}": shape for t in range(net.blocks) for name, shape in SHAPES.items()}
    shapes |= {"embedding": (VOCABULARY, WIDTH), "head weight": (2, WIDTH), "head bias": (2,)}
    size = 10 ** torch.empty(CASES, dtype=torch.float64).uniform_(-0.7, 0.5, generator=generator)
    return {
        name: torch.randn(CASES, *shape, generator=generator, dtype=torch.float64)
        * (size / math.sqrt(shape[-1])).reshape(-1, *[1] * len(shape))
        for name, shape in shapes.items()
    }


def moves(net: Net, parameters: Parameters, ids: Tensor, generator: torch.Generator) -> Parameters:
    """A direction per tensor: random, or the gradient, which finds the steepest change; sizes 1e-5 to 0.3."""
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    loss = forward(net, leaves, ids)[0].sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    steps = {}
    for (name, value), gradient in zip(parameters.items(), gradients, strict=True):
        axes = tuple(range(1, value.ndim))
        random = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        follow = torch.rand(CASES, generator=generator) < 0.6
        follow &= gradient.abs().amax(axes) > 1e-12
        direction = torch.where(follow.reshape(-1, *[1] * len(axes)), gradient, random)
        size = 10 ** torch.empty(CASES, dtype=torch.float64).uniform_(-5, -0.5, generator=generator)
        norm = direction.pow(2).sum(axes, keepdim=True).sqrt()
        steps[name] = direction / norm * size.reshape(-1, *[1] * len(axes))
    return steps


def bound_name(tensor: str) -> str:
    return tensor.replace("b_q", "W_q")  # one constant speaks about [W_q b_q]


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["full", "topk", "band"])
@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize(("activation", "blocks"), [("relu", 2), ("gelu", 3), ("mish", 2)])
def test_no_parameter_moves_the_loss_further_than_its_bound(activation, blocks, pre_norm, mask):
    net = Net(blocks, pre_norm, activation, mask)
    generator = torch.Generator().manual_seed(6 * blocks + 3 * pre_norm + len(mask))
    ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
    parameters = random_parameters(net, generator)
    steps = moves(net, parameters, ids, generator)
    names = list(parameters)
    start = here = (*forward(net, parameters, ids), parameters)
    squares = torch.zeros(CASES, dtype=torch.float64)
    for name in names:
        parameters = parameters | {name: parameters[name] + steps[name]}
        there = (*forward(net, parameters, ids), parameters)
        log_bound = bounds_over(net, ids, here, there)[bound_name(name)]
        distance = steps[name].flatten(1).norm(dim=-1)
        change = (here[0] - there[0]).abs()
        assert (change <= log_bound.exp() * distance * (1 + 1e-7) + 1e-12 * (1 + here[0])).all(), name
        squares += (2 * log_bound).exp()
        here = there
    total = torch.stack([s.flatten(1).square().sum(-1) for s in steps.values()]).sum(0).sqrt()
    assert ((start[0] - here[0]).abs() <= squares.sqrt() * total * (1 + 1e-7)).all()


def test_all_parameters_at_once_stay_below_the_network_bound():
    """The same, read off one Bound over the whole path: fixed masks, small moves, constants over all its ends."""
    net = Net(2, True, "gelu", "band")
    generator = torch.Generator().manual_seed(99)
    ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
    parameters = random_parameters(net, generator)
    steps = {name: 1e-4 * step for name, step in moves(net, parameters, ids, generator).items()}
    moved = {name: value + steps[name] for name, value in parameters.items()}
    here = (*forward(net, parameters, ids), parameters)
    there = (*forward(net, moved, ids), moved)
    bound = network_bound(bounds_over(net, ids, here, there))
    total = torch.stack([s.flatten(1).square().sum(-1) for s in steps.values()]).sum(0).sqrt()
    # The path between the ends is a little outside their constants: 1% covers moves of 1e-4.
    assert ((here[0] - there[0]).abs() <= 1.01 * bound.log_value.exp() * total).all()


@pytest.mark.parametrize("mask", ["full", "topk"])
def test_finite_at_a_dispersion_of_700(mask):
    net = Net(3, True, "relu", mask)
    generator = torch.Generator().manual_seed(4)
    ids = torch.tensor([0, 1, 2, 1, 0, 2])
    parameters = random_parameters(net, generator)
    parameters = {n: v * (3000 if n.endswith("W_q") else 1) for n, v in parameters.items()}
    here = (*forward(net, parameters, ids), parameters)
    blocks = [constants(net, (trace, trace)) for trace in here[1]]
    assert here[1][0].scores.amax() - here[1][0].scores.amin() > 700
    bound = network_bound(bounds_over(net, ids, here, here), merged(b.assumptions for b in blocks))
    assert bound.holds
    assert bound.log_value.isfinite().all()


def test_ties_are_reported_and_leave_no_guarantee():
    net = Net(2, True, "relu", "topk")
    generator = torch.Generator().manual_seed(4)
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    parameters = random_parameters(net, generator)
    parameters |= {n: 0 * v for n, v in parameters.items() if n.endswith(("W_q", "b_q"))}
    here = (*forward(net, parameters, ids), parameters)
    blocks = [constants(net, (trace, trace)) for trace in here[1]]
    bound = network_bound(bounds_over(net, ids, here, here), merged(b.assumptions for b in blocks))
    # All scores are 0, and so is the separation.
    assert (bound.log_value == math.inf).all()
    assert {a.statement for a in bound.unmet} == {"the separation is positive in every row"}
