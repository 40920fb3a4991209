"""The machine-readable findings: their shape, and that they are strict JSON."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.findings.estimates import counterfactual_ks
from semdiag.measuring.findings.findings import Findings, json_ready
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions import registry

NUMBERS = ["queries", "mean", *(f"p{p}" for p in (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)), "undefined"]


def strict(summary):
    """Through JSON and back, refusing NaN and infinities."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(json.dumps(summary), parse_constant=refuse)


@pytest.fixture(scope="module")
def measured(tiny_runs):
    """Both tiny runs, the full one with k = 2 and k = 3."""
    return survey([tiny_runs.full, tiny_runs.topk], Conditions(samples=5, k=(2, 3)))


@pytest.mark.parametrize("command", ["dispersion", "separation"])
def test_the_shape_is_that_of_the_contract(measured, tiny_runs, command):
    summary = strict(registry.QUESTIONS[command].json(Findings(measured)))
    assert list(summary) == ["schema", "provenance", "results"]
    assert summary["schema"] == f"semdiag.{command}/2"
    assert {"semdiag", "torch", "device", "dtype", "seed", "samples"} <= set(summary["provenance"])
    full, topk = summary["results"]
    facts = ["model", "sha256", "task", "attention", "k", "epoch", "unit", "layers", "all", "capture"]
    assert list(full) == [*facts, "within_model"]
    assert list(topk) == facts
    assert (topk["attention"], topk["k"], topk["epoch"], topk["unit"]) == ("topk", 3, 2, "nats")
    assert {name: topk["capture"][name] for name in ("found", "captured", "skipped")} == {
        "found": 2, "captured": 2, "skipped": [],
    }  # fmt: skip
    assert 0 <= topk["capture"]["residual"] < 1e-5
    assert (full["model"], full["k"]) == (str(tiny_runs.full), None)
    assert [(row["layer"], row["head"]) for row in topk["layers"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [within["k"] for within in full["within_model"]] == [2, 3]


def test_dispersions_are_percentiles_per_layer_and_pooled(measured):
    result = strict(registry.QUESTIONS["dispersion"].json(Findings(measured)))["results"][1]
    rows = measured.of(result["model"]).queries
    for entry in (*result["layers"], {"rows": rows, **result["all"]}):
        own = rows.query(f"layer == {entry['layer']} and head == {entry['head']}") if "layer" in entry else rows
        numbers = {name: entry[name] for name in entry if name not in ("layer", "head", "rows")}
        assert list(numbers) == NUMBERS
        assert numbers["queries"] == len(own)
        assert numbers["mean"] == pytest.approx(own["dispersion"].mean())
        assert numbers["p95"] == pytest.approx(np.percentile(own["dispersion"], 95))
        assert numbers["undefined"] == 0


def test_separations_and_loads_are_told_apart(measured):
    result = strict(registry.QUESTIONS["separation"].json(Findings(measured)))["results"][1]
    own = measured.of(result["model"])
    assert list(result["all"]) == ["separation", "load"]
    assert list(result["all"]["separation"]) == [*NUMBERS, "not_positive"]
    assert result["all"]["separation"]["p50"] == pytest.approx(own.queries["separation"].median())
    load = result["all"]["load"]
    assert set(load) == {"keys", *NUMBERS} - {"queries", "undefined"}
    assert load["keys"] == len(own.loads) == 5 * 12 * 4
    assert load["mean"] == pytest.approx(own.loads["load"].mean()) == 3
    assert load["p100"] == own.loads["load"].max()
    assert result["layers"][3]["load"]["keys"] == 60


def test_full_attention_has_no_separation(measured):
    numbers = strict(registry.QUESTIONS["separation"].json(Findings(measured)))["results"][0]["all"]["separation"]
    assert numbers["undefined"] == numbers["queries"] == 5 * 12 * 4
    assert numbers["not_positive"] == 0
    assert {numbers[name] for name in NUMBERS[1:-1]} == {None}


def test_counterfactuals_are_those_of_their_columns(measured):
    result = strict(registry.QUESTIONS["dispersion"].json(Findings(measured)))["results"][0]
    own = measured.of(result["model"])
    within = result["within_model"][0]
    assert within["all"]["p50"] == pytest.approx(own.queries["dispersion_k2"].median())
    assert within["all"]["p100"] < result["all"]["p100"]
    loads = strict(registry.QUESTIONS["separation"].json(Findings(measured)))["results"][0]["within_model"][1][
        "all"
    ]
    assert loads["load"]["p100"] == own.loads["load_k3"].max()
    assert loads["separation"]["undefined"] == 0


def test_separations_that_are_not_positive_and_undefined_ones_are_counted(made_up):
    measured = made_up(("x", [-10, 0, 20, np.inf, np.nan, 5, 5, 5], {"task": None, "epoch": None}))
    result = strict(registry.QUESTIONS["separation"].json(Findings(measured)))["results"][0]
    numbers = result["all"]["separation"]
    assert (numbers["queries"], numbers["undefined"], numbers["not_positive"]) == (8, 2, 2)
    assert (numbers["p0"], numbers["p100"]) == (-1, 2)
    assert (result["task"], result["epoch"]) == (None, None)


def test_counterfactual_columns_are_found_only_where_they_hold_something():
    table = pd.DataFrame({"dispersion": [1.0], "dispersion_k4": [1.0], "dispersion_k16": [np.nan], "load_k2": [3]})
    assert counterfactual_ks(table) == [4]


def test_what_json_has_no_number_for_is_written_at_any_depth():
    value = {"a": [1.0, math.nan, (math.inf, -math.inf)], 2: {"b": pd.NA, "c": np.float64("nan")}, "d": "x"}
    assert json_ready(value) == {"a": [1.0, None, ["inf", "-inf"]], "2": {"b": None, "c": None}, "d": "x"}
