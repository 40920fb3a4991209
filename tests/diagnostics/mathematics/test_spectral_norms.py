"""Spectral norms against naive products and against the values of the paper's released code."""

from pathlib import Path

import numpy as np
import pytest
import torch

from semdiag.mathematics.spectral_norms import (
    bilinear_form_norm,
    paper_code_bilinear_norm,
    paper_code_layer_norm,
    score_scale,
    spectral_norm,
    spectral_norm_upper_bound,
    value_output_norm,
)

FIXTURE = Path(__file__).parents[2] / "fixtures" / "paper_code" / "fresh_windowed5"


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("rows", "m", "n"), [(3, 7, 9), (7, 3, 9), (5, 5, 5), (1, 4, 2)])
def test_norms_of_products_match_the_formed_product(rows, m, n):
    left, right = randn(2, rows, m), randn(2, rows, n, seed=1)
    naive = torch.linalg.svdvals(left.mT @ right).amax(-1)
    torch.testing.assert_close(value_output_norm(left.mT, right), naive)


def test_norms_of_heads_match_naive_products():
    w_q, b_q, w_k = randn(2, 3, 8), randn(2, 3, seed=1), randn(2, 3, 8, seed=2)
    w_v, w_o = randn(2, 3, 8, seed=3), randn(2, 8, 3, seed=4)
    for h in range(2):
        form = 2.5 / 3**0.5 * torch.cat([w_q[h], b_q[h][:, None]], 1).T @ w_k[h]
        gamma = bilinear_form_norm(w_q, w_k, b_q, score_scale(3, 2.5))[h]
        torch.testing.assert_close(gamma, torch.linalg.svdvals(form).max())
        torch.testing.assert_close(value_output_norm(w_o, w_v)[h], torch.linalg.svdvals(w_o[h] @ w_v[h]).max())


def test_scores_never_exceed_the_bilinear_norm():
    w_q, b_q, w_k = randn(3, 8), randn(3, seed=1), randn(3, 8, seed=2)
    gamma = bilinear_form_norm(w_q, w_k, b_q, 0.7).item()
    u, v = randn(500, 8, seed=3), randn(500, 8, seed=4)
    scores = 0.7 * ((u @ w_q.T + b_q) * (v @ w_k.T)).sum(-1).abs()
    reach = (u.norm(dim=-1) ** 2 + 1).sqrt() * v.norm(dim=-1)
    assert (scores <= gamma * reach * (1 + 1e-12)).all()


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 5, 3)])
def test_gram_iteration_bounds_from_above(shape):
    matrix = randn(*shape)
    exact = spectral_norm(matrix)
    rank = min(shape[-2:])
    for iterations in (0, 1, 6, 12):
        upper = spectral_norm_upper_bound(matrix, iterations)
        assert (upper >= exact * (1 - 1e-12)).all()
        assert (upper <= exact * rank ** (0.5 ** (iterations + 1)) * (1 + 1e-12)).all()
    assert (spectral_norm_upper_bound(matrix, 12) <= exact * 1.001).all()


def test_gram_iteration_edges():
    assert spectral_norm_upper_bound(torch.zeros(3, 3)).item() == 0.0
    # Squaring 13 times would overflow without the rescaling.
    assert spectral_norm_upper_bound(1e30 * torch.eye(2), 12).item() == pytest.approx(1e30, rel=1e-3)
    with pytest.raises(ValueError, match="at least 0"):
        spectral_norm_upper_bound(torch.eye(2), -1)


def test_layers_without_bias():
    weight = randn(3, 4)
    torch.testing.assert_close(paper_code_layer_norm(weight, None), spectral_norm(weight))


@pytest.mark.processor
def test_agrees_with_the_papers_released_code():
    weights = torch.load(FIXTURE.with_suffix(".pt"), weights_only=True)
    with np.load(FIXTURE.with_suffix(".npz")) as stored:
        expected = {name: stored[name] for name in stored.files if name.startswith("norm64")}
    for t in range(5):
        layer = {
            name.split(f"transformer.{t}.")[1]: value
            for name, value in weights.items()
            if f"transformer.{t}." in name
        }
        q, k, v = ((layer[f"attention.W_{x}.weight"], layer[f"attention.W_{x}.bias"]) for x in ("q", "k", "v"))
        found = {
            "norm64_QK_norm_Gamma": paper_code_bilinear_norm(*q, *k, score_scale(64)),
            "norm64_V_norm_Upsilon": paper_code_layer_norm(*v),
            "norm64_P_norm_B": paper_code_layer_norm(layer["ffn.0.weight"], layer["ffn.0.bias"]),
            "norm64_R_norm_B": paper_code_layer_norm(layer["ffn.3.weight"], layer["ffn.3.bias"]),
        }
        for name, value in found.items():
            assert value.item() == pytest.approx(expected[name][t], rel=1e-9), (name, t)
        # Leaving b_k out can only make the form's norm smaller.
        ours = bilinear_form_norm(q[0], k[0], q[1], score_scale(64))
        assert ours <= found["norm64_QK_norm_Gamma"] * (1 + 1e-12)
