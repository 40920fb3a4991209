"""Two chained products: attention without a softmax sums over positions; other chains mix features alone."""

import copy

import architectures as toys
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import semdiag
from semdiag.capturing.provenance.softmaxes import NO_SOFTMAX

LENGTH, WIDTH, STREAMS = 6, 12, 3


class Block(nn.Module):
    """Softmax attention, then a function of the stream."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4)
        self.small, self.mix = nn.Linear(WIDTH, STREAMS**2), mix
        self.point = nn.Linear(STREAMS, STREAMS)
        self.keep = None  # number of keys that attention keeps; None: all

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT
        if self.keep is not None:
            best = scores.topk(self.keep, -1).values[..., -1:]
            scores = scores.masked_fill(scores < best, -torch.inf)
        x = x + scores.softmax(-1) @ v
        return x + self.mix(self, x)


def square(block, x):
    return block.small(x).tanh().unflatten(-1, (STREAMS, STREAMS))


def rotation(block, x):
    return torch.linalg.qr(square(block, x))[0]


def points(x):
    return x.unflatten(-1, (-1, STREAMS))


def normals(x):
    return F.normalize(x, dim=-1)


def altup(block, x):
    streams = torch.stack([x, x / 2, x.tanh()], -1)
    for _ in range(2):
        streams = streams + streams @ square(block, streams[..., 0])
    return streams[..., 0]


def hyper_connections(block, x):
    streams = torch.stack([x, x / 2, x.tanh()], 2)
    for _ in range(2):
        streams = square(block, streams[:, :, 0]) @ streams
    return streams.mean(2)


def frames(block, x):
    frame = rotation(block, x) @ rotation(block, x.tanh())
    return (frame @ points(x).mT).mT.flatten(-2)


def frames_by_einsum(block, x):
    frame = torch.einsum("blij,bljk->blik", rotation(block, x), rotation(block, x.tanh()))
    return torch.einsum("blik,blnk->blni", frame, points(x)).flatten(-2)


def frames_by_rows(block, x):
    """The matrices are stacked of single entries, which no projection made."""
    angle, zero, one = x[..., 0], torch.zeros_like(x[..., 0]), torch.ones_like(x[..., 0])
    rows = torch.stack([angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero, zero, zero, one], -1)
    frame = rows.unflatten(-1, (STREAMS, STREAMS))
    return (frame @ (frame @ points(x).mT)).mT.flatten(-2)


def transforms_of_samples(block, x):
    first, second = (block.small(pooled).view(-1, 1, STREAMS, STREAMS) for pooled in (x.mean(1), x.amax(1)))
    return (points(x) @ first @ second).flatten(-2)


def reflections(block, x):
    normal = normals(x)
    mirror = torch.eye(WIDTH) - 2 * normal[..., None] * normal[..., None, :]
    return (mirror @ (mirror @ x[..., None]))[..., 0]


def reflections_by_products(block, x):
    normal = normals(x)
    mirror = torch.eye(WIDTH) - 2 * (normal[..., None] @ normal[..., None, :])
    return (mirror @ x[..., None])[..., 0]


def indexer(block, x):
    """Relevance of keys as in DeepSeek's indexer: heads are summed with weights of each query."""
    q, k = block.qkv(x)[..., :WIDTH].unflatten(-1, (4, -1)), block.small(x)[..., :STREAMS]
    relevance = (q @ k.mT.unsqueeze(1)).relu()
    return (block.heads(x).unsqueeze(-2) @ relevance)[..., 0, :].mean(-1, keepdim=True)


def indexer_of_projected_heads(block, x):
    """A further projection of each head makes heads rows of its product."""
    q = block.point(block.qkv(x)[..., :WIDTH].unflatten(-1, (4, -1)))
    return (block.heads(x).unsqueeze(-2) @ (q @ q[:, :, 0].mT.unsqueeze(1)).relu())[..., 0, :].mean(
        -1, keepdim=True
    )


def indexer_by_einsum(block, x):
    q, k = block.qkv(x)[..., :WIDTH].unflatten(-1, (4, -1)), block.small(x)[..., :STREAMS]
    relevance = torch.einsum("blhd,bmd->blhm", q, k).relu()
    return torch.einsum("blh,blhm->blm", block.heads(x), relevance).mean(-1, keepdim=True)


def indexer_of_the_stream(block, x):
    relevance = (points(x) @ points(x).permute(0, 2, 3, 1).mean(1, keepdim=True)).relu()
    return (block.heads(x).unsqueeze(-2) @ relevance)[..., 0, :].mean(-1, keepdim=True)


NO_ATTENTION = (
    *(altup, hyper_connections, frames, frames_by_einsum, frames_by_rows, transforms_of_samples),
    *(
        reflections,
        reflections_by_products,
        indexer,
        indexer_of_projected_heads,
        indexer_by_einsum,
        indexer_of_the_stream,
    ),
)


@pytest.mark.parametrize("mix", NO_ATTENTION, ids=lambda mix: mix.__name__)
def test_products_that_sum_features_alone_are_no_attention_and_a_mask_passes(mix):
    model, x = Block(mix), torch.randn(2, LENGTH, WIDTH).requires_grad_()
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(x)
    assert (len(calls), [*calls.audit["reason"]]) == (1, [])
    with semdiag.sparsify(model, semdiag.TopK(2)):
        output = model(x)
    reference, y = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    reference.keep = 2
    with torch.device("cpu"):
        expected = _in_double(reference, y)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    (output.square().sum() + expected.square().sum()).backward()
    torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-3, rtol=1e-4)


