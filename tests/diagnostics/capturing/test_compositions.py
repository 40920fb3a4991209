"""Whatever is composed by hand is captured as it was, or in the audit: held against an independent truth."""

import math
import os
import warnings

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, reject, settings
from recorded_softmaxes import RecordedSoftmaxes, agrees
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from semdiag.capturing.attention_calls import watch_attention

BATCH, HEADS, LENGTH, WIDTH = 3, 2, 6, 4
LOWEST = torch.finfo(torch.float32).min
KEPT = [6, 2, 4]
SEEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.matmul(q, k.transpose(-2, -1))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit is deprecated
    scripted = torch.jit.script(scores)


PRODUCTS = {
    "@": lambda q, k: q @ k.mT,
    "matmul": lambda q, k: torch.matmul(q, k.transpose(2, 3)),
    "linalg.matmul": lambda q, k: torch.linalg.matmul(q, k.mT),
    "einsum": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k),
    "einsum, ...": lambda q, k: torch.einsum("...id,...jd->...ij", q, k),
    "einsum, swapped": lambda q, k: torch.einsum("bhjd,bhid->bhij", k, q),
    "bmm": lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, (BATCH, HEADS)),
    "bmm, out": lambda q, k: torch.bmm(
        q.flatten(0, 1), k.flatten(0, 1).mT, out=torch.empty(BATCH * HEADS, LENGTH, LENGTH)
    ).view(BATCH, HEADS, LENGTH, LENGTH),
    "baddbmm": lambda q, k: torch.baddbmm(draw(6, 6, 6, seed=3), q.flatten(0, 1), k.flatten(0, 1).mT).view(
        BATCH, HEADS, LENGTH, LENGTH
    ),
    "linear": lambda q, k: torch.stack([torch.stack([F.linear(*x) for x in zip(*y)]) for y in zip(q, k)]),  # noqa: B905
    "keys first": lambda q, k: (k @ q.mT).mT,
    "cdist": lambda q, k: -torch.cdist(q, k),
    "products by hand": lambda q, k: (q[:, :, :, None] * k[:, :, None]).sum(-1),
    "scripted": scripted,
    "one head's keys": lambda q, k: q @ k[:, :1].mT,
    "sum of two": lambda q, k: q @ k.mT + k @ q.mT,
}


def rows_cut(z):
    for row, n in zip(z, KEPT, strict=True):
        row[:, :, n:] = -torch.inf
    return z


def changed(z, change):
    z = z * 1.0
    change(z)
    return z


