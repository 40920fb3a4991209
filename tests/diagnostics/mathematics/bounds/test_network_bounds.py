"""Theorem 2 on hand-computed networks, deep networks and merged assumptions."""

import math

import pytest
import torch

from semdiag.mathematics.bounds.block_bounds import AttentionConstants, BlockConstants, Bound, MlpConstants, merged
from semdiag.mathematics.bounds.network_bounds import (
    Readout,
    log_paper_parameter_bounds,
    log_parameter_bounds,
    loss_residual,
    network_bound,
)
from semdiag.mathematics.score_strips import heavy_hitter_rows
from semdiag.mathematics.spectral_norms import log


def scalar_block(log_map: float, pre_norm: bool) -> BlockConstants:
    one = torch.ones(1, dtype=torch.float64)
    attention = AttentionConstants(
        log_map=log_map * one,
        log_form=math.log(7) * one,
        upsilon=2 * one,
        query_weight=3 * one,
        key_weight=5 * one,
        value_weight=1.5 * one,
        value_bias=0.5 * one,
        output_weight=4.0,
        score_scale=0.5,
        token_norm=2.0,
    )
    return BlockConstants(attention, MlpConstants(2.0, 3.0, 1.0, 6.0, 8.0), 10, 0.5, 0.25, pre_norm)


def test_the_residual_is_the_gradient_in_the_logits():
    generator = torch.Generator().manual_seed(0)
    size = 10 ** torch.linspace(-2, 1.5, 60, dtype=torch.float64)[:, None]
    logits = (size * torch.randn(60, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    labels = torch.arange(60) % 4
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    assert logits.grad is not None
    # The gradient subtracts from 1 what softmax rounds by a few units of 2⁻⁵².
    torch.testing.assert_close(loss_residual(logits.detach(), labels), logits.grad, rtol=1e-14, atol=1e-15)
    sure, wrong = loss_residual(torch.tensor([[30.0, 0.0], [0.0, 800.0]]), torch.tensor([0, 0])).tolist()
    assert sure == pytest.approx([-math.exp(-30), math.exp(-30)], rel=1e-12)  # 1 − p would keep three digits
    assert wrong == [-1.0, 1.0]


def test_network_by_hand():
    """Two equal pre-norm blocks: λ_X = (1 + 2·3·0.25)(1 + 0.5·2·6) = 2.5·7."""
    blocks = [scalar_block(math.log(6), pre_norm=True)] * 2
    readout = Readout(head_weight=3.0, pooled_norm=5.0, pooling=0.1)
    named = {n: v.exp().item() for n, v in log_parameter_bounds(blocks, readout, log(4.0)).items()}
    above = math.sqrt(2) * 3 * 0.1
    expected = {
        "embedding": above * 17.5**2 * 4,
        "block 0 W_v": above * 17.5 * 2.5 * 10 * 2 * 4,
        "block 1 W_q": above * 2.5 * 7 * 5 * 0.5,
        "block 1 W_k": above * 2.5 * 7 * 3 * 0.5,
        "block 1 b_k": 0.0,
        "block 1 W_o": above * 2.5 * 10 * 3.5,
        "block 1 W_P": above * 3 * 10 * 6,
        "block 1 b_R": above * 10,
        "head weight": math.sqrt(2) * 5,
        "head bias": math.sqrt(2),
    }
    assert {name: named[name] for name in expected} == pytest.approx(expected)
    assert len(named) == 2 * 11 + 3
    total = network_bound(log_parameter_bounds(blocks, readout, log(4.0))).log_value.exp().item()
    assert total == pytest.approx(math.sqrt(sum(v * v for v in named.values())))


def test_paper_parameters_by_hand():
    blocks = [scalar_block(math.log(6), pre_norm=False)]
    named = log_paper_parameter_bounds(blocks, Readout(3.0, 5.0, 0.1))
    above = math.sqrt(2) * 3 * 0.1
    assert {n: v.exp().item() for n, v in named.items()} == pytest.approx(
        {
            "block 0 W": above * 0.25 * 7 * 0.5 * 7,
            "block 0 V": above * 0.25 * 7 * 0.5 * 20,
            "block 0 W_P": above * 0.25 * 180,
            "block 0 W_R": above * 0.25 * 80,
        }
    )


def test_deep_networks_do_not_overflow():
    blocks = [scalar_block(700.0, pre_norm=True)] * 50
    bound = network_bound(log_parameter_bounds(blocks, Readout(3.0, 5.0, 1.0)))
    assert 49 * 700 < bound.log_value.item() < 52 * 710
    with pytest.raises(ValueError, match="without parameters"):
        network_bound({})


def test_assumptions_are_merged_in_order():
    rows = heavy_hitter_rows([1.0], [-1.0], 1)
    bound = Bound(log(1.0), merged([rows.assumptions, rows.assumptions]), "test")
    assert len(bound.assumptions) == 1
