import pytest
import torch

from semdiag_models.attention.dense_attention import (
    dropped_positions,
    plain_selected_attention,
    selected_attention,
)
from semdiag_models.attention.selection import select_keys

B, L, D, SCALE = 3, 10, 5, 0.7


def projected(heads):
    qkv = torch.randn(B, L, 3, heads, D, dtype=torch.float64, requires_grad=True)
    return qkv, qkv.permute(2, 0, 3, 1, 4)


def validity(padded):
    """Lengths 10, 7 and 2: with block-local attention some queries are left without a key."""
    return torch.arange(L) < torch.tensor([[L], [7], [2]]) if padded else None


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


def test_all_keys_selected_is_full_attention(naive_attention):
    _, (q, keys, v) = projected(2)
    selected = torch.arange(L).expand(B, 2, L, L)
    mixed = selected_attention(q, keys, v, SCALE, selected, 0.0)
    torch.testing.assert_close(mixed, naive_attention(q, keys, v, SCALE), rtol=0, atol=1e-12)


def test_one_selected_key_hands_its_value_through():
    _, (q, keys, v) = projected(1)
    selected = torch.randint(L, (B, 1, L, 1))
    mixed = selected_attention(q, keys, v, SCALE, selected, 0.0)
    for b in range(B):
        torch.testing.assert_close(mixed[b, 0], v[b, 0, selected[b, 0, :, 0]], rtol=0, atol=1e-15)


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


def test_moving_keys_and_their_selection_together_changes_nothing():
    _, (q, keys, v) = projected(2)
    selected = select_keys("topk", 3, q, keys, SCALE, None)
    order = torch.randperm(L)
    moved = order.argsort()[selected]
    torch.testing.assert_close(
        selected_attention(q, keys[:, :, order], v[:, :, order], SCALE, moved, 0.0),
        selected_attention(q, keys, v, SCALE, selected, 0.0),
        rtol=0,
        atol=1e-12,
    )


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
    plain = plain_selected_attention(q, keys, v, SCALE, selected)
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
        return plain_selected_attention(*inputs, SCALE, selected)

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
    assert torch.autograd.gradgradcheck(lambda *t: plain_selected_attention(*t, SCALE, selected), inputs)


@pytest.mark.device
def test_bfloat16_runs_on_another_device(other_device):
    """CUDA has no kernel for one of its products in bfloat16."""
    draw = torch.Generator().manual_seed(4)
    q, k, v = torch.randn(3, 2, 2, 9, 8, generator=draw).bfloat16().to(other_device)
    selected = torch.rand(2, 2, 9, 9, generator=draw).topk(3, -1).indices.to(other_device)
    mixed = [
        selected_attention(*(t.to(dtype) for t in (q, k, v)), 0.5, selected, 0.0).float().cpu()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    # The scores, the weights and the values are each rounded to 8 bits; scores lie below 8.
    torch.testing.assert_close(*mixed, rtol=0, atol=(8 + 2) * 2**-8 * float(v.abs().max()))