STEPS = {
    "/": lambda z: z / 2,
    "scale in place": lambda z: z.mul_(0.5),
    "masked_fill": lambda z: z.masked_fill(~SEEN, -torch.inf),
    "masked_fill, lowest": lambda z: z.masked_fill(~SEEN, LOWEST),
    "masked_fill, -1e4": lambda z: z.masked_fill(~SEEN, -1e4),
    "the best one at -1e4": lambda z: z - 1e4 * (z == z.max()),
    "additive -1e4": lambda z: z + torch.where(SEEN, 0.0, -1e4),
    "additive -inf": lambda z: z + torch.where(SEEN, 0.0, -torch.inf),
    "where": lambda z: torch.where(SEEN, z, torch.tensor(-torch.inf)),
    "where on the mask": lambda z: z + torch.where(SEEN, torch.tensor(0.0), torch.tensor(-torch.inf)),
    "b w - 1e4 (1 - b)": lambda z: z * SEEN - 1e4 * (1 - SEEN.float()),
    "max with lowest": lambda z: torch.max(z + torch.where(SEEN, 0.0, LOWEST), torch.tensor(LOWEST)),
    "clamp": lambda z: z.clamp(-1, 1),
    "clamp_": lambda z: changed(z, lambda z: z.clamp_(-1, 1)),
    "tanh_": lambda z: changed(z, lambda z: z.tanh_()),
    "soft-cap": lambda z: 3 * torch.tanh(z / 3),
    "relu": lambda z: z.relu(),
    "negated": lambda z: -z,
    "bias": lambda z: z + draw(HEADS, LENGTH, LENGTH, seed=4),
    "times a number per head": lambda z: z * torch.tensor([0.3, 1.4])[:, None, None],
    "times a number per key": lambda z: z * draw(LENGTH, seed=7),
    "rows in a loop": lambda z: rows_cut(z * 1.0),
    "fill_ of a part": lambda z: changed(z, lambda z: z[1, :, :, 2:].fill_(-torch.inf)),
    "masked_fill_ of a part": lambda z: changed(z, lambda z: z[1].masked_fill_(~SEEN, -torch.inf)),
    "mul_ of a part": lambda z: changed(z, lambda z: z[:, :, 2:4].mul_(3)),
    "add_ of a part": lambda z: changed(z, lambda z: z.narrow(3, 0, 2).add_(1.5)),
    "copy_": lambda z: changed(z, lambda z: z.copy_(draw(*z.shape, seed=8))),
    "index_fill_": lambda z: changed(z, lambda z: z.index_fill_(3, torch.tensor([1]), -torch.inf)),
    "fill_diagonal_": lambda z: changed(z, lambda z: z[0, 0].fill_diagonal_(-1.0)),
    "view, mul_": lambda z: changed(z, lambda z: z.view(-1).mul_(2)),
    "through .data": lambda z: changed(z, lambda z: z.data[1].zero_()),
    "out": lambda z: torch.mul(z, 2, out=torch.empty_like(z)),
    "flattened": lambda z: (z.flatten(0, 1) * 2).view_as(z),
    "double": lambda z: z.double().float(),
    "talking heads": lambda z: torch.einsum("bhij,hg->bgij", z, draw(HEADS, HEADS, seed=9)),
    "less the largest": lambda z: z - z.amax(-1, keepdim=True),
    "sorted": lambda z: z.sort(-1).values,
    "rolled": lambda z: z.roll(1, -1),
}


def in_place(z):
    z = z * 1
    return torch.softmax(z, -1, out=z)


