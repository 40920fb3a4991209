"""Masks in number formats: the tables of models, and what is said and drawn of numbers that are known."""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag.capturing.attention_calls import watch_attention
from semdiag.mathematics.rounding import number_format
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.calls.running import home_of, unnamed
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.subject import Subject
from semdiag.measuring.survey import survey
from semdiag.measuring.table import column_types
from semdiag.presenting.answer import sentences_of, show
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.questions import registry
from semdiag.questions.mask_precision.answer import (
    masks_in_formats,
    precision_glance,
    precision_of,
    precision_table,
)
from semdiag.questions.mask_precision.measure import (
    LOST_WEIGHTS,
    ROUNDED_MASKS,
    PrecisionPlan,
    rounded_rows,
)
from semdiag.questions.mask_stability.answer import mask_words
from semdiag.questions.mask_stability.mask_rows import selection_of
from semdiag.questions.mask_stability.measure import NoisePlan
from semdiag_files import InputError

pytestmark = pytest.mark.usefixtures("few_resamples")

FORMATS = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
NAMES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def mask_precision(model, inputs, plan=None, batch_size=100, min_keys=1):
    loaded = unnamed(model)
    device, dtype = home_of(loaded.module)
    subject = Subject(loaded, [inputs], None, 0, batch_size, device, dtype, min_keys=min_keys)
    tables = (plan or PrecisionPlan()).measure(subject)
    return tables["rounded_masks"], tables["lost_weights"]


COUNTS = ["queries", "not_covered", "changed", "tied", "changed_or_tied", "certified", "certified_changed"]


@pytest.mark.processor
@pytest.mark.parametrize("batch_size", [1000, 2])
@pytest.mark.parametrize(("kind", "min_keys"), [("full", 1), ("topk", 1), ("topk", 10), ("bottomk", 1)])
def test_the_tables_count_the_rows_of_every_call(wild_encoder, padded_tokens, kind, min_keys, batch_size):
    encoder, tokens = wild_encoder(kind), padded_tokens[0]
    plan = PrecisionPlan(FORMATS, k=3)
    masks, lost = mask_precision(encoder, tokens, plan, batch_size=batch_size, min_keys=min_keys)
    assert column_types(masks) == ROUNDED_MASKS.columns
    assert column_types(lost) == LOST_WEIGHTS.columns
    calls, expected, weights = [], {}, {}
    with torch.no_grad(), watch_attention(encoder, calls.append):
        encoder(tokens)
    for call in calls:
        rows = rounded_rows(call, 3, selection_of(kind), [number_format(name) for name in FORMATS])
        for at, b, h, i in np.ndindex(4, *rows.keys.shape):
            if not rows.counted[b, h, i] or rows.keys[b, h, i] < min_keys:
                continue
            changed, tied, sure = (
                bool(getattr(rows, name)[at, b, h, i]) for name in ("changed", "tied", "certified")
            )
            found = [1, not rows.covered[at, b, h, i], changed, tied, changed or tied, sure]
            place = NAMES[at], b, call.layer, h
            expected[place] = np.add(expected.get(place, 0), [*found, sure and (changed or tied)])
            if changed:
                weights[*place, i] = rows.lost[at, b, h, i].item()
    counted = masks.set_index(["format", "sample", "layer", "head"])[COUNTS]
    assert sorted(counted.index) == sorted(expected)
    assert all(counted.loc[place].tolist() == values.tolist() for place, values in expected.items())
    # A batch of another size may add in another order: float64's rounding, and the sums of weights below 1.
    assert lost.set_index(["format", "sample", "layer", "head", "query"])["lost"].to_dict() == pytest.approx(
        weights, abs=1e-9
    )
    assert weights
    assert (masks["kept"] == 3).all()
    assert (masks["why"] == "").all()
    assert masks["certified"].sum() > 0
    assert masks["certified_changed"].sum() == 0


def test_no_certified_row_of_a_trained_model_changes(tiny_models):
    for model in tiny_models:
        masks, lost = mask_precision(model, model.default_inputs(40, 0)[0], PrecisionPlan(FORMATS))
        assert masks["certified"].sum() > 0
        assert masks["certified_changed"].sum() == 0
        assert masks["changed"].sum() == len(lost) > 0
        assert lost["lost"].between(0, 1).all()


@pytest.mark.parametrize("kind", ["banded", "block"])
def test_a_fixed_mask_has_no_rows(wild_encoder, padded_tokens, kind):
    masks, lost = mask_precision(wild_encoder(kind), padded_tokens[0])
    assert masks.empty
    assert lost.empty
    assert list(masks) == list(ROUNDED_MASKS.columns)


