"""What is said of two models: sums by hand, ranks, sentences, the figure."""

import math

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.answer import sentences_of
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.questions import registry
from semdiag.questions.compare.answer import (
    answer_table,
    compare_map,
    comparison_claims,
    comparison_table,
    head_ranking,
)
from semdiag.questions.compare.measure import COMPARED, COMPARED_OUTPUTS

SAMPLES = 6
# Layer, head: mean total variation.
HEADS = {(0, 0): 0.1, (0, 1): 0.3, (1, 0): 0.2, (1, 1): 0.05}


def made(model, path, **changed):
    """Ten queries of every head and sample; heads change by HEADS; sample s has its queries' largest at s / 10."""
    rows = [
        {
            "model": path, "base": "base.pt", "sample": sample, "layer": layer, "head": head, "queries": 10,
            "total_variation": 10 * change, "largest": sample / 10, "dispersion_base": 20.0, "dispersion": 30.0,
            "moved": 15.0, "top_queries": 4, "overlap": 3.0, "output": 100.0, "by_weights": 9.0, "by_values": 16.0,
            "change": 49.0, **changed,
        }
        for sample in range(SAMPLES) for (layer, head), change in HEADS.items()
    ]  # fmt: skip
    answers = [
        {"model": path, "base": "base.pt", "sample": sample, "targets": 4, "predictions": 5,
         "changed": sample == 0, "loss_base": 8.0, "loss": 12.0, "divergence": 0.5, "output_change": 0.1}
        for sample in range(SAMPLES)
    ]  # fmt: skip
    found = model(path=path).replace(
        compared=COMPARED.of_rows(rows), compared_outputs=COMPARED_OUTPUTS.of_rows(answers)
    )
    found.provenance["compare_top"] = 8
    return found


@pytest.fixture
def found(model):
    return Findings(made(model, "b.pt"))


def test_heads_layers_and_all_are_means_over_queries_and_relative_norms(found):
    table = found(comparison_table).set_index(["layer", "head"])
    assert len(table) == 4 + 2 + 1
    expected = {**HEADS, (0, ALL): 0.2, (1, ALL): 0.125, (ALL, ALL): 0.1625}
    for place, change in expected.items():
        row = table.loc[place]
        assert row["total_variation"] == pytest.approx(change, rel=1e-12)
        parts = row[
            ["dispersion_base", "dispersion", "moved", "overlap", "output_change", "by_weights", "by_values"]
        ]
        assert parts.tolist() == pytest.approx([2.0, 3.0, 1.5, 0.75, 0.7, 0.3, 0.4], rel=1e-12)
        assert row["weights_share"] == pytest.approx(9 / 25)
        assert row["largest"] == 0.5
        number = SAMPLES * (10 if ALL not in place else 20 if place[0] != ALL else 40)
        assert (row["queries"], row["top_queries"]) == (number, 4 * number / 10)
        # All samples are alike: resampling them changes nothing but the rounding of sums, and tells nothing.
        assert np.isnan([row["low"], row["high"]]).all()


def test_ranks_begin_with_the_head_that_changed_most(found):
    ranking = found(head_ranking)
    assert list(zip(ranking["layer"], ranking["head"], strict=True)) == [(0, 1), (1, 0), (0, 0), (1, 1)]
    assert ranking["rank"].tolist() == [1, 2, 3, 4]
    assert found(comparison_table)["rank"].isna().tolist() == [True, True, True, False, False, False, False]


def test_what_is_0_of_0_is_unknown(model):
    nothing = dict.fromkeys(("output", "by_weights", "by_values", "change", "top_queries", "overlap"), 0)
    table = Findings(made(model, "b.pt", **nothing))(comparison_table)
    assert table[["output_change", "by_weights", "by_values", "weights_share", "overlap"]].isna().all(axis=None)


