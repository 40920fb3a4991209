"""Transforms of torch.func over parameters, buffers and inputs: the user's run goes on, and all is said."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import semdiag
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.recording import TRANSFORMED
from semdiag_models import InputError

# Of torch itself: of its compiler, of vmap, and of captures that are empty.
pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 8


class Attention(nn.Module):
    def __init__(self, fused=False, kept=None):
        super().__init__()
        self.qkv, self.fused, self.kept = nn.Linear(WIDTH, 3 * WIDTH), fused, kept
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(x + self.shift).chunk(3, -1)
        if self.fused:
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        z = q @ k.mT / WIDTH**0.5
        if self.kept is not None:
            best = z.detach().topk(self.kept, -1).indices
            z = z.masked_fill(torch.ones_like(z, dtype=torch.bool).scatter(-1, best, False), -torch.inf)
        return z.softmax(-1) @ v


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters(model):
    return {name: part.detach() for name, part in model.named_parameters()}


def called(model, values, x):
    return torch.func.functional_call(model, values, (x,))


def ensemble(model, x):
    stacked = torch.func.stack_module_state([model, model])[0]
    return torch.vmap(lambda values: called(model, values, x))(stacked)


def per_sample(model, x):
    grad = torch.func.grad(lambda values, one: called(model, values, one[None]).sum())
    return torch.vmap(grad, (None, 0))(parameters(model), x)


BATCHED = {
    "per-sample gradients": per_sample,
    "an ensemble": ensemble,
    "stacked buffers": lambda m, x: torch.vmap(lambda b: called(m, b, x))({"shift": drawn(3, WIDTH)}),
    "a square input": lambda m, x: torch.vmap(m)(drawn(2, 1, WIDTH, WIDTH)),
    "another axis": lambda m, x: torch.vmap(m, in_dims=2)(drawn(1, 5, 2, WIDTH)),
    "twice": lambda m, x: torch.vmap(torch.vmap(m))(drawn(2, 2, 1, 5, WIDTH)),
}
FORWARD = {  # in forward mode, which torch's fused attention on a processor lacks
    "a Hessian": lambda m, x: torch.func.hessian(lambda y: m(y).sum())(drawn(1, WIDTH, WIDTH)),
    "jacfwd": lambda m, x: torch.func.jacfwd(lambda p: called(m, p, x))(parameters(m)),
}
ONE = {
    "grad": lambda m, x: torch.func.grad(lambda p: called(m, p, x).sum())(parameters(m)),
    "vjp": lambda m, x: torch.func.vjp(lambda p: called(m, p, x), parameters(m))[0],
    "jvp": lambda m, x: torch.func.jvp(lambda p: called(m, p, x), (parameters(m),), (parameters(m),))[0],
    "jacrev": lambda m, x: torch.func.jacrev(lambda p: called(m, p, x))(parameters(m)),
    "grad of a square input": lambda m, x: torch.func.grad(lambda y: m(y).sum())(drawn(2, WIDTH, WIDTH)),
}


@pytest.mark.parametrize(
    ("name", "fused"), [*((n, f) for n in BATCHED for f in (False, True)), *((n, False) for n in FORWARD)]
)
def test_what_runs_under_vmap_is_in_the_audit_and_takes_no_mask(name, fused):
    model, x, run = Attention(fused), drawn(2, 5, WIDTH), (BATCHED | FORWARD)[name]
    alone = run(model, x)
    with semdiag.capture(model) as calls:
        watched = run(model, x)
    assert len(calls) == 0
    assert {*calls.audit["reason"]} == {TRANSFORMED}
    torch.testing.assert_close(watched, alone, rtol=0, atol=0)
    with pytest.raises(InputError, match=r"torch\.func transform"), semdiag.sparsify(model, semdiag.TopK(2)):
        run(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with semdiag.Monitor(model):
            run(model, x)


@pytest.mark.parametrize("name", ONE)
def test_by_hand_the_scores_under_a_transform_are_those_without_it(name):
    model, run = Attention(), ONE[name]
    x = drawn(2, WIDTH, WIDTH) if "square" in name else drawn(2, 5, WIDTH)
    with watch_attention(model, (found := []).append) as audit:
        run(model, x)
    with torch.no_grad(), watch_attention(model, (usual := []).append):
        model(x)
    assert not audit.skipped
    (call,), (expected,) = found, usual
    torch.testing.assert_close(call.scores(torch.float64), expected.scores(torch.float64), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call.mixed, expected.mixed)
    with pytest.raises(InputError, match="takes no mask here"), semdiag.sparsify(model, semdiag.TopK(2)):
        run(model, x)


class Routed(nn.Module):
    """Attention, and a softmax over learned keys, which is none."""

    def __init__(self):
        super().__init__()
        self.attention, self.router = Attention(), nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x):
        return self.attention(x) * self.router(x).softmax(-1)[..., :1]


def test_parameters_under_a_transform_are_parameters():
    model = Routed()
    with semdiag.capture(model) as calls:
        torch.func.grad(lambda p: called(model, p, drawn(2, 5, WIDTH)).sum())(parameters(model))
    assert (len(calls), calls.other_softmaxes, len(calls.audit)) == (1, 1, 0)


def tangent(model, x, direction):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction))).tangent


def hessian(model, x, direction):
    return torch.autograd.functional.hessian(lambda y: (model(y) * direction).square().sum(), x)


def penalty(model, x, direction):
    """The gradient of a loss with the norm of a gradient in it."""
    x = x.clone().requires_grad_()
    loss = (model(x) * direction).sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(loss + slope.square().sum(), [*model.parameters()])


@pytest.mark.parametrize("differentiate", [tangent, hessian, penalty])
@pytest.mark.parametrize("fused", [False, True])
def test_tangents_and_second_derivatives_of_masked_attention_are_those_of_a_mask_written_out(fused, differentiate):
    """Of fused attention, the second derivatives were zero."""
    model, reference = Attention(fused), Attention(kept=2).double()
    reference.load_state_dict(model.state_dict())
    x, direction = drawn(1, 4, WIDTH), drawn(1, 4, WIDTH, seed=2)
    # In forward mode, torch's fused attention runs on this backend alone.
    with sdpa_kernel(SDPBackend.MATH), semdiag.sparsify(model, semdiag.TopK(2)) as masked:
        found = differentiate(model, x, direction)
    assert masked.calls == 1
    expected = differentiate(reference, x.double(), direction.double())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_the_linearised_model_has_the_mask():
    model, reference, x = Attention(), Attention(kept=2), drawn(2, 5, WIDTH)
    reference.load_state_dict(model.state_dict())
    with semdiag.sparsify(model, semdiag.TopK(2)):
        found = torch.func.linearize(lambda p: called(model, p, x), parameters(model))[1](parameters(model))
    expected = torch.func.jvp(lambda p: called(reference, p, x), (parameters(model),), (parameters(model),))[1]
    torch.testing.assert_close(found, expected)
