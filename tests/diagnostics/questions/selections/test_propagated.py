"""Choices where a model runs in a format throughout: a loop as reference, what is forecast, what is refused."""

import pytest
import torch
from indexers_by_hand import COMPRESSED, INDEXED, LATENT
from torch import nn

from semdiag import InputError
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.selections.number_formats import FORMATS
from semdiag.measuring.calls.running import placed, unnamed
from semdiag.measuring.calls.scored_rows import NotAvailableError
from semdiag.measuring.findings.changed_shares import changed_shares
from semdiag.questions.selections.answer.own import own_summary
from semdiag.questions.selections.measure.own import OwnSelections
from semdiag.questions.selections.measure.propagated import propagated_selections

CPU = torch.device("cpu")
FAMILIES = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8, "head_dim": 8},
    "DeepseekV3": {**LATENT, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    "GptOss": {"num_local_experts": 8, "head_dim": 8, "sliding_window": 16},
    "DeepseekV32": INDEXED,
    "GlmMoeDsa": INDEXED,
    "DeepseekV4": COMPRESSED,
}


class Gate(nn.Module):
    """Chooses two of six."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x).topk(2, -1).values.sum(-1, keepdim=True)


class Routers(nn.Module):
    """Two layers that route each token by its state, and pass it on."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor
        self.embedding = nn.Embedding(4096, 8)
        self.gates = nn.ModuleList(Gate(nn.Linear(8, 6, bias=False)) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        draw = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            weight.data.normal_(generator=draw)

    def forward(self, input_ids):
        x = self.embedding(input_ids) * self.factor
        for gate, layer in zip(self.gates, self.layers, strict=True):
            x = layer(x).tanh() + gate(x)
        return x


def routers(factor=1.0):
    return Routers(factor).eval()


def ids(samples=40, length=24, top=4096):
    return torch.randint(top, (samples, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.processor
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_measured_counts_the_tokens_that_choose_otherwise(name):
    model, tokens = routers(), ids()
    chosen = []
    for dtype in (torch.float64, getattr(torch, name)):
        own, found = placed(routers(), dtype=dtype), []
        for gate in own.gates:
            gate.register_forward_hook(
                lambda gate, given, out, found=found: found.append(gate.linear(given[0]).topk(2, -1).indices)
            )
        with torch.no_grad():
            own(tokens)
        chosen.append([{*row} for each in found for row in each.flatten(0, 1).tolist()])
    expected = [one != other for one, other in zip(*chosen, strict=True)]
    table = propagated_selections(unnamed(model), list(tokens.split(15)), FORMATS[name], CPU)
    layers = table.groupby("module", sort=False)
    changes = [expected[i * tokens.numel() : (i + 1) * tokens.numel()] for i in range(2)]
    assert layers["measured"].sum().tolist() == [sum(layer) for layer in changes]
    assert layers["queries"].sum().tolist() == [tokens.numel()] * 2
    later = sum(second and not first for first, second in zip(*changes, strict=True))
    assert layers["first"].sum().tolist() == [sum(changes[0]), later]
    assert table["sample"].max() == 39
    assert sum(expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_forecast_of_models_of_transformers_is_near_what_is_measured(tiny, family):
    """Shares of rows differ by draws alone: 5 standard errors of both, as if one row in 4 were independent."""
    loaded = LoadedModel("tiny", "", tiny(family, **FAMILIES[family]), "hugging face", "unknown")
    table = propagated_selections(loaded, list(ids(64, 40, 64).split(32)), FORMATS["bfloat16"], CPU)
    queries, forecast, measured = (table[name].sum() for name in ("queries", "forecast", "measured"))
    assert measured > 0
    assert abs(forecast - measured) < 5 * (2 * measured * (1 - measured / queries) * 4) ** 0.5
    assert measured / 2 <= forecast <= 2 * measured


def test_float32_is_forecast_in_proportion_to_float16():
    loaded, batches, kinds = unnamed(routers()), [ids(160)], ("bfloat16", "float16", "float32")
    sums = {name: propagated_selections(loaded, batches, FORMATS[name], CPU)["forecast"].sum() for name in kinds}
    assert 4 < sums["bfloat16"] / sums["float16"] < 16  # 8, were shares in proportion
    assert sums["float32"] == sums["float16"] / 2**13


def test_the_same_again_and_the_model_untouched():
    model = routers()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    first, again = (propagated_selections(unnamed(model), [ids()], FORMATS["float8_e4m3fn"], CPU) for _ in "12")
    assert first.equals(again)
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


def test_states_that_overflow_float16_change_every_choice():
    table = propagated_selections(unnamed(routers(factor=1e6)), [ids()], FORMATS["float16"], CPU)
    first = table[table["module"] == table["module"].iloc[0]]
    assert (first["measured"] == first["queries"]).all()
    assert (first["forecast"] == first["queries"]).all()


def test_rows_with_nothing_to_choose_from_and_padding_are_left_out(tiny, batch):
    loaded = LoadedModel("tiny", "", tiny("DeepseekV32", **INDEXED), "hugging face", "unknown")
    table = propagated_selections(loaded, [batch], FORMATS["bfloat16"], CPU)
    queries = table.groupby("module")["queries"].sum()
    real = batch["attention_mask"].sum(1)
    assert queries["model.layers.1.mlp.gate"] == real.sum()
    assert queries["model.layers.0.self_attn.indexer"] == (real - 6).clamp(min=0).sum()  # index_topk is 6


class Fickle(nn.Module):
    """Selects more often in float64."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.gate = Gate(nn.Linear(8, 6))

    def forward(self, x):
        for _ in range(2 if x.dtype == torch.float64 else 1):
            self.gate(x @ self.weight)
        return x


class Drawing(Fickle):
    """Adds random numbers."""

    def forward(self, x):
        return self.gate((x + torch.rand(x.shape, dtype=x.dtype)) @ self.weight)


@pytest.mark.parametrize(
    ("model", "said"),
    [(Fickle(), "are not those of its rounded run"), (Drawing(), "draws random numbers")],
    ids=["fickle", "drawing"],
)
def test_why_there_is_no_forecast(model, said):
    inputs = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(NotAvailableError, match=said):
        propagated_selections(unnamed(model), [inputs], FORMATS["bfloat16"], CPU)


def test_float64_is_no_other_format():
    with pytest.raises(InputError, match="Name a coarser format"):
        propagated_selections(unnamed(routers()), [ids()], FORMATS["float64"], CPU)


def test_the_answer_has_shares_and_intervals():
    table = propagated_selections(unnamed(routers()), [ids()], FORMATS["bfloat16"], CPU)
    nothing = OwnSelections([], {})
    (entry,) = own_summary(nothing, "m", "bfloat16", {}, table)["results"]
    shares = entry["propagated"]["all"]
    assert shares["measured"] == pytest.approx(table["measured"].sum() / table["queries"].sum())
    assert shares["measured_low"] <= shares["measured"] <= shares["measured_high"]
    # The forecast's interval is wider by a tenth of each end.
    narrow = changed_shares(table.assign(measured=table["forecast"]))
    assert shares["forecast_low"] == pytest.approx(0.9 * narrow["measured_low"])
    assert shares["forecast_high"] == pytest.approx(1.1 * narrow["measured_high"])
    assert [row["queries"] for row in entry["propagated"]["selections"]] == [960, 960]
    (without,) = own_summary(nothing, "m", "bfloat16", {}, "why")["results"]
    assert without["propagated"] == {"selections": [], "all": None, "reason": "why"}
    assert "propagated" not in own_summary(nothing, "m", "bfloat16", {})["results"][0]
