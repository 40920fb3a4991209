"""Scores and weights of a capture that keeps them, against what transformers and our encoder return."""

import pytest
import torch

from semdiag import capture
from semdiag_files import InputError
from semdiag_models import Encoder, ModelConfig

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROUNDING = 1e-5  # of weights in float32, over 8 keys


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES, num_attention_heads=4))


def with_sinks():
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SIZES, **HEADS, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
        )
    )


@pytest.mark.parametrize("make", [llama, bert, with_sinks])
def test_weights_are_those_that_transformers_returns(make):
    torch.manual_seed(0)
    model = make().eval()
    model.set_attn_implementation("eager")
    tokens, mask = torch.randint(1, 30, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    mask[1, 6:] = 0  # padding on the right
    with torch.no_grad(), capture(model, scores=True) as calls:
        returned = model(tokens, attention_mask=mask, output_attentions=True).attentions
    for layer, weights in enumerate(returned):
        ours = calls.weights(layer)
        assert ours.shape == weights.shape
        torch.testing.assert_close(ours[0], weights[0], rtol=0, atol=ROUNDING)
        torch.testing.assert_close(ours[1, :, :6], weights[1, :, :6], rtol=0, atol=ROUNDING)
        assert not ours[1, :, 6:].any()  # padded queries attend to nothing that counts
        torch.testing.assert_close(calls.weights(layer, head=3), ours[:, 3])
        received = (weights * mask[:, None, :, None]).sum(2)
        rows = calls.loads().query("layer == @layer")
        found = received[tuple(torch.tensor(rows[name].to_numpy()) for name in ("sample", "head", "key"))]
        torch.testing.assert_close(torch.tensor(rows["received"].to_numpy()), found, rtol=0, atol=8 * ROUNDING)
        assert len(rows) == 4 * (8 + 6)
    assert calls.loads(k=2)["received"].isna().all()


def test_scores_are_kept_where_a_query_attends_and_their_entropy_is_that_of_the_table():
    torch.manual_seed(0)
    sizes = {"vocabulary_size": 3, "classes": 2, "length": 8, "blocks": 2}
    model = Encoder(ModelConfig(**sizes, attention="topk", k=3)).eval()
    with torch.no_grad(), capture(model, scores=True) as calls:
        model(torch.randint(0, 2, (2, 8)))
        model(torch.randint(0, 2, (1, 8)))
    scores = calls.scores(1)
    assert scores.shape == (3, 1, 8, 8)
    assert torch.isfinite(scores).sum(-1).eq(3).all()
    weights = calls.weights(1, head=0).double()
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    table = calls.entropy()
    own = table[table["layer"] == 1]["entropy"].to_numpy()
    assert own == pytest.approx(entropy.flatten().numpy(), abs=8 * ROUNDING)
    spread = scores.masked_fill(torch.isinf(scores), torch.nan)
    ranges = spread.nan_to_num(-torch.inf).amax(-1) - spread.nan_to_num(torch.inf).amin(-1)
    delta = calls.dispersion()
    assert delta[delta["layer"] == 1]["dispersion"].to_numpy() == pytest.approx(ranges.flatten().numpy(), abs=1e-5)


def test_what_is_not_kept_is_refused_in_one_line():
    sizes = {"vocabulary_size": 3, "classes": 2, "length": 8, "blocks": 1}
    model = Encoder(ModelConfig(**sizes)).eval()
    with capture(model) as calls:
        model(torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(InputError, match=r"keeps no scores: use capture\(model, scores=True\)"):
        calls.weights(0)
    with capture(model, scores=True) as calls:
        with pytest.raises(InputError, match="run the model inside the context"):
            calls.scores(0)
        model(torch.zeros(1, 8, dtype=torch.int64))
        with pytest.raises(InputError, match=r"no scores of layer 4.*layers 0 to 0"):
            calls.scores(4)
        with pytest.raises(InputError, match=r"head must lie in 0 … 0. Got 1."):
            calls.scores(0, head=1)
        model(torch.zeros(1, 6, dtype=torch.int64))
        with pytest.raises(InputError, match="differ in length"):
            calls.scores(0)


class Twice(torch.nn.Module):
    """One attention module, called twice."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.attention(x, x, x, need_weights=False)[0]


def test_a_module_that_is_called_twice_is_two_layers_by_their_number_in_the_tables():
    torch.manual_seed(0)
    model = Twice().eval()
    with torch.no_grad(), capture(model, scores=True) as calls:
        model(torch.randn(2, 5, 8))
    spans = calls.dispersion()
    assert sorted(set(zip(spans["layer"], spans["occurrence"], strict=True))) == [(0, 0), (1, 1)]
    for layer in (0, 1):
        scores = calls.scores(layer)
        own = torch.tensor(spans.loc[spans["layer"] == layer, "dispersion"].to_numpy()).view(2, 2, 5)
        torch.testing.assert_close(
            (scores.amax(-1) - scores.amin(-1)).double(), own.double(), rtol=1e-5, atol=1e-6
        )
