"""Γ and Υ of models of others: where they are given they are those of the weights, elsewhere the reason is."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag.measuring.calls.running import unnamed
from semdiag.questions.bounds.measure import projection_norms

HEADS, KEY_HEADS, WIDTH, HEAD_WIDTH = 4, 2, 12, 3


class Attention(nn.Module):
    """Grouped heads; ``turn`` comes between the queries' layer and the scores."""

    def __init__(self, fused, turn=False, bias=True):
        super().__init__()
        self.fused, self.turn = fused, turn
        self.sizes = [HEADS * HEAD_WIDTH, KEY_HEADS * HEAD_WIDTH, KEY_HEADS * HEAD_WIDTH]
        if fused:
            self.qkv = nn.Linear(WIDTH, sum(self.sizes), bias=bias)
        else:
            self.parts = nn.ModuleList(nn.Linear(WIDTH, size, bias=bias) for size in self.sizes)
        self.out = nn.Linear(self.sizes[0], WIDTH)

    def forward(self, x):
        parts = self.qkv(x).split(self.sizes, -1) if self.fused else [part(x) for part in self.parts]
        q, k, v = (part.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in parts)
        q = q.flip(2) if self.turn else q
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def weights(self, at):
        if not self.fused:
            return self.parts[at].weight, self.parts[at].bias
        bias = [None] * 3 if self.qkv.bias is None else self.qkv.bias.split(self.sizes)
        return self.qkv.weight.split(self.sizes)[at], bias[at]


def norms(model):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        inputs = torch.randn(3, 5, WIDTH)
    return projection_norms(unnamed(model), [inputs])


def naive(attention, head):
    """Γ and Υ of one head, in float64."""
    own = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
    shared = head // (HEADS // KEY_HEADS)
    key = slice(shared * HEAD_WIDTH, (shared + 1) * HEAD_WIDTH)
    (wq, bq), (wk, _), (wv, _) = (attention.weights(at) for at in range(3))
    query = wq[own] if bq is None else torch.cat([wq[own], bq[own, None]], 1)
    form = query.detach().double().T @ wk[key].detach().double() / math.sqrt(HEAD_WIDTH)
    mapped = attention.out.weight[:, own].detach().double() @ wv[key].detach().double()
    return np.linalg.norm(form, 2), np.linalg.norm(mapped, 2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_norms_are_those_of_the_weights(fused, bias):
    attention = Attention(fused, bias=bias)
    table = norms(nn.Sequential(nn.LayerNorm(WIDTH), attention))
    assert table["head"].tolist() == list(range(HEADS))
    for row in table.to_dict("records"):
        assert (row["gamma"], row["upsilon"]) == pytest.approx(naive(attention, row["head"]), rel=1e-6)
        assert row["reason"] == ""


def test_what_comes_between_makes_the_form_unknown_and_says_so():
    attention = Attention(fused=False, turn=True)
    table = norms(attention)
    assert table["gamma"].isna().all()
    assert table["upsilon"].tolist() == pytest.approx([naive(attention, head)[1] for head in range(HEADS)])
    assert table["reason"].str.startswith("Γ: the queries are not what a linear layer returned").all()


def test_without_an_output_layer_the_map_is_unknown():
    attention = Attention(fused=False)
    attention.out = nn.Identity()
    table = norms(attention)
    assert table["upsilon"].isna().all()
    assert table["gamma"].notna().all()
    assert (table["reason"] == "Υ: none took the mixed values").all()


def test_torch_s_own_layer_names_its_projections():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True)
    table = norms(layer)
    own = layer.self_attn
    wq, wk, wv = (part.detach().double().view(HEADS, HEAD_WIDTH, WIDTH) for part in own.in_proj_weight.chunk(3))
    bias = own.in_proj_bias[:WIDTH].detach().double().view(HEADS, HEAD_WIDTH, 1)
    form = torch.cat([wq, bias], -1).transpose(1, 2) @ wk / math.sqrt(HEAD_WIDTH)
    out = own.out_proj.weight.detach().double().view(WIDTH, HEADS, HEAD_WIDTH).transpose(0, 1)
    assert table["gamma"].tolist() == pytest.approx(torch.linalg.matrix_norm(form, 2).tolist(), rel=1e-6)
    assert table["upsilon"].tolist() == pytest.approx(torch.linalg.matrix_norm(out @ wv, 2).tolist(), rel=1e-6)


def test_nothing_is_left_behind():
    model = Attention(fused=True)
    norms(model)
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Doubled(nn.Linear):
    """Its map is another than that of its weight, as with low ranks that are added or weights that are rounded."""

    def forward(self, x):
        return F.linear(x, 2 * self.weight, self.bias)


class Adapted(nn.Module):
    """A linear layer, and something that is added to it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.rank = base, nn.Parameter(torch.ones(WIDTH, base.in_features))

    def forward(self, x):
        return self.base(x) + x @ self.rank.T


@pytest.mark.parametrize("hooked", [False, True])
def test_a_layer_with_another_map_than_its_weight_is_no_linear_layer(hooked):
    """Its Γ was that of half the queries."""
    attention = Attention(fused=False)
    if hooked:
        attention.parts[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        attention.parts[0].__class__ = Doubled
    table = norms(attention)
    assert table["gamma"].isna().all()
    assert table["reason"].str.startswith("Γ: the queries are not what a linear layer returned").all()
    assert table["upsilon"].tolist() == pytest.approx([naive(attention, head)[1] for head in range(HEADS)])


def test_an_adapter_around_the_last_layer_makes_the_value_map_unknown_and_says_so():
    """Υ was that of the layer without its adapter."""
    attention = Attention(fused=False)
    gamma = norms(attention)["gamma"]
    attention.out = Adapted(attention.out)
    table = norms(attention)
    assert table["upsilon"].isna().all()
    assert table["reason"].unique().tolist() == [
        "Υ: what a linear layer made of the mixed values was changed (an adapter)"
    ]
    assert table["gamma"].tolist() == gamma.tolist()
