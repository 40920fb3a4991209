"""Runs in a number format: torch's own casts as reference, what is rounded, and what is left as it is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag.mathematics.selections.number_formats import FORMATS
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.rounded_operations import (
    RoundedProducts,
    RoundedResults,
    converted,
    operands_alone,
    with_rounded_weights,
)

BF16, E4M3 = FORMATS["bfloat16"], FORMATS["float8_e4m3fn"]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cast(x, dtype=torch.bfloat16):
    return x.float().to(dtype).double()  # float32 between: the numbers drawn here are not near a middle


class Small(nn.Module):
    """A product, a norm that insists on float32, a table of frequencies, and a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("inv_freq", torch.tensor([1 / 3]), persistent=False)
        self.register_buffer("shift", torch.tensor([1 / 3]))

    def forward(self, x):
        y = self.linear(x) + self.shift
        wide = y.float()
        return (wide / (wide * wide).mean(-1, keepdim=True).sqrt()).to(x.dtype) * y


def test_formats_of_eight_bits_have_operands_alone():
    assert [name for name, kind in FORMATS.items() if operands_alone(kind)] == ["float8_e4m3fn", "float8_e5m2"]


def test_a_copy_keeps_its_frequencies_and_the_model_its_weights(monkeypatch):
    monkeypatch.setattr(Small, "__module__", "transformers.models.small")
    model = Small()
    copied = converted(unnamed(model), torch.bfloat16).module
    assert (copied.linear.weight.dtype, copied.shift.dtype) == (torch.bfloat16, torch.bfloat16)
    assert copied.inv_freq.dtype == torch.float32
    assert model.linear.weight.dtype == torch.float32


def test_rounded_weights_are_those_of_torch():
    model = Small()
    weights = with_rounded_weights(unnamed(model), BF16).module.linear.weight
    assert weights.dtype == torch.float64
    assert torch.equal(weights, model.linear.weight.bfloat16().double())


def test_every_float64_result_is_rounded_and_float32_is_left_alone():
    x, y = drawn(3, 5), drawn(5, 4, seed=1)
    with RoundedResults(BF16):
        product, total, split = x @ y, x + 1 / 3, x.clone().split(2)
        narrow = x.float() / 3
        masked = torch.zeros(2, dtype=torch.float64).masked_fill(torch.tensor([True, False]), -torch.inf)
        x_written = x.clone()
        x_written += 1 / 3
    assert torch.equal(product, cast(x @ y))
    assert torch.equal(total, cast(x + 1 / 3))
    assert torch.equal(torch.cat(split), cast(x))
    assert torch.equal(narrow, x.float() / 3)
    assert masked.tolist() == [-torch.inf, 0]
    assert torch.equal(x_written, cast(cast(x) + 1 / 3))


def test_what_overflows_float16_is_infinite_and_what_masks_add_is_its_largest_number():
    x = torch.tensor([65519.0, 65520.0, -1e5, torch.finfo(torch.float64).min, torch.inf], dtype=torch.float64)
    with RoundedResults(FORMATS["float16"]):
        found = x * 1
    assert torch.equal(found[:3], x[:3].half().double())
    assert found[3:].tolist() == [-65504, torch.inf]


def test_where_float32_meets_the_models_precision_the_result_is_float32_as_torch_promotes():
    x, y = drawn(3, 5), drawn(3, 5, seed=1)
    with RoundedResults(BF16):
        sums, joined = x.float() + y, torch.cat([x.float(), y])
        scaled, back = torch.tensor(0.3) * y, sums.to(x.dtype)
        y_written = y.clone()
        y_written += x.float()
    narrow = y.bfloat16()
    assert (x.float() + narrow).dtype == sums.dtype == joined.dtype == torch.float32
    assert (torch.tensor(0.3) * narrow).dtype == torch.bfloat16, "a number without axes does not promote"
    assert torch.equal(scaled, cast(torch.tensor(0.3) * y))
    assert torch.equal(back, cast(sums))
    assert torch.equal(y_written, cast(cast(y) + x.float()))


