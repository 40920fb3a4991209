"""Attention in the bodies of higher-order operators, against the same attention in their place, in float64.

Tolerances: the same operations run in the same order, but for sums of gradients, of which at most 64 are added:
they round by 64 · 2^-53 of the largest, and 1e-12 is some hundred times that.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.map import map as over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.strict_mode import strict_mode
from torch._higher_order_ops.while_loop import while_loop
from torch._prims.rng_prims import run_and_save_rng_state
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.provenance.operations import MAY_HIDE
from semdiag.capturing.sparsify import TopK, sparsify
from semdiag_files import InputError

BATCH, LENGTH, WIDTH = 2, 5, 4
NEAR = {"rtol": 1e-12, "atol": 1e-12}


def by_hand(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / WIDTH**0.5, -1) @ v


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v) * 1.0


def no_attention(q, k, v):
    return torch.tanh(q * k) + v


class Graph(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v):
        return (self.attend(q, k, v),)


GRAPHS = {attend: torch.fx.symbolic_trace(Graph(attend)) for attend in (by_hand, fused, no_attention)}


def every_sample(attend, q, k, v):
    return torch.stack([attend(a[None], b[None], c[None])[0] for a, b, c in zip(q, k, v, strict=True)])


def twice(attend, q, k, v):
    return attend(attend(q, k, v), k, v)


def as_branch(attend, q, k, v):
    return torch.cond(q.sum() > -1e9, attend, lambda q, k, v: q * 1.0, (q, k, v))


def as_loop(attend, q, k, v):
    return while_loop(lambda i, q: i < 2, lambda i, q: (i + 1, attend(q, k, v)), (torch.tensor(0), q))[1]


def as_scan(attend, q, k, v):
    def step(carry, at):
        q, k, v = (x[None] for x in at)
        return carry + 1.0, attend(q, k, v)[0]

    return scan(step, torch.zeros(2), (q, k, v))[1]


def as_map(attend, q, k, v):
    return over(lambda at: attend(*(x[None] for x in at))[0], (q, k, v))


def as_hint(attend, q, k, v):
    return hints_wrapper(attend, (q, k, v), {}, hints={})


def as_strict(attend, q, k, v):
    return strict_mode(lambda *x: (attend(*x),), (q, k, v))[0]


def as_subgraph(attend, q, k, v):
    operands = (q, k, v) if torch.__version__ >= (2, 8) else ((q, k, v),)
    return invoke_subgraph(GRAPHS[attend], "semdiag_tests", *operands)[0]


def once(attend, q, k, v):
    return attend(q, k, v)


OPERATORS = {
    "cond": (as_branch, once, 1),
    "while_loop": (as_loop, twice, 2),
    "scan": (as_scan, every_sample, BATCH),
    "map": (as_map, every_sample, BATCH),
    "hints_wrapper": (as_hint, once, 1),
    "strict_mode": (as_strict, once, 1),
    "invoke_subgraph": (as_subgraph, once, 1),
}


class Layer(nn.Module):
    def __init__(self, run, attend):
        super().__init__()
        self.qkv, self.run, self.attend = nn.Linear(WIDTH, 3 * WIDTH), run, attend

    def forward(self, x):
        return self.run(self.attend, *(part.contiguous() for part in self.qkv(x).chunk(3, -1)))


def layers(operator, attend):
    run, plain, calls = OPERATORS[operator]
    torch.manual_seed(0)
    model = nn.Sequential(Layer(run, attend)).double()
    reference = nn.Sequential(Layer(plain, attend)).double()
    reference.load_state_dict(model.state_dict())
    return model, reference, calls, torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)


def gradients(model, out):
    return torch.autograd.grad(out.square().sum(), list(model.parameters()))


def kept_best(q, k, v):
    """Of each query, the best two keys, dense: exponentials, of which the others are zero."""
    scores = q @ k.transpose(-1, -2) / WIDTH**0.5
    least = scores.detach().sort(-1, descending=True).values[..., 1:2]
    weights = scores.exp() * (scores >= least)
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("attend", [by_hand, fused])
@pytest.mark.parametrize("operator", OPERATORS)
def test_attention_in_a_body_is_captured(operator, attend, context):
    model, reference, count, x = layers(operator, attend)
    calls, expected = [], []
    with context():
        with watch_attention(reference, expected.append):
            right = reference(x)
        with watch_attention(model, calls.append) as audit:
            out = model(x)
    assert not audit.skipped
    assert len(calls) == len(expected) == count
    assert {call.module for call in calls} == {"0"}
    assert [call.occurrence for call in calls] == [*range(count)]
    torch.testing.assert_close(out, right, **NEAR)
    for got, wanted in zip(calls, expected, strict=True):
        torch.testing.assert_close(
            got.scores(torch.float64).softmax(-1), wanted.scores(torch.float64).softmax(-1), **NEAR
        )
        torch.testing.assert_close(got.mixed, wanted.mixed, **NEAR)
    if context is torch.enable_grad:
        for got, wanted in zip(gradients(model, out), gradients(reference, right), strict=True):
            torch.testing.assert_close(got, wanted, **NEAR)
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_body_without_attention_is_not_named(operator):
    model, reference, _, x = layers(operator, no_attention)
    calls = []
    with watch_attention(model, calls.append) as audit:
        out = model(x)
    assert not calls
    assert not audit.skipped
    torch.testing.assert_close(out, reference(x), **NEAR)


@pytest.mark.parametrize("attend", [by_hand, fused])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_masked_body_has_outputs_and_gradients_of_dense_attention(operator, attend):
    model, _, count, x = layers(operator, attend)
    dense = nn.Sequential(Layer(OPERATORS[operator][1], kept_best)).double()
    dense.load_state_dict(model.state_dict())
    with sparsify(model, TopK(2)) as masked:
        out = model(x)
    assert masked.calls == count
    assert masked.kept["most"].max() == 2
    right = dense(x)
    torch.testing.assert_close(out, right, **NEAR)
    for got, wanted in zip(gradients(model, out), gradients(dense, right), strict=True):
        torch.testing.assert_close(got, wanted, **NEAR)


def test_weights_that_leave_a_body_are_followed_or_named():
    def split(attend, q, k, v):
        return attend(lambda z: torch.softmax(z, -1) * 1.0, q @ k.transpose(-1, -2)) @ v

    ways = {
        "cond": lambda f, z: torch.cond(z.sum() > -1e9, f, lambda z: z * 1.0, (z,)),
        "map": lambda f, z: over(f, z),
    }
    seen = {}
    for name, way in ways.items():
        model = Layer(split, way)
        with torch.no_grad(), watch_attention(model, lambda call: None) as audit:
            model(torch.randn(BATCH, LENGTH, WIDTH))
        seen[name] = (audit.captured.total(), [s.operation for s in audit.skipped])
    assert seen == {"cond": (1, []), "map": (0, ["softmax"])}


def test_an_operator_whose_body_is_hidden_is_named_where_it_may_attend():
    aten = torch.ops.aten

    def hidden(attend, q, k, v):
        return run_and_save_rng_state(aten._scaled_dot_product_flash_attention_for_cpu.default, *heads(q, k, v))[
            1
        ][0]

    def harmless(attend, q, k, v):
        return run_and_save_rng_state(aten.mul.Tensor, q, k)[1] + v

    def heads(*given):
        return [x[:, None] for x in given]

    x, found = torch.randn(BATCH, LENGTH, WIDTH), []
    for run in (hidden, harmless):
        model = nn.Sequential(Layer(run, None))
        with torch.no_grad(), watch_attention(model, lambda call: None) as audit:
            model(x)
        found.append([*audit.skipped])
    assert found == [[("0", "run_and_save_rng_state", MAY_HIDE)], []]
    model = nn.Sequential(Layer(hidden, None))
    said = r"0: run_and_save_rng_state .*may hide attention"
    with torch.no_grad(), pytest.raises(InputError, match=said), sparsify(model, TopK(2)):
        model(x)