def by_exp(z):
    e = (z - z.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def normalised(e):
    return e / e.sum(-1, keepdim=True)


def exp2_out(z):
    z = z * math.log2(math.e)
    return normalised(torch.exp2(z, out=z))


def over_the_queries(z):
    return z.mT.softmax(-2).mT


def sinks(z):
    return torch.tensor([0.3, -1.2])[:, None, None].expand(*z.shape[:-1], 1)


def sunk(z):
    z = torch.cat([z, sinks(z)], -1)
    return (z - z.max(-1, keepdim=True).values).softmax(-1).split([LENGTH, 1], -1)[0]


SOFTMAXES = {
    "softmax": lambda z: z.softmax(-1),
    "F.softmax": lambda z: F.softmax(z, dim=3, dtype=torch.float32),
    "special.softmax": lambda z: torch.special.softmax(z, -1),
    "module": nn.Softmax(-1),
    "log_softmax, exp": lambda z: z.log_softmax(-1).exp(),
    "exp / sum": by_exp,
    "exp of less logsumexp": lambda z: (z - z.logsumexp(-1, keepdim=True)).exp(),
    "exp, out": lambda z: normalised(torch.exp(z := z * 1, out=z)),
    "exp2": lambda z: normalised(torch.exp2(z)),
    "exp2, less the largest": lambda z: normalised(torch.exp2((z - z.amax(-1, keepdim=True)) * math.log2(math.e))),
    "exp2 of less logsumexp": lambda z: torch.exp2((z - z.logsumexp(-1, keepdim=True)) * math.log2(math.e)),
    "log_softmax, exp2": lambda z: torch.exp2(z.log_softmax(-1) * math.log2(math.e)),
    "exp2_": lambda z: normalised((z * 2).exp2_()),
    "exp2, out": exp2_out,
    "2 ** z": lambda z: normalised(2.0**z),
    "e ** z": lambda z: normalised(math.e**z),
    "0.1 ** -z": lambda z: normalised(0.1**-z),
    "pow of a tensor": lambda z: normalised(torch.pow(torch.tensor(3.0), z)),
    "pow, out": lambda z: normalised(torch.pow(3.0, z := z * 1, out=z)),
    "float_power": lambda z: normalised(torch.float_power(2.0, z)).float(),
    "expm1 + 1": lambda z: normalised(torch.expm1(z - z.amax(-1, keepdim=True)) + 1),
    "exp2 with a sink": lambda z: normalised(torch.exp2(torch.cat([z, sinks(z)], -1)))[..., :-1],
    "out": lambda z: torch.softmax(z, -1, out=torch.empty_like(z)),
    "in place": in_place,
    "over -2": over_the_queries,
    "with a sink": lambda z: torch.cat([z, torch.zeros(*z.shape[:-1], 1)], -1).softmax(-1)[..., :-1],
    "with a sink per head, first": lambda z: F.softmax(torch.cat([sinks(z), z], -1), -1)[..., 1:],
    "with a sink, less the largest": sunk,
    "with a sink that is masked in a row": lambda z: (
        torch.cat([z, (torch.arange(LENGTH)[:, None] == 2).float().mul(LOWEST).expand(*z.shape[:-1], 1)], -1)
    ).softmax(-1)[..., :-1],
    "two columns left out": lambda z: F.pad(z, (0, 2)).softmax(-1)[..., :-2],
    "a column in the middle left out": lambda z: F.pad(z, (0, 1)).roll(2, -1).softmax(-1)[..., [0, 2, 3, 4, 5, 6]],
    "twice": lambda z: z.softmax(-1).softmax(-1),
}
LATER = {
    "dropout off": lambda w: F.dropout(w, 0.5, False),
    "nan_to_num": lambda w: w.nan_to_num(0.0),
    "masked": lambda w: w.masked_fill(~SEEN, 0.0),
    "masked, always": lambda w: w * SEEN.roll(1),
    "halved": lambda w: w * 0.5,
    "halved in place": lambda w: w.mul_(0.5),
    "one row halved": lambda w: changed(w, lambda w: w[0, 0, 0].mul_(0.5)),
    "one entry": lambda w: changed(w, lambda w: w.__setitem__((2, 1, 5, 0), 0.9)),
    "renormalised": lambda w: w / w.sum(-1, keepdim=True),
    "talking heads": lambda w: torch.einsum("bhij,hg->bgij", w, draw(HEADS, HEADS, seed=9)),
    "contiguous": lambda w: w.mT.contiguous().mT,
    "half": lambda w: w.bfloat16().float(),
    "cut": lambda w: torch.where(w > 0.1, w, 0.0),
}


def skewed(w):
    return F.pad(w, (0, 1)).view(BATCH, HEADS, LENGTH + 1, LENGTH)


def in_a_loop(w, v):
    return torch.stack([w[b] @ v[b] for b in range(len(w))])


VALUES = {
    "@": lambda w, v: w @ v,
    "einsum": lambda w, v: torch.einsum("bhij,bjhd->bihd", w, v.transpose(1, 2)).transpose(1, 2),
    "einsum, swapped": lambda w, v: torch.einsum("bhjd,bhij->bhid", v, w),
    "transposed": lambda w, v: (v.mT @ w.mT).mT,
    "bmm": lambda w, v: torch.bmm(w.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (BATCH, HEADS)),
    "twice": lambda w, v: w @ v + w @ v.sin(),
    "one head's values": lambda w, v: torch.einsum("bhij,bjd->bhid", w, v[:, 0]),
    "multiplied and summed": lambda w, v: (w[..., None] * v[:, :, None]).sum(-2),
    "in a loop": in_a_loop,
    "mean over heads": lambda w, v: w.mean(1, keepdim=True) @ v,
    "sum over heads": lambda w, v: w.sum(1) @ v[:, 0],
    "stacked heads, mean": lambda w, v: torch.stack([*w.unbind(1)]).mean(0) @ v[:, 0],
    "einsum over heads": lambda w, v: torch.einsum("bhij,bjd->bid", w, v[:, 0]),
    "mean over queries": lambda w, v: w.mean(2, keepdim=True) @ v,
    "skewed and scaled": lambda w, v: (skewed(w) * draw(BATCH, HEADS, 7, 6).exp())[:, :, 1:] @ v,
    "addbmm": lambda w, v: torch.addbmm(torch.zeros(LENGTH, WIDTH), w.flatten(0, 1), v.flatten(0, 1)),
    "addmv": lambda w, v: torch.addmv(torch.zeros(LENGTH), w[0, 0], v[0, 0, :, 0]),
    "dot": lambda w, v: torch.stack([torch.dot(row, v[0, 0, :, 0]) for row in w[0, 0]]),
    "conv1d": lambda w, v: F.conv1d(v[0], w[0, 0, :, :, None]),
    "mv": lambda w, v: torch.stack([torch.mv(x, y) for x, y in zip(w.flatten(0, 1), v.flatten(0, 1)[..., 0])]),  # noqa: B905
}


class Written(nn.Module):
    """Attention that somebody wrote by hand."""

    def __init__(self, product, steps, softmax, later, values):
        super().__init__()
        self.parts = PRODUCTS[product], [STEPS[s] for s in steps], [LATER[s] for s in later], VALUES[values]
        self.softmax = SOFTMAXES[softmax]

    def forward(self, q, k, v):
        product, steps, later, values = self.parts
        z = product(q, k)
        for step in steps:
            z = step(z)
        w = self.softmax(z)
        for step in later:
            w = step(w)
        return values(w, v)


INPUTS = [draw(BATCH, HEADS, LENGTH, WIDTH, seed=i) for i in range(3)]
CONTEXTS = [torch.enable_grad, torch.no_grad, torch.inference_mode]
NAMES = [st.sampled_from([*names]) for names in (PRODUCTS, STEPS, SOFTMAXES, LATER, VALUES)]


def judged(model, context=torch.no_grad):
    """Outputs the same, and of what was computed: captured and right, or audited. Returns which."""
    with torch.no_grad(), RecordedSoftmaxes() as truth:
        model(*(x.clone() for x in INPUTS))
    with context():
        inputs = [x.clone().requires_grad_(torch.is_grad_enabled()) for x in INPUTS]
        before = model(*inputs)
        calls, verdicts = [], []

        def hold(call):
            softmaxes = [t for t in truth.seen if not hasattr(t, "q")] + _written_out(truth)
            verdicts.append(any(agrees(call, t) for t in softmaxes))
            calls.append(call.dropout)

        with watch_attention(model, hold) as audit:
            during = model(*inputs)
    assert torch.equal(before, during) or bool(before.isnan().any())
    assert all(verdicts)
    assert calls or audit.skipped, "silent"
    return "right" if calls and not audit.skipped else "audited"


def _written_out(truth):
    return [type("Exp", (), {"scores": z}) for z in truth.exponentials]


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("SEMDIAG_COMPOSITIONS", "150")), deadline=None)
@given(
    product=NAMES[0],
    steps=st.lists(NAMES[1], max_size=3),
    softmax=NAMES[2],
    later=st.lists(NAMES[3], max_size=2),
    values=NAMES[4],
    context=st.sampled_from(CONTEXTS),
)
@example("@", ["rows in a loop"], "softmax", [], "@", torch.no_grad)
@example("@", ["index_fill_", "talking heads"], "exp / sum", ["talking heads"], "@", torch.no_grad)
@example("einsum, ...", ["the best one at -1e4"], "softmax", [], "@", torch.no_grad)
@example("@", ["masked_fill, -1e4", "times a number per key", "/"], "softmax", [], "@", torch.no_grad)
def test_any_composition_by_hand_is_exact_or_audited(product, steps, softmax, later, values, context):
    model = Written(product, steps, softmax, later, values)
    try:
        model(*(x.clone().requires_grad_(context is torch.enable_grad) for x in INPUTS))
    except RuntimeError:  # in place under a gradient, or no view: torch refuses it
        reject()
    judged(model, context)


