"""The one input and what every head makes of it: scores by loops, masks, limits, labels."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import semdiag
from semdiag.measuring.calls.running import unnamed
from semdiag.questions.look import measure as heads
from semdiag.questions.look.measure import LONGEST, Cut, fitting_k, given_sample, see
from semdiag_files import InputError


class Decoder(nn.Module):
    """Embeddings, and one causal attention of two heads: small enough for loops."""

    def __init__(self, vocabulary=300, heads=2, width=3):
        super().__init__()
        self.heads = heads
        generator = torch.Generator().manual_seed(2)
        tables = torch.randn(3, vocabulary, heads * width, generator=generator, dtype=torch.float64)
        self.q, self.k, self.v = (nn.Embedding.from_pretrained(table) for table in tables)

    def forward(self, ids, attention_mask=None):
        q, k, v = (each(ids).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def seen_of(module, inputs, **how):
    model = unnamed(module)
    return see(model, given_sample(model, inputs, None), **how)


def test_scores_and_numbers_are_those_of_loops():
    """Rounding: three products of numbers below 5, and sums of at most six exponentials: below 1e-12."""
    module, ids = Decoder(), [7, 1, 250, 1, 42, 9]
    (layer,) = seen_of(module, torch.tensor([ids])).layers
    for number, head in enumerate(layer.heads):
        rows, spans, entropies, firsts = [], [], [], []
        for i, query in enumerate(ids):
            z = []
            for key in ids[: i + 1]:
                a, b = (table.weight[token].tolist() for table, token in ((module.q, query), (module.k, key)))
                z.append(sum(a[3 * number + d] * b[3 * number + d] for d in range(3)) / math.sqrt(3))
            weights = [math.exp(x) / sum(map(math.exp, z)) for x in z]
            rows += z
            spans.append(max(z) - min(z))
            entropies.append(-sum(p * math.log(p) for p in weights))
            firsts.append(weights[0])
        assert head.scores == pytest.approx(rows, abs=1e-12)
        assert head.allowed.tolist() == [[j <= i for j in range(6)] for i in range(6)]
        assert head.selected is head.sink is None
        assert head.dispersion == pytest.approx(float(np.median(spans)), abs=1e-12)
        assert head.entropy == pytest.approx(sum(entropies) / 6, abs=1e-12)
        assert head.first_weight == pytest.approx(sum(firsts) / 6, abs=1e-12)


def test_padding_is_no_query_and_no_key():
    batch = {"ids": torch.tensor([[5, 6, 7, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    (layer,) = seen_of(Decoder(), batch).layers
    assert layer.heads[0].allowed.sum(1).tolist() == [1, 2, 3, 0, 0]
    assert len(layer.heads[0].scores) == 6
    alone = seen_of(Decoder(), torch.tensor([[5, 6, 7]])).layers[0].heads[0]
    assert layer.heads[0].dispersion == alone.dispersion
    assert layer.heads[0].first_weight == alone.first_weight


def test_the_numbers_are_those_of_a_capture_and_the_first_sample_alone_is_looked_at(tiny_runs):
    model = semdiag.load(tiny_runs.topk)
    tokens = model.default_inputs(3, 0)[0]
    with semdiag.capture(model.module, k=3) as calls:
        model.module(tokens[1:2])
    spans = calls.dispersion().groupby(["layer", "head"])["dispersion"].median()
    found = see(model, given_sample(model, tokens[1:], None))
    for layer, one in enumerate(found.layers):
        for number, head in enumerate(one.heads):
            assert head.dispersion == spans[layer, number]
            assert head.selected.sum(1).tolist() == [3] * 12
            assert head.allowed.all()


def test_tokens_beyond_a_page_are_left_out_and_that_is_known():
    found = seen_of(Decoder(), torch.arange(LONGEST + 5)[None])
    assert (found.length, found.sample.cut) == (LONGEST, Cut.PAGE)
    assert found.layers[0].queries == [str(token) for token in range(LONGEST)]
    assert seen_of(Decoder(), torch.arange(LONGEST)[None]).sample.cut is None


def test_an_input_whose_scores_take_too_much_is_shortened(monkeypatch):
    monkeypatch.setattr(heads, "LARGEST", 8 * 2 * 55)  # two causal heads of ten queries in double precision
    found = seen_of(Decoder(), torch.arange(40)[None])
    assert found.sample.cut is Cut.SCORES
    assert 8 <= found.length <= 10
    assert seen_of(Decoder(), torch.arange(10)[None]).sample.cut is None


def test_numbers_that_are_no_token_ids_cannot_be_shortened(monkeypatch):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1).eval()
    monkeypatch.setattr(heads, "LARGEST", 2 * 4 * 36)
    assert seen_of(encoder, torch.randn(1, 6, 8)).length == 6
    with pytest.raises(InputError, match=r"^the first sample given: its scores take 0 MiB, and .*smaller input"):
        seen_of(encoder, torch.randn(1, 7, 8))


def test_what_does_not_fit_is_told():
    module = Decoder()
    with pytest.raises(InputError, match=r"No softmax attention was seen while model ran"):
        seen_of(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(InputError, match=r"number of samples is 0"):
        seen_of(module, torch.zeros(0, 4, dtype=torch.long))
    with pytest.raises(InputError, match=r"texts need a tokenizer, and model has none"):
        seen_of(module, "a text")
    found = seen_of(module, torch.arange(4)[None])
    assert (fitting_k(found, None), fitting_k(found, 4)) == (4, 4)
    for wrong in (0, 5):
        with pytest.raises(InputError, match=rf"^k must lie in 1 … 4, the largest number of keys. Got k={wrong}"):
            fitting_k(found, wrong)


def test_k_is_not_asked_of_heads_that_select(tiny_runs):
    model = semdiag.load(tiny_runs.topk)
    found = see(model, given_sample(model, model.default_inputs(1, 0)[0], None))
    assert fitting_k(found, None) == 5
    with pytest.raises(InputError, match=r"k applies only to models that attend to every key"):
        fitting_k(found, 3)


@pytest.mark.filterwarnings("ignore")
def test_a_decoder_and_its_crossing_keys_have_their_own_tokens():
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings"), 8)
    few = {f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    bart = transformers.BartModel(transformers.BartConfig(vocab_size=60, **sizes, **few)).eval()
    batch = {"input_ids": torch.tensor([[4, 5, 6]]), "decoder_input_ids": torch.tensor([[20, 21, 22]])}
    found = [(one.queries, one.keys, one.crossing) for one in seen_of(bart, batch).layers]
    own, other = ["4", "5", "6"], ["20", "21", "22"]
    assert found == [(own, own, False), (other, other, False), (other, own, True)]
