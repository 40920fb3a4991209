"""The step derived by hand against torch's differentiation of the encoder, in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from semdiag_models.attention import selection as products
from semdiag_models.attention.attention import SHORT, largest
from semdiag_models.attention.dense_attention import dropped_positions
from semdiag_models.config import ACTIVATIONS, ModelConfig
from semdiag_models.encoder import ACTIVATION_FUNCTIONS, Encoder
from semdiag_models.reading import InputError
from semdiag_models.step import Stack, random_state, restore_random_state

pytestmark = pytest.mark.usefixtures("in_float64")
CPU = torch.device("cpu")
PAD = 4
KINDS = {
    "full": {},
    "topk": {"k": 3},
    "topk straight through": {"attention": "topk", "k": 3, "score_gradient": "straight-through"},
    "topk of many": {"attention": "topk", "k": 14},
    "bottomk": {"k": 3},
    "banded": {"k": 3},
    "block": {"k": 4},
    "block with a global token": {"attention": "block", "k": 4, "global_tokens": 1},
    "banded with CLS and global tokens": {"attention": "banded", "k": 3, "global_tokens": 2, "pooling": "cls"},
    "random": {"k": 3, "selection_seed": 5},
}
ROUNDING = 1e-12  # sums of at most some thousand products of numbers around 1, in float64


def encoder(kind="full", **fields):
    small = {"vocabulary_size": 5, "classes": 3, "length": 16, "blocks": 2, "width": 6, "mlp_width": 7}
    own = {"attention": kind.split()[0], **KINDS[kind]}
    return Encoder(ModelConfig(**{**small, "heads": 2, "head_width": 5, "dropout": 0.0, **own, **fields}))


def batch(model, padded=False, size=5):
    tokens = torch.randint(PAD, (size, model.config.length))
    if padded:
        tokens[1, 7:] = tokens[3, 1:] = PAD
    return tokens, torch.randint(3, (size,))


def differentiated(model, tokens, labels):
    stack = Stack([model.train()])
    stack.load()
    loss = stack.differentiate(tokens[None], labels[None])
    return loss[0], dict(stack.parts(stack.gradients, 0)), stack


def assert_same_gradients(model, loss, gradients, expected):
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=ROUNDING)
    names = [name for name, _ in model.named_parameters()]
    for name, gradient in zip(names, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(
            gradients[name], gradient, rtol=0, atol=ROUNDING, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("length", [16, SHORT + 4])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_width_one_are_as_any_others(kind, length):
    model = encoder(kind, heads=2, head_width=1, length=length)
    tokens, labels = batch(model)
    loss, gradients, _ = differentiated(model, tokens, labels)
    assert_same_gradients(model, loss, gradients, F.cross_entropy(model(tokens), labels))


@pytest.mark.processor
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [16, SHORT + 4])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_torchs(kind, heads, length, padded):
    model = encoder(kind, heads=heads, length=length, inverse_temperature=1.7, first_norm_eps=0.1)
    tokens, labels = batch(model, padded)
    loss, gradients, _ = differentiated(model, tokens, labels)
    assert_same_gradients(model, loss, gradients, F.cross_entropy(model(tokens), labels))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("pad_as_token", [False, True])
def test_so_they_are_for_every_activation_and_norm(activation, norm, pad_as_token):
    model = encoder("topk", activation=activation, norm=norm, pad_as_token=pad_as_token)
    tokens, labels = batch(model, padded=True)
    loss, gradients, _ = differentiated(model, tokens, labels)
    assert_same_gradients(model, loss, gradients, F.cross_entropy(model(tokens), labels))


class Dropping:
    """The encoder in elementary operations, with the drops of a step in the order in which they are drawn."""

    def __init__(self, model, samples):
        self.model, self.c, length = model, model.config, model.config.length
        c, rows = self.c, samples * model.config.length
        sizes = [rows * c.width]
        for _ in range(c.blocks):
            sizes += [rows * c.width, rows * c.mlp_width, rows * c.width]
        sizes += [rows * c.heads * length] * c.blocks
        kept = torch.ones(sum(sizes))
        kept[dropped_positions(len(kept), c.dropout)] = 0
        parts = (kept / (1 - c.dropout)).split(sizes)
        self.embedded, self.branches = parts[0], parts[1 : 1 + 3 * c.blocks]
        self.weights = [w.view(length, samples, c.heads, length).permute(1, 2, 3, 0) for w in parts[-c.blocks :]]

    def logits(self, tokens):
        c, model = self.c, self.model
        x = model.embedding(tokens) * math.sqrt(c.width) + model.positions
        x = x * self.embedded.view_as(x)
        for i, block in enumerate(model.blocks):
            attended, hidden, mlp = self.branches[3 * i : 3 * i + 3]
            y = self.attention(block.attention, F.layer_norm(x, (c.width,)), self.weights[i])
            x = x + y * attended.view_as(y)
            y = block.expand(F.layer_norm(x, (c.width,)))
            y = block.contract(ACTIVATION_FUNCTIONS[c.activation](y * hidden.view_as(y)))
            x = x + y * mlp.view_as(y)
        return model.head(x.mean(1))

    def attention(self, layer, x, kept):
        split = layer.qkv(x).view(*x.shape[:2], 3, self.c.heads, self.c.head_width)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(self.c.head_width)
        if self.c.k is not None:
            selected = layer.select(q, k, None)
            of_all = scores.softmax(-1)
            scores = scores + torch.full_like(scores, -math.inf).scatter(-1, selected, 0.0)
        weights = scores.softmax(-1)
        if self.c.score_gradient == "straight-through":
            weights = weights.detach() + of_all - of_all.detach()
        mixed = (weights * kept) @ v
        return layer.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.processor
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["full", "topk", "topk straight through", "banded", "random"])
def test_with_dropout_they_are_those_of_the_network_written_out(kind, activation):
    model = encoder(kind, dropout=0.2, activation=activation)
    tokens, labels = batch(model)
    torch.manual_seed(8)
    loss, gradients, _ = differentiated(model, tokens, labels)
    torch.manual_seed(8)
    written_out = F.cross_entropy(Dropping(model, len(tokens)).logits(tokens), labels)
    assert_same_gradients(model, loss, gradients, written_out)


@pytest.mark.processor
@pytest.mark.parametrize("kind", ["full", "banded"])  # which rounding cannot make to select other keys
@pytest.mark.parametrize("length", [100, 256])
def test_in_single_precision_large_products_round_no_worse_than_torchs(kind, length, through_onednn):
    """At sizes at which oneDNN makes the products.

    The errors of two sums of the same rounded terms are alike.
    """
    sizes = {"length": length, "width": 64, "mlp_width": 64, "heads": 1, "head_width": 64}
    model = encoder(kind, **sizes)
    tokens, labels = batch(model, size=8)
    expected = F.cross_entropy(model(tokens), labels)
    exact = torch.autograd.grad(expected, list(model.parameters()))
    single = copy.deepcopy(model).float()
    torchs = torch.autograd.grad(F.cross_entropy(single(tokens), labels), list(single.parameters()))
    _, gradients, stack = differentiated(single, tokens, labels)
    rows = torch.empty(8 * length, 64, dtype=torch.float32)
    assert products.takes(rows, rows[:64])
    assert stack.gradients.dtype == torch.float32
    for (name, _), true, by_torch in zip(model.named_parameters(), exact, torchs, strict=True):
        ours, theirs = ((g.double() - true).norm() for g in (gradients[name], by_torch))
        assert ours <= 3 * theirs + 1e-7 * true.norm(), name
    pair = Stack([single, copy.deepcopy(single)])
    pair.load()
    pair.differentiate(tokens.expand(2, -1, -1), labels.expand(2, -1))
    for i in range(2):
        for name, part in pair.parts(pair.gradients, i):
            torch.testing.assert_close(part, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_at_long_lengths_attention_drops_its_weights_itself():
    model = encoder("topk", dropout=0.3, length=SHORT + 1)
    tokens, labels = batch(model)
    _, _, stack = differentiated(model, tokens, labels)
    step, direction = 1e-6, torch.randn_like(stack.parameters)
    losses = []
    for sign in (1, -1):
        torch.manual_seed(4)
        stack.load()
        stack.parameters.add_(direction, alpha=sign * step)
        losses.append(stack.differentiate(tokens[None], labels[None])[0])
    torch.manual_seed(4)
    stack.load()
    stack.differentiate(tokens[None], labels[None])
    slope = (losses[0] - losses[1]) / (2 * step)
    # Second order: the third derivative, some hundreds here, times step²; rounding: 1e-16 / step.
    torch.testing.assert_close((stack.gradients * direction).sum(), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.processor
@pytest.mark.parametrize("length", [16, SHORT + 4])
def test_a_stack_of_different_masks_and_seeds_is_each_alone(length):
    kinds = ["full", "topk", "topk", "random", "full", "banded"]
    models = [encoder(kind, dropout=0.2, length=length).train() for kind in kinds]
    data = [batch(model, padded=i == 2) for i, model in enumerate(models)]
    tokens, labels = (torch.stack(part) for part in zip(*data, strict=True))
    states = []
    for seed in range(len(models)):
        torch.manual_seed(seed)
        states.append(random_state(CPU))
    torch.manual_seed(77)
    before = torch.get_rng_state()
    own = list(states)
    stack = Stack(models, own)
    stack.load()
    losses = stack.differentiate(tokens, labels)
    assert torch.equal(before, torch.get_rng_state())
    for i, model in enumerate(models):
        restore_random_state(states[i])
        loss, gradients, alone = differentiated(model, *data[i])
        goes_on = torch.rand(4)
        restore_random_state(own[i])
        assert torch.equal(torch.rand(4), goes_on), kinds[i]  # as many draws as alone
        torch.testing.assert_close(losses[i], loss, rtol=0, atol=ROUNDING)
        for name, part in stack.parts(stack.gradients, i):
            torch.testing.assert_close(part, gradients[name], rtol=0, atol=ROUNDING)
        torch.testing.assert_close(
            stack.logits(tokens)[i], alone.logits(tokens[i][None])[0], rtol=0, atol=ROUNDING
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [16, SHORT + 4])
def test_logits_are_the_encoders_in_evaluation(kind, length):
    model = encoder(kind, dropout=0.5, length=length).eval()
    stack = Stack([model])
    stack.load()
    tokens, _ = batch(model, padded=True)
    before = torch.get_rng_state()
    torch.testing.assert_close(stack.logits(tokens[None])[0], model(tokens).detach(), rtol=0, atol=ROUNDING)
    assert torch.equal(before, torch.get_rng_state())


def test_memory_is_used_again_without_a_trace():
    model = encoder("topk", dropout=0.2)
    tokens, labels = batch(model, padded=True)
    torch.manual_seed(3)
    _, gradients, stack = differentiated(model, tokens, labels)
    fresh = {name: gradient.clone() for name, gradient in gradients.items()}
    logits = stack.logits(tokens[None])
    kept = logits.clone()
    stack.logits(torch.randint(PAD, (1, 40, 16)))
    stack.differentiate(tokens[None, :2], labels[None, :2])
    assert torch.equal(logits, kept)
    torch.manual_seed(3)
    stack.differentiate(tokens[None], labels[None])
    assert all(torch.equal(part, fresh[name]) for name, part in stack.parts(stack.gradients, 0))


def test_a_query_without_a_key_mixes_nothing():
    """The last block of 4 of a sample with one token holds PAD alone."""
    model = encoder("block", length=16)
    tokens = torch.full((1, 16), PAD)
    tokens[0, 0] = 1
    labels = torch.tensor([2])
    loss, gradients, _ = differentiated(model, tokens, labels)
    assert_same_gradients(model, loss, gradients, F.cross_entropy(model(tokens), labels))


def test_parameters_are_loaded_and_stored_bit_for_bit():
    models = [encoder(), encoder("topk")]
    stack = Stack(models)
    stack.load()
    for i, model in enumerate(models):
        for name, part in stack.parts(stack.parameters, i):
            assert torch.equal(part, model.get_parameter(name))
            assert part.data_ptr() != model.get_parameter(name).data_ptr()
    other = models[0].head.weight.clone()
    stack.parameters.mul_(2)
    stack.store(1)
    assert torch.equal(models[0].head.weight, other)
    assert torch.equal(models[1].head.weight, dict(stack.parts(stack.parameters, 1))["head.weight"])


def test_a_model_of_the_papers_code_with_cls_is_not_trained():
    config = ModelConfig(3, 2, 8, "topk", k=3, pooling="cls", cls_as_key=False)
    with pytest.raises(InputError, match=r"cls_as_key=False, as the paper's code has, cannot be trained here\.$"):
        Stack([Encoder(config)])


def test_models_of_other_sizes_are_refused_with_the_reason():
    with pytest.raises(
        InputError, match=r"equal in all but their attention\. Got width of 6 and 8: train them one"
    ):
        Stack([encoder(), encoder(width=8)])


def test_a_member_that_is_not_a_number_leaves_the_others_as_they_are():
    models = [encoder() for _ in range(3)]
    tokens, labels = torch.randint(PAD, (3, 5, 16)), torch.randint(3, (3, 5))
    expected = [differentiated(model, tokens[i], labels[i])[1] for i, model in enumerate(models)]
    models[1].blocks[0].expand.weight.data[0, 0] = math.nan
    stack = Stack(models)
    stack.load()
    losses = stack.differentiate(tokens, labels)
    assert losses.isfinite().tolist() == [True, False, True]
    for i in (0, 2):
        for name, part in stack.parts(stack.gradients, i):
            torch.testing.assert_close(part, expected[i][name], rtol=0, atol=ROUNDING)


@given(
    st.integers(1, 14).flatmap(
        lambda keys: st.tuples(
            st.integers(1, keys),
            st.lists(
                st.lists(
                    st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 1.0, 1.5, 3.0]), min_size=keys, max_size=keys
                ),
                min_size=1,
                max_size=5,
            ),
        )
    )
)
def test_the_largest_are_kept_however_many_are_equal(drawn):
    k, rows = drawn
    scores = torch.tensor(rows).T[:, None]  # (keys, 1, queries)
    finite = (scores > -math.inf).sum(0)
    wanted = int((finite.clamp(max=k) + len(scores) - finite).sum())
    kept = largest(scores.clone(), k, wanted)
    assert torch.equal((kept > -math.inf).sum(0), finite.clamp(max=k))
    assert torch.equal(kept.topk(k, 0).values, scores.topk(k, 0).values)
    assert ((kept == scores) | (kept == -math.inf)).all()
