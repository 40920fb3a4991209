"""Constants of normalisations and activations are not exceeded, and are attained."""

import math

import pytest
import torch

from semdiag.mathematics.bounds.block_bounds import (
    ACTIVATION_LIPSCHITZ,
    normalisation_lipschitz,
    query_norm,
)

ACTIVATIONS = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "mish": torch.nn.functional.mish,
}


@pytest.mark.parametrize("name", ACTIVATION_LIPSCHITZ)
def test_activation_constants_are_attained_and_rounded_up(name):
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(ACTIVATIONS[name](x).sum(), x)
    largest = slope.abs().max().item()
    assert largest <= ACTIVATION_LIPSCHITZ[name] <= largest + 1e-5


def normalised(x, eps):
    centred = x - x.mean(-1, keepdim=True)
    std = (centred.square().mean(-1) + eps).sqrt()
    return centred / std[..., None], std


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.1])
@pytest.mark.parametrize("width", [2, 5, 64])
def test_normalisation_constant(width, eps):
    generator = torch.Generator().manual_seed(width)
    x, step = (torch.randn(4000, width, generator=generator, dtype=torch.float64) for _ in range(2))
    size = 10 ** (-4 * torch.rand(4000, 1, generator=generator, dtype=torch.float64))
    x = x * size.flip(0)
    y = x + size * step
    (ln_x, s_x), (ln_y, s_y) = normalised(x, eps), normalised(y, eps)
    distance = (x - y).norm(dim=-1)
    constant = normalisation_lipschitz(torch.stack([s_x, s_y], -1))
    assert ((ln_x - ln_y).norm(dim=-1) <= distance * constant * (1 + 1e-9)).all()
    assert ((ln_x - ln_y).norm(dim=-1) <= distance * 2 / (s_x + s_y) * (1 + 1e-9)).all()
    assert (ln_x.norm(dim=-1) <= width**0.5 * (1 + 1e-12)).all()


def test_normalisation_constant_is_attained_by_a_turn():
    x = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    y = x + 1e-6 * torch.tensor([[1.0, 1.0, -2.0]], dtype=torch.float64)
    (ln_x, s_x), (ln_y, _) = normalised(x, 0.0), normalised(y, 0.0)
    ratio = (ln_x - ln_y).norm() / (x - y).norm()
    assert ratio.item() == pytest.approx(normalisation_lipschitz(s_x).item(), rel=1e-4)


def test_of_constant_tokens_there_is_no_constant():
    assert normalisation_lipschitz(torch.tensor([[1.0, 0.0], [1.0, math.nan]])).tolist() == [math.inf] * 2


def test_query_norm_without_overflow():
    assert query_norm([0.0, 1e200]).tolist() == [1.0, 1e200]
