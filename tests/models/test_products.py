"""oneDNN's products against float64."""

import pytest
import torch

from semdiag_models import products


@pytest.mark.processor
@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_off_by_no_more_than_rounding(bias, onto):
    rows, width, outputs = 1500, 64, 96
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 2 * width, generator=generator)[:, ::2] for n in (rows, outputs))
    b, base = torch.randn(outputs, generator=generator), torch.randn(rows, outputs, generator=generator)
    if not products.takes(x, weight):
        pytest.skip("This torch has no oneDNN.")
    found = products.linear(x, weight, b if bias else None, base if onto else None)
    exact = x.double() @ weight.double().T + bias * b + onto * base
    # Higham, Accuracy and Stability, eq. 3.5: a sum of n products is off by at most n u / (1 − n u) Σ |products|.
    n, u = width + 2, torch.finfo(torch.float32).eps / 2
    size = x.abs().double() @ weight.abs().double().T + bias * b.abs() + onto * base.abs()
    assert bool(((found - exact).abs() <= n * u / (1 - n * u) * size).all())
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(1500, 64, dtype=torch.float64), torch.ones(64, 64, dtype=torch.float64)),
        (torch.ones(1500, 64, device="meta"), torch.ones(64, 64, device="meta")),
        (torch.ones(2, 1500, 64), torch.ones(2, 64, 64)),
        (torch.ones(10, 64), torch.ones(64, 64)),
    ],
    ids=["double", "other device", "batched", "small"],
)
def test_other_products_are_left_to_torch(x, weight):
    assert not products.takes(x, weight)
