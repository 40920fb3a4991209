"""The local form against Jacobians, attacked in every direction, and against the sound form over all rows."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics.attention_rows import fixed_mask_rows
from semdiag.mathematics.bounds.attention_bounds import HeadNorms, attention_map_bound, bilinear_form_bound
from semdiag.mathematics.bounds.local_bounds import local_attention_map_bound, local_rows

ROWS = st.lists(st.floats(-40, 40), min_size=1, max_size=7)


@given(ROWS)
def test_rows_against_every_sign_vector_and_every_column(scores):
    p = torch.tensor(scores, dtype=torch.float64).softmax(-1)
    jacobian = torch.diag(p) - p[:, None] * p
    rows = local_rows(p[None])
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(p))), dtype=torch.float64)
    assert (signs @ jacobian).abs().sum(-1).max() <= rows.log_row.exp().item() * (1 + 1e-12) + 1e-15
    columns = jacobian.abs().sum(0).max().item()
    assert columns == pytest.approx(rows.log_xi.exp().item(), rel=1e-9, abs=1e-15)
    sound = fixed_mask_rows(p.log().max() - p.log().min(), len(p))
    for name in ("log_weight", "log_xi", "log_row"):
        assert getattr(rows, name).item() <= getattr(sound, name).item() + 1e-12


def test_by_hand_and_where_one_minus_p_is_lost_to_rounding():
    rows = local_rows(torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [0.0, 0.0, 0.0]]).double())
    assert rows.log_row.exp().tolist() == pytest.approx([0.36, 1.0, 1.0, 0.0])
    assert rows.log_xi.exp().tolist() == pytest.approx([0.18, 0.5, 0.48, 0.0])
    sharp = local_rows(torch.tensor([[1.0, 1e-30]], dtype=torch.float64))
    assert sharp.log_row.item() == pytest.approx(math.log(4e-30))


def attention(u, form, selected):
    scores = torch.cat([u, torch.ones_like(u[:, :1])], 1) @ form @ u.T
    weights = scores.masked_fill(~selected, -math.inf).softmax(-1)
    return weights @ u, weights


@pytest.mark.parametrize("seed", range(12))
def test_no_direction_is_stretched_more_than_the_local_form_says(seed):
    """Whole Jacobians in tokens and in the form, along their singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    length, width = 6, 3
    u = torch.randn(length, width, generator=generator, dtype=torch.float64)
    form = 3 * torch.randn(width + 1, width, generator=generator, dtype=torch.float64)
    selected = torch.rand(length, length, generator=generator) < 0.6
    selected |= torch.eye(length, dtype=torch.bool)
    _, weights = attention(u, form, selected)
    token = u.norm(dim=-1).max()
    gamma = torch.linalg.matrix_norm(form, 2)
    norms = HeadNorms(gamma=gamma, upsilon=1.0, token=token, query=(token**2 + 1).sqrt())
    in_tokens = torch.func.jacrev(lambda x: attention(x, form, selected)[0])(u)  # (L, d, L, d)
    bound = local_attention_map_bound(weights, norms).log_value.exp()
    for token_moved in range(length):  # a sum of 2-norms is largest at single tokens
        part = in_tokens[:, :, token_moved].reshape(length * width, width)
        for direction in torch.linalg.svd(part).Vh:
            assert (part @ direction).reshape(length, width).norm(dim=-1).sum() <= bound * (1 + 1e-12)
    in_form = torch.func.jacrev(lambda m: attention(u, m, selected)[0])(form).reshape(length * width, -1)
    form_bound = bilinear_form_bound(local_rows(weights), norms).log_value.exp()
    for direction in torch.linalg.svd(in_form).Vh:
        assert (in_form @ direction).reshape(length, width).norm(dim=-1).sum() <= form_bound * (1 + 1e-12)
    spread = torch.where(selected, weights.log(), 0.0)
    delta = spread.masked_fill(~selected, -math.inf).amax(-1) - spread.masked_fill(~selected, math.inf).amin(-1)
    sound = attention_map_bound(fixed_mask_rows(delta, selected.sum(-1)), selected, norms).log_value.exp()
    assert bound <= sound * (1 + 1e-12)
