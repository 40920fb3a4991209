import math
import subprocess
import sys

import pytest
import torch
from scipy.stats import kstest

from semdiag_models.dropout import dropped_positions
from semdiag_models.encoder import AttentionCore, Encoder
from semdiag_models.model_config import ACTIVATIONS, ModelConfig

KINDS = [("full", None), ("banded", 3), ("block", 4), ("topk", 3)]
PAD = 4
TOKENS = torch.tensor([[0, 3, 1, 2, 2, 0, 1, 3, 0, 1], [3, 1, 1, 0, 2, 3, PAD, PAD, PAD, PAD]])
NAIVE_ACTIVATIONS = {
    "relu": lambda x: x * (x > 0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "mish": lambda x: x * torch.tanh(torch.log1p(x.exp())),
}


@pytest.fixture
def in_float64():
    """Have the encoders of a test built in float64, positions included."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def config(kind="full", k=None, **fields):
    small = {"vocabulary_size": 5, "classes": 3, "length": 12, "blocks": 2, "width": 6, "mlp_width": 7}
    return ModelConfig(**{**small, "heads": 2, "head_width": 5, "attention": kind, "k": k, **fields})


def encoder(*arguments, **fields):
    torch.manual_seed(11)
    return Encoder(config(*arguments, **fields)).eval()


class Naive:
    """The encoder written out, query by query, with the same drops in the same order."""

    def __init__(self, model, training):
        self.config, self.weights = model.config, model.state_dict()
        self.p = self.config.dropout if training else 0.0

    def drop(self, x):
        kept = torch.ones(x.numel())
        if self.p:
            kept[dropped_positions(x.numel(), self.p)] = 0
        return x * kept.view(x.shape) / (1 - self.p)

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, x, eps):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()

    def embed(self, tokens):
        d = self.config.width
        x = torch.empty(*tokens.shape, d)
        for b, row in enumerate(tokens.tolist()):
            for i, token in enumerate(row):
                for c in range(d):
                    angle = i / 10000 ** (c // 2 * 2 / d)
                    position = math.cos(angle) if c % 2 else math.sin(angle)
                    x[b, i, c] = self.weights["embedding.weight"][token, c] * math.sqrt(d) + position
        return self.drop(x)

    def chosen(self, query, scores, valid):
        """Keys of a query: a list in which None is an empty place."""
        length, k, kind = len(scores), self.config.k, self.config.attention
        if kind == "full":
            places = range(length)
        elif kind == "banded":
            first = min(max(query - (k - 1) // 2, 0), length - k)
            places = range(first, first + k)
        elif kind == "block":
            places = range(query // k * k, query // k * k + k)
        else:
            places = sorted((j for j in range(length) if valid[j]), key=lambda j: -float(scores[j]))[:k]
        return [j if j < length and valid[j] else None for j in places]

    def attention(self, name, x, valid):
        c = self.config
        batch, length, _ = x.shape
        q, k, v = (
            part.unflatten(-1, (c.heads, c.head_width)) for part in self.linear(f"{name}.qkv", x).chunk(3, -1)
        )
        scale = c.inverse_temperature / math.sqrt(c.head_width)
        columns = length if c.k is None else c.k
        weights, keys = torch.zeros(batch, c.heads, length, columns), {}
        for b in range(batch):
            for h in range(c.heads):
                for i in range(length):
                    scores = torch.stack([scale * (q[b, i, h] * k[b, j, h]).sum() for j in range(length)])
                    keys[b, h, i] = self.chosen(i, scores, valid[b])
                    total = sum(scores[j].exp() for j in keys[b, h, i] if j is not None)
                    for place, j in enumerate(keys[b, h, i]):
                        if j is not None:
                            weights[b, h, i, place] = scores[j].exp() / total
        weights = self.drop(weights)
        mixed = torch.zeros(batch, length, c.heads, c.head_width)
        for (b, h, i), places in keys.items():
            for place, j in enumerate(places):
                if j is not None:
                    mixed[b, i, h] += weights[b, h, i, place] * v[b, j, h]
        return self.linear(f"{name}.out", mixed.flatten(2))

    def logits(self, tokens):
        valid = torch.ones_like(tokens, dtype=torch.bool) if self.config.pad_as_token else tokens != PAD
        x = self.embed(tokens)
        for n in range(self.config.blocks):
            eps = self.config.first_norm_eps if n == 0 else 1e-5
            x = x + self.drop(self.attention(f"blocks.{n}.attention", self.norm(x, eps), valid))
            hidden = self.drop(self.linear(f"blocks.{n}.expand", self.norm(x, 1e-5)))
            hidden = NAIVE_ACTIVATIONS[self.config.activation](hidden)
            x = x + self.drop(self.linear(f"blocks.{n}.contract", hidden))
        pooled = torch.stack([row[kept].mean(0) for row, kept in zip(x, valid, strict=True)])
        return self.linear("head", pooled)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("kind", "k"), KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_logits_are_those_of_the_encoder_written_out(kind, k, activation):
    model = encoder(kind, k, activation=activation, inverse_temperature=1.7, first_norm_eps=0.1)
    naive = Naive(model, training=False).logits(TOKENS)
    torch.testing.assert_close(model(TOKENS), naive, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("kind", "k"), KINDS)
@pytest.mark.parametrize("pad_as_token", [False, True])
def test_in_training_dropout_acts_at_the_places_of_the_paper(kind, k, pad_as_token):
    model = encoder(kind, k, dropout=0.2, pad_as_token=pad_as_token).train()
    torch.manual_seed(8)
    logits = model(TOKENS)
    torch.manual_seed(8)
    torch.testing.assert_close(logits, Naive(model, training=True).logits(TOKENS), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "k"), KINDS)
def test_evaluation_is_deterministic_and_draws_nothing(kind, k):
    model, before = encoder(kind, k, dropout=0.5), torch.get_rng_state()
    assert torch.equal(model(TOKENS), model(TOKENS))
    assert torch.equal(torch.get_rng_state(), before)
    model.train()
    assert not torch.equal(model(TOKENS), model(TOKENS))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("kind", "k"), [pair for pair in KINDS if pair[0] != "banded"])
def test_appended_pads_do_not_change_the_logits(kind, k):
    model = encoder(kind, k)
    tokens = TOKENS[:, :6]
    padded = torch.cat([tokens, torch.full((2, 5), PAD)], 1)
    torch.testing.assert_close(model(padded), model(tokens), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("in_float64")
def test_bands_are_placed_by_the_padded_length_and_further_pads_change_nothing():
    model = encoder("banded", 3)
    once, more = (torch.cat([TOKENS[:, :6], torch.full((2, n), PAD)], 1) for n in (1, 5))
    torch.testing.assert_close(model(once), model(more), rtol=0, atol=1e-12)
    assert (model(once) - model(TOKENS[:, :6])).abs().max() > 1e-6  # the last query's band moved to the right


@pytest.mark.parametrize(("kind", "k"), KINDS)
@pytest.mark.parametrize("pad_as_token", [False, True])
def test_the_embedding_of_pad_matters_only_where_pad_is_a_token(kind, k, pad_as_token):
    model = encoder(kind, k, pad_as_token=pad_as_token)
    before = model(TOKENS)
    gradient = torch.autograd.grad(before.square().sum(), model.embedding.weight)[0]
    model.embedding.weight.data[PAD] += torch.randn(6)
    assert torch.equal(model(TOKENS)[0], before[0])
    assert torch.equal(model(TOKENS)[1], before[1]) is not pad_as_token
    assert bool(gradient[PAD].any()) is pad_as_token


@pytest.mark.parametrize(("kind", "k"), KINDS)
def test_saying_that_pads_may_occur_changes_nothing_but_spares_the_look(kind, k):
    model = encoder(kind, k)
    torch.testing.assert_close(model(TOKENS, True), model(TOKENS))
    torch.testing.assert_close(model(TOKENS[:1], True), model(TOKENS[:1]))
    assert torch.equal(model(TOKENS[:1], False), model(TOKENS[:1]))
    assert model.valid(TOKENS[:1]) is None
    assert torch.equal(model.valid(TOKENS[:1], True), torch.ones(1, 10, dtype=torch.bool))
    assert model.valid(TOKENS, False) is None


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("kind", "k"), KINDS)
def test_the_order_of_tokens_enters_through_positions_and_windows_alone(kind, k):
    model, order = encoder(kind, k), torch.randperm(10)
    tokens = TOKENS[:1]
    assert (model(tokens[:, order]) - model(tokens)).abs().max() > 1e-6
    model.positions = model.positions[torch.zeros(12, dtype=torch.int64)] + torch.randn(6)
    model.embedding = torch.nn.Embedding(10, 6)
    tokens = torch.arange(10)[None]  # all different, so that the largest scores have no ties
    same = torch.allclose(model(tokens[:, order], False), model(tokens, False), rtol=0, atol=1e-12)
    assert same is (kind in {"full", "topk"})


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("kind", "k"), KINDS)
def test_the_hook_point_sees_all_that_attention_does(naive_attention, kind, k):
    model, calls = encoder(kind, k), []
    for module in model.modules():
        if isinstance(module, AttentionCore):
            module.register_forward_hook(lambda _, inputs, output: calls.append((inputs, output)))
    model(TOKENS)
    assert len(calls) == 2
    for (q, keys, v, scale, valid, selected), mixed in calls:
        assert scale == 1 / math.sqrt(5)
        if selected is None:
            allowed = valid[:, None, None, :].expand(2, 2, 10, 10)
        else:
            allowed = torch.zeros(2, 2, 10, 11, dtype=torch.bool)
            allowed = allowed.scatter(3, selected.where(selected >= 0, 10), True)[..., :10]
        some = allowed.any(-1, keepdim=True)
        naive = naive_attention(q, keys, v, scale, allowed | ~some) * some
        torch.testing.assert_close(mixed, naive, rtol=0, atol=1e-12)


def test_the_same_seed_gives_the_same_parameters_for_every_attention():
    states = [encoder(kind, k).state_dict() for kind, k in KINDS]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], states[0][name]) for name in state)


def test_parameters_start_from_the_laws_of_the_released_code():
    model = encoder(vocabulary_size=100, classes=100, width=32, mlp_width=48, head_width=20)
    bounds = {"embedding.weight": 0.1, "head.weight": 0.1}
    for block in ("blocks.0", "blocks.1"):
        for layer, inputs in (("attention.qkv", 32), ("attention.out", 40), ("expand", 32), ("contract", 48)):
            bounds[f"{block}.{layer}.weight"] = bounds[f"{block}.{layer}.bias"] = 1 / math.sqrt(inputs)
    state = dict(model.named_parameters())
    assert not state.pop("head.bias").any()
    assert state.keys() == bounds.keys()
    for name, parameter in state.items():
        values = parameter.detach().flatten().double().numpy()
        assert kstest(values, "uniform", (-bounds[name], 2 * bounds[name])).pvalue > 1e-4, name
        assert abs(values).max() <= bounds[name]


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({"vocabulary_size": 16, "classes": 10, "length": 599, "blocks": 10}, 251_274),
        ({"vocabulary_size": 16, "classes": 10, "length": 599, "blocks": 10, "heads": 8}, 1_411_594),
        ({"vocabulary_size": 3, "classes": 2}, 125_122),
        ({"vocabulary_size": 4, "classes": 2}, 125_186),
        ({"vocabulary_size": 6, "classes": 3}, 125_379),
        ({"vocabulary_size": 12, "classes": 5}, 125_893),
        ({"vocabulary_size": 4, "classes": 5}, 125_381),
        *(
            (
                {"vocabulary_size": 4096, "classes": 4096, "blocks": blocks, "width": 32, "mlp_width": 128}
                | widths,
                n,
            )
            for widths in ({"head_width": 32},)
            for blocks, n in ((8, 366_848), (16, 467_456), (32, 668_672), (64, 1_071_104))
        ),
        *(
            ({"vocabulary_size": 10_000, "classes": 10_000, "blocks": blocks, "width": 128} | widths, n)
            for widths in ({"mlp_width": 512, "heads": 4, "head_width": 128},)
            for blocks, n in ((6, 4_943_120), (10, 6_525_200), (15, 8_502_800))
        ),
    ],
)
def test_parameters_are_as_many_as_in_the_released_runs(fields, parameters):
    with torch.device("meta"):
        model = Encoder(ModelConfig(**{"length": 40, **fields}))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_every_parameter_is_learned():
    model = encoder("topk", 3, activation="gelu").train()
    model(TOKENS[:1]).square().sum().backward()
    idle = {name for name, p in model.named_parameters() if not p.grad.any()}
    assert not idle


def test_a_model_without_memory_is_made_without_torchs_compiler():
    """Which takes a second to load: every command that reads a checkpoint would wait for it."""
    code = (
        "import sys, torch; from semdiag_models import Encoder, ModelConfig\n"
        "with torch.device('meta'):\n"
        "    encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4))\n"
        "assert encoder.positions.shape == (4, encoder.config.width)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
