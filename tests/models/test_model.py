import math
import subprocess
import sys

import pytest
import torch
from scipy.stats import kstest

from semdiag_models.config import ModelConfig
from semdiag_models.model import AttentionCore, Encoder

KINDS = [("full", None), ("banded", 3), ("block", 4), ("topk", 3)]
PAD = 4
TOKENS = torch.tensor([[0, 3, 1, 2, 2, 0, 1, 3, 0, 1], [3, 1, 1, 0, 2, 3, PAD, PAD, PAD, PAD]])


def config(kind="full", k=None, **fields):
    small = {"vocabulary_size": 5, "classes": 3, "length": 12, "blocks": 2, "width": 6, "mlp_width": 7}
    return ModelConfig(**{**small, "heads": 2, "head_width": 5, "attention": kind, "k": k, **fields})


def encoder(*arguments, **fields):
    torch.manual_seed(11)
    return Encoder(config(*arguments, **fields)).eval()


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


@pytest.mark.slow
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
