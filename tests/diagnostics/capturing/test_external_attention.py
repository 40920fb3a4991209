"""Attention that is not ours: what is captured is what was computed, and the watch changes nothing."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from residuals import recomputation_residual
from torch import nn
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.recording import TRANSFORMED
from semdiag.capturing.sparsify import TopK, sparsify
from semdiag_files import InputError
from semdiag_models import Encoder

HEADS, HEAD_WIDTH, LENGTH = 2, 8, 7
WIDTH = HEADS * HEAD_WIDTH
LOWEST = torch.finfo(torch.float64).min
SEEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


BIAS = draw(HEADS, LENGTH, LENGTH, seed=5)


class Attention(nn.Module):
    """Projections around a function of q, k, v (B, H, L, D)."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.attend = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64), attend
        with torch.no_grad():
            self.qkv.weight.copy_(draw(3 * WIDTH, WIDTH, seed=1))

    def forward(self, x):
        qkv = self.qkv(x).view(*x.shape[:2], 3, HEADS, HEAD_WIDTH)
        return self.attend(*qkv.permute(2, 0, 3, 1, 4))


def watched(model, *inputs, **options):
    """Outputs without and with the watch, its calls and its audit."""
    calls = []
    with torch.no_grad():
        before = model(*inputs)
        with watch_attention(model, calls.append, **options) as audit:
            during = model(*inputs)
    assert torch.equal(before, during)
    return during, calls, audit


def naive(call):
    """Mixed values of a call, by loops over samples, heads, queries and keys; NaN for a row without keys."""
    mixed = torch.full_like(call.mixed, torch.nan)
    (batch, heads, queries, _), keys = call.q.shape, call.k.shape[2]
    full = (batch, heads, queries, keys)
    bias = None if call.bias is None else call.bias.expand(full)
    allowed = None if call.allowed is None else call.allowed.expand(full)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // call.k.shape[1])
            for i in range(queries):
                weights = {}
                for j in range(keys):
                    if allowed is not None and not allowed[b, h, i, j]:
                        continue
                    if call.causal and j > call.first_query + i:
                        continue
                    z = call.scale * float(call.q[b, h, i] @ call.k[b, g, j])
                    if call.softcap is not None:
                        z = call.softcap * math.tanh(z / call.softcap)
                    weights[j] = math.exp(z + (0 if bias is None else float(bias[b, h, i, j])))
                total = sum(weights.values()) + (0 if call.sinks is None else math.exp(call.sinks[h]))
                if weights:
                    mixed[b, h, i] = sum(w / total * call.v[b, g, j] for j, w in weights.items())
    return mixed


def softmax_of(change):
    """Attention by hand whose scores go through a change."""
    return lambda q, k, v: change(q @ k.transpose(-2, -1)).softmax(-1) @ v


def soft_capped(z):
    return 3 * torch.tanh(0.4 * z / 3) + BIAS


def in_place(z):
    z /= 3
    z += torch.where(SEEN, 0.0, -torch.inf)
    z -= z.amax(-1, keepdim=True)
    return z


def assigned(z):
    z = z * 0.5
    z[..., -1] = -torch.inf
    return z


def scaled_per_head(z):
    return z * torch.tensor([0.3, 0.7], dtype=torch.float64)[:, None, None] + BIAS


def merged_and_split(z):
    return (z.flatten(0, 1) / 2 + BIAS.repeat(2, 1, 1)).view(2, HEADS, LENGTH, LENGTH)


def einsum(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bihd, bjhd -> bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).transpose(1, 2)


def grouped(q, k, v):
    """Two query heads over one key head, as products with five axes."""
    k, v = k[:, :1, None], v[:, :1, None]
    return ((q[:, None] @ k.mT).softmax(-1) @ v).flatten(1, 2)


def with_baddbmm(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(BIAS.repeat(2, 1, 1), q, k.mT, beta=0.5, alpha=0.3)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (2, HEADS))


