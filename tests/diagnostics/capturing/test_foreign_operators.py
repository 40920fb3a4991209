"""Operators of other libraries: one that may be attention is in the audit, and no other."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.provenance.operations import is_foreign
from semdiag.capturing.sparsify import TopK, sparsify
from semdiag_files import InputError

pytestmark = pytest.mark.usefixtures("own_random_numbers")
WIDTH, HEADS = 16, 4
SAID = "a custom operator, which may be attention: it cannot be inspected"
library = torch.library.Library("semdiag_tests", "DEF")


def defined(schema, function, opaque=True):
    def kernel(*args):  # as in C++, nothing of it can be seen
        with _disable_current_modes():
            return function(*args)

    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, kernel if opaque else function, "CompositeExplicitAutograd")
    return getattr(torch.ops.semdiag_tests, name)


def into(q, k, v, out):
    out.copy_(F.scaled_dot_product_attention(q, k, v))


THREE = "(Tensor q, Tensor k, Tensor v) -> Tensor"
mixing = defined(f"mixing{THREE}", F.scaled_dot_product_attention)
mixing_into = defined("mixing_into(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()", into)
with_sums = defined(
    "with_sums(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)",
    lambda q, k, v: (F.scaled_dot_product_attention(q, k, v), (q @ k.mT).logsumexp(-1)),
)
packed_attn = defined("packed_attn(Tensor x) -> Tensor", lambda x: F.scaled_dot_product_attention(x, x, x))
norm = defined("norm(Tensor x, Tensor weight) -> Tensor", lambda x, weight: x * x.norm() * weight)
gate = defined("gate(Tensor x, Tensor y) -> Tensor", lambda x, y: x * y.sigmoid())
shift = defined(f"shift{THREE}", lambda x, scale, by: x * scale + by)
rotary = defined(
    "rotary(Tensor q, Tensor k, Tensor c, Tensor s) -> (Tensor, Tensor)",
    lambda q, k, c, s: (q * c + q.flip(-1) * s, k * c + k.flip(-1) * s),
)
count = defined("count_attention(Tensor positions) -> Tensor", lambda positions: positions.bincount())


class Layer(nn.Module):
    def __init__(self, mix, heads=True):
        super().__init__()
        self.qkv, self.mix, self.heads = nn.Linear(WIDTH, 3 * WIDTH), mix, heads
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.heads:
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        out = self.mix(self, q, k, v)
        return x + (out.transpose(1, 2).flatten(2) if self.heads else out)


def mixed_into(self, q, k, v):
    mixing_into(q, k, v, out := torch.empty_like(q))
    return out


def turned(self, q, k, v):
    angles = q.detach().sum((1, 3), keepdim=True).expand(-1, 1, -1, q.shape[-1]).contiguous()
    q, k = rotary(q, k, angles.cos(), angles.sin())
    return F.scaled_dot_product_attention(q, k, v)


MAY_BE = {
    "q, k, v": (lambda self, q, k, v: mixing(q, k, v), "mixing"),
    "fewer heads and wider values": (lambda self, q, k, v: mixing(q, k, torch.cat([v, v], -1))[..., :4], "mixing"),
    "written": (mixed_into, "mixing_into"),
    "with what was summed": (lambda self, q, k, v: with_sums(q, k, v)[0], "with_sums"),
    "by name": (lambda self, q, k, v: packed_attn(q), "packed_attn"),
}
PACKED = (
    ("CompositeExplicitAutograd", F.scaled_dot_product_attention),
    ("CPU", F.scaled_dot_product_attention),
    ("CPU", lambda q, k, v: torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v),
)
NONE = {
    "norm": lambda self, q, k, v: norm(q, self.weight[:4]) + F.scaled_dot_product_attention(q, k, v),
    "gate": lambda self, q, k, v: gate(F.scaled_dot_product_attention(q, k, v), v),
    "rotary embedding": turned,
    "parameters": lambda self, q, k, v: (
        shift(q, self.weight[:4].sin()[None, None, None], self.weight[4:8])
        + F.scaled_dot_product_attention(q, k, v)
    ),
    "whole numbers": lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v) + count(torch.arange(4)),
}


def audited(model, context=torch.no_grad):
    calls, x = [], torch.randn(2, 5, WIDTH)
    with context():
        before = model(x)
        with watch_attention(model, calls.append) as audit:
            assert torch.equal(model(x), before)
    return calls, {(s.module, s.operation, s.reason): n for s, n in audit.skipped.items()}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MAY_BE)
def test_an_operator_that_may_be_attention_is_named_and_not_masked(name, context):
    mix, operator = MAY_BE[name]
    model = nn.Sequential(Layer(NONE["gate"]), Layer(mix))
    calls, skipped = audited(model, context)
    assert [call.module for call in calls] == ["0"]
    assert skipped == {("1", f"semdiag_tests::{operator}", SAID): 1}
    with torch.no_grad(), pytest.raises(InputError, match=f"semdiag_tests::{operator}"), sparsify(model, TopK(1)):
        model(torch.randn(2, 5, WIDTH))


@pytest.mark.parametrize("name", NONE)
def test_other_operators_are_not_named(name):
    calls, skipped = audited(Layer(NONE[name]))
    assert (len(calls), skipped) == (1, {})


def test_of_three_axes_the_name_of_the_module_counts():
    """Streams have three axes, and a kernel that scales and shifts one is given three of them."""
    x = nn.ModuleDict({"self_attn": Layer(lambda self, *qkv: mixing(*qkv), heads=False)})
    x.forward = lambda y: x["self_attn"](y)
    assert list(audited(x)[1]) == [("self_attn", "semdiag_tests::mixing", SAID)]
    assert audited(Layer(lambda self, *streams: shift(*streams), heads=False)) == ([], {})


@pytest.mark.parametrize("hidden", [True, False])
def test_an_operator_with_a_gradient_of_its_own_is_captured_or_named_in_training(hidden):
    """Where its kernel is Python's, what that calls is seen; where it is not, it may be attention."""

    @torch.library.custom_op(f"semdiag_tests::trained{hidden}", mutates_args=())
    def trained(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with _disable_current_modes() if hidden else nullcontext():
            return F.scaled_dot_product_attention(q, k, v)

    trained.register_autograd(lambda context, grad: (grad, grad, grad))
    model = Layer(lambda self, q, k, v: trained(q, k, v)).train()
    calls, skipped = audited(model, torch.enable_grad)
    assert len(calls) == (not hidden)
    assert skipped == ({("", "semdiag_tests::trainedTrue", SAID): 1} if hidden else {})
    with (
        pytest.raises(InputError, match="Some of the model's attention cannot be masked"),
        sparsify(model, TopK(1)),
    ):
        model(torch.randn(2, 5, WIDTH))


@pytest.mark.parametrize("number", range(len(PACKED)))
def test_attention_in_an_operator_whose_kernel_is_python_is_captured(number):
    """Nothing in its name or its arguments says that it is attention."""
    key, attend = PACKED[number]
    library.define(f"stir{number}(Tensor x) -> Tensor")
    library.impl(f"stir{number}", lambda x: attend(x, x * 1.1, x * 0.9), key)
    stir = getattr(torch.ops.semdiag_tests, f"stir{number}")
    model = Layer(lambda self, q, k, v: stir(q))
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        calls, skipped = audited(model, context)
        assert (len(calls), skipped) == (1, {})
        (call,) = calls
        weights = call.scores(torch.float64).softmax(
            -1
        )  # of float32: the sums of 5 products round by 1e-6 at most
        torch.testing.assert_close(weights @ call.v.double(), call.mixed.double(), rtol=1e-5, atol=1e-6)


def test_torchs_own_operators_are_none():
    spaces = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
    known = {"aten", "prims", "quantized", "mkldnn", "onednn", "c10d", "_c10d_functional", "profiler", "inductor"}
    assert {"semdiag_tests"} <= {space for space in spaces if is_foreign(space)}
    assert not any(map(is_foreign, (known & spaces) | {"torchvision", "semdiag"}))


torch_library = torch.library.Library("aten", "FRAGMENT")


def kernel(schema):
    name = schema.partition("(")[0]
    torch_library.define(schema)

    def run(q, k=None, v=None):
        with _disable_current_modes():
            return F.scaled_dot_product_attention(q, q if k is None else k, q if v is None else v)

    torch_library.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.aten, name)


KERNELS = {
    "by its shapes": (kernel("_semdiag_fused(Tensor x, Tensor y, Tensor z) -> Tensor"), True),
    "by its schema": (kernel("_semdiag_named(Tensor query, Tensor key, Tensor value) -> Tensor"), False),
    "by its name": (kernel("_semdiag_attn(Tensor x) -> Tensor"), True),
    "by one packed tensor": (kernel("_semdiag_packed(Tensor qkv) -> Tensor"), True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_new_kernel_of_torch_is_named_and_not_masked(name):
    run, heads = KERNELS[name]
    one = len(run.default._schema.arguments) == 1
    model = nn.Sequential(Layer(lambda self, q, k, v: run(q) if one else run(q, k, v), heads))
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad(), watch_attention(model, lambda call: None) as audit:
        model(x)
    [(skipped, times)] = audit.skipped.items()
    assert (skipped.operation, times) == (run.default._schema.name, 1)
    assert "kernel of torch" in skipped.reason
    with torch.no_grad(), pytest.raises(InputError, match="cannot be masked"), sparsify(model, TopK(2)):
        model(x)
