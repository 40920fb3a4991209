"""Softmaxes written out with exponentials of any base: their scores are in nats; what is not followed is named."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.provenance.softmaxes import NO_SOFTMAX
from semdiag_files import InputError

HEADS, LENGTH, WIDTH, K = 2, 9, 12, 3
SEEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
LOG2_E = math.log2(math.e)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    """Causal attention of a stream (B, L, D) whose weights some function makes of the scores."""

    def __init__(self, weigh, seed=1, table=None, scale=1.0):
        super().__init__()
        self.qkv, self.weigh, self.table, self.scale = nn.Linear(WIDTH, 3 * WIDTH), weigh, table, scale
        with torch.no_grad():
            self.qkv.weight.copy_(draw(3 * WIDTH, WIDTH, seed=seed))

    def parts(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return (q, k, v) if self.table is None else (q * self.table(), k * self.table(), v)

    def scores(self, x):
        """In float64, -inf where a key is forbidden."""
        q, k, _ = (t.detach().double() for t in self.parts(x))
        return (self.scale * torch.einsum("bhid,bhjd->bhij", q, k)).masked_fill(~SEEN, -torch.inf)

    def forward(self, x):
        q, k, v = self.parts(x)
        z = (self.scale * (q @ k.mT)).masked_fill(~SEEN, -torch.inf)
        return (self.weigh(z) @ v).transpose(1, 2).flatten(2)


def normalised(e):
    return e / e.sum(-1, keepdim=True)


def less_the_largest(z):
    return z - z.amax(-1, keepdim=True)


def with_out(z):
    return normalised(torch.exp2(y := z * LOG2_E, out=y))


EXPONENTIALS = {
    "exp2": lambda z: normalised(torch.exp2(less_the_largest(z) * LOG2_E)),
    "exp2, not shifted": lambda z: normalised(torch.exp2(z * LOG2_E)),
    "exp2_": lambda z: normalised((z * LOG2_E).exp2_()),
    "exp2, out": with_out,
    "exp2 of less logsumexp": lambda z: torch.exp2((z - z.logsumexp(-1, keepdim=True)) * LOG2_E),
    "2 **": lambda z: normalised(2.0 ** (z * LOG2_E)),
    "10 **": lambda z: normalised(10.0 ** (z * math.log10(math.e))),
    "0.5 **": lambda z: normalised(0.5 ** (z * -LOG2_E)),
    "e **": lambda z: normalised(math.e**z),
    "pow of a tensor": lambda z: normalised(torch.pow(torch.tensor(math.e), z)),
    "pow of a tensor of one entry": lambda z: normalised(torch.tensor([2.0]) ** (z * LOG2_E)),
    "expm1 + 1": lambda z: normalised(torch.expm1(less_the_largest(z)) + 1),
    "expm1_, add_": lambda z: normalised(less_the_largest(z).expm1_().add_(1)),
    "exp, out": lambda z: normalised(torch.exp(y := z * 1, out=y)),
}


def naive(z):
    """Number of keys, δ over all and over K keys, Δ and mass of K keys of each row (..., keys) in float64."""
    found = []
    for row in z.reshape(-1, z.shape[-1]).numpy():
        row = np.sort(row[np.isfinite(row)])[::-1]
        top, weights = row[:K], np.exp(row - row[0])
        after = row[K - 1] - row[K] if len(row) > K else np.inf
        found.append((len(row), row[0] - row[-1], top[0] - top[-1], after, weights[:K].sum() / weights.sum()))
    return np.array(found)


COLUMNS = ["keys", "dispersion", f"dispersion_k{K}", f"separation_k{K}", f"weight_kept_k{K}"]


@pytest.mark.parametrize("scale", [0.02, 0.2])  # scores reach 3 and 33
@pytest.mark.parametrize("name", EXPONENTIALS)
def test_scores_are_in_nats_whatever_the_base(name, scale):
    model, x = Attention(EXPONENTIALS[name], scale=scale).eval(), draw(3, LENGTH, WIDTH)
    expected = naive(model.scores(x))
    measured = semdiag.measure(model, x, k=(K,)).queries
    np.testing.assert_allclose(measured[COLUMNS].to_numpy(float), expected, rtol=2e-5, atol=2e-5)
    with torch.no_grad(), semdiag.capture(model, k=K) as calls:
        model(x)
    assert calls.audit.empty
    assert calls.residual["residual"].max() < 1e-5
    for table, column in ((calls.dispersion(), 1), (calls.dispersion(K), 2), (calls.separation(K), 3)):
        values = table["separation" if column == 3 else "dispersion"].to_numpy(float)
        np.testing.assert_allclose(values, expected[:, column], rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPONENTIALS)
def test_its_layer_is_counted_in_a_sweep_and_refused_where_it_takes_no_mask(name):
    parts = Attention(lambda z: z.softmax(-1), scale=0.02), Attention(EXPONENTIALS[name], scale=0.02)
    model, x = nn.Sequential(*parts).eval(), draw(2, LENGTH, WIDTH)
    sweep = semdiag.k_sweep(model, x).sweep
    assert {0, 1} <= {*sweep["layer"]}
    with (
        torch.no_grad(),
        pytest.raises(InputError, match=r"1: softmax provenance \(captured, but it takes no mask here"),
        semdiag.sparsify(model, semdiag.TopK(2)),
    ):
        model(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["exp2", "2 **"])
def test_other_precisions_are_followed(name, dtype):
    q, k, v = (draw(2, HEADS, LENGTH, 4, seed=seed).to(dtype) for seed in (1, 2, 3))

    class Model(nn.Module):
        def forward(self, q, k, v):
            return EXPONENTIALS[name](less_the_largest(q @ k.mT)) @ v

    with torch.no_grad(), watch_attention(model := Model(), (calls := []).append) as audit:
        model(q, k, v)
    (call,) = calls
    z, true = less_the_largest(call.scores(torch.float64)), less_the_largest((q @ k.mT).double())
    torch.testing.assert_close(z, true, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    assert not audit.skipped


def blocks(exponential):
    """Attention over blocks of keys with one running sum, as kernels of flash attention go."""

    def run(q, k, v):
        top, total, out = torch.tensor(-torch.inf), torch.zeros(()), torch.zeros_like(v)
        for keys, values in zip(k.split(3, 2), v.split(3, 2), strict=True):
            z = q @ keys.mT
            new = torch.maximum(top, z.amax(-1, keepdim=True))
            e, old = exponential(z - new), exponential(top - new)
            top, total, out = new, total * old + e.sum(-1, keepdim=True), out * old + e @ values
        return out / total

    return run


def rest(z, j):
    return torch.cat([z[..., :j], z[..., j + 1 :]], -1).logsumexp(-1)


NAMED = {
    "blocks, exp": (blocks(torch.exp), "its weights were changed"),
    "blocks, exp2": (blocks(lambda z: torch.exp2(z * LOG2_E)), "its weights were changed"),
    "blocks, pow": (blocks(lambda z: 2.0 ** (z * LOG2_E)), "its weights were changed"),
    "expm1 alone": (lambda q, k, v: normalised(torch.expm1((q @ k.mT).abs())) @ v, "its weights were changed"),
    "sigmoid against the rest": (
        lambda q, k, v: torch.sigmoid((z := q @ k.mT) - torch.stack([rest(z, j) for j in range(LENGTH)], -1)) @ v,
        NO_SOFTMAX,
    ),
    "sigmoid, normalised": (lambda q, k, v: normalised((q @ k.mT).sigmoid()) @ v, NO_SOFTMAX),
    "a base per head": (
        lambda q, k, v: normalised(torch.tensor([2.0, 3.0])[:, None, None] ** (q @ k.mT)) @ v,
        NO_SOFTMAX,
    ),
    "values first": (lambda q, k, v: (v.mT @ normalised((q @ k.mT).sigmoid()).mT).mT, NO_SOFTMAX),
}


class Written(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, *qkv):
        return self.attend(*qkv)


@pytest.mark.parametrize("name", NAMED)
def test_what_is_like_a_softmax_and_cannot_be_followed_is_named(name):
    attend, reason = NAMED[name]
    with torch.no_grad(), watch_attention(model := Written(attend), (calls := []).append) as audit:
        model(*(draw(2, HEADS, LENGTH, 4, seed=seed) for seed in (1, 2, 3)))
    assert not calls
    assert audit.skipped
    assert all(seen.reason.startswith(reason) for seen in audit.skipped)


@pytest.mark.parametrize("exponential", [torch.exp, torch.exp2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_are_multiplied_one_by_one_are_named_in_either_precision(dtype, exponential):
    def attend(q, k, v):
        return (normalised(exponential(q @ k.mT))[..., None] * v[:, :, None]).sum(-2)

    with torch.no_grad(), watch_attention(model := Written(attend), (calls := []).append) as audit:
        model(*(draw(2, HEADS, LENGTH, 4, seed=seed).to(dtype) for seed in (1, 2, 3)))
    assert not calls
    assert [seen.reason[:26] for seen in audit.skipped] == ["its values are multiplied "]


NO_WEIGHTS = {
    "a permutation": lambda q, k, v: torch.eye(LENGTH)[(q @ k.mT).argmax(-1)] @ v,
    "gates": lambda q, k, v: (q * k.exp2()) @ draw(4, 4),
    "scores alone": lambda q, k, v: (q @ k.mT).sigmoid(),
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_what_is_unlike_a_softmax_is_not_named(name):
    with torch.no_grad(), watch_attention(model := Written(NO_WEIGHTS[name]), (calls := []).append) as audit:
        model(*(draw(2, HEADS, LENGTH, 4, seed=seed) for seed in (1, 2, 3)))
    assert (len(calls), audit.skipped) == (0, {})


TABLES = {
    "exp": lambda: torch.exp(-torch.arange(LENGTH * WIDTH // HEADS).view(LENGTH, -1) / 50),
    "exp2": lambda: torch.exp2(-torch.arange(LENGTH * WIDTH // HEADS).view(LENGTH, -1) / 50),
    "pow": lambda: 10.0 ** (-torch.arange(LENGTH * WIDTH // HEADS).view(LENGTH, -1) / 50),
}


@pytest.mark.parametrize("softmax", ["softmax", "exp2"])
@pytest.mark.parametrize("name", TABLES)
def test_exponentials_in_queries_and_keys_hide_no_attention(name, softmax):
    weigh = EXPONENTIALS.get(softmax, lambda z: z.softmax(-1))
    model, x = Attention(weigh, table=TABLES[name]).eval(), draw(2, LENGTH, WIDTH)
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(x)
    assert calls.audit.empty
    np.testing.assert_allclose(
        calls.dispersion()["dispersion"], naive(model.scores(x))[:, 1], rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("values", [torch.exp, torch.exp2])
def test_values_that_are_exponentials_are_values(values):
    calls = []
    with (
        torch.no_grad(),
        watch_attention(
            model := Written(lambda q, k, v: (q @ k.mT).softmax(-1) @ values(v)), calls.append
        ) as audit,
    ):
        model(*(draw(2, HEADS, LENGTH, 4, seed=seed) for seed in (1, 2, 3)))
    assert (len(calls), audit.skipped) == (1, {})
