import pytest
import torch

from semdiag_models.attention import dense_attention as module
from semdiag_models.attention.dense_attention import dense_attention, dropped_positions

B, L, D, SCALE = 3, 10, 5, 0.7
STRIPS = {"one strip": 2**20, "a short last strip": 4 * L**2, "a matrix a strip": 1}


def projected(heads):
    """Queries, keys and values as the encoder lays them out: three views of one tensor."""
    qkv = torch.randn(B, L, 3, heads, D, dtype=torch.float64, requires_grad=True)
    return qkv, qkv.permute(2, 0, 3, 1, 4)


def validity(padded):
    return torch.arange(L) < torch.tensor([[L], [7], [1]]) if padded else None


def redrawn(heads, p, strip, seed):
    """The drops that a seed leads to, as (B, H, L, L) zeros among ones."""
    torch.manual_seed(seed)
    kept = torch.ones(B * heads, L, L, dtype=torch.float64)
    per_strip = max(1, strip // L**2)
    for rows in range(0, B * heads, per_strip):
        part = kept[rows : rows + per_strip]
        part.view(-1)[dropped_positions(part.numel(), p)] = 0
    return kept.view(B, heads, L, L)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("strip", STRIPS.values(), ids=STRIPS)
def test_with_dropout_it_is_the_naive_softmax_under_the_same_drops(
    monkeypatch, naive_attention, heads, padded, strip
):
    monkeypatch.setattr(module, "_STRIP", strip)
    qkv, (q, k, v) = projected(heads)
    valid, p = validity(padded), 0.3
    torch.manual_seed(4)
    mixed = dense_attention(q, k, v, SCALE, valid, p)
    kept = redrawn(heads, p, strip, 4)
    assert 0.5 < kept.mean() < 0.9
    allowed = None if valid is None else valid[:, None, None, :].expand(B, heads, L, L)
    naive = naive_attention(q, k, v, SCALE, allowed, kept, p)
    torch.testing.assert_close(mixed, naive, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(mixed)
    gradients = [torch.autograd.grad(out, qkv, cotangent, retain_graph=True)[0] for out in (mixed, naive)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_without_dropout_it_is_the_naive_softmax(naive_attention, heads, padded):
    qkv, (q, k, v) = projected(heads)
    valid = validity(padded)
    mixed = dense_attention(q, k, v, SCALE, valid, 0.0)
    allowed = None if valid is None else valid[:, None, None, :].expand(B, heads, L, L)
    naive = naive_attention(q, k, v, SCALE, allowed)
    torch.testing.assert_close(mixed, naive, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(mixed)
    gradients = [torch.autograd.grad(out, qkv, cotangent, retain_graph=True)[0] for out in (mixed, naive)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("strip", [2**20, 2 * L, 1])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_few_queries_attend_to_all_keys(monkeypatch, naive_attention, padded, strip, p):
    monkeypatch.setattr(module, "_STRIP", strip)
    qkv, (q, k, v) = projected(2)
    valid = validity(padded)
    torch.manual_seed(4)
    mixed = dense_attention(q[:, :, :2], k, v, SCALE, valid, p)
    torch.manual_seed(4)
    kept = torch.ones(B * 2, 2, L, dtype=torch.float64)
    for rows in kept.split(max(1, strip // (2 * L))) if p else ():
        rows.view(-1)[dropped_positions(rows.numel(), p)] = 0
    allowed = None if valid is None else valid[:, None, None, :].expand(B, 2, 2, L)
    naive = naive_attention(q[:, :, :2], k, v, SCALE, allowed, kept.view(B, 2, 2, L), p)
    torch.testing.assert_close(mixed, naive, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(mixed)
    gradients = [torch.autograd.grad(out, qkv, cotangent, retain_graph=True)[0] for out in (mixed, naive)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_one_key_hands_its_value_through():
    q, k, v = torch.randn(3, 2, 2, 1, D, dtype=torch.float64)
    torch.testing.assert_close(dense_attention(q, k, v, SCALE, None, 0.0), v, rtol=0, atol=1e-15)


def test_its_gradient_is_that_of_finite_differences():
    q, k, v = torch.randn(3, 2, 2, 4, 3, dtype=torch.float64)
    valid = torch.tensor([[True, True, True, False], [True, True, True, True]])

    def seeded(*inputs):
        torch.manual_seed(1)
        return dense_attention(*inputs, SCALE, valid, 0.2)

    assert torch.autograd.gradcheck(seeded, [t.clone().requires_grad_() for t in (q, k, v)])


def test_an_excluded_key_has_no_influence_and_no_gradient():
    _, (q, k, v) = projected(1)
    k, v = k.detach().requires_grad_(), v.detach().requires_grad_()
    valid = validity(True)
    mixed = dense_attention(q, k, v, SCALE, valid, 0.1)
    for gradient in torch.autograd.grad(mixed.square().sum(), (k, v)):
        assert not gradient[~valid[:, None, :].expand(B, 1, L)].any()
        assert gradient[valid[:, None, :].expand(B, 1, L)].any(-1).float().mean() > 0.9


def test_permuting_the_keys_changes_nothing():
    _, (q, k, v) = projected(2)
    order = torch.randperm(L)
    torch.testing.assert_close(
        dense_attention(q, k[:, :, order], v[:, :, order], SCALE, None, 0.0),
        dense_attention(q, k, v, SCALE, None, 0.0),
        rtol=0,
        atol=1e-12,
    )


def test_nothing_as_large_as_the_scores_is_kept_for_the_backward_pass():
    length, kept = 200, []
    q, k, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))

    def note(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        dense_attention(q, k, v, 1.0, None, 0.01)
    assert 3 * length * 4 <= sum(kept) < length**2 / 4
