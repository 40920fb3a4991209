"""Attention behind indexers, beside dense attention worked out from the weights in float64."""

import math

import pytest
import torch
from indexers_by_hand import (
    COMPRESSED,
    INDEXED,
    LENGTH,
    block_scores,
    half_split,
    index_scores,
    inputs_of,
    interleaved,
    latent_scores,
    margin,
)
from torch import nn

from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.selections.number_formats import FORMATS
from semdiag.questions.selections.answer.own import own_summary
from semdiag.questions.selections.measure.own import own_selections
from semdiag.questions.selections.words import own_sentences

# Scores of the dense attention are three products of at most 32 numbers behind each other, of sizes whose sum is
# below 20 here: off by less than 3 · 34 · 2^-24 · 20 = 1.2e-4 in float32; shares of weight by at most twice that.
NEAR = 2.5e-4
SHARED = {**INDEXED, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}


@pytest.fixture
def spread(tiny):
    """Tiny models whose scores differ: matrices of standard deviation n^-0.5, by their names in order."""

    def build(family, **own):
        model, draw = tiny(family, **own), torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if parameter.ndim > 1 or "sinks" in name:
                    parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=draw)
        return model

    return build


def measured(model, *batches):
    """What is found of a model."""
    loaded = LoadedModel("tiny", "", model, "factory", "unknown")
    return own_selections(loaded, batches, FORMATS["bfloat16"], torch.device("cpu"), torch.float32)


def said(found):
    """The entry of results, and the sentences."""
    (entry,) = own_summary(found, "tiny", "bfloat16", {})["results"]
    return entry, " ".join(own_sentences(entry))


def truth(scores, chosen_by, allowed, k):
    """Return of each row recalled and hit by head; whether its choice is sure, and its largest key by head.

    Args:
        scores: (rows, heads, n) of the dense attention.
        chosen_by: (rows, n) of the indexer.
        allowed: bool (rows, n).
        k: of the indexer.
    """
    gap, chosen = margin(chosen_by.masked_fill(~allowed, -torch.inf), k)
    kept = torch.zeros_like(allowed).scatter(1, chosen, True)
    weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    recalled = (weights * kept[:, None]).sum(-1)
    largest = weights.argmax(-1)
    hit = kept[:, None].expand_as(weights).gather(-1, largest[..., None])[..., 0]
    near = weights.topk(2, -1).values
    sure = gap > 1e-5 * chosen_by.abs().max()  # a hundred roundings
    clear = near[..., 0] - near[..., 1] > NEAR
    return recalled, hit, sure, clear


def check(layer, scores, chosen_by, allowed, k):
    """Compare a layer with dense attention worked out by hand, of rows that have more than k keys."""
    must = allowed.sum(1) > k
    recalled, hit, sure, clear = truth(scores[must], chosen_by[must], allowed[must], k)
    (part,) = layer.parts
    assert part.recalled.shape == recalled.shape
    assert float(sure.double().mean()) > 0.7, "ties of the indexer's zeros are few"
    assert float((part.recalled - recalled)[sure].abs().max()) <= NEAR
    assert torch.equal(part.hit[sure[:, None] & clear].bool(), hit[sure[:, None] & clear])
    assert torch.allclose(part.at_random, k / allowed[must].sum(1).double())
    assert float((recalled - part.at_random[:, None])[sure].abs().mean()) > 100 * NEAR, "dense weights are uneven"
    assert bool((part.recalled.mean(1) <= part.best + 1e-12).all())
    assert layer.unlike == 0


