"""Straight-through top-k attention against its definition, in float64."""

import pytest
import torch

from semdiag_models import InputError
from semdiag_models.attention.dense_attention import plain_selected_attention
from semdiag_models.attention.selection import select_keys, straight_through_attention
from semdiag_models.encoder import Encoder

ROUNDING = 1e-13  # sums of some dozen products of numbers around 1, in float64
SCALE = 0.7


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, g = torch.randn(4, 2, 3, 7, 5, generator=generator, dtype=torch.float64)
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, 5:] = False
    return q, k, v, g, valid


def gradients(attend, *leaves, g):
    leaves = [t.clone().requires_grad_() for t in leaves]
    mixed = attend(*leaves)
    return mixed.detach(), *torch.autograd.grad(mixed, leaves, g)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kept", [1, 3, 6])
def test_forward_is_topk_and_the_scores_learn_by_the_softmax_over_all_keys(kept, padded):
    q, k, v, g, valid = drawn()
    valid = valid if padded else None
    selected = select_keys("topk", kept, q, k, SCALE, valid)
    found = gradients(lambda *t: straight_through_attention(*t, SCALE, valid, selected, 0.0), q, k, v, g=g)
    exact = gradients(lambda *t: plain_selected_attention(*t, SCALE, selected), q, k, v, g=g)
    for one, other in ((found[0], exact[0]), (found[3], exact[3])):  # output, and gradient of v
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)

    scores = SCALE * q @ k.mT
    if padded:
        scores.masked_fill_(~valid[:, None, None], -torch.inf)
    p, a = scores.softmax(-1), g @ v.mT
    d_scores = p * (a - (p * a).sum(-1, keepdim=True))  # (diag(p) - p pᵀ) a, written out
    for one, other in ((found[1], SCALE * d_scores @ k), (found[2], SCALE * d_scores.mT @ q)):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)
    assert (found[1] - exact[1]).abs().max() > 1e-3  # not the derivative of what is computed


def test_with_all_keys_it_is_full_attention():
    q, k, v, g, _ = drawn(1)
    selected = select_keys("topk", 7, q, k, SCALE, None)
    found = gradients(lambda *t: straight_through_attention(*t, SCALE, None, selected, 0.0), q, k, v, g=g)
    full = gradients(lambda q, k, v: (SCALE * q @ k.mT).softmax(-1) @ v, q, k, v, g=g)
    for one, other in zip(found, full, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)


def test_a_sample_of_padding_alone_mixes_nothing_and_has_no_gradient():
    q, k, v, g, valid = drawn()
    valid[1] = False
    selected = select_keys("topk", 2, q, k, SCALE, valid)
    found = gradients(lambda *t: straight_through_attention(*t, SCALE, valid, selected, 0.0), q, k, v, g=g)
    assert not any(t[1].any() for t in found)
    assert all(t.isfinite().all() and t[0].any() for t in found)


def test_in_evaluation_the_gradient_is_that_of_topk(tiny_model):
    tokens = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1]])
    torch.manual_seed(0)
    model = Encoder(tiny_model(attention="topk", k=3, dropout=0, score_gradient="straight-through")).double()
    exact = Encoder(tiny_model(attention="topk", k=3, dropout=0)).double().eval()
    exact.load_state_dict(model.state_dict())

    def of(encoder):
        outputs = encoder(tokens)
        return outputs.detach(), torch.autograd.grad(outputs[0, 0], encoder.attention(0).qkv.weight)[0]

    (trained, learning), (output, gradient) = of(model.train()), of(exact)
    torch.testing.assert_close(trained, output, rtol=0, atol=ROUNDING)
    assert (learning - gradient).abs().max() > 1e-6
    for one, other in zip(of(model.eval()), (output, gradient), strict=True):
        assert torch.equal(one, other)


def test_topk_alone_takes_it_and_the_label_says_so(tiny_model):
    chosen = {"score_gradient": "straight-through"}
    assert tiny_model(attention="topk", k=3, **chosen).attention_label == "topk-3-straight-through"
    with pytest.raises(InputError, match="Only topk attention takes score_gradient='straight-through'"):
        tiny_model(attention="bottomk", k=3, **chosen)
    with pytest.raises(InputError, match="Unknown score_gradient 'straight_through'"):
        tiny_model(attention="topk", k=3, score_gradient="straight_through")
