"""Masks where a model runs in a format throughout: loops as reference, what is forecast, what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import watch_attention
from semdiag.measuring.conditions import Conditions
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.rounded_operations import converted
from semdiag.measuring.survey import survey
from semdiag.measuring.table import ALL, column_types
from semdiag.questions.mask_precision.answer import precision_of, propagated_table
from semdiag.questions.mask_precision.measure.probe import PrecisionPlan
from semdiag.questions.mask_precision.measure.propagated import PROPAGATED_MASKS
from semdiag.questions.mask_precision.words import precision_sentences
from semdiag.questions.mask_stability.terminal import print_masks
from semdiag_models import InputError

pytestmark = pytest.mark.usefixtures("few_resamples")

FORMATS = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")


def calls_of(module, tokens):
    calls = []
    with torch.no_grad(), watch_attention(module, lambda call: calls.append((call.q.double(), call.k.double()))):
        module(tokens)
    return calls


@pytest.mark.processor
@pytest.mark.parametrize("batch_size", [100, 2])
@pytest.mark.parametrize("kind", ["full", "topk", "bottomk"])
def test_measured_counts_the_rows_that_choose_other_keys(wild_encoder, padded_tokens, kind, batch_size):
    encoder, tokens = wild_encoder(kind), padded_tokens[0]
    plan = PrecisionPlan(("bf16",), k=3, forecast=True)
    found = semdiag.mask_precision(encoder, tokens, plan, batch_size=batch_size).propagated_masks
    assert column_types(found) == PROPAGATED_MASKS.columns
    models = [converted(semdiag.measuring.calls.running.unnamed(encoder), d).module.eval() for d in DTYPES]
    exact, other = (calls_of(model, tokens) for model in models)
    valid = tokens != encoder.config.pad_id
    sign = -1 if kind == "bottomk" else 1
    expected, seen = {}, set()
    for layer, pair in enumerate(zip(exact, other, strict=True)):
        for b, h, i in np.ndindex(pair[0][0].shape[:3]):
            keys = valid[b].nonzero().flatten()
            if not valid[b, i] or len(keys) <= 3:
                continue
            chosen = [{*(sign * (k[b, h, keys] @ q[b, h, i])).topk(3).indices.tolist()} for q, k in pair]
            row = expected.setdefault((b, layer), [0, 0, set()])
            row[0] += 1
            row[1] += chosen[0] != chosen[1]
            if chosen[0] != chosen[1] and (b, i) not in seen:
                row[2].add(i)
        seen |= {(b, i) for (b, at), row in expected.items() if at == layer for i in row[2]}
    counts = found.set_index(["sample", "layer"])[["queries", "measured", "first"]]
    assert sorted(counts.index) == sorted(expected)
    for place, (queries, changed, first) in expected.items():
        assert counts.loc[place].tolist() == [queries, changed, len(first)]
    assert counts["measured"].sum() > 0


DTYPES = (torch.float64, torch.bfloat16)


def test_the_forecast_of_a_trained_model_is_near_what_is_measured(tiny_models):
    """Rows differ by draws alone: 5 standard errors of both shares, as if one row in 4 were independent."""
    for model in tiny_models:
        found = semdiag.mask_precision(model, model.default_inputs(40, 0)[0], formats=FORMATS, forecast=True)
        for _, own in found.propagated_masks.groupby("format"):
            queries, forecast, measured = (own[name].sum() for name in ("queries", "forecast", "measured"))
            spread = np.sqrt(2 * max(measured, 1) * (1 - measured / queries) * 4)
            assert abs(forecast - measured) < 5 * spread
        assert found.propagated_masks["measured"].sum() > 0


def test_finer_formats_change_fewer_masks_in_proportion(tiny_models):
    model = tiny_models[0]
    few, draw = model.default_inputs(40, 0)[0], torch.Generator().manual_seed(0)
    inputs = torch.cat([few[:, torch.randperm(few.shape[1], generator=draw)] for _ in range(20)])
    found = semdiag.mask_precision(model, inputs, formats=("bf16", "fp16", "fp32"), forecast=True)
    sums = found.propagated_masks.groupby("format")["forecast"].sum()
    assert 4 < sums["bfloat16"] / sums["float16"] < 16  # 8, were shares in proportion
    assert sums["float32"] == sums["float16"] / 2**13


def test_a_forecast_is_the_same_again_and_with_the_model_untouched(wild_encoder, padded_tokens):
    encoder, tokens = wild_encoder("full"), padded_tokens[0]
    before = {name: values.clone() for name, values in encoder.state_dict().items()}
    first, again = (
        semdiag.mask_precision(encoder, tokens, formats=FORMATS, forecast=True).propagated_masks for _ in range(2)
    )
    assert first.equals(again)
    assert all(torch.equal(values, before[name]) for name, values in encoder.state_dict().items())


def test_without_being_asked_nothing_is_forecast(wild_encoder, padded_tokens):
    found = semdiag.mask_precision(wild_encoder("full"), padded_tokens[0])
    assert found.propagated_masks.empty
    assert "propagated" not in precision_of(Findings(found), "model")[0]
    banded = semdiag.mask_precision(wild_encoder("banded"), padded_tokens[0], forecast=True)
    assert banded.propagated_masks.empty


class Fickle(nn.Module):
    """Attends more often in float64."""

    def __init__(self, times=2):
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        for _ in range(self.times if x.dtype == torch.float64 else 1):
            x = torch.nn.functional.scaled_dot_product_attention(*[(x @ self.weight)[:, None]] * 3)[:, 0]
        return x


class ByHand(nn.Module):
    """Attention out of two products and a softmax."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        y = x @ self.weight
        return (y @ y.mT).softmax(-1) @ y


