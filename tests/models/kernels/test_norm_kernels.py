"""Norms by compiled kernels against torch's differentiation in float64, alone and in the trainer's step."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F

from semdiag_models import compiled
from semdiag_models.encoder import Encoder
from semdiag_models.kernels import norm_kernels
from semdiag_models.step.stack import Stack

ROWS = compiled.LEAST["norm_kernels"]


@pytest.mark.processor
@pytest.mark.parametrize("shape", [(7, 1), (7, 3), (40, 64), (2, 5, 100)])
@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.parametrize("keep", [True, False])
def test_rows_and_gradients_are_torchs(shape, shift, keep):
    x, grad, before = torch.randn(3, *shape, generator=torch.Generator().manual_seed(3))
    x += shift
    y, scale = torch.empty(shape), torch.empty(*shape[:-1], 1)
    norm_kernels.normalise(x, y, scale, 0.1)
    exact = x.double().requires_grad_()
    expected = F.layer_norm(exact, shape[-1:], eps=0.1)
    # A mean is off by at most the rounding of its sum, some units of the largest term; the gradient by that of y.
    rounding = 1e-6 * (1 + shift)
    torch.testing.assert_close(y.double(), expected.detach(), rtol=0, atol=rounding)
    out = before.clone() if keep else grad
    d_x = torch.autograd.grad(expected, exact, grad.double())[0] + keep * before
    norm_kernels.differentiate(grad, y, scale, out, keep=keep)
    torch.testing.assert_close(out.double(), d_x, rtol=0, atol=20 * rounding)


@pytest.mark.processor
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("encoders", [1, 2])
def test_in_the_step_they_round_no_worse_than_torch_s_operations(monkeypatch, tiny_model, norm, encoders):
    """The errors of two sums of the same rounded terms are alike."""
    model = Encoder(tiny_model(attention="full", norm=norm, blocks=3, dropout=0.0))
    tokens, labels = torch.randint(2, (1, ROWS // 8, 8)), torch.randint(2, (1, ROWS // 8))

    def gradients(model):
        stack = Stack([copy.deepcopy(model) for _ in range(encoders)])
        stack.load()
        stack.differentiate(tokens.expand(encoders, -1, -1), labels.expand(encoders, -1))
        return stack.gradients.double()

    ours, exact, calls = gradients(model), gradients(copy.deepcopy(model).double()), []
    monkeypatch.setitem(compiled.LEAST, "norm_kernels", ROWS + 1)
    monkeypatch.setattr(norm_kernels, "normalise", lambda *of: calls.append(of))
    theirs = gradients(model)
    assert not calls
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 1e-7 * exact.norm()


@pytest.mark.parametrize(
    ("threads", "missing", "dtype", "calls"),
    [
        (1, False, torch.float32, 4),
        (2, False, torch.float32, 0),
        (1, True, torch.float32, 0),
        (1, False, torch.float64, 0),
    ],
)
def test_they_take_many_rows_of_one_thread_where_numba_is_installed(
    monkeypatch, tiny_model, threads, missing, dtype, calls
):
    stack, found, before = Stack([Encoder(tiny_model(blocks=2)).to(dtype)]), [], torch.get_num_threads()
    stack.load()
    normalise = norm_kernels.normalise
    monkeypatch.setattr(norm_kernels, "normalise", lambda *of: found.append(of) or normalise(*of))
    if missing:
        monkeypatch.setitem(
            sys.modules, "semdiag_models.kernels.norm_kernels", None
        )  # as if it were not installed
    compiled._imported.cache_clear()
    try:
        torch.set_num_threads(threads)
        stack.logits(torch.randint(2, (1, ROWS // 8, 8)))
        assert len(found) == calls
        stack.logits(torch.randint(2, (1, ROWS // 8 - 1, 8)))
        assert len(found) == calls
    finally:
        torch.set_num_threads(before)
        compiled._imported.cache_clear()
