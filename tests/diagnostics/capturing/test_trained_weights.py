"""Weights that training, averaging or a parametrisation writes are not made of the input."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import semdiag
from semdiag.capturing.provenance.softmaxes import NO_SOFTMAX

WIDTH = 8


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 2, False), nn.Linear(2, 8, False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class MergedLowRank(LowRank):
    def forward(self, x):
        return F.linear(x, self.base.weight + self.up.weight @ self.down.weight)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.three(self.one(x) * self.two(x).sigmoid())


class Experts(nn.Module):
    def __init__(self, score, mix):
        super().__init__()
        self.router, self.score, self.mix = nn.Linear(8, 3), score, mix
        self.up, self.down = (nn.Parameter(torch.randn(3, *shape) / 4) for shape in ((8, 12), (12, 8)))

    def forward(self, x):
        found = self.mix(self.score(self.router(x)), self.each(x))
        best = self.router(x).argmax(-1, keepdim=True)
        return found + self.each(x).gather(2, best[..., None].expand(-1, -1, -1, 8))[:, :, 0]

    def each(self, x):
        return torch.einsum("bleh,ehd->bled", torch.einsum("bld,edh->bleh", x, self.up).relu(), self.down)


class Squeeze(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x):
        return x * self.two(self.one(x.mean(1, keepdim=True)).relu()).sigmoid()


class Averaged(nn.Module):
    """Weights whose mean over time the forward pass itself keeps, in other parameters and in a buffer."""

    def __init__(self):
        super().__init__()
        self.fast, self.slow = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("mean", self.fast.weight.detach().clone())

    def forward(self, x):
        with torch.no_grad():
            self.slow.weight.lerp_(self.fast.weight, 0.1)
            self.slow.bias.data.mul_(0.9).add_(self.fast.bias.data, alpha=0.1)
            self.mean.mul_(0.9).add_(self.fast.weight, alpha=0.1)
        return F.linear(self.slow(self.fast(x)), self.mean)


class Sampled(nn.Module):
    """A weight drawn around its mean, as in a Bayesian layer."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.full((8, 8), 0.1))

    def forward(self, x):
        return F.linear(x, F.dropout(self.mean + self.spread * torch.randn_like(self.spread), 0.1))


def linear():
    return nn.Linear(WIDTH, WIDTH)


def tied():
    first, second = linear(), linear()
    second.weight = first.weight
    return nn.Sequential(first, nn.GELU(), second)


def pruned():
    layer = linear()
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


BLOCKS = {
    "MLP": lambda: nn.Sequential(linear(), nn.GELU(), linear()),
    "tied": tied,
    "weight norm": lambda: nn.Sequential(*(parametrizations.weight_norm(linear()) for _ in range(2))),
    "spectral norm": lambda: nn.Sequential(*(parametrizations.spectral_norm(linear()) for _ in range(2))),
    "spectral norm by a hook": lambda: nn.Sequential(*(nn.utils.spectral_norm(linear()) for _ in range(2))),
    "orthogonal": lambda: nn.Sequential(*(parametrizations.orthogonal(linear()) for _ in range(2))),
    "pruned": lambda: nn.Sequential(pruned(), pruned()),
    "LoRA": LowRank,
    "merged LoRA": lambda: nn.Sequential(MergedLowRank(), MergedLowRank()),
    "gated": Gated,
    "experts by softmax": partial(Experts, lambda z: z.softmax(-1), lambda w, each: (w[..., None] * each).sum(-2)),
    "experts by sigmoid": partial(Experts, torch.sigmoid, partial(torch.einsum, "ble,bled->bld")),
    "squeeze and excite": Squeeze,
    "averaged": Averaged,
    "sampled": lambda: nn.Sequential(Sampled(), Sampled()),
}
OPTIMISERS = {
    "SGD": partial(torch.optim.SGD, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False),
    "Adam": partial(torch.optim.Adam, foreach=True),
    "AdamW": partial(torch.optim.AdamW, foreach=False),
    "fused": partial(torch.optim.AdamW, fused=True),
    "Muon": lambda own: Orthogonal(own),
}


class Orthogonal(torch.optim.SGD):
    """Newton and Schulz's iteration of each gradient, as Muon's: its steps are products of products."""

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            g = p.grad.flatten(0, -2) if p.ndim > 1 else p.grad[None]
            for _ in range(2):
                g = 1.5 * g - 0.5 * (g @ g.mT) @ g
            p.data.sub_(g.view_as(p), alpha=1e-2)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.block, self.norm, self.last = block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.norm(x + self.block(x)))


def stream():
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def train(model, optimiser, averaged=None):
    """Three steps, each of two batches whose gradients add up."""
    for _ in range(3):
        optimiser.zero_grad()
        for _ in range(2):
            model(stream()).square().mean().backward()
        optimiser.step()
        if averaged is not None:
            averaged.update_parameters(model)


@contextlib.contextmanager
def masked(model):
    with semdiag.sparsify(model, semdiag.TopK(2)) as found:
        yield
    assert not found.unmasked


@contextlib.contextmanager
def captured(model):
    with semdiag.capture(model) as calls:
        yield
    assert NO_SOFTMAX not in set(calls.audit["reason"])
    assert len(calls)


@pytest.mark.parametrize("context", [masked, captured])
@pytest.mark.parametrize(
    ("block", "optimiser"),
    [*((block, "Adam") for block in BLOCKS), *(("MLP", name) for name in OPTIMISERS if name != "Adam")],
)
def test_a_model_in_training_has_no_attention_but_its_own(context, block, optimiser):
    model = Model(BLOCKS[block])
    before = copy.deepcopy(model.state_dict())
    with context(model):
        train(model, OPTIMISERS[optimiser](model.parameters()))
    assert any(not torch.equal(before[name], now) for name, now in model.state_dict().items())


@pytest.mark.parametrize("context", [masked, captured])
def test_the_mean_of_weights_over_steps_is_a_model_without_inputs(context):
    model = Model(BLOCKS["MLP"])
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    with context(averaged):
        train(model, OPTIMISERS["SGD"](model.parameters()), averaged)
        averaged(stream())


@pytest.mark.parametrize("context", [masked, captured])
@pytest.mark.parametrize("how", ["assigned", "called"])
def test_weights_put_in_the_place_of_others_are_weights(context, how):
    model = Model(BLOCKS["MLP"])
    with context(model), torch.no_grad():
        model(stream())
        other = {name: p * 1.1 for name, p in model.named_parameters()}
        if how == "assigned":
            for name, p in model.named_parameters():
                p.data = other[name]
            model(stream())
        else:
            torch.func.functional_call(model, other, (stream(),))


def test_a_buffer_and_a_parameter_that_hold_the_input_are_made_of_it():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("keys", torch.zeros(2, 6, WIDTH))
            self.values = nn.Parameter(torch.zeros(2, 6, WIDTH), requires_grad=False)

        def forward(self, x):
            self.keys.copy_(x)
            self.values.data[:] = x
            return (x @ self.keys.mT).sigmoid() @ self.values

    model = Model(Cached)
    for _ in range(2):
        with torch.no_grad(), semdiag.capture(model) as calls:
            model(stream())
            model(stream())
        assert calls.audit["module"].tolist() == ["block"]
