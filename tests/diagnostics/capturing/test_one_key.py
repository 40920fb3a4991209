"""Attention of one key, as in a generation's first step: einsum multiplies weights with values entry by entry."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.sparsify import TopK, sparsify

pytestmark = pytest.mark.usefixtures("own_random_numbers")
WIDTH = 4


def usual(q, k, v, change=lambda w: w):
    w = change(torch.einsum("bqhd,bkhd->bhqk", q, k).div(2).softmax(-1))
    return torch.einsum("bhqk,bkhd->bqhd", w, v)


def queries_first(q, k, v):
    return torch.einsum("bqhk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1), v)


def shared_values(q, k, v):
    w = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]).softmax(-1)
    return torch.einsum("bhqk,bkd->bqhd", w, v[:, :, 0])


def swapped(q, k, v):
    return torch.einsum("bkhd,bhqk->bqhd", v, torch.einsum("bkhd,bqhd->bhqk", k, q).softmax(-1))


def one_by_one(q, k, v):
    w = torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1)
    return (w[..., None] * v.transpose(1, 2)[:, None]).sum(-2)


ATTENTIONS = {f.__name__: f for f in (usual, queries_first, shared_values, swapped, one_by_one)}
SIZES = [*itertools.product((1, 2), (1, 3), (1, 5))]


class Attention(nn.Module):
    def __init__(self, attend, heads):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH * heads, WIDTH * heads) for _ in range(3))
        self.o, self.attend, self.heads = nn.Linear(WIDTH * heads, WIDTH * heads), attend, heads

    def forward(self, x, memory):
        parts = self.q(x), self.k(memory), self.v(memory)
        return self.o(self.attend(*(t.unflatten(-1, (self.heads, -1)) for t in parts)).flatten(2))


def watched(model, *inputs, context=torch.no_grad):
    calls = []
    with context():
        before = model(*inputs)
        with watch_attention(model, calls.append) as audit:
            during = model(*inputs)
    assert torch.equal(before, during)
    return calls, [s.reason for s in audit.skipped], audit.others.total()


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("batch", "heads", "length"), SIZES)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_it_is_captured(name, batch, heads, length, context):
    model = Attention(ATTENTIONS[name], heads)
    x, memory = torch.randn(batch, length, WIDTH * heads), torch.randn(batch, 1, WIDTH * heads)
    (call,), skipped, others = watched(model, x, memory, context=context)
    assert (skipped, others) == ([], 0)
    assert call.q.shape[:3] == (batch, heads, length)
    assert call.k.shape[2] == call.v.shape[2] == 1
    q, k, v = (
        t.detach().unflatten(-1, (heads, -1)).transpose(1, 2)
        for t in (model.q(x), model.k(memory), model.v(memory))
    )
    k, v = (k[:, :1], v[:, :1]) if name == "shared_values" else (k, v)
    torch.testing.assert_close(call.mixed, v.expand_as(q), rtol=1e-5, atol=1e-6)
    expected = (q @ k.mT) / (2 if name == "usual" else 1)
    torch.testing.assert_close(call.scores(torch.float32), expected, rtol=1e-4, atol=1e-5)


class Generation(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(usual, 3)

    def forward(self, x):
        return torch.cat([self.attention(x[:, t : t + 1], x[:, : t + 1]) for t in range(x.shape[1])], 1)


def test_a_generation_is_captured_and_masked_whole():
    model, x = Generation(), torch.randn(2, 5, WIDTH * 3)
    calls, skipped, others = watched(model, x)
    assert ([call.k.shape[2] for call in calls], skipped, others) == ([1, 2, 3, 4, 5], [], 0)
    with torch.no_grad(), sparsify(model, TopK(2)) as masked:
        model(x)
    assert (masked.calls, masked.unmasked) == (5, [])
    assert masked.kept["most"].tolist() == [1] * 3 + [2] * 12


def test_with_dropout_and_a_factor_besides():
    def dropped(q, k, v):
        return usual(q, k, v, lambda w: F.dropout(w, 0.5) * torch.ones(5, 1))

    torch.manual_seed(1)
    model, inputs, calls = Attention(dropped, 3), (torch.randn(2, 5, 12), torch.randn(2, 1, 12)), []
    with watch_attention(model, calls.append) as audit:
        model(*inputs)
    assert ([call.dropout for call in calls], audit.skipped) == ([0.5], {})


def test_heads_of_width_one_are_in_the_audit():
    """Values that are not wider than their weights may as well be a mask or a gate."""
    model = Attention(usual, 3)
    model.heads = 3 * WIDTH
    calls, skipped, _ = watched(model, torch.randn(2, 5, 12), torch.randn(2, 1, 12))
    assert calls == []
    assert skipped == ["it has one key, and its values cannot be told from other factors of its weights"]