@pytest.mark.parametrize("context", CONTEXTS[1:])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, context):
    found = judged(Written(name, ["/"], "softmax", [], "@"), context)
    assert found == ("audited" if name in ("cdist", "products by hand") else "right")


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    assert judged(Written("@", [name], "softmax", [], "@")) == "right"


CUT = ("with a sink that is masked in a row", "two columns left out", "a column in the middle left out")


@pytest.mark.parametrize("context", CONTEXTS[1:])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes(name, context):
    found = judged(Written("@", ["/"], name, [], "@"), context)
    assert found == ("audited" if name in ("twice", *CUT) else "right")


CHANGED = (
    "masked, always",
    "halved",
    "halved in place",
    "one row halved",
    "one entry",
    "talking heads",
    "cut",
    "masked",
)


@pytest.mark.parametrize("name", LATER)
def test_weights(name):
    assert judged(Written("@", ["/"], "softmax", [name], "@")) == ("audited" if name in CHANGED else "right")


HALF = {
    "all of some keys": lambda w: w * (torch.arange(w.shape[-1]) % 2).to(w.dtype) * 2,
    "renormalised without some keys": lambda w: (
        (x := w * (torch.arange(w.shape[-1]) % 2)) / x.sum(-1, keepdim=True)
    ),
    "a head at half": lambda w: w * torch.tensor([1.0, 0.5]).to(w.dtype)[:, None, None],
    "a head left out": lambda w: w * torch.tensor([1.0, 0.0]).to(w.dtype)[:, None, None],
    "nothing": lambda w: w * 1,
    "renormalised": lambda w: w / w.sum(-1, keepdim=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softmax", ["softmax", "exp / sum", "exp of less logsumexp", "log_softmax, exp"])
@pytest.mark.parametrize("change", HALF)
def test_weights_in_half_precision_that_are_not_the_softmaxs_are_audited(change, softmax, dtype):
    class Model(nn.Module):
        def forward(self, q, k, v):
            return HALF[change](SOFTMAXES[softmax](q @ k.mT)) @ v

    for length, spread in ((40, 0.3), (300, 0.3), (300, 1.0)):
        q, k, v = (spread * draw(2, HEADS, length, 8, seed=seed) for seed in (20, 21, 22))
        model, calls = Model(), []
        with torch.no_grad(), watch_attention(model, calls.append) as audit:
            model(q.to(dtype), k.to(dtype), v.to(dtype))
        assert (len(calls), audit.skipped.total()) == ((1, 0) if change in ("nothing", "renormalised") else (0, 1))


def test_weights_under_autocast_are_captured():
    class Model(nn.Module):
        def forward(self, q, k, v):
            return F.dropout((q @ k.mT / 2).softmax(-1), 0.5, False) @ v + by_exp(q @ k.mT) * 1 @ v

    calls = []
    model, inputs = Model(), [draw(2, HEADS, 100, 8, seed=seed) for seed in (20, 21, 22)]
    with torch.no_grad(), watch_attention(model, calls.append) as audit, torch.autocast("cpu", torch.bfloat16):
        model(*inputs)
    assert (len(calls), audit.skipped) == (2, {})


@pytest.mark.parametrize("context", CONTEXTS[1:])
@pytest.mark.parametrize("name", VALUES)
def test_values(name, context):
    found = judged(Written("@", ["/"], "softmax", [], name), context)
    whole = ("@", "einsum", "einsum, swapped", "transposed", "bmm", "twice", "one head's values")
    assert found == ("right" if name in whole else "audited")


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("values", ["@", "einsum"])
@pytest.mark.parametrize("product", ["@", "einsum", "linear"])
def test_autocast_casts_what_it_casts_alone(product, values, context):
    model = Written(product, ["/"], "softmax", [], values)
    with context(), torch.autocast("cpu", torch.bfloat16):
        alone = model(*INPUTS)
        with watch_attention(model, lambda call: None) as audit:
            watched = model(*INPUTS)
    assert torch.equal(alone, watched)
    assert alone.dtype == torch.bfloat16
    assert (audit.captured.total(), len(audit.skipped)) == (1, 0)


class Freed(nn.Module):
    """Attention by hand that looks whether earlier scores are still in memory."""

    def __init__(self):
        super().__init__()
        self.held, self.scores = [], []

    def forward(self, x):
        self.held.append(sum(not ref.expired() for ref in self.scores))
        z = x @ x.mT
        self.scores.append(StorageWeakRef(z.untyped_storage()))
        return z.softmax(-1) @ x


def test_scores_are_freed_once_they_are_captured():
    model = nn.Sequential(*[Freed()] * 3).eval()
    with torch.no_grad(), watch_attention(model, lambda call: None) as audit:
        model(INPUTS[0])
    assert audit.captured.total() == 3
    assert model[0].held == [0, 0, 0]


@pytest.mark.parametrize("name", [name for name in SOFTMAXES if "sink" in name and name not in CUT])
def test_a_sink_is_one_more_logit_in_the_denominator(name):
    calls = []
    model = Written("@", ["masked_fill"], name, [], "@")
    with torch.no_grad(), watch_attention(model, calls.append):
        model(*INPUTS)
    (call,) = calls
    scores = call.scores(torch.float64).masked_fill(~call.allowed, -torch.inf)
    sink = call.sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close((weights @ call.v.double()).float(), call.mixed, rtol=1e-5, atol=1e-6)


class Learned(nn.Module):
    """Keys and values of which the first two are parameters."""

    def __init__(self, over_scores):
        super().__init__()
        self.k, self.v = (nn.Parameter(draw(1, HEADS, 2, WIDTH, seed=i)) for i in (11, 12))
        self.over_scores = over_scores

    def forward(self, q, k, v):
        own = self.k.expand(BATCH, -1, -1, -1)
        z = torch.cat([q @ own.mT, q @ k.mT], -1) if self.over_scores else q @ torch.cat([own, k], 2).mT
        return z.softmax(-1) @ torch.cat([self.v.expand(BATCH, -1, -1, -1), v], 2)


class Looped(nn.Module):
    """Attention in a loop over samples, or over samples and heads."""

    def __init__(self, over_heads):
        super().__init__()
        self.over_heads = over_heads

    def forward(self, q, k, v):
        if self.over_heads:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        mixed = torch.stack([(q[b] @ k[b].mT / 2).softmax(-1) @ v[b] for b in range(len(q))])
        return mixed.view(BATCH, HEADS, LENGTH, WIDTH)


@pytest.mark.parametrize("model", [Learned(False), Learned(True), Looped(False), Looped(True)])
def test_learned_keys_and_loops_are_captured(model):
    assert judged(model) == "right"


def flat(q, k, v):
    """Rows of queries and heads in one product."""
    z = (q.flatten(1, 2) @ k.mT).view(*q.shape[:3], k.shape[1])
    return (z.softmax(-1).flatten(1, 2) @ v).view_as(q)


LAYOUTS = {  # attention of q (B, Lq, H, D) and k and v, (B, Lk, H, D) or (B, Lk, D)
    "bhqk": lambda q, k, v: torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1), v),
    "bqhk": lambda q, k, v: torch.einsum("bqhk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1), v),
    "bqkh": lambda q, k, v: torch.einsum("bqkh,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqkh", q, k).softmax(2), v),
    "hbqk": lambda q, k, v: torch.einsum("hbqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->hbqk", q, k).softmax(-1), v),
    "bhqk, one key head": lambda q, k, v: torch.einsum(
        "bhqk,bkd->bqhd", torch.einsum("bqhd,bkd->bhqk", q, k).softmax(-1), v
    ),
    "bqhk, one key head": lambda q, k, v: torch.einsum(
        "bqhk,bkd->bqhd", torch.einsum("bqhd,bkd->bqhk", q, k).softmax(-1), v
    ),
    "(qh)k, one key head": flat,
}