def test_a_mask_that_drops_nothing_has_no_rows(wild_encoder, padded_tokens):
    assert mask_precision(wild_encoder("full"), padded_tokens[0], PrecisionPlan(k=12))[0].empty


def test_keys_found_by_hashes_are_refused(wild_encoder, padded_tokens):
    with pytest.raises(NotAvailableError, match="the scores alone do not say which keys lsh attention keeps"):
        mask_precision(wild_encoder("lsh", selection_seed=1), padded_tokens[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"formats": ()}, "Masks are compared in float32, bfloat16, .* against float64. Got none"),
        ({"formats": ("bf16", "fp64")}, "against float64. Got bf16, fp64"),
        ({"formats": ("bf61",)}, "Unknown number format 'bf61'"),
        ({"k": 0}, "k must be at least 1"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(values, message):
    with pytest.raises(InputError, match=message):
        PrecisionPlan(**values)


def test_a_format_is_kept_once_by_its_long_name():
    assert PrecisionPlan(("fp16", "bf16", "torch.bfloat16", "float16")).formats == ("float16", "bfloat16")


class Biased(nn.Module):
    """Two layers of attention: one with a bias on the scores, one without."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        place = torch.arange(x.shape[1], device=x.device)
        distance = -(place[:, None] - place).abs().float()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=distance)
        return F.scaled_dot_product_attention(q, k, mixed)


@pytest.mark.slow
def test_a_layer_with_a_bias_is_counted_as_not_covered():
    inputs = torch.randn(6, 9, 8, generator=torch.Generator().manual_seed(1))
    found = survey([_loaded(Biased(), inputs)], Conditions(plans=(PrecisionPlan(FORMATS, k=3),)))
    masks = found.rounded_masks
    biased = masks["layer"] == 0
    assert (masks.loc[biased, "not_covered"] == masks.loc[biased, "queries"]).all()
    assert (masks.loc[biased, COUNTS[2:]] == 0).all(axis=None)
    assert (masks.loc[biased, "why"] == "scores with a bias").all()
    assert (masks.loc[~biased, "not_covered"] == 0).all()
    assert masks.loc[~biased, "changed"].sum() > 0
    table = Findings(found)(precision_table)
    assert table.loc[table["layer"] == 0, ["changed", "certified"]].isna().all(axis=None)
    assert "Not covered: 108 of 216 rows (scores with a bias)." in said(Findings(found))
    (result,) = registry.QUESTIONS["mask-stability"].json(Findings(found))["results"]
    assert result["precision"][0]["layers"][0]["certified"] is None
    assert result["precision"][0]["layers"][0]["why"] == "scores with a bias"


@pytest.mark.parametrize("beside", [(), (NoisePlan((0.1,), draws=1),)], ids=["alone", "beside noise"])
def test_a_refusal_is_said_on_the_terminal_and_in_the_report(wild_encoder, padded_tokens, capsys, beside):
    encoder = wild_encoder("lsh", selection_seed=1).float()
    model = _loaded(encoder, padded_tokens[0], "semdiag")
    findings = Findings(survey([model], Conditions(plans=(*beside, PrecisionPlan()))))
    show(registry.QUESTIONS["mask-stability"].answered(findings))
    why = "not available, because the scores alone do not say which keys lsh attention keeps"
    refused = [f"mask stability {why}"] * len(beside) + [f"mask precision {why}"]
    assert " ".join(capsys.readouterr().out.split()).count(why) == len(refused)
    assert f": {refused[0]}." in said(findings)
    assert registry.QUESTIONS["mask-stability"].json(findings)["results"][0]["refused"] == refused


def _loaded(module, inputs, source="factory"):
    from semdiag.capturing.loading import LoadedModel

    return LoadedModel("theirs", "", module, source, "unknown", batches=[inputs])


# ------------------------------------------------------------------------------------------ numbers by hand


@pytest.fixture
def by_hand(model):
    """A full, a top-k and a banded model, the first two with masks in two formats."""
    pair = Measurements.concat([model("full"), model("topk"), model("banded")])
    masks, lost = [], []
    for path in pair.models["model"][:2]:
        for kind, changed in (("bfloat16", 1), ("float8_e4m3fn", 3)):
            for sample in range(6):
                for layer in range(2):
                    row = {"model": path, "format": kind, "sample": sample, "layer": layer, "head": 0, "kept": 3}
                    row |= {"queries": 12, "not_covered": 2, "why": "scores with a bias", "tied": 2}
                    row |= {"changed": changed * (layer + 1), "changed_or_tied": changed * (layer + 1) + 1}
                    masks.append(row | {"certified": 3, "certified_changed": 0})
            for query, weight in enumerate((0.1, 0.2, 0.6)):
                place = {"model": path, "format": kind, "sample": 0, "layer": 0, "head": 0, "query": query}
                lost.append(place | {"lost": weight})
    return pair.replace(rounded_masks=ROUNDED_MASKS.of_rows(masks), lost_weights=LOST_WEIGHTS.of_rows(lost))


def said(findings):
    return " ".join(sentences_of(registry.QUESTIONS["mask-precision"].answered(findings).details))


@pytest.mark.slow
def test_shares_are_of_the_covered_rows(by_hand):
    findings = Findings(by_hand)
    first = precision_of(findings, by_hand.models["model"].iloc[0])
    assert [entry["format"] for entry in first] == ["bfloat16", "float8_e4m3fn"]
    zero, one = first[1]["layers"]
    every = first[1]["all"]
    assert (zero["layer"], one["layer"], every["layer"]) == (0, 1, "all")
    assert (every["queries"], every["not_covered"], every["certified_rows"]) == (144, 24, 36)
    assert [row["changed"] for row in (zero, one, every)] == pytest.approx([0.3, 0.6, 0.45])
    assert [every[name] for name in ("tied", "changed_or_tied", "certified")] == pytest.approx([0.2, 0.55, 0.3])
    assert np.isnan([every["changed_low"], every["changed_high"]]).all()  # all samples are alike
    assert (zero["lost_p50"], zero["lost_mean"]) == pytest.approx((0.2, 0.3))
    assert np.isnan(one["lost_p50"])
    assert precision_of(findings, by_hand.models["model"].iloc[2]) == []


@pytest.mark.slow
def test_what_is_said_of_each_model(by_hand):
    details = registry.QUESTIONS["mask-precision"].answered(Findings(by_hand)).details
    full, first, _, last, topk, second, *_, banded = details
    assert full.sentence.endswith("top-3 would choose from its scores.")
    assert topk.sentence.endswith("the model's own mask, k = 3.")
    assert last.sentence == (
        "float8_e4m3fn: Certified rows that changed: 0 of 36. Not covered: 24 of 144 rows (scores with a bias)."
    )
    assert second.rows[-1][0:2] == ("float8_e4m3fn", "all")
    assert {"30.0%", "45.00%", "20.00%", "55.00%", "0.2", "0.3"} <= {*second.rows[-1]}
    assert len(first.rows) == len(second.rows) == 6
    assert banded.sentence.endswith("not applicable: the mask of banded attention does not depend on the input.")
    glance = precision_glance(Findings(by_hand))
    assert (glance.answer, glance.number) == ("measured", "15%")
    assert glance.words.startswith("of the masks of 2 models change in bfloat16")


@pytest.mark.slow
def test_a_certified_row_that_changed_is_called_a_fault(by_hand):
    masks = by_hand.rounded_masks.copy()
    masks.loc[0, "certified_changed"] = 1
    findings = Findings(by_hand.replace(rounded_masks=masks))
    assert said(findings).count("Certified rows that changed: 1 of 36, which is an error of semdiag.") == 1
    assert "1 of 72 certified ones changed" in precision_glance(findings).words


@pytest.mark.slow
def test_a_curve_for_each_format_with_its_ties_and_its_certificates(by_hand):
    figure = masks_in_formats(Findings(by_hand))
    full, topk = (ax for ax in figure.axes if ax.get_visible())
    lines = {line.get_label(): line for line in topk.get_lines()}
    np.testing.assert_allclose(lines["bfloat16"].get_ydata(), [0.9, 0.8])
    np.testing.assert_allclose(lines["float8_e4m3fn"].get_ydata(), [0.7, 0.4])
    dotted = [line for line in topk.get_lines() if line.get_linestyle() == ":"]
    np.testing.assert_allclose([line.get_ydata() for line in dotted], 0.3)
    bands = [band.get_paths()[0].vertices[:, 1] for band in topk.collections]
    assert [band.min() for band in bands] == pytest.approx([0.7, 0.3])
    assert "top-3 it would choose" in full.get_title(loc="left")
    nothing = by_hand.replace(rounded_masks=ROUNDED_MASKS.empty(), lost_weights=LOST_WEIGHTS.empty())
    with pytest.raises(NothingToDrawError):
        masks_in_formats(Findings(nothing))


@pytest.mark.slow
def test_measurements_keep_both_tables(by_hand, tmp_path):
    by_hand.save(tmp_path / "kept")
    again = Measurements.load(tmp_path / "kept")
    for name in ("rounded_masks", "lost_weights"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(by_hand, name))
    assert mask_words(Findings(again), by_hand.models["model"].iloc[1]) == "the model's own mask, k = 3"
