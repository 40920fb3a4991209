"""Gradients under a mask where a function has a backward pass of its own, against a dense reference in float64.

Tolerance: sums of fewer than 64 products round by 64 · 2^-53 of the largest; 1e-12 is some hundred times that.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionMeta, once_differentiable

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.sparsify import TopK, sparsify
from semdiag_files import InputError

WIDTH = 8


def attend(q, k, v):
    return torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v


def dense(q, k, v):
    """Of each query, the best two keys: exponentials, of which the others are zero."""
    scores = q @ k.mT / WIDTH**0.5
    weights = scores.exp() * (scores >= scores.detach().sort(-1, descending=True).values[..., 1:2])
    return weights / weights.sum(-1, keepdim=True) @ v


class Recomputing(torch.autograd.Function):
    """As activation checkpointing and reversible layers do it."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return attend(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return torch.autograd.grad(attend(*given), given, grad)


class WithSetup(Recomputing):
    @staticmethod
    def forward(q, k, v):
        return attend(q, k, v)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return taken(q, k, v)

    backward = Recomputing.backward


class Doubled(torch.autograd.Function):
    """Around no attention."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Once(Recomputing):
    backward = staticmethod(once_differentiable(Recomputing.backward))


class Inner(torch.autograd.Function):
    """Which runs another inside, with gradients."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        with torch.enable_grad():
            return Doubled.apply(attend(q, k, v)).detach() / 2

    backward = Recomputing.backward


@torch.library.custom_op("semdiag_tests::attending", mutates_args=())
def attending(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v).clone()


attending.register_autograd(
    lambda ctx, grad: Recomputing.backward(ctx, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
taken = Recomputing.apply  # before any context is open
REFUSED = {
    "by its class": (lambda *qkv: Recomputing.apply(*qkv), "Recomputing"),
    "taken before": (taken, "Recomputing"),
    "with a context that is set up": (lambda *qkv: WithSetup.apply(*qkv), "WithSetup"),
    "inside another": (lambda *qkv: Outer.apply(*qkv), "Outer"),
    "around another": (lambda *qkv: Inner.apply(*qkv), "Inner"),
    "differentiable once": (lambda *qkv: Once.apply(*qkv), "Once"),
}


class Layer(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.qkv, self.run = nn.Linear(WIDTH, 3 * WIDTH), run

    def forward(self, x):
        return self.run(*self.qkv(x).chunk(3, -1))


def layer(run):
    torch.manual_seed(0)
    return nn.Sequential(Layer(run)).double(), torch.randn(2, 5, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("name", REFUSED)
def test_a_backward_pass_that_knows_no_mask_is_refused(name):
    run, said = REFUSED[name]
    model, x = layer(run)
    refused = pytest.raises(InputError, match=rf"^0 attends in {said}, an autograd\.Function.*without {said}")
    with refused, sparsify(model, TopK(2)):
        model(x)
    assert "__getattribute__" not in vars(FunctionMeta)
    with torch.no_grad(), sparsify(model, TopK(2)) as masked:
        out = model(x)
    assert masked.calls == 1
    torch.testing.assert_close(out, layer(dense)[0](x), rtol=1e-12, atol=1e-12)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with sparsify(model, TopK(2)):
        torch.testing.assert_close(model(x), out, rtol=0, atol=0)


@pytest.mark.parametrize("gradient", [True, False])
def test_no_mask_reaches_into_a_custom_operator_which_is_refused(gradient):
    model, x = layer(attending)
    before = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    refused = pytest.raises(InputError, match=r"0: softmax provenance \(captured, but it takes no mask here\)")
    with torch.set_grad_enabled(gradient), refused, sparsify(model, TopK(2)):
        model(x)
    with sparsify(model, TopK(2), partial=True):
        out = model(x)
    for got, wanted in zip(torch.autograd.grad(out.square().sum(), [*model.parameters()]), before, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("run", [attend, taken], ids=["plainly", "in a Function"])
def test_in_a_checkpoint_it_is_refused_whatever_its_functions_are_called(reentrant, run, monkeypatch):
    forward = torch.utils.checkpoint.CheckpointFunction.forward
    renamed = forward.__code__.replace(co_name="run", co_filename="elsewhere.py")
    monkeypatch.setattr(forward, "__code__", renamed)
    model, x = layer(lambda *qkv: torch.utils.checkpoint.checkpoint(run, *qkv, use_reentrant=reentrant))
    with pytest.raises(InputError, match="activation checkpointing"), sparsify(model, TopK(2)):
        model(x)


def test_without_it_the_gradients_are_those_of_the_masked_model():
    model, x = layer(attend)
    reference, _ = layer(dense)
    right = torch.autograd.grad(reference(x).square().sum(), [*reference.parameters()])
    with sparsify(model, TopK(2)):
        out = model(x)
    for got, wanted in zip(torch.autograd.grad(out.square().sum(), [*model.parameters()]), right, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_other_functions_are_let_alone():
    model, x = layer(lambda q, k, v: Doubled.apply(attend(Doubled.apply(q), k, v)))
    reference, _ = layer(lambda q, k, v: 2 * dense(2 * q, k, v))
    with sparsify(model, TopK(2)):
        out = model(x)
    for got, wanted in zip(
        torch.autograd.grad(out.square().sum(), [*model.parameters()]),
        torch.autograd.grad(reference(x).square().sum(), [*reference.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_captured(name):
    model, x = layer(REFUSED[name][0])
    calls = []
    with watch_attention(model, calls.append) as audit:
        model(x)
    assert len(calls) == 1
    assert not audit.skipped
