"""What rounding can do to an attention, and what is left out of one: told apart in every precision.

At six scales of scores, in four precisions, fused and by hand: no capture that is whole is called incomplete, and
every part that is left out is found, or the precision is said to tell nothing. The bias grows with the scores: one
that is smaller than their rounding changes nothing that could be found.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from residuals import recomputation_residual
from torch import nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_calls import watch_attention
from semdiag.measuring.findings.findings import BLIND, Completeness, completeness

SAMPLES, HEADS, LENGTH, WIDTH = 4, 4, 48, 16
SCALES = (1.0, 3.0, 8.0, 20.0, 50.0, 120.0)  # standard deviations of the scores, in nats
DTYPES = ("float32", "bfloat16", "float16", "autocast")
WAYS = ("sdpa", "eager")


class Attention(nn.Module):
    """Causal, with a bias that falls with distance; scores as large as a scale says."""

    def __init__(self, way, scale):
        super().__init__()
        self.way, self.scale, self.slope = way, 1.0, 0.5 * max(1.0, scale / 8)
        self.project = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q * self.scale, k, v))
        places = torch.arange(LENGTH)
        hidden = places > places[:, None]
        bias = (-self.slope * (places[:, None] - places)).to(q.dtype).masked_fill(hidden, -torch.inf)
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return (q @ k.mT * WIDTH**-0.5 + bias).softmax(-1) @ v


def captured(way, dtype, scale):
    """The one call of a model in a precision, and the residual of it."""
    torch.manual_seed(0)
    model, calls = Attention(way, scale).eval(), []
    x = torch.randn(SAMPLES, LENGTH, HEADS * WIDTH)
    with torch.no_grad():
        q, k, _ = model.project(x).unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        model.scale = scale / float((q.transpose(1, 2) @ k.transpose(1, 2).mT * WIDTH**-0.5).std())
        if dtype != "autocast":
            model, x = model.to(getattr(torch, dtype)), x.to(getattr(torch, dtype))
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"),
            watch_attention(model, calls.append),
        ):
            model(x)
    (call,) = calls
    return call


def answer(call):
    found = recomputation_residual(call)
    row = {"residual": found.residual, "residual_over_rounding": found.over_rounding, "rounding": found.rounding}
    return completeness(row), found


def without(call, part):
    """The call as a capture would have it that missed a part of it."""
    if part == "head":  # another head's values
        return dataclasses.replace(call, v=call.v.roll(1, 1))
    if part == "mask":
        return dataclasses.replace(call, allowed=None, causal=False)
    if part == "bias":
        return dataclasses.replace(call, bias=None)
    return dataclasses.replace(call, sinks=torch.full((HEADS,), float(call.scores(torch.float32).max())))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_a_whole_capture_is_within_rounding(way, dtype, scale):
    found, numbers = answer(captured(way, dtype, scale))
    coarse = dtype in ("bfloat16", "autocast") and scale > 50  # rounding changes which key is the largest
    assert found in ({Completeness.COMPLETE, Completeness.BLIND} if coarse else {Completeness.COMPLETE}), numbers


@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_values_of_one_sign_are_summed_within_rounding(length):
    """Partial sums grow to the whole: taken for sums of random signs, such attention was called incomplete."""
    torch.manual_seed(0)
    q, k = 0.1 * torch.randn(2, 1, 2, length, 8)
    v = 1 + 0.01 * torch.randn(1, 2, length, 8)
    mixed = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    found, numbers = answer(AttentionCall("attention", 0, q, k, v, 1.0, None, None, None, mixed))
    assert found == Completeness.COMPLETE, numbers


class Undivided(Attention):
    """Less a logsumexp that the format rounds, as Reformer has it."""

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, WIDTH)).transpose(1, 3).unbind(2)
        scores = q @ k.mT * WIDTH**-0.5 + self.slope
        return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ (1 + v / 100)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("level", [1.0, 6.0, 12.0])
def test_exponentials_that_nothing_divides_are_within_rounding(level, dtype):
    """A sum of exponentials far from 1 is rounded by much, and all weights of a row are off alike."""
    torch.manual_seed(0)
    model, calls = Undivided("", 1.0).to(getattr(torch, dtype)).eval(), []
    model.slope = level  # of all scores of a row: no weight depends on it
    with torch.no_grad(), watch_attention(model, calls.append):
        model(torch.randn(SAMPLES, LENGTH, HEADS * WIDTH).to(getattr(torch, dtype)))
    found, numbers = answer(calls[0])
    assert found == Completeness.COMPLETE, numbers
    wrong = dataclasses.replace(calls[0], v=calls[0].v * 1.2)
    assert answer(wrong)[0] == Completeness.MISSING


@pytest.mark.parametrize("part", ["head", "mask", "bias", "sink"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_what_was_left_out_is_found(way, dtype, scale, part):
    found, numbers = answer(without(captured(way, dtype, scale), part))
    coarse = dtype in ("bfloat16", "autocast") and scale > 8  # its unit times the scores is a nat and more
    assert found in ({Completeness.MISSING, Completeness.BLIND} if coarse else {Completeness.MISSING}), numbers


def test_where_rounding_could_hide_a_tenth_it_is_said():
    """Scores of 20 nats that are nearly alike, in bfloat16: every weight may be off by a factor."""
    torch.manual_seed(0)
    q = torch.full((1, 1, LENGTH, WIDTH), 2.0 * WIDTH**-0.25, dtype=torch.bfloat16)
    k, v = q * 20 + torch.randn(q.shape).to(q.dtype) / 8, torch.randn(q.shape).to(q.dtype)
    mixed = F.scaled_dot_product_attention(q, k, v)
    found, numbers = answer(AttentionCall("", 0, q, k, v, WIDTH**-0.5, None, None, None, mixed))
    assert numbers.over_rounding <= 1 < numbers.rounding / BLIND
    assert found is Completeness.BLIND


def test_an_unknown_residual_is_judged_unknown():
    unknown = {"residual": float("nan"), "residual_over_rounding": float("nan"), "rounding": float("nan")}
    assert completeness(unknown) is Completeness.UNKNOWN


class SingleSoftmax(Attention):
    """In float64, but for the softmax, as eager attention of transformers does it."""

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, WIDTH)).transpose(1, 3).unbind(2)
        return (q @ k.mT * WIDTH**-0.5).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


@pytest.mark.parametrize("scale", SCALES)
def test_a_softmax_in_float32_inside_a_float64_model_is_no_omission(scale):
    torch.manual_seed(0)
    model, calls = SingleSoftmax("eager", scale).double().eval(), []
    with torch.no_grad():
        model.project.weight.mul_(scale**0.5 / 0.4)
        with watch_attention(model, calls.append):
            model(torch.randn(SAMPLES, LENGTH, HEADS * WIDTH, dtype=torch.float64))
    (call,) = calls
    found = recomputation_residual(call)
    assert 1e-10 < found.residual < 1e-4
    assert found.over_rounding < 1
    for omitted in ({"scale": call.scale * 1.01}, {"bias": torch.randn(1, 1, LENGTH, LENGTH) / 100}):
        assert recomputation_residual(dataclasses.replace(call, **omitted)).over_rounding > 1


def test_rows_without_keys_may_be_no_numbers():
    """As of a sample that is all padding, behind attention that is written out: queries, keys, outputs."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 4, 5, generator=draw)
    q[2] = torch.nan
    allowed = torch.ones(3, 1, 1, 4, dtype=torch.bool)
    allowed[2] = False
    mixed = torch.softmax((q @ q.mT).masked_fill(~allowed, -torch.inf), -1) @ q
    assert mixed[2].isnan().all()
    found = recomputation_residual(AttentionCall("", 0, q, q, q, 1.0, allowed, None, None, mixed))
    whole = recomputation_residual(AttentionCall("", 0, q[:2], q[:2], q[:2], 1.0, None, None, None, mixed[:2]))
    assert found.over_rounding < 1
    assert found.rounding == pytest.approx(whole.rounding, rel=1e-6)
    wrong = AttentionCall("", 0, q, q, q, 1.0, allowed, None, None, 2 * mixed)
    assert recomputation_residual(wrong).over_rounding > 100
    nothing = AttentionCall("", 0, q[2:], q[2:], q[2:], 1.0, allowed[2:], None, None, mixed[2:])
    assert recomputation_residual(nothing) == (0, 0, 0)