def split_for_the_softmax(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(2, HEADS, LENGTH, LENGTH).masked_fill(~SEEN, LOWEST)
    return torch.bmm(scores.softmax(-1).view(-1, LENGTH, LENGTH), v).unflatten(0, (2, HEADS))


def floats(seen):
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)


LOWER_RIGHT = causal_lower_right(3, LENGTH)
ATTENTIONS = {
    "plain": softmax_of(lambda z: z),
    "scaled, masked_fill": softmax_of(lambda z: (0.3 * z).masked_fill(~SEEN, -1e9)),
    "where": softmax_of(lambda z: torch.where(SEEN, z / 3, LOWEST)),
    "additive mask and bias": softmax_of(lambda z: z / 3 + floats(SEEN) + BIAS),
    "bias, then scale": softmax_of(lambda z: (z + BIAS) * 0.3),
    "subtracted": softmax_of(lambda z: z - BIAS),
    "soft-capped": softmax_of(soft_capped),
    "in place": softmax_of(in_place),
    "assigned": softmax_of(assigned),
    "scaled per head": softmax_of(scaled_per_head),
    "merged and split": softmax_of(merged_and_split),
    "higher precision": softmax_of(lambda z: z.to(torch.float64).contiguous()),
    "torch.softmax, dropout off": lambda q, k, v: F.dropout(torch.softmax(q @ k.mT, -1), 0.5, False) @ v,
    "einsum": einsum,
    "grouped": grouped,
    "baddbmm": with_baddbmm,
    "split for the softmax": split_for_the_softmax,
    "sdpa, bool mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, SEEN),
    "sdpa, float mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, BIAS + floats(SEEN), scale=0.2),
    "sdpa, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "sdpa, causal, fewer queries": lambda q, k, v: F.scaled_dot_product_attention(
        q[:, :, :4], k, v, is_causal=True
    ),
    "sdpa, lower right": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, 4:], k, v, LOWER_RIGHT),
    "sdpa, lower right, made inside": lambda q, k, v: F.scaled_dot_product_attention(
        q[:, :, 4:], k, v, causal_lower_right(3, LENGTH)
    ),
    "sdpa, grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "sdpa, no heads": lambda q, k, v: F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], SEEN),
    "sdpa, windows": lambda q, k, v: F.scaled_dot_product_attention(*(x[:, None] for x in (q, k, v)), SEEN),
    "sdpa, narrow values": lambda q, k, v: F.scaled_dot_product_attention(q, k, v[..., :3]),
}


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_the_captured_tensors_are_all_that_attention_is_made_of(kind):
    output, calls, audit = watched(Attention(ATTENTIONS[kind]), draw(2, LENGTH, WIDTH))
    (call,) = calls
    torch.testing.assert_close(naive(call), call.mixed, rtol=1e-10, atol=1e-10)
    assert torch.equal(call.mixed.flatten(), output.flatten())
    assert recomputation_residual(call).residual < 1e-13
    assert not audit.skipped
    assert "__new__" not in vars(CausalBias)
    assert (call.layer, call.module, call.occurrence) == (0, "", 0)
    assert call.q.shape[1] == (1 if kind in ("baddbmm", "sdpa, no heads") else HEADS)


GROUPED = {  # shapes of q, k and v without their lengths and widths
    "keys and values of different heads": ((2, 6), (2, 2), (2, 3)),
    "shared by all samples": ((2, 4), (1, 2), (1, 2)),
    "queries of one sample": ((1, 4), (2, 2), (2, 1)),
    "no samples": ((6,), (2,), (3,)),
    "windows": ((3, 2, 4), (3, 2, 2), (2, 4)),
}


