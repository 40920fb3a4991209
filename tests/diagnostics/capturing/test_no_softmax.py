"""Attention without a softmax beside one with: the audit names its module, and no mask passes it over."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import semdiag
from semdiag.capturing.provenance.softmaxes import NO_SOFTMAX
from semdiag_files import InputError

LENGTH, WIDTH = 6, 4
PAST = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
BIAS = torch.arange(LENGTH) / 8.0


def divided(z):
    return z / (z.sum(-1, keepdim=True) + 1e-6)


def weighing(weigh):
    return lambda q, k, v: weigh(q @ k.mT / 2) @ v


def hstu(q, k, v):
    scores = torch.einsum("bnd,bmd->bnm", q, k) + BIAS
    return torch.einsum("bnm,bmd->bnd", (F.silu(scores) / LENGTH).masked_fill(~PAST, 0), v)


def linear(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(1, keepdim=True).mT)


def two_heads(q, k, v):
    q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT).sigmoid() @ v).transpose(1, 2).flatten(-2)


def one_by_one(q, k, v):
    return torch.stack([F.relu(q[i] @ k[i].T) @ v[i] for i in range(len(q))])


WAYS = {
    "SiLU": weighing(F.silu),
    "sigmoid": weighing(torch.sigmoid),
    "sigmoid, less a bias, causal": weighing(lambda z: (z - math.log(LENGTH)).sigmoid().masked_fill(~PAST, 0)),
    "sigmoid, normalised": weighing(lambda z: divided(z.sigmoid())),
    "ReLU": weighing(F.relu),
    "ReLU, normalised": weighing(lambda z: divided(F.relu(z))),
    "ReLU, by the length": weighing(lambda z: F.relu(z) / LENGTH),
    "ReLU²": weighing(lambda z: F.relu(z) ** 2),
    "GELU": weighing(F.gelu),
    "ELU + 1": weighing(lambda z: F.elu(z) + 1),
    "softplus, in place": weighing(lambda z: F.softplus(z).mul_(0.5)),
    "identity": weighing(lambda z: z),
    "decaying": weighing(lambda z: z * 0.9 ** (BIAS[:, None] - BIAS) * PAST),
    "decaying by exp": weighing(lambda z: z * (BIAS - BIAS[:, None]).exp()),
    "norm": weighing(lambda z: F.normalize(z, dim=-1)),
    "dropout": weighing(lambda z: F.dropout(F.silu(z), 0.0, True)),
    "bfloat16": weighing(lambda z: F.silu(z.bfloat16()).float()),
    "values first": lambda q, k, v: (v.mT @ F.silu(k @ q.mT)).mT,
    "HSTU": hstu,
    "linear": linear,
    "two heads": two_heads,
    "two axes": one_by_one,
}


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.qkv, self.attend = nn.Linear(WIDTH, 3 * WIDTH), attend

    def forward(self, x):
        return self.attend(*self.qkv(x).chunk(3, -1))


class Both(nn.Module):
    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Attention(weighing(lambda z: z.softmax(-1))), Attention(attend)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, WIDTH))

    def forward(self, x):
        x = x + self.first(x)
        x = x + self.second(x)
        return x + self.mlp(x)


def stream():
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def top_two(q, k, v):
    scores = q @ k.mT / 2
    best = scores.argsort(-1, descending=True)[..., :2]
    weights = torch.zeros_like(scores).scatter(-1, best, scores.gather(-1, best).softmax(-1))
    return weights @ v


@pytest.mark.parametrize("way", WAYS)
def test_the_audit_names_its_module_and_the_attention_beside_it_is_captured(way):
    model = Both(WAYS[way])
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(stream())
    assert {(row.what, row.module, row.reason) for row in calls.audit.itertuples()} == {
        ("not captured", "second", NO_SOFTMAX)
    }
    q, k, _ = model.first.qkv(stream()).double().chunk(3, -1)
    scores = q @ k.mT / 2
    expected = (scores.amax(-1) - scores.amin(-1)).flatten().detach()
    torch.testing.assert_close(torch.tensor(calls.dispersion()["dispersion"].to_numpy()), expected.float())


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_refuses_it_by_name_and_masks_the_rest_when_told(way):
    model, x = Both(WAYS[way]), stream().requires_grad_()
    with pytest.raises(InputError, match=r"second: \w+ \(a product of two tensors"):  # noqa: SIM117
        with semdiag.sparsify(model, semdiag.TopK(2)):
            model(x)
    with semdiag.sparsify(model, semdiag.TopK(2), partial=True) as masked:
        output = model(x)
    assert {seen.module for seen in masked.unmasked} == {"second"}
    reference, y = Both(WAYS["SiLU" if way == "bfloat16" else way]).double(), stream().double().requires_grad_()
    reference.first.attend = top_two
    tolerance, expected = 2e-2 if way == "bfloat16" else 1e-5, reference(y)
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    (output.square().sum() + expected.square().sum()).backward()
    assert (x.grad - y.grad).abs().max() <= tolerance * y.grad.abs().max()


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: ((q @ k.mT).relu() @ v @ k.mT).softmax(-1) @ v,
        lambda q, k, v: (q @ (k.mT @ k) @ k.mT).softmax(-1) @ v,
    ],
)
def test_a_product_that_makes_scores_of_a_softmax_has_one(attend):
    """Where an attention without a softmax makes queries, it is named; the scores that they make are not."""
    model = Both(attend)
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(stream())
    assert len(calls) == 2
    assert calls.audit["times"].tolist() == [1]


def test_products_outside_the_model_are_no_attention():
    """An optimiser's, for one: Newton and Schulz's iteration of a gradient."""
    model = Both(top_two).first
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(stream())
        g = stream()
        for _ in range(2):
            g = 1.5 * g - 0.5 * (g @ g.mT) @ g
    assert calls.audit.empty


def fourier(size):
    places = torch.arange(size)
    return torch.cos(2 * math.pi * torch.outer(places, places) / size)


class Mixing(nn.Module):
    """Softmax attention, then products of the stream with matrices that no projection of it made."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mix = Attention(weighing(lambda z: z.softmax(-1))), mix
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.constant = fourier(LENGTH)
        self.register_buffer("graph", torch.rand(LENGTH, LENGTH))

    def forward(self, x, edges=None):
        x = x + self.first(x)
        edges = self.graph if edges is None else edges
        for way in self.ways:
            x = x + way(self.mix(self, x, edges)).relu()
        return x