def test_copies_that_do_not_fit_are_refused(wild_encoder, padded_tokens, monkeypatch):
    monkeypatch.setattr("semdiag_models.reading._memory", lambda: 2**16)
    with pytest.raises(InputError, match="To forecast, for copies of the model would take"):
        semdiag.mask_precision(wild_encoder("full"), padded_tokens[0], forecast=True)


class Drawing(Fickle):
    """Adds random numbers."""

    def forward(self, x):
        return super().forward(x + torch.rand(x.shape, dtype=x.dtype))


def test_a_model_that_draws_random_numbers_is_not_compared_with_itself():
    inputs = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    found = semdiag.mask_precision(Drawing(times=1), inputs, formats=("bf16",), forecast=True)
    assert found.propagated_masks.empty
    (said,) = found.remarks.loc[found.remarks["code"] == "no-mask-forecast", "text"]
    assert "random" in said


@pytest.mark.parametrize(
    "module", [Fickle(), Fickle(times=0), ByHand()], ids=["seen more often", "seen less often", "by hand"]
)
def test_why_there_is_no_forecast_is_said_and_the_rest_is_measured(module):
    inputs = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    found = semdiag.mask_precision(module, inputs, formats=("bf16",), forecast=True)
    assert found.propagated_masks.empty
    assert not found.rounded_masks.empty
    (said,) = found.remarks.loc[found.remarks["code"] == "no-mask-forecast", "text"]
    assert "its attention calls in float64 are not those of its rounded run" in said


def test_scores_that_overflow_count_as_changed():
    inputs = 1000 * torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    module = Fickle(times=1)
    module.weight.data.mul_(1000)
    found = semdiag.mask_precision(module, inputs, formats=("fp16",), k=2, forecast=True).propagated_masks
    assert (found["measured"] == found["queries"]).all()


def test_the_answer_in_all_places(tiny_models, capsys):
    found = survey([tiny_models[0]], Conditions(samples=20, plans=(PrecisionPlan(("bf16",), forecast=True),)))
    findings = Findings(found)
    table = findings(propagated_table)
    masks = found.propagated_masks
    pooled = table[table["layer"] == ALL].iloc[0]
    for name in ("forecast", "measured"):
        assert pooled[name] == pytest.approx(masks[name].sum() / masks["queries"].sum())
        assert pooled[f"{name}_low"] <= pooled[name] <= pooled[f"{name}_high"]
    (found_json,) = precision_of(findings, found.models["model"].iloc[0])
    assert found_json["propagated"]["all"]["measured"] == pooled["measured"]
    assert len(found_json["propagated"]["layers"]) == masks["layer"].nunique()
    assert "Where the model runs in bfloat16 throughout" in precision_sentences(findings)[0]
    print_masks(findings)
    said = capsys.readouterr().out
    assert "Masks that change where the model runs in the format throughout" in said
    assert f"{int(pooled['first']):,}" in said