@pytest.mark.parametrize(
    ("family", "sizes", "rotate", "chooses"),
    [
        ("DeepseekV32", INDEXED, half_split, {0: 0, 1: 1}),
        ("GlmMoeDsa", SHARED, interleaved, {0: 0, 1: 0, 2: 2}),
    ],
)
def test_the_dense_weight_of_chosen_keys_is_that_worked_out_by_hand(spread, batch, family, sizes, rotate, chooses):
    model = spread(family, **sizes)
    layers = [f"model.layers.{layer}.self_attn" for layer in chooses]
    indexers = {
        layer: f"model.layers.{own}.self_attn.indexer" for layer, own in zip(layers, chooses.values(), strict=True)
    }
    given = inputs_of(model, [*layers, *set(indexers.values())])
    found = {layer.module: layer for layer in measured(model, batch).dense}
    assert {name: layer.chosen_by for name, layer in found.items()} == indexers
    valid = batch["attention_mask"].bool()
    allowed = (valid[:, None] & torch.ones(LENGTH, LENGTH).tril().bool())[valid]
    for name in layers:
        (hidden, residual, turns, *_), _ = given[indexers[name]]
        chosen_by = index_scores(model.get_submodule(indexers[name]), hidden, residual, *turns, rotate)[valid]
        own = given[name][1]
        scores = latent_scores(model.get_submodule(name), own["hidden_states"], *own["position_embeddings"])
        check(found[name], scores.transpose(1, 2)[valid], chosen_by, allowed, 6)


def test_blocks_behind_a_window_are_those_worked_out_by_hand(spread, batch):
    model = spread("DeepseekV4", **COMPRESSED)
    layers = ["model.layers.1.self_attn", "model.layers.2.self_attn"]
    given = inputs_of(model, layers)
    found = {layer.module: layer for layer in measured(model, batch["input_ids"]).dense}
    assert list(found) == layers
    places = torch.arange(LENGTH)
    allowed = (torch.arange(LENGTH // 2) < ((places + 1) // 2)[:, None]).repeat(6, 1)
    for name in layers:
        chosen_by, scores = block_scores(model.get_submodule(name), given[name][0][0])
        check(found[name], scores.transpose(1, 2).flatten(0, 1), chosen_by.flatten(0, 1), allowed, 2)
        (part,) = found[name].parts
        assert bool((part.lost < 1 - part.recalled).all()), "the window's keys and the sink have weight, too"
        assert bool((part.lost > 0).all())


def test_without_selection_the_model_is_the_dense_one(spread, batch):
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")
    model = spread("DeepseekV32", **INDEXED)
    options = {name: value for name, value in model.config.to_dict().items() if not name.startswith("index")}
    options |= {"architectures": None, "model_type": "deepseek_v3"}
    dense = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**options)).eval()
    left = dense.load_state_dict(model.state_dict(), strict=False)
    assert not left.missing_keys
    assert all(".indexer." in name for name in left.unexpected_keys)
    with torch.no_grad():
        sparse, whole = (each(**batch).logits.double() for each in (model, dense))
    real = batch["attention_mask"].bool()
    p, q = whole[real].log_softmax(-1), sparse[real].log_softmax(-1)
    found = measured(model, batch)
    entry, sentences = said(found)
    outputs = entry["without_selection"]["outputs"]
    assert outputs["predictions"] == int(real.sum())
    assert outputs["divergence"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert outputs["divergence"] > 0.01
    changed = float((p.argmax(-1) != q.argmax(-1)).double().mean())
    assert outputs["changed_share"] == pytest.approx(changed, abs=1.5 / int(real.sum()))
    assert entry["without_selection"]["dense"] is True
    assert "all 2 layers are dense attention to rounding" in sentences
    assert entry["passed"] is True
    assert [module.index_topk for module in model.modules() if hasattr(module, "index_topk")] == [6, 6], "put back"


def test_k_of_all_keys_changes_nothing(spread, batch):
    model = spread("GlmMoeDsa", **{**INDEXED, "index_topk": LENGTH})
    entry, sentences = said(measured(model, batch))
    assert [row["rows"] for row in entry["dense"]] == [0, 0]
    assert entry["dense"][0]["recalled"] is None
    assert entry["without_selection"]["outputs"]["divergence"] == 0
    assert "all 2 layers are dense attention to rounding" in sentences


class Indexer(nn.Module):
    """Chooses keys by a product of its own."""

    def __init__(self, most):
        super().__init__()
        self.index_topk, self.most = 2, most

    def forward(self, x):
        scores = (x @ x.mT).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf)
        return scores.topk(min(self.index_topk, self.most), -1).indices


