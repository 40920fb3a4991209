"""The summaries of stability and bounds: strict JSON, every place, the same numbers as the tables."""

import json

import numpy as np
import pytest

from semdiag.measuring.findings.findings import Findings, Verdict
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.measuring.words import number_from_json
from semdiag.presenting.answer import show
from semdiag.questions import registry
from semdiag.questions.bounds.measure import BoundsPlan
from semdiag.questions.stability.measure import SecantsPlan, with_bounds


@pytest.fixture(scope="module")
def measured(tiny_runs):
    conditions = Conditions(samples=20, plans=(SecantsPlan((0.01, 0.1)), BoundsPlan()), dtype="float64")
    return survey([tiny_runs.full, tiny_runs.topk], conditions)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stability", "bounds"])
def test_summaries_are_strict_json_of_their_schema(measured, name):
    summary = registry.QUESTIONS[name].json(Findings(measured))
    assert summary["schema"] == f"semdiag.{name}/2"
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    words = {verdict["verdict"] for result in summary["results"] for verdict in result["verdicts"]}
    assert words <= {word.value for word in Verdict}
    assert [result["model"] for result in summary["results"]] == measured.models["model"].tolist()


@pytest.mark.slow
def test_a_constant_of_0_no_guarantee_and_the_unknown_stay_apart_in_json(measured):
    """−∞ for b_k, +∞ where a separation is not positive, NaN for what the paper says nothing about."""
    first = measured.constants["quantity"] == "network"
    constants = measured.constants.assign(ln_value=measured.constants["ln_value"].mask(first, np.inf))
    summary = registry.QUESTIONS["bounds"].json(Findings(measured.replace(constants=constants)))
    whole = json.loads(json.dumps(summary, allow_nan=False))
    for result in whole["results"]:
        keys = [row for row in result["parameters"] if row["tensor"].endswith("k.bias")]
        assert {(row["ln_sound"], row["ln_paper"], row["ln_secant"]) for row in keys} == {("-inf", None, None)}
        network = [row["ln_value"] for row in result["constants"] if row["quantity"] == "network"]
        assert set(network) == {"inf"}
        values = [row["ln_sound"] for row in result["parameters"]]
        own = measured.parameters[measured.parameters["model"] == result["model"]]
        assert [number_from_json(value) for value in values] == own["ln_sound"].tolist()
    show(registry.QUESTIONS["bounds"].answered(Findings(measured.replace(constants=constants))))


@pytest.mark.slow
def test_stability_has_the_numbers_of_the_tables(measured):
    for result in registry.QUESTIONS["stability"].json(Findings(measured))["results"]:
        rows = measured.secants[measured.secants["model"] == result["model"]]
        rows = with_bounds(rows, result["attention"])
        assert [(r["layer"], r["head"]) for r in result["layers"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert result["all"]["secant"]["p100"] == pytest.approx(np.nanmax(rows["secant"]))
        assert result["all"]["ln_sound"]["p50"] == pytest.approx(np.median(rows["ln_sound"]))
        assert [r["noise"] for r in result["all"]["response"]] == [0.01, 0.1]
        small = rows[(rows["level"] == 0.01) & (rows["layer"] == 1) & (rows["head"] == 0)]
        assert result["layers"][2]["response"][0]["mean"] == pytest.approx(small["weight_change"].mean())
        assert not any(v["verdict"] == "violated" and v["form"] != "paper" for v in result["verdicts"])


@pytest.mark.slow
def test_several_noise_levels_are_told_apart(measured):
    for result in registry.QUESTIONS["stability"].json(Findings(measured))["results"]:
        rows = measured.secants[measured.secants["model"] == result["model"]]
        rows = with_bounds(rows, result["attention"])
        assert [level["noise"] for level in result["all"]["by_noise"]] == [0.01, 0.1]
        for level in result["all"]["by_noise"]:
            own = rows[rows["level"] == level["noise"]]
            assert level["same_set"] == pytest.approx(own["same_set"].mean())
            for name in ("secant", "ln_sound", "ln_paper"):
                assert level[name]["p50"] == pytest.approx(np.nanmedian(own[name]))


@pytest.mark.slow
def test_without_secants_the_local_constants_remain(tiny_runs):
    summary = registry.QUESTIONS["stability"].json(Findings(survey([tiny_runs.full], Conditions(samples=5))))
    assert list(summary["results"][0]["all"]) == ["local"]


def test_bounds_name_every_pair(measured):
    summary = registry.QUESTIONS["bounds"].json(Findings(measured))
    (pair,) = summary["pairs"]
    assert (pair["reference"], pair["other"]) == tuple(measured.models["model"])
    assert pair["differences"] == []
    for result in summary["results"]:
        assert len(result["parameters"]) == 1 + 2 * 12 + 2
        assert {row["form"] for row in result["constants"]} == {
            "measured",
            "sound",
            "paper",
            "local",
            "paper code",
        }
        # Constants a thousand times above the slopes of most tensors are vacuous, those at the point are not.
        assert all(v["verdict"] in ("holds", "assumption not met", "vacuous") for v in result["verdicts"])
        (near,) = (v for v in result["verdicts"] if v["form"] == "point")
        assert (near["verdict"], near["numbers"]["violated"], near["numbers"]["vacuous"]) == ("holds", 0, 0)
    assert "for these inputs" in summary["scope"]