class Layout(nn.Module):
    """Attention of a stream (B, L, D) whose scores are laid out in some way."""

    def __init__(self, attend, heads):
        super().__init__()
        self.attend, self.heads = attend, heads

    def forward(self, x, keys=None):
        keys = x.cos() if keys is None else keys
        q = x.unflatten(-1, (self.heads, -1))
        single = "one key head" in self.attend
        k = keys[..., : q.shape[-1]] if single else keys.unflatten(-1, (self.heads, -1))
        self.scores = torch.einsum("bqhd,bkd->bhqk" if single else "bqhd,bkhd->bhqk", q, k)
        return LAYOUTS[self.attend](q, k, k.sin())


@pytest.mark.parametrize(("batch", "length", "keys"), [(2, 6, 6), (1, 6, 6), (2, 1, 6), (2, 5, 7)])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("attend", LAYOUTS)
def test_samples_heads_and_queries_are_told_apart_however_scores_are_laid_out(attend, heads, batch, length, keys):
    model, calls = Layout(attend, heads), []
    with torch.no_grad(), watch_attention(model, calls.append) as audit:
        model(draw(batch, length, 12, seed=1), draw(batch, keys, 12, seed=2))
    (call,) = calls
    torch.testing.assert_close(call.scores(torch.float32), model.scores, rtol=1e-5, atol=1e-5)
    assert not audit.remarks