def _in_double(model, x):
    torch.set_default_dtype(torch.float64)
    try:
        return model(x)
    finally:
        torch.set_default_dtype(torch.float32)


def by_heads(x):
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def together(x):
    return x.transpose(1, 2).flatten(-2)


def stacked(block, x):
    """Queries, keys and values as entries of a stack, as in vision models."""
    return block.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def unprojected(block, x):
    return (x @ x.mT).relu() @ x


def sigmoid_of_stacked(block, x):
    q, k, v = stacked(block, x)
    return together((q @ k.mT).sigmoid() @ v)


def linear_of_stacked(block, x):
    q, k, v = stacked(block, x)
    return together(q.relu() @ (k.relu().mT @ v))


def keys_of_fewer_positions(block, x):
    """As in Linformer."""
    q, k, v = block.qkv(x).chunk(3, -1)
    fewer = torch.full((LENGTH, 4), 1 / LENGTH)
    return (q @ (k.mT @ fewer)).relu() @ (fewer.mT @ v)


def recurrent(block, x):
    q, k, v = map(by_heads, block.qkv(x).chunk(3, -1))
    state, outputs = torch.zeros(len(x), 2, WIDTH // 2, WIDTH // 2), []
    for place in range(LENGTH):
        state = 0.9 * state + k[:, :, place, :, None] @ v[:, :, place, None]
        outputs.append(q[:, :, place, None] @ state)
    return together(torch.cat(outputs, 2))


def recurrent_by_slices(block, x):
    q, k, v = block.qkv(x).chunk(3, -1)
    state, outputs = torch.zeros(len(x), WIDTH, WIDTH), []
    for place in range(LENGTH):
        here = slice(place, place + 1)
        state = state + k[:, here].mT @ v[:, here]
        outputs.append(q[:, here] @ state)
    return torch.cat(outputs, 1)


def cumulative(block, x):
    q, k, v = block.qkv(x).chunk(3, -1)
    state = (k[..., None] @ v[..., None, :]).cumsum(1)
    return (q[..., None, :] @ state)[..., 0, :]


def of_channels(block, x):
    q, k, v = block.qkv(x).chunk(3, -1)
    return (F.normalize(q, dim=1).mT @ F.normalize(k, dim=1) @ v.mT).mT


def with_cached_keys(block, x):
    q, k, v = block.qkv(x).chunk(3, -1)
    k, v = (torch.cat([torch.ones(len(x), 4, WIDTH), part], 1) for part in (k, v))
    return (q @ k.mT).relu() @ v


ATTENTION = (
    *(unprojected, sigmoid_of_stacked, linear_of_stacked, keys_of_fewer_positions, recurrent),
    *(recurrent_by_slices, cumulative, of_channels, with_cached_keys),
)


@pytest.mark.parametrize("mix", ATTENTION, ids=lambda mix: mix.__name__)
def test_products_that_sum_positions_may_be_attention_and_a_mask_is_refused(mix):
    model, x = Block(mix), torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(x)
    assert len(calls) == 1
    assert {*calls.audit["reason"]} == {NO_SOFTMAX}
    with pytest.raises(semdiag.InputError), semdiag.sparsify(model, semdiag.TopK(2)):
        model(x)


@pytest.mark.parametrize("mix", [unprojected, recurrent, linear_of_stacked], ids=lambda mix: mix.__name__)
def test_so_is_one_token_that_is_decoded_alone(mix, monkeypatch):
    """Its sums over positions have length 1, but for those of a cache, of which every batch is a multiple."""
    monkeypatch.setitem(globals(), "LENGTH", 1)
    memory = torch.randn(2, 5, WIDTH)

    def attend(block, x):
        return (x @ memory.mT).relu() @ memory if mix is unprojected else mix(block, x)

    model, x = Block(attend), torch.randn(2, 1, WIDTH)
    with torch.no_grad(), semdiag.capture(model) as calls:
        model(x)
    assert {*calls.audit["reason"]} == {NO_SOFTMAX}


FAMILIES = "DeepseekV32 GlmMoeDsa HYV4 AXK2 MistralLarge4Text Dots3NoteText Gemma3nText"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES.split())
def test_indexers_and_mixed_streams_of_transformers_are_no_attention(name):
    """Under a mask that keeps all keys the model is itself; with fewer it is masked in every layer."""
    if not hasattr(pytest.importorskip("transformers"), f"{name}Config"):
        pytest.skip("not in this version")
    toy = toys.hugging_face(name, toys.left, **toys.SPECIAL[name])
    model = toys.ready(toy)
    with torch.no_grad(), semdiag.capture(model) as calls:
        expected = toy.run(model)
    assert (len(calls), NO_SOFTMAX in {*calls.audit["reason"]}) == (2, False)
    with torch.no_grad(), semdiag.sparsify(model, semdiag.TopK(toys.L)):
        output = toy.run(model)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad(), semdiag.sparsify(model, semdiag.TopK(1)) as masked:
        toy.run(model)
    assert masked.calls == 2