@pytest.mark.parametrize("kind", GROUPED)
def test_grouped_heads_are_shared_as_torch_shares_them(kind):
    q, k, v = (draw(*lead, 5, 4, seed=n) for n, lead in enumerate(GROUPED[kind]))
    mask = torch.rand(q.shape[-3], 5, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    mask |= torch.eye(5, dtype=torch.bool)

    class Grouped(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    def spread(x):
        return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)

    model = Grouped()
    output, (call,), audit = watched(model, q, k, v)
    scores = (q @ spread(k).mT / 2).masked_fill(~mask, -math.inf)
    found = call.scores(torch.float64).masked_fill(~call.part().allowed, -math.inf)
    torch.testing.assert_close(found.flatten(), scores.flatten())
    assert torch.equal(call.mixed.flatten(), output.flatten())
    assert recomputation_residual(call).residual < 1e-13
    assert not audit.skipped
    kept = scores.masked_fill(scores < scores.topk(2).values[..., 1:], -math.inf)
    expected = kept.softmax(-1) @ spread(v)
    with torch.no_grad(), sparsify(model, TopK(2)):
        found = model(q, k, v)
    torch.testing.assert_close(found, expected)


def test_a_causal_rule_costs_no_mask():
    for kind, first in (("sdpa, causal", 0), ("sdpa, lower right", 4)):
        (call,) = watched(Attention(ATTENTIONS[kind]), draw(2, LENGTH, WIDTH))[1]
        assert (call.causal, call.first_query, call.allowed) == (True, first, None)


def test_allowed_keys_of_some_rows_are_those_rows_of_the_whole_mask():
    (call,) = watched(Attention(ATTENTIONS["sdpa, lower right"]), draw(2, LENGTH, WIDTH))[1]
    whole = torch.ones(3, LENGTH, dtype=torch.bool).tril(4)
    assert torch.equal(call.part(queries=slice(1, 3)).allowed[0, 0], whole[1:3])
    padded = dataclasses.replace(call, allowed=torch.arange(LENGTH)[None, None, None] > 0)
    assert torch.equal(padded.part(queries=slice(2)).allowed[0, 0], whole[:2] & (torch.arange(LENGTH) > 0))


@pytest.mark.parametrize(
    ("kind", "missed"),
    [
        ("sdpa, float mask", {"bias": None}),
        ("sdpa, bool mask", {"allowed": None}),
        ("sdpa, causal", {"causal": False}),
        ("soft-capped", {"softcap": None}),
        ("plain", {"scale": 1.01}),
        ("plain", {"sinks": torch.zeros(HEADS, dtype=torch.float64)}),
    ],
)
def test_the_residual_shows_what_was_missed(kind, missed):
    (call,) = watched(Attention(ATTENTIONS[kind]), draw(2, LENGTH, WIDTH))[1]
    found = recomputation_residual(dataclasses.replace(call, **missed))
    assert found.residual > 1e-4
    assert found.over_rounding > 1


NOT_ATTENTION = {
    "softmax over queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "sigmoid": lambda q, k, v: (q @ k.mT).sigmoid() @ v,
    "weights scaled by hand": lambda q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v,
    "a part of the weights": lambda q, k, v: (q @ k.mT).softmax(-1)[..., :3] @ v[..., :3, :],
    "two softmaxes subtracted": lambda q, k, v: ((q @ k.mT).softmax(-1) - (k @ q.mT).softmax(-1)) @ v,
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_what_is_not_softmax_attention_is_not_captured_and_the_rest_is_listed(name):
    _, calls, audit = watched(Attention(NOT_ATTENTION[name]), draw(2, LENGTH, WIDTH))
    assert not calls
    assert {skipped.operation for skipped in audit.skipped} == {"bmm" if name == "sigmoid" else "softmax"}


def test_a_language_model_head_is_not_taken_for_attention():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(draw(20, WIDTH))

        def forward(self, x):
            return (x @ self.table.t()).softmax(-1) @ self.table

    _, calls, audit = watched(Head(), draw(2, LENGTH, WIDTH))
    assert not calls
    assert [s.reason[:23] for s in audit.skipped] == ["its keys are parameters"]


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:Warning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", ["plain", "sdpa, causal", "sdpa, float mask"])
def test_a_traced_graph_is_captured_below_python(kind):
    x = draw(2, LENGTH, WIDTH)
    model = nn.Sequential(torch.jit.trace(Attention(ATTENTIONS[kind]), x, check_trace=False))
    _, (call,), audit = watched(model, x)
    torch.testing.assert_close(naive(call), call.mixed, rtol=1e-10, atol=1e-10)
    assert (call.module, audit.skipped) == ("0", {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_listed_as_not_captured():
    class Ragged(nn.Module):
        def forward(self, x):
            q = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
            q = q.unflatten(-1, (HEADS, HEAD_WIDTH)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).values()

    _, calls, audit = watched(Ragged(), draw(2, LENGTH, WIDTH).float())
    assert not calls
    assert [s.operation for s in audit.skipped] == ["scaled_dot_product_attention"]


def plus_mask(value):
    return softmax_of(lambda z: z + torch.where(SEEN, 0.0, value))


ALIBI = -3e3 * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
FORBIDDING = {
    "added": plus_mask(-1e4),
    "added, huge": plus_mask(-1e30),
    "added to a bias": softmax_of(lambda z: z + (BIAS + torch.where(SEEN, 0.0, -1e4))),
    "filled": softmax_of(lambda z: z.masked_fill(~SEEN, -1e4)),
    "mixed by hand": softmax_of(lambda z: z * SEEN - 1e4 * (1 - SEEN.double())),
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.where(SEEN, 0.0, -1e4).double()),
}


@pytest.mark.parametrize("kind", FORBIDDING)
def test_a_constant_of_minus_ten_thousand_or_less_forbids_a_key_and_is_remarked(kind):
    _, (call,), audit = watched(Attention(FORBIDDING[kind]), draw(2, LENGTH, WIDTH))
    assert torch.equal(call.part().allowed.expand(2, HEADS, LENGTH, LENGTH), SEEN.expand(2, HEADS, LENGTH, LENGTH))
    assert [remark.text.split(":")[0][:13] for remark in audit.remarks] == ["a mask of -1e"]


@pytest.mark.parametrize("kind", ["by hand", "sdpa"])
def test_a_term_that_falls_with_distance_is_a_bias_however_low(kind):
    attend = softmax_of(lambda z: z + ALIBI)
    if kind == "sdpa":
        attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, ALIBI.double())  # noqa: E731
    _, (call,), audit = watched(Attention(attend), draw(2, LENGTH, WIDTH))
    assert call.part().allowed is None
    assert torch.equal(call.bias.expand(1, 1, LENGTH, LENGTH)[0, 0].float(), ALIBI)
    assert [remark.text[:23] for remark in audit.remarks] == ["a term of down to -1.8e"]


FAINT = {  # whether it is remarked on
    "a hundred": (softmax_of(lambda z: z + BIAS + torch.where(SEEN, 0.0, -100.0)), True),
    "ten": (softmax_of(lambda z: z + torch.where(SEEN, 0.0, -10.0)), False),
    "by distance": (softmax_of(lambda z: z + ALIBI / 500), False),
    "scores alone": (softmax_of(lambda z: 40 * z.sign()), False),
}


@pytest.mark.parametrize("kind", FAINT)
def test_a_term_that_leaves_a_key_no_weight_but_is_no_mask_is_remarked(kind):
    attend, said = FAINT[kind]
    _, (call,), audit = watched(Attention(attend), draw(2, LENGTH, WIDTH))
    assert call.part().allowed is None
    assert call.bias is not None
    assert ["if it is meant as a mask" in remark.text for remark in audit.remarks] == [True] * said


def test_calls_of_a_shared_module_are_told_apart_and_counted_anew_in_each_forward():
    shared = Attention(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = shared, Attention(ATTENTIONS["sdpa, causal"])

        def forward(self, x):
            for attention in (self.first, self.first, self.last):
                x = attention(x).transpose(1, 2).flatten(2)
            return x

    model, calls = Twice(), []
    with torch.no_grad(), watch_attention(model, calls.append) as audit:
        model(draw(2, LENGTH, WIDTH))
        model(draw(2, LENGTH, WIDTH))
    once = [("first", 0, 0), ("first", 0, 1), ("last", 1, 0)]
    assert [(c.module, c.layer, c.occurrence) for c in calls] == once * 2
    assert audit.modules == ["first", "last"]


def test_attention_outside_the_model_is_not_captured():
    model, other, calls = Attention(ATTENTIONS["plain"]), Attention(ATTENTIONS["plain"]), []
    q = draw(1, 1, 3, 4)
    with watch_attention(model, calls.append):
        F.scaled_dot_product_attention(q, q, q)
        other(draw(2, LENGTH, WIDTH))
    assert not calls


def test_the_consumer_runs_without_gradient_autocast_and_modes_and_is_not_captured_itself():
    seen = []

    class Count(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Count.count += 1
            return func(*args, **(kwargs or {}))

    def consume(call):
        before = Count.count
        mixed = F.scaled_dot_product_attention(call.q, call.k, call.v)
        again = (call.q @ call.k.mT).softmax(-1) @ call.v
        gradient = mixed.requires_grad or again.requires_grad or call.q.requires_grad
        seen.append((gradient, torch.is_autocast_enabled("cpu"), Count.count - before))

    for attend in (ATTENTIONS["plain"], F.scaled_dot_product_attention):
        model = Attention(attend).float()
        with Count(), torch.autocast("cpu", torch.bfloat16), watch_attention(model, consume):
            model(draw(2, LENGTH, WIDTH).float())
    assert seen == [(False, False, 0)] * 2
    assert Count.count > 0


def test_gradients_in_training_mode_are_the_same_to_the_bit():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.3, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    gradients, dropouts = [], []
    for watch in (False, True):
        model.zero_grad()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            if watch:
                with watch_attention(model, lambda call: dropouts.append(call.dropout)):
                    model(draw(2, LENGTH, WIDTH).float()).square().sum().backward()
            else:
                model(draw(2, LENGTH, WIDTH).float()).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert dropouts == [0.3, 0.3]


class Checkpointed(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return checkpoint(lambda x: self.inside(x).sin().exp(), x, use_reentrant=False)


def test_attention_recomputed_in_the_backward_pass_is_not_counted_twice(tiny_config):
    """Function modes are off in backward; hooks on modules are not."""
    inputs = (draw(2, LENGTH, WIDTH), torch.tensor([[0, 1, 1, 0]]))
    listed = []
    for inside, x in zip((Attention(ATTENTIONS["plain"]), Encoder(tiny_config())), inputs, strict=True):
        model, calls = Checkpointed(inside), []
        with watch_attention(model, calls.append) as audit:
            output = model(x)
            forward = len(calls)
            output.sum().backward()
        assert len(calls) == forward > 0
        listed.append([(s.reason[:31], count) for s, count in audit.skipped.items()])
    assert listed == [[], [("recomputed in the backward pass", 1)] * 2]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_attention_under_a_transform_is_listed():
    model, calls = Attention(ATTENTIONS["sdpa, bool mask"]), []
    with watch_attention(model, calls.append) as audit:
        torch.func.vmap(model)(draw(3, 1, LENGTH, WIDTH))
    assert not calls
    assert "torch.func" in next(iter(audit.skipped)).reason


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda y: model(y).sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[0],
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,))[0],
    "jacrev": lambda model, x: torch.func.jacrev(lambda y: model(y).sum())(x),
}


class Transformed(nn.Module):
    def __init__(self, transform, attend):
        super().__init__()
        self.inside, self.transform = Attention(ATTENTIONS[attend]), TRANSFORMS[transform]

    def forward(self, x):
        return self.transform(self.inside, x)


TORCHS_OWN_WARNINGS = pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:There is a performance drop")


@TORCHS_OWN_WARNINGS
@pytest.mark.parametrize("attend", ["plain", "einsum", "split for the softmax"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_attention_by_hand_under_a_transform_is_captured_and_not_masked(transform, attend):
    model, x = Transformed(transform, attend), draw(2, LENGTH, WIDTH)
    _, (call,), audit = watched(model, x)
    _, (usual,), _ = watched(model.inside, x)
    assert not audit.skipped
    allowed = usual.part().allowed
    found, expected = call.scores(torch.float64), usual.scores(torch.float64)
    if allowed is not None:
        found, expected = found.where(allowed, 0), expected.where(allowed, 0)
        assert torch.equal(call.part().allowed.expand(found.shape), allowed.expand(found.shape))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(call.mixed, usual.mixed)
    with pytest.raises(InputError, match="it takes no mask here"), sparsify(model, TopK(1)):
        model(x)


@TORCHS_OWN_WARNINGS
@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name != "jvp"])  # torch has none of it
def test_torchs_attention_under_a_transform_is_listed(transform):
    _, calls, audit = watched(Transformed(transform, "sdpa, causal"), draw(2, LENGTH, WIDTH))
    assert (len(calls), [s.reason for s in audit.skipped]) == (0, [TRANSFORMED])


@pytest.mark.slow
def test_a_compiled_model_is_captured_and_stays_compiled():
    model, calls = Attention(ATTENTIONS["plain"]), []
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        before = compiled(draw(2, LENGTH, WIDTH))
        with watch_attention(compiled, calls.append):
            during = compiled(draw(2, LENGTH, WIDTH))
        after = compiled(draw(2, LENGTH, WIDTH))
    assert (len(calls), len(graphs)) == (1, 1)
    assert torch.equal(before, after)
    torch.testing.assert_close(before, during, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_in_a_fused_encoder_leaves_zeros_that_the_watch_replaces_by_values():
    """What the documentation says about nn.TransformerEncoder's nested-tensor path."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x, padding = draw(2, LENGTH, WIDTH).float(), torch.arange(LENGTH)[None] >= torch.tensor([[LENGTH], [4]])
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padding)
    with torch.no_grad(), watch_attention(model, lambda call: None):
        during = model(x, src_key_padding_mask=padding)
    assert (before[padding] == 0).all()
    assert (during[padding] != 0).any()
    torch.testing.assert_close(before[~padding], during[~padding], rtol=1e-5, atol=1e-5)


class Named(torch.Tensor):
    """A tensor that torch calls another type."""


@pytest.mark.parametrize("need_weights", [False, True])
def test_inside_torchs_own_layer_too_only_plain_tensors_are_captured(need_weights):
    layer, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), draw(2, LENGTH, WIDTH).float()
    with watch_attention(layer, pytest.fail) as audit:
        layer(*3 * [x.as_subclass(Named)], need_weights=need_weights)
    (skipped,) = audit.skipped
    assert "only plain" in skipped.reason


@pytest.mark.slow
def test_watching_needs_neither_transformers_nor_the_compiler():
    script = """
import sys, torch
from semdiag.capturing.attention_calls import watch_attention
model = torch.nn.MultiheadAttention(4, 1)
with watch_attention(model, lambda call: None) as audit:
    model(*3 * [torch.ones(2, 1, 4)])
print(sum(audit.captured.values()), "transformers" in sys.modules, "torch._dynamo" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "False", "False"]


FIRST_COMPILED = {
    "compile": "return torch.compile(lambda q: (q @ q.mT).softmax(-1) @ q, backend='eager', fullgraph=True)(x)",
    "flex": "from torch.nn.attention.flex_attention import flex_attention; return flex_attention(x, x, x)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST_COMPILED)
def test_a_compiler_that_the_model_itself_imports_does_not_hide_its_attention(name):
    script = f"""
import sys, torch
from semdiag.capturing.attention_calls import watch_attention
class Model(torch.nn.Module):
    def forward(self, x):
        {FIRST_COMPILED[name]}
original = torch.compile
assert "torch._dynamo" not in sys.modules
with watch_attention(Model(), lambda call: None) as audit:
    pass
assert torch.compile is original
model, x = Model(), torch.ones(1, 1, 3, 4)
with torch.no_grad(), watch_attention(model, lambda call: None) as audit:
    model(x)
assert "torch._dynamo" in sys.modules and torch.compile is original
print(sum(audit.captured.values()), sum(audit.skipped.values()), torch._dynamo.eval_frame._stance.stance)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["1", "0", "default"], found.stderr