class Attention(nn.Module):
    """Attends to the chosen keys that are not after the query, and as a fault to some more."""

    is_causal = True

    def __init__(self, most, fault):
        super().__init__()
        self.indexer, self.fault = Indexer(most), fault

    def forward(self, x):
        kept = torch.zeros(len(x), 6, 6, dtype=torch.bool).scatter(-1, self.indexer(x), True)
        kept = kept.roll(1, -1) if self.fault == "beside" else kept
        past = torch.ones(6, 6).tril().bool()
        if self.fault == "future":
            past[2, 5] = True
            kept[:, 2, 5] = self.indexer.index_topk > 2
        head = x[:, None]
        return nn.functional.scaled_dot_product_attention(head, head, head, attn_mask=(kept & past)[:, None])[:, 0]


class Model(nn.Module):
    """One such layer."""

    def __init__(self, most=99, fault=""):
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        with torch.no_grad():
            self.embedding.weight.normal_(generator=torch.Generator().manual_seed(1))
        self.attention = Attention(most, fault)

    def forward(self, input_ids):
        return self.attention(self.embedding(input_ids)) @ self.embedding.weight.T


IDS = torch.arange(18).remainder(16).view(3, 6)


def test_a_model_of_ones_own_is_measured_too():
    entry, sentences = said(measured(Model(), IDS))
    (row,) = entry["dense"]
    assert (row["attention"], row["chosen_by"], row["rows"]) == ("attention", "attention.indexer", 12)
    assert entry["without_selection"]["dense"] is True
    assert "the attention behind an indexer is dense attention to rounding" in sentences


@pytest.mark.parametrize(("options", "rows"), [({"most": 3}, 9), ({"fault": "future"}, 3)])
def test_what_is_not_dense_with_k_of_all_keys_is_a_fault(options, rows):
    entry, sentences = said(measured(Model(**options), IDS))
    (layer,) = entry["without_selection"]["layers"]
    assert (layer["other_keys"], layer["rows"], layer["dense"]) == (rows, 18, False)
    assert (entry["faults"], entry["passed"]) == (0, False)
    assert f"attention is not dense attention: {rows} of 18 rows attend to other keys" in sentences


def test_an_output_that_is_not_finite_is_not_said_to_be_dense():
    found = measured(Model(), IDS)
    assert found.without is not None
    (layer,) = found.without.layers
    layer.over_rounding = layer.residual = math.nan
    entry, sentences = said(found)
    assert entry["without_selection"]["dense"] is None
    assert entry["without_selection"]["layers"][0]["over_rounding"] is None
    assert "outputs are not finite: attention." in sentences
    assert entry["passed"] is True


def test_attention_to_other_keys_than_were_chosen_is_told():
    entry, sentences = said(measured(Model(fault="beside"), IDS))
    assert (entry["dense"][0]["unlike"], entry["dense"][0]["recalled"]) == (1, None)
    assert "as it attends to other keys than were chosen: attention." in sentences


def test_a_model_that_cannot_run_without_selection_says_why():
    class Refusing(Indexer):
        def forward(self, x):
            if self.index_topk > 2:
                raise ValueError("k is part of\nthe kernel")
            return super().forward(x)

    model = Model()
    model.attention.indexer = Refusing(99)
    entry, sentences = said(measured(model, IDS, IDS))
    assert entry["without_selection"]["reason"] == "ValueError: k is part of the kernel"
    assert "the model cannot be run (ValueError: k is part of the kernel)" in sentences
    assert entry["passed"] is True
    assert model.attention.indexer.index_topk == 2


def test_batches_are_put_together(spread, batch):
    model = spread("DeepseekV32", **INDEXED)
    whole = said(measured(model, batch))[0]
    halves = [{name: each[rows] for name, each in batch.items()} for rows in (slice(0, 3), slice(3, 6))]
    parts = said(measured(model, *halves))[0]
    for one, other in zip(whole["dense"], parts["dense"], strict=True):
        assert one["rows"] == other["rows"]
        # A choice that hangs on rounding moves the mean over rows by less than one of them.
        assert one["recalled"] == pytest.approx(other["recalled"], abs=1 / one["rows"])
    assert whole["without_selection"]["outputs"]["targets"] == parts["without_selection"]["outputs"]["targets"]