class Kept(nn.Module):
    """A router that names what transformers keeps in float32, in any 16 bits or in float16 alone."""

    _keep_in_fp32_modules_strict = ("gate.weight", "correction")
    _keep_in_fp32_modules = ("norm",)

    def __init__(self):
        super().__init__()
        self.gate, self.norm, self.gate_proj = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.register_buffer("correction", torch.full((6,), 1 / 3))


def test_a_copy_keeps_in_float32_what_transformers_does():
    model, single = unnamed(Kept()), {}
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        state = converted(model, dtype).module.state_dict()
        single[dtype] = {name for name, values in state.items() if values.dtype == torch.float32}
    always = {"gate.weight", "correction"}
    expected = {torch.bfloat16: always, torch.float16: always | {"norm.weight", "norm.bias"}, torch.float64: set()}
    assert single == expected
    of_format = with_rounded_weights(model, BF16).module
    assert torch.equal(of_format.gate.weight, model.module.gate.weight)
    assert torch.equal(of_format.correction, model.module.correction)
    assert torch.equal(of_format.gate.bias, model.module.gate.bias.bfloat16().double())
    assert model.module.norm.weight.dtype == torch.float32


def test_a_model_in_bfloat16_is_matched_to_the_last_bit_where_its_steps_are_single_operations():
    """Sums of 6 products of 8 digits each are exact in float64, and nearly so in float32, as torch adds."""
    model, x = Small().eval(), cast(drawn(8, 6))
    ours, theirs = (
        with_rounded_weights(unnamed(model), BF16).module,
        converted(unnamed(model), torch.bfloat16).module,
    )
    with torch.no_grad(), RoundedResults(BF16):
        found = ours(x)
    with torch.no_grad():
        expected = theirs(x.bfloat16()).double()
    # One step of bfloat16 at most, where a sum lies in the middle to within float32's rounding.
    assert ((found - expected).abs() <= 2**-7 * expected.abs()).all()
    assert (found == expected).double().mean() > 0.9


@pytest.mark.parametrize("attention", [False, True])
def test_operands_of_products_are_rounded_and_nothing_else(attention):
    linear = nn.Linear(6, 4).double()
    x = drawn(2, 3, 6)

    def run():
        y = linear(x)
        return F.scaled_dot_product_attention(y[None], y[None], y[None])[0] if attention else y / 3

    with torch.no_grad(), RoundedProducts(E4M3, linear):
        found = run()
    fp8 = torch.float8_e4m3fn
    with torch.no_grad():
        y = F.linear(cast(x, fp8), cast(linear.weight, fp8), linear.bias)
        expected = F.scaled_dot_product_attention(*[cast(y, fp8)[None]] * 3)[0] if attention else y / 3
    assert torch.allclose(found, expected, rtol=1e-12, atol=0)


def test_drawn_operands_move_within_half_a_last_place_and_weights_to_nearest():
    eye = nn.Linear(4, 4, bias=False).double()
    eye.weight.data.copy_(torch.eye(4))
    x = drawn(5000, 4)
    with torch.no_grad(), RoundedProducts(E4M3, eye).drawing(torch.Generator().manual_seed(0)):
        moved = eye(x) - x
    step = 2.0 ** (torch.frexp(x).exponent - 1).clamp(min=E4M3.exponent) * 2.0 ** (1 - E4M3.digits)
    places = moved / step
    assert places.abs().max() <= 0.5
    # Even within ±½: mean 0 ± 5/√(12 n), variance 1/12; 5 standard errors, n = 20,000.
    assert abs(places.mean()) < 5 / (12 * x.numel()) ** 0.5
    assert abs(places.var() - 1 / 12) < 5 * (1 / 180 / x.numel()) ** 0.5
    eye.weight.data.mul_(1.05)
    with torch.no_grad(), RoundedProducts(E4M3, eye).drawing(torch.Generator().manual_seed(0)):
        assert torch.equal(eye(x), moved + x)  # 1.05 is rounded to 1
