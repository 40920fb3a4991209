"""Attention without a softmax beside one with: the audit names its module, and no mask passes it over."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import semdiag
from semdiag.capturing.provenance.softmaxes import NO_SOFTMAX
from semdiag_models import InputError

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
