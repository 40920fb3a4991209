"""Attention over all keys and over selected ones against the naive softmax, with gradients."""

import pytest
import torch

from semdiag_models import ModelConfig
from semdiag_models import fast_attention as module
from semdiag_models.fast_attention import dense_attention, dropped_positions, selected_attention
from semdiag_models.model import Attention, Encoder, attend_selected, attend_straight_through

CPU = torch.device("cpu")


def select_keys(kind, k, q, keys, scale, valid):
    """What a layer of this kind keeps."""
    layer = Attention(ModelConfig(3, 2, q.shape[2], kind, k, heads=q.shape[1], head_width=q.shape[3]))
    layer.scale = scale
    return layer.select(q, keys, valid)


# --- attention over all keys


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


@pytest.mark.slow
def test_the_gradient_over_all_keys_is_that_of_finite_differences():
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


def test_of_several_strips_nothing_as_large_as_the_scores_is_kept(monkeypatch):
    monkeypatch.setattr(module, "_STRIP", 2**14)
    length, kept = 200, []
    q, k, v = (torch.randn(2, 1, length, 4, requires_grad=True) for _ in range(3))

    def note(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        dense_attention(q, k, v, 1.0, None, 0.01)
    assert 6 * length * 4 <= sum(kept) < length**2 / 2


# --- attention over selected keys


def dense(selected, entries):
    """Scatter entries (B, H, L, K) of the selected keys into (B, H, L, L); zero elsewhere."""
    whole = torch.zeros(*selected.shape[:3], L + 1, dtype=entries.dtype)
    return whole.scatter(3, selected.where(selected >= 0, L), entries)[..., :L]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", ["banded", "block", "topk"])
@pytest.mark.parametrize("k", [1, 3, L])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_it_is_the_naive_masked_softmax_under_the_same_drops(naive_attention, kind, k, heads, padded, p):
    qkv, (q, keys, v) = projected(heads)
    selected = select_keys(kind, k, q, keys, SCALE, validity(padded))
    torch.manual_seed(6)
    mixed = selected_attention(q, keys, v, SCALE, selected, p)

    torch.manual_seed(6)
    kept = torch.ones(selected.shape, dtype=torch.float64)
    if p:
        kept.view(-1)[dropped_positions(kept.numel(), p)] = 0
        assert 0.5 < kept.mean() < 0.9
    allowed = dense(selected, torch.ones(selected.shape)) > 0
    some = allowed.any(-1, keepdim=True)  # the naive softmax has no answer for a query without a key
    naive = naive_attention(q, keys, v, SCALE, allowed | ~some, dense(selected, kept), p) * some
    torch.testing.assert_close(mixed, naive, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(mixed)
    gradients = [torch.autograd.grad(out, qkv, cotangent, retain_graph=True)[0] for out in (mixed, naive)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_a_query_without_a_selected_key_gives_zero_and_takes_no_gradient():
    q, k, v = (torch.randn(1, 1, 4, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    selected = torch.tensor([[[[0, 1], [-1, -1], [2, -1], [3, 0]]]])
    mixed = selected_attention(q, k, v, SCALE, selected, 0.0)
    assert not mixed[0, 0, 1].any()
    torch.testing.assert_close(mixed[0, 0, 2], v[0, 0, 2])
    gradient = torch.autograd.grad(mixed.square().sum(), q)[0]
    assert not gradient[0, 0, 1].any()
    assert gradient[0, 0, 0].all()
    assert gradient.isfinite().all()


@pytest.mark.slow
def test_its_gradient_is_that_of_finite_differences():
    inputs = [torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    selected = torch.tensor([[0, 2], [1, -1], [3, 2], [-1, -1]]).expand(2, 2, 4, 2)

    def seeded(*inputs):
        torch.manual_seed(1)
        return selected_attention(*inputs, SCALE, selected, 0.2)

    assert torch.autograd.gradcheck(seeded, inputs)


@pytest.mark.processor
def test_the_backward_pass_repeats_itself_bit_for_bit():
    gradients = []
    inputs = [torch.randn(4, 2, 50, 8, requires_grad=True) for _ in range(3)]
    selected = torch.zeros(4, 2, 50, 7, dtype=torch.int64).copy_(
        torch.arange(7)
    )  # every query loads the same keys
    for _ in range(3):
        mixed = selected_attention(*inputs, SCALE, selected, 0.0)
        gradients.append(torch.autograd.grad(mixed.square().sum(), inputs))
    assert all(torch.equal(a, b) for later in gradients[1:] for a, b in zip(gradients[0], later, strict=True))


def test_the_gathered_keys_and_values_are_never_stored():
    length, k, width, kept = 64, 16, 32, []
    q, keys, v = (torch.randn(1, 1, length, width, requires_grad=True) for _ in range(3))
    selected = select_keys("topk", k, q, keys, 1.0, None)

    def note(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        selected_attention(q, keys, v, 1.0, selected, 0.01)
    assert 3 * length * width <= sum(kept) < length * k * width


@pytest.mark.parametrize(("kind", "k"), [("banded", 3), ("block", 3), ("topk", 4)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_plain_path_is_the_fast_one_and_so_are_its_gradients(kind, k, padded):
    qkv, (q, keys, v) = projected(2)
    selected = select_keys(kind, k, q, keys, SCALE, validity(padded))
    mixed = selected_attention(q, keys, v, SCALE, selected, 0.0)
    plain = attend_selected(q, keys, v, SCALE, selected)
    torch.testing.assert_close(plain, mixed, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(mixed)
    gradients = [torch.autograd.grad(out, qkv, cotangent)[0] for out in (mixed, plain)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is ")  # torch's own jvp calls it
def test_the_plain_path_has_forward_derivatives_alone_and_vectorised():
    _, (q, keys, v) = projected(2)
    inputs = tuple(t.detach() for t in (q, keys, v))
    selected = select_keys("topk", 3, q, keys, SCALE, validity(True))

    def mix(*inputs):
        return attend_selected(*inputs, SCALE, selected)

    tangents = tuple(torch.randn(5, *t.shape, dtype=t.dtype) for t in inputs)
    several = torch.func.vmap(lambda *t: torch.func.jvp(mix, inputs, t)[1])(*tangents)
    for i in range(5):
        tangent = tuple(t[i] for t in tangents)
        step = 1e-6
        there, back = (
            mix(*(x + sign * step * t for x, t in zip(inputs, tangent, strict=True))) for sign in (1, -1)
        )
        torch.testing.assert_close(several[i], (there - back) / (2 * step), rtol=1e-6, atol=1e-8)
    batched = torch.func.vmap(mix, randomness="error")(*(torch.stack([t, 2 * t]) for t in inputs))
    torch.testing.assert_close(batched[1], mix(*(2 * t for t in inputs)), rtol=0, atol=1e-12)


def test_the_plain_path_can_be_differentiated_twice():
    inputs = [torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    selected = torch.tensor([[0, 2], [1, -1], [3, 2], [-1, -1]]).expand(1, 2, 4, 2)
    assert torch.autograd.gradgradcheck(lambda *t: attend_selected(*t, SCALE, selected), inputs)


# --- straight-through gradients


ROUNDING = 1e-13  # sums of some dozen products of numbers around 1, in float64


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
    found = gradients(lambda *t: attend_straight_through(*t, SCALE, valid, selected, 0.0), q, k, v, g=g)
    exact = gradients(lambda *t: attend_selected(*t, SCALE, selected), q, k, v, g=g)
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


def test_a_sample_of_padding_alone_mixes_nothing_and_has_no_gradient():
    q, k, v, g, valid = drawn()
    valid[1] = False
    selected = select_keys("topk", 2, q, k, SCALE, valid)
    found = gradients(lambda *t: attend_straight_through(*t, SCALE, valid, selected, 0.0), q, k, v, g=g)
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