def test_where_as_many_heads_as_samples_come_first_it_is_said_that_they_may_be_swapped():
    for attend, said in (("hbqk", 1), ("bhqk", 0), ("bqhk", 0)):
        with torch.no_grad(), watch_attention(model := Layout(attend, 3), lambda call: None) as audit:
            model(draw(3, 6, 12))
        assert [r.text.split(":")[0] for r in audit.remarks] == ["its samples and heads may be swapped"] * said


def test_where_nothing_tells_heads_from_queries_it_is_said():
    class Nameless(nn.Module):
        def forward(self, *, q, k, v):
            return LAYOUTS["bqhk, one key head"](q, k, v)

    with torch.no_grad(), watch_attention(model := Nameless(), lambda call: None) as audit:
        model(q=draw(2, 5, 3, 4), k=draw(2, 7, 4), v=draw(2, 7, 4, seed=1))
    assert [remark.text.split(":")[0] for remark in audit.remarks] == ["its queries and heads may be swapped"]


class Nearest(nn.Module):
    """Each query meets the three best keys alone."""

    def forward(self, x):
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        self.best, at = (q @ q.mT).topk(3)
        values = q[:, :, None].expand(*at.shape[:3], *q.shape[2:])
        values = values.gather(3, at[..., None].expand(*at.shape, q.shape[-1]))
        return (self.best.softmax(-1)[..., None, :] @ values)[..., 0, :]


