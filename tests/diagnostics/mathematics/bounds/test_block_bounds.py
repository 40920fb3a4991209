"""One block's constants: hand-computed cases, and why the heads of W_o are taken one by one."""

import math
from dataclasses import replace

import pytest
import torch

from semdiag.mathematics.bounds.block_bounds import (
    AttentionConstants,
    BlockConstants,
    MlpConstants,
    log_input_constant,
    log_paper_parameter_constants,
    log_parameter_constants,
)


def block(*, pre_norm: bool) -> BlockConstants:
    """Two heads, with λ_A = 3 and 4, λ_M = 6 and 8."""
    attention = AttentionConstants(
        log_map=torch.tensor([3.0, 4.0]).double().log(),
        log_form=torch.tensor([6.0, 8.0]).double().log(),
        upsilon=torch.tensor([2.0, 0.5]).double(),
        query_weight=torch.tensor([1.0, 3.0]).double(),
        key_weight=torch.tensor([2.0, 1.0]).double(),
        value_weight=torch.tensor([1.0, 2.0]).double(),
        value_bias=torch.tensor([1.0, 0.0]).double(),
        output_weight=5.0,
        score_scale=0.5,
        token_norm=2.0,
    )
    mlp = MlpConstants(weight_in=2.0, weight_out=3.0, activation=1.5, token_norm=4.0, hidden_norm=7.0)
    return BlockConstants(attention, mlp, 10, attention_norm=0.25, mlp_norm=0.2, pre_norm=pre_norm)


def test_input_constant_by_hand():
    # Σ_h Υ_h λ_A,h = 2·3 + 0.5·4 = 8; B_R B_P λ_σ = 9.
    assert log_input_constant(block(pre_norm=True)).exp().item() == pytest.approx((1 + 9 * 0.2) * (1 + 8 * 0.25))
    assert log_input_constant(block(pre_norm=False)).exp().item() == pytest.approx(0.2 * 10 * 0.25 * 9)


@pytest.mark.parametrize(("pre_norm", "rest", "rest_mlp"), [(True, 2.8, 1.0), (False, 0.2 * 10 * 0.25, 0.2)])
def test_parameter_constants_by_hand(pre_norm, rest, rest_mlp):
    inside = {
        "W_q": math.hypot(6 * 2, 8 * 1) * 0.5,
        "W_k": math.hypot(6 * 1, 8 * 3) * 0.5,
        "b_k": 0.0,
        "W_v": 10 * 2 * 5,
        "b_v": 10 * 5,
        "W_o": 10 * math.hypot(1 * 2 + 1, 2 * 2),
        "b_o": 10,
        "W_P": 3 * 1.5 * 10 * 4,
        "b_P": 3 * 1.5 * 10,
        "W_R": 10 * 7,
        "b_R": 10,
    }
    expected = {n: v * (rest_mlp if n in ("W_P", "b_P", "W_R", "b_R") else rest) for n, v in inside.items()}
    found = log_parameter_constants(block(pre_norm=pre_norm))
    assert {name: value.exp().item() for name, value in found.items()} == pytest.approx(expected)
    paper = log_paper_parameter_constants(block(pre_norm=pre_norm))
    assert paper["W"].exp().item() == pytest.approx(10 * rest)
    assert paper["V"].exp().item() == pytest.approx(10 * 2 * math.sqrt(2) * rest)
    assert paper["W_P"] == found["W_P"]


def test_heads_of_the_output_weight_are_taken_one_by_one():
    """Two heads that read different directions from different tokens: ‖W_v‖₂Ξ of the stacked W_v is too small.

    W_v = [e₁ᵀ; e₂ᵀ] has norm 1, but head 1 attends to Ξe₁ and head 2 to Ξe₂, and the concatenated values are
    (Ξ, Ξ), of norm √2 Ξ.
    """
    xi = 3.0
    values = torch.tensor([1.0, 0.0]) @ torch.tensor([xi, 0.0]), torch.tensor([0.0, 1.0]) @ torch.tensor([0.0, xi])
    concatenated = torch.stack(values).norm().item()
    stacked = torch.linalg.matrix_norm(torch.eye(2), ord=2).item() * xi
    assert concatenated > 1.4 * stacked
    here = block(pre_norm=True)
    heads = replace(
        here.attention,
        value_weight=torch.ones(2).double(),
        value_bias=torch.zeros(2).double(),
        token_norm=xi,
    )
    constants = log_parameter_constants(replace(here, attention=heads, tokens=1))
    inside = constants["W_o"].exp().item() / 2.8
    assert concatenated == pytest.approx(inside)


def test_samples_may_lead():
    here = block(pre_norm=True)
    tokens = torch.tensor([10.0, 20.0])
    attention = replace(here.attention, log_map=here.attention.log_map.expand(2, 2))
    both = log_parameter_constants(replace(here, attention=attention, tokens=tokens))
    alone = log_parameter_constants(here)
    assert both["W_o"].shape == (2,)
    assert both["W_o"][0].item() == pytest.approx(alone["W_o"].item())
    assert both["W_o"][1].item() == pytest.approx(alone["W_o"].item() + math.log(2))