def chebyshev(model, x, edges):
    return edges @ x + (2 * edges @ edges - torch.eye(LENGTH)) @ x


def by_degree(model, x, edges):
    degree = edges.sum(-1).rsqrt().diag_embed()
    return degree @ edges @ degree @ x


MIXES = {
    "a Fourier transform, held": lambda model, x, edges: model.constant @ x @ fourier(WIDTH),
    "a Fourier transform, made": lambda model, x, edges: fourier(LENGTH) @ x @ fourier(WIDTH),
    "einsum": lambda model, x, edges: torch.einsum("mn,bnd,de->bme", model.constant, x, fourier(WIDTH)),
    "edges twice": lambda model, x, edges: edges @ (edges @ x),
    "Chebyshev": chebyshev,
    "edges by degree": by_degree,
}


@pytest.mark.parametrize("graph", ["buffer", "input", "by name"])
@pytest.mark.parametrize("mix", MIXES)
def test_products_with_constants_and_graphs_are_no_attention(mix, graph):
    model, edges = Mixing(MIXES[mix]), torch.rand(2, LENGTH, LENGTH)
    inputs = (stream(), edges) if graph == "input" else (stream(),)
    named = {"edges": edges} if graph == "by name" else {}
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(*inputs, **named)
    assert (len(calls), len(calls.audit)) == (1, 0)
    with semdiag.sparsify(model, semdiag.TopK(2)):
        model(*inputs, **named)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with semdiag.Monitor(model):
            model(*inputs, **named)


def test_a_constant_that_was_overwritten_by_queries_is_none():
    def attend(q, k, v):
        queries = torch.zeros(2, LENGTH, WIDTH)
        queries.copy_(q)
        return (queries @ k.mT).relu() @ v

    with torch.no_grad(), semdiag.capture(model := Both(attend)) as calls:
        model(stream())
    assert [*calls.audit["module"]] == ["second"]


EXPERTS = {
    "einsum": lambda gate, outputs: torch.einsum("bne,bneh->bnh", gate, outputs),
    "experts first": lambda gate, outputs: torch.einsum("bne,ebnh->bnh", gate, outputs.permute(2, 0, 1, 3)),
    "matmul": lambda gate, outputs: (gate.unsqueeze(-2) @ outputs).squeeze(-2),
    "flat": lambda gate, outputs: torch.bmm(gate.flatten(0, 1)[:, None], outputs.flatten(0, 1)).view(
        2, LENGTH, -1
    ),
}


@pytest.mark.parametrize("way", EXPERTS)
def test_a_gate_of_dense_experts_is_no_attention(way):
    def mix(model, x, edges):
        outputs = torch.stack([way(x) for way in model.ways], -2)
        return EXPERTS[way](model.graph_gate(x).softmax(-1), outputs)

    model, x = Mixing(mix), stream().requires_grad_()
    model.graph_gate = nn.Linear(WIDTH, 3)
    with semdiag.sparsify(model, semdiag.TopK(2)) as masked:
        output = model(x)
    assert len(masked.unmasked) == 0
    model.first.attend, y = top_two, x.detach().clone().requires_grad_()
    torch.testing.assert_close(output, expected := model(y), atol=1e-5, rtol=1e-5)
    (output.square().sum() + expected.square().sum()).backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-4, rtol=1e-4)


def test_a_softmax_over_learned_keys_whose_rows_share_their_values_is_refused():
    class Synthesizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.values = nn.Linear(WIDTH, LENGTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.scores(x).softmax(-1) @ self.values(x)

    with (
        pytest.raises(InputError, match="its keys are parameters"),
        semdiag.sparsify(model := Synthesizer(), semdiag.TopK(2)),
    ):
        model(stream())
