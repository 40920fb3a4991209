"""Attention over selected keys by compiled kernels against torch's operations, and what torch makes of theirs."""

import sys

import pytest
import torch

from semdiag_models import compiled
from semdiag_models.attention.selected_attention import selected_attention
from semdiag_models.kernels.selected_kernels import mix_selected, mix_selected_backward

L, SCALE = compiled.LEAST["selected_kernels"], 0.3


def inputs(heads=2, width=5, count=4, missing=True):
    """q, k and v as they lie in the product with the weights, and keys: none for some queries, some for others."""
    generator = torch.Generator().manual_seed(width)
    qkv = torch.randn(2, L, 3, heads, width, generator=generator, requires_grad=True)
    selected = torch.rand(2, heads, L, L, generator=generator).topk(count, -1).indices
    if missing:
        selected[:, :, ::3, 0] = -1
        selected[1, :, 10:20] = -1
    return qkv, qkv.permute(2, 0, 3, 1, 4), selected


def mixed_and_gradients(qkv, selected, p, dtype=torch.float32):
    x = qkv.detach().to(dtype).requires_grad_()
    torch.manual_seed(3)
    mixed = selected_attention(*x.permute(2, 0, 3, 1, 4), SCALE, selected, p)
    cotangent = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return mixed.detach(), *torch.autograd.grad(mixed, x, cotangent)[0].unbind(2)


@pytest.mark.processor
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("count", [1, 4, 40])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_kernels_round_no_worse_than_torch_s_operations(monkeypatch, heads, width, count, p):
    """The errors of two sums of the same terms, in another order, are alike."""
    qkv, _, selected = inputs(heads, width, count)
    ours, exact = mixed_and_gradients(qkv, selected, p), mixed_and_gradients(qkv, selected, p, torch.float64)
    monkeypatch.setitem(compiled.LEAST, "selected_kernels", L + 1)
    theirs = mixed_and_gradients(qkv, selected, p)
    for name, x, y, true in zip(("mixed", "d_q", "d_k", "d_v"), ours, theirs, exact, strict=True):
        assert (x - true).norm() <= 2 * (y - true).norm() + 1e-7 * true.norm(), name


def test_queries_without_a_key_give_zero_and_take_no_gradient():
    qkv, _, selected = inputs()
    mixed, d_q, _, _ = mixed_and_gradients(qkv, selected, 0.0)
    assert not mixed[1, :, 10:20].any()
    assert mixed[1, :, :10].all()
    assert not d_q[1, 10:20].any()


@pytest.mark.parametrize("missing", [False, True])
def test_kernels_mix_in_single_precision_and_where_numba_is_installed(monkeypatch, missing):
    _, (q, k, v), selected = inputs(missing=False)
    if missing:
        monkeypatch.setitem(
            sys.modules, "semdiag_models.kernels.selected_kernels", None
        )  # as if it were not installed
    compiled._imported.cache_clear()

    def maker(*of):
        return type(selected_attention(*of, SCALE, selected, 0.0).grad_fn).__name__

    assert ("Compiled" in maker(q, k, v)) is not missing
    assert "Compiled" not in maker(q.double(), k.double(), v.double())
    compiled._imported.cache_clear()


def test_scores_that_are_no_numbers_are_passed_on():
    _, (q, k, v), selected = inputs(missing=False)
    q = q.detach().clone()
    q[0, 0, 7], q[0, 0, 8] = torch.nan, torch.inf
    mixed, _ = mix_selected(q, k, v, selected, torch.ones(selected.shape), SCALE)
    assert mixed[0, 0, 7:9].isnan().all()
    assert mixed.isnan().any(-1).sum() == 2


@pytest.mark.parametrize("position", [L, 2**40])
def test_a_position_without_a_key_is_refused(position):
    _, (q, k, v), selected = inputs()
    selected[1, 1, 5, 2] = position
    with pytest.raises(IndexError, match=f"below {L}"):
        mix_selected(q, k, v, selected, torch.ones(selected.shape), SCALE)


def test_neither_threads_nor_where_it_lies_change_anything():
    _, (q, k, v), selected = inputs()
    kept, before, found = torch.ones(selected.shape), torch.get_num_threads(), []
    across = [t.mT.contiguous().mT for t in (q, k, v)]
    try:
        for threads, of in ((1, (q, k, v)), (3, (q, k, v)), (1, (q, k.contiguous(), v)), (1, across)):
            torch.set_num_threads(threads)
            mixed, weights = mix_selected(*of, selected, kept, SCALE)
            grads = mix_selected_backward(torch.ones_like(across[0]), *of, selected, kept, weights, SCALE)
            found.append((mixed, weights, *grads))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:Warning")
def test_torch_traces_the_operations_and_not_what_they_found(traced):
    qkv, _, selected = inputs()
    kept, x = torch.ones(selected.shape), qkv.detach()

    def gradients(qkv):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed, weights = mix_selected(q, k, v, selected, kept, SCALE)
        return torch.stack(mix_selected_backward(mixed, q, k, v, selected, kept, weights, SCALE))

    assert torch.equal(traced(gradients, x)(x.flip(0)), gradients(x.flip(0)))
