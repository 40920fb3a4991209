"""Every architecture against a dense masked encoder written out in plain torch: logits, gradients, drops."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from semdiag_models import ModelConfig
from semdiag_models.config import ACTIVATIONS
from semdiag_models.fast_attention import dropped_positions
from semdiag_models.model import Encoder
from semdiag_models.selection import random_priorities

PAD, LENGTH = 4, 8
TOKENS = torch.tensor([[0, 3, 1, 2, 2, 0, 1], [3, 1, 1, 0, PAD, PAD, PAD]])  # one shorter than the longest input
KINDS = [("full", None, 0), ("topk", 3, 0), ("bottomk", 3, 0), ("random", 3, 0)]
KINDS += [(kind, 3, extra) for kind in ("banded", "block") for extra in (0, 1, 2)]
PRODUCT = [
    {"attention": kind, "k": k, "global_tokens": extra, "norm": norm, "pooling": pooling, "pad_as_token": pad}
    | {"heads": heads, "selection_seed": 9 if kind == "random" else 0}
    for (kind, k, extra), norm, pooling, pad, heads in itertools.product(
        KINDS, ("pre", "post"), ("mean", "cls"), (False, True), (1, 2)
    )
]
NAIVE_ACTIVATIONS = {
    "relu": lambda x: x * (x > 0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "mish": lambda x: x * torch.tanh(torch.log1p(x.exp())),
}


def encoder(**fields):
    sizes = {"vocabulary_size": 5, "classes": 3, "length": LENGTH, "blocks": 2, "width": 6, "mlp_width": 7}
    torch.manual_seed(11)
    model = Encoder(ModelConfig(**{**sizes, "head_width": 5, "dropout": 0.2, **fields})).eval()
    with torch.no_grad():  # scores of a size that matters
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


class Dense:
    """The encoder as its definition reads, with L×L masks; drops are drawn in the order of the encoder."""

    def __init__(self, model, training):
        self.c, self.weights, self.p = model.config, dict(model.named_parameters()), 0.2 * training

    def kept(self, *shape):
        coins = torch.ones(math.prod(shape))
        if self.p:
            coins[dropped_positions(coins.numel(), self.p)] = 0
        return coins.view(shape) / (1 - self.p)

    def drop(self, x):
        return x * self.kept(*x.shape)

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, x, eps=1e-5):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()

    def embed(self, tokens):
        """CLS at position 0, the input behind it, the global tokens at the last positions of the model."""
        c, first = self.c, self.c.pooling == "cls"
        rows, places = [], []
        if first:
            rows, places = [PAD + c.global_tokens + 1], [0]
        places += [first + i for i in range(tokens.shape[1])]
        places += [first + c.length + i for i in range(c.global_tokens)]
        ids = torch.tensor([[*rows, *row, *range(PAD + 1, PAD + 1 + c.global_tokens)] for row in tokens.tolist()])
        x = self.weights["embedding.weight"][ids] * math.sqrt(c.width)
        angle = torch.tensor(places)[:, None] / 10000 ** (torch.arange(0, c.width, 2) / c.width)
        return ids, self.drop(x + torch.stack([angle.sin(), angle.cos()], -1).flatten(1))

    def places(self, layer, head, query, scores, valid):
        """Keys of a query in the order in which their drops are drawn; None for all of them, -1 for none."""
        c, length = self.c, len(scores)
        first = int(c.pooling == "cls") if c.attention in ("banded", "block") else 0
        inner, k = length - first - c.global_tokens, c.k
        everywhere = [*range(first), *range(length - c.global_tokens, length)]
        if c.attention == "full" or query in everywhere:
            return None
        if c.attention == "banded":
            start = min(max(query - first - (k - 1) // 2, 0), inner - k)
            own = [first + start + j for j in range(k)]
        elif c.attention == "block":
            start = (query - first) // k * k
            own = [first + j if j < inner else -1 for j in range(start, start + k)]
        else:
            order = random_priorities(9, 2, c.heads, c.length + first + (c.pooling == "cls"), torch.device("cpu"))
            by = {"topk": -scores, "bottomk": scores, "random": -order[layer, head, query, :length]}[c.attention]
            own = sorted((j for j in range(length) if valid[j]), key=lambda j: float(by[j]))[:k]
        own = [*everywhere[:first], *own, *everywhere[first:]]
        return [j if j >= 0 and valid[j] else -1 for j in own] + [-1] * (k - len(own))

    def mix(self, layer, scores, valid):
        """Weights (B, H, L, L) after the drops."""
        batch, heads, length, _ = scores.shape
        mask = torch.zeros(scores.shape, dtype=torch.bool)
        chosen = {
            (b, h, i): self.places(layer, h, i, scores[b, h, i].detach(), valid[b])
            for b in range(batch)
            for h in range(heads)
            for i in range(length)
        }
        for (b, h, i), keys in chosen.items():
            mask[
                b, h, i, [j for j in range(length) if valid[b, j]] if keys is None else [j for j in keys if j >= 0]
            ] = True
        some = mask.any(-1, keepdim=True)
        weights = scores.masked_fill(~mask, -math.inf).masked_fill(~some, 0).softmax(-1) * some
        if not self.p:
            return weights
        kept = torch.ones(scores.shape)
        if any(keys is not None for keys in chosen.values()):
            kept = self.kept(batch, heads, length, length)
        dense = sorted({i for (_, _, i), keys in chosen.items() if keys is None})
        if dense:
            kept[:, :, dense] = self.kept(batch, heads, len(dense), length)
        return weights * kept

    def attention(self, layer, x, valid):
        c, name = self.c, f"blocks.{layer}.attention"
        q, k, v = (
            part.unflatten(-1, (c.heads, 5)).transpose(1, 2) for part in self.linear(f"{name}.qkv", x).chunk(3, -1)
        )
        scores = self.c.inverse_temperature * q @ k.mT / math.sqrt(5)
        mixed = self.mix(layer, scores, valid) @ v
        return self.linear(f"{name}.out", mixed.transpose(1, 2).flatten(2))

    def mlp(self, layer, x):
        hidden = self.drop(self.linear(f"blocks.{layer}.expand", x))
        return self.linear(f"blocks.{layer}.contract", NAIVE_ACTIVATIONS[self.c.activation](hidden))

    def logits(self, tokens):
        ids, x = self.embed(tokens)
        valid = torch.ones_like(ids, dtype=torch.bool) if self.c.pad_as_token else ids != PAD
        for layer in range(2):
            if self.c.norm == "pre":
                x = x + self.drop(
                    self.attention(layer, self.norm(x, 1e-5 if layer else self.c.first_norm_eps), valid)
                )
                x = x + self.drop(self.mlp(layer, self.norm(x)))
            else:
                x = self.norm(x + self.drop(self.attention(layer, x, valid)))
                x = self.norm(x + self.drop(self.mlp(layer, x)))
        if self.c.pooling == "cls":
            return self.linear("head", x[:, 0])
        return self.linear("head", torch.stack([row[kept].mean(0) for row, kept in zip(x, valid, strict=True)]))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("fields", PRODUCT, ids=lambda fields: "-".join(map(str, fields.values())))
def test_it_is_the_dense_masked_encoder_with_its_gradients_and_drops(fields):
    model = encoder(**fields)
    cotangent = torch.randn(2, 3)
    for training in (False, True):
        model.train(training)
        outputs = []
        for run in (model, Dense(model, training).logits):
            torch.manual_seed(8)
            outputs.append(run(TOKENS))
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
        ours, dense = (
            torch.autograd.grad((out * cotangent).sum(), list(model.parameters()), allow_unused=True)
            for out in outputs
        )
        for (name, _), one, other in zip(model.named_parameters(), ours, dense, strict=True):
            size = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * size, msg=name)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", ["full", "banded", "block", "topk"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_temperature_and_first_eps_are_where_they_belong(kind, activation):
    others = {"activation": activation, "inverse_temperature": 1.7, "first_norm_eps": 0.1}
    model = encoder(attention=kind, k=None if kind == "full" else 4, heads=2, **others)
    torch.testing.assert_close(model(TOKENS), Dense(model, training=False).logits(TOKENS), rtol=0, atol=1e-12)


LEGAL = [fields for fields in PRODUCT if not fields["pad_as_token"] and fields["heads"] == 2]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    "fields", [f for f in LEGAL if f["attention"] != "banded"], ids=lambda f: "-".join(map(str, f.values()))
)
def test_appended_pads_move_neither_the_global_tokens_nor_the_logits(fields):
    model, tokens = encoder(**fields), TOKENS[:1]
    padded = F.pad(tokens, (0, 1), value=PAD)
    torch.testing.assert_close(model(padded), model(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fields", LEGAL, ids=lambda f: "-".join(map(str, f.values())))
def test_every_extra_token_is_learned_and_counts_its_width(fields):
    model = encoder(**fields).train()
    extra = fields["global_tokens"] + (fields["pooling"] == "cls")
    plain = encoder(**{**fields, "global_tokens": 0, "pooling": "mean"})
    count, without = (sum(p.numel() for p in m.parameters()) for m in (model, plain))
    assert count == without + extra * model.config.width
    # In a post-norm block of width 6 a token may reach the head through others only: look at both samples.
    model(TOKENS).square().sum().backward()
    assert model.embedding.weight.grad[PAD + 1 :].any(-1).all()
    assert not model.embedding.weight.grad[PAD].any()


def test_nothing_as_large_as_the_scores_is_kept_for_global_tokens():
    length, kept = 300, []
    sizes = {"vocabulary_size": 5, "classes": 2, "length": length, "blocks": 1, "width": 4, "mlp_width": 4}
    model = Encoder(ModelConfig(**sizes, head_width=4, attention="banded", k=5, global_tokens=2)).train()

    def note(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(torch.randint(4, (1, length)))
    assert max(kept) < length * 10


def test_the_parameters_of_one_seed_do_not_depend_on_norm_or_kind():
    states = [
        encoder(attention=kind, k=None if kind == "full" else 3, norm=norm).state_dict()
        for kind in ("full", "banded", "block", "topk", "random")
        for norm in ("pre", "post")
    ]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], value) for name, value in states[0].items())


def test_a_random_pattern_is_rebuilt_from_the_configuration_and_draws_nothing():
    first = encoder(attention="random", k=3, selection_seed=4)
    again = Encoder(ModelConfig.from_dict(first.config.to_dict())).eval()
    again.load_state_dict(first.state_dict())
    before = torch.get_rng_state()
    random_priorities.cache_clear()
    logits = first(TOKENS)
    random_priorities.cache_clear()
    assert torch.equal(again(TOKENS), logits)
    assert torch.equal(torch.get_rng_state(), before)
    other = Encoder(ModelConfig.from_dict({**first.config.to_dict(), "selection_seed": 5})).eval()
    other.load_state_dict(first.state_dict())
    assert not torch.allclose(other(TOKENS), logits)