def test_outputs_are_means_over_predictions_and_targets(found):
    (row,) = found(answer_table).to_dict("records")
    numbers = {"samples": 6, "predictions": 30, "changed": 1, "targets": 24, "loss_base": 2.0, "loss": 3.0}
    numbers |= {"divergence": 0.1, "output_change": 0.1}
    assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-12)
    assert np.isnan([row["low"], row["high"]]).all()  # the samples are all alike


def test_no_interval_of_a_divergence_lies_below_0(model):
    found = made(model, "b.pt")
    outputs = found.compared_outputs.assign(divergence=[5.0, 0, 0, 0, 0, 0])
    (row,) = Findings(found.replace(compared_outputs=outputs))(answer_table).to_dict("records")
    assert row["divergence"] == pytest.approx(5 / 30)
    assert row["low"] == 0.0
    assert row["high"] > row["divergence"]


def sentences(entry):
    return sentences_of(comparison_claims(entry["model"], entry))


def test_the_sentences_and_the_summary_say_the_numbers(found):
    summary = registry.QUESTIONS["compare"].json(found)
    assert (summary["schema"], summary["top"]) == ("semdiag.compare/2", 8)
    (entry,) = summary["results"]
    assert (entry["model"], entry["base"], len(entry["layers"]), len(entry["heads"])) == ("b.pt", "base.pt", 2, 4)
    assert sentences(entry) == [
        "16% of the attention weight moves from A to B, most in layer 0, head 1.",
        "Total variation of the weights: 0.163 in the mean of 240 queries (no interval), 0.5 at "
        "most; in layer 0, head 1: 0.3.",
        "Attention's outputs change by 0.7 of their norm: weights and values moved (36% of both squares; the "
        "weights alone change them by 0.3, the values by 0.4).",
        "KL(A || B) of the model's outputs: 0.1 nats (no interval); 1 of 30 predictions change.",
        "Loss of 24 targets: 2 nats before, 3 after.",
    ]
    entry["outputs"] |= {"predictions": 0, "divergence": None, "loss": None, "loss_base": None}
    assert sentences(entry)[3:] == ["The model's outputs change by 0.1 of their norm, in the mean."]
    entry["outputs"] = None
    assert len(sentences(entry)) == 3
    for share, more, less in ((0.33, "values", "weights"), (0.67, "weights", "values")):
        entry["all"]["weights_share"] = share
        assert f"mostly the {more} moved, not the {less}" in sentences(entry)[2]
    entry["all"] |= {"total_variation": 0.0, "largest": 0.0}
    assert sentences(entry)[0] == "The weights of all 240 queries are the same."


@pytest.mark.slow
def test_the_figure_has_a_cell_for_each_head(found, model):
    figure = compare_map(found)
    images = {
        ax.get_title(loc="left"): ax.images[0] for ax in figure.axes if ax.images and ax.get_title(loc="left")
    }
    assert list(images) == [
        "total variation of the weights", "overlap of the top-8", "change of the output by the weights",
        "change of the output by the values",
    ]  # fmt: skip
    cells = images["total variation of the weights"].get_array()
    assert {(layer, head): cells[head, layer] for layer, head in HEADS} == pytest.approx(HEADS)
    scales = [(images[name].norm.vmin, images[name].norm.vmax) for name in list(images)[2:]]
    assert scales == [(0, pytest.approx(0.4)), (0, pytest.approx(0.4))]
    without = Findings(made(model, "b.pt", top_queries=0, overlap=0.0))
    assert len([ax for ax in compare_map(without).axes if ax.get_title(loc="left")]) == 3
    with pytest.raises(NothingToDrawError):
        compare_map(Findings(model()))


def test_the_page_has_both_tables(found):
    answer = registry.QUESTIONS["compare"].answered(found)
    tables = answer.tables
    assert {name: len(table) for name, table in tables.items()} == {"compare": 7, "compare_outputs": 1}
    assert isinstance(tables["compare"], pd.DataFrame)
    assert answer.glance.number == "0.163"
    assert not math.isnan(tables["compare"]["total_variation"].sum())