def test_queries_with_keys_of_their_own_are_samples_and_it_is_said():
    calls = []
    with torch.no_grad(), watch_attention(model := Nearest(), calls.append) as audit:
        model(draw(2, 16, 8))
    (call,) = calls
    expected = model.best.transpose(1, 2).flatten(0, 1)[:, :, None]
    torch.testing.assert_close(call.scores(torch.float32), expected, rtol=1e-5, atol=1e-5)
    assert [remark.text.split(":")[0] for remark in audit.remarks] == ["each query has keys of its own"]


class Edges(nn.Module):
    """Keys of a graph: each pair of tokens has one of its own, as edges have features; or one query for all."""

    def __init__(self, of_pairs):
        super().__init__()
        self.of_pairs = of_pairs

    def forward(self, x):
        if self.of_pairs:
            q, k = x, x[:, None] + draw(LENGTH, LENGTH, 8)
        else:
            q, k = (
                x[:, 0].unflatten(-1, (HEADS, 4)),
                torch.cat([x, x], 1).unflatten(-1, (HEADS, 4)).transpose(1, 2),
            )
        weights = torch.einsum("bid,bijd->bij", q, k).softmax(-1)
        return torch.einsum("bij,bijd->bid", weights, k)


@pytest.mark.parametrize(("of_pairs", "length"), [(True, LENGTH), (False, LENGTH), (False, 1)])
def test_queries_of_three_axes_with_keys_of_their_own_may_be_heads_and_it_is_said(of_pairs, length):
    """They count as heads of one query, which nothing tells them from; only of one token they are."""
    calls, model = [], Edges(of_pairs)
    with torch.no_grad(), watch_attention(model, calls.append) as audit:
        model(draw(BATCH, length, 8))
    (call,) = calls
    assert call.q.shape[:3] == (BATCH, LENGTH if of_pairs else HEADS, 1)
    said = [remark.text.split(":")[0] for remark in audit.remarks]
    assert said == ["its queries and heads may be swapped"] * (length > 1)
