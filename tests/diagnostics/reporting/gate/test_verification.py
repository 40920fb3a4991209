"""Layers, invariants and drift of semdiag check."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings, Pair, json_ready
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.dispersion.answer import GateResult, dispersion_gate
from semdiag.questions.mask_stability.measure import MASKS
from semdiag.reporting import gate
from semdiag.reporting.gate import (
    invariants,
    junit_xml,
    layer_gate,
    parse_rule,
    read_baseline,
    tracked_numbers,
    verify,
)
from semdiag_files import InputError


def gate_of(made_up, topk, every=False):
    """The gate of a pair whose medians are 2 in each layer of the full model, and these of the top-k model."""
    found = made_up(("full", [2.0] * len(topk), {}), ("topk", topk, {"attention": "topk", "k": 2}))
    found = found.replace(queries=found.queries.assign(layer=found.queries.groupby("model").cumcount()))
    bad = {"model": "topk", "sample": 0, "layer": np.flatnonzero(np.isnan(topk)), "head": 0, "scores": 1}
    findings = Findings(found.replace(non_finite=pd.DataFrame(bad)))
    (gate,) = layer_gate(findings, [GateResult(Pair("pair", "full", "topk"), {}, {})], every)
    return gate


def drift(*args, **more):
    moved, _ = gate.drift(*args, **more)
    return moved


@pytest.mark.parametrize(
    ("topk", "failing", "passed", "strict"),
    [
        ((1, 1, 1), (), True, True),
        ((1, 9, 1), (1,), True, False),
        ((1, 9, 2), (1, 2), False, False),
        ((1, float("nan"), 1), (1,), True, False),
    ],
)
def test_fewer_than_half_of_the_layers_may_fail_and_every_one_if_asked(made_up, topk, failing, passed, strict):
    for every, expected in ((False, passed), (True, strict)):
        gate = gate_of(made_up, topk, every)
        assert (gate.failed, gate.passed) == (failing, expected)


def test_half_of_the_layers_is_a_failure(made_up):
    assert not gate_of(made_up, (1.0, 3.0)).passed


@pytest.fixture(scope="module")
def measured(tiny_runs):
    return survey([tiny_runs.full, tiny_runs.topk], Conditions(samples=10))


@pytest.fixture(scope="module")
def findings(measured):
    return Findings(measured)


def test_medians_by_layer_are_those_of_the_queries(measured, findings, tiny_runs):
    (gate,) = layer_gate(findings, dispersion_gate(findings))
    own = measured.queries[measured.queries["model"] == str(tiny_runs.full)]
    assert [*gate.full.values()] == pytest.approx([own[own["layer"] == n]["dispersion"].median() for n in (0, 1)])


def test_a_true_capture_keeps_its_invariants(findings):
    assert [(i.name, i.passed) for i in invariants(findings)] == [
        ("residual", True), ("captured", True), ("finite", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"residual_over_rounding": 1.5}, "residual"),
        ({"residual": np.nan}, "residual"),
        ({"attention_captured": 1}, "captured"),
    ],
)
def test_a_broken_capture_is_seen(measured, change, name):
    broken = Findings(measured.replace(models=measured.models.assign(**change)))
    assert [i.name for i in invariants(broken) if not i.passed] == [name]


def test_a_precision_that_cannot_tell_is_said_to_be_one_and_fails_nothing(measured):
    coarse = Findings(measured.replace(models=measured.models.assign(rounding=0.5)))
    (residual,) = (i for i in invariants(coarse) if i.name == "residual")
    assert residual.passed
    assert residual.words.endswith("so coarse at this precision that it tells nothing")


def test_scores_that_are_not_finite_and_certified_masks_that_change_are_seen(measured):
    bad = pd.DataFrame({"model": ["m"], "sample": [0], "layer": [0], "head": [0], "scores": [3]})
    row = dict.fromkeys(MASKS.columns, 0) | {"model": "m", "draws": 4, "certified": 0.5}
    masks = pd.DataFrame([row, {**row, "certified_changed": 1}])
    found = invariants(Findings(measured.replace(non_finite=bad, masks=masks)))
    assert [i.name for i in found if not i.passed] == ["finite", "certified"]
    assert "1 of 4" in found[-1].words


def test_nothing_drifts_from_itself_and_a_small_move_is_allowed(findings, tmp_path):
    file = tmp_path / "baseline.json"
    file.write_text(json.dumps({"schema": "semdiag.check/2", "models": tracked_numbers(findings)}))
    baseline = read_baseline(file)
    assert drift(findings, baseline) == []
    entry = baseline[0]["numbers"]
    entry["dispersion.p50"] *= 1.04
    assert drift(findings, baseline) == []
    entry["dispersion.p50"] *= 1.04
    (moved,) = drift(findings, baseline)
    assert moved.quantity == "dispersion.p50"
    assert moved.was == entry["dispersion.p50"]
    assert drift(findings, baseline, tolerance=0.2) == []


@pytest.fixture
def diverged(measured, tiny_runs):
    """The pair, with a score of the top-k model's second layer that is no number."""
    bad = pd.DataFrame({"model": [str(tiny_runs.topk)], "sample": [0], "layer": [1], "head": [0], "scores": [3]})
    return Findings(measured.replace(non_finite=bad))


def test_of_a_diverged_model_nobody_can_tell_whether_it_moved(findings, diverged):
    for baseline in (tracked_numbers(findings), tracked_numbers(diverged)):
        moved = drift(diverged, baseline)
        assert [m.quantity for m in moved] == [f"dispersion.{p}" for p in ("p50", "p75", "p90", "p95")]
        assert all("it is unclear" in m.words and "nan" not in m.words for m in moved)


def test_what_is_said_of_a_diverged_pair_holds_nothing(diverged):
    result = verify(diverged, [parse_rule("dispersion.p50 < 1e9")])
    (gate,) = result.layers
    assert gate.unknown == (1,)
    said = "\n".join(result.failures) + junit_xml(result)
    assert "nan" not in said.replace(gate.pair.label, "")
    assert "cannot be judged at p50, p75, p90, p95" in said
    assert "cannot be judged at the median of 1 of 2 layers (1)" in gate.fault
    assert [r.known for r in result.rules] == [True, False]
    assert json.dumps(result.summary(), allow_nan=False)


def test_an_infinite_number_is_read_back_and_an_older_baseline_still_is(findings, tmp_path):
    entry = {**tracked_numbers(findings)[0], "numbers": {"dispersion.p95": math.inf}}
    file = tmp_path / "baseline.json"
    file.write_text(json.dumps(json_ready({"schema": "semdiag.check/2", "models": [entry]}), allow_nan=False))
    (moved,) = drift(findings, read_baseline(file))
    assert (moved.quantity, moved.was) == ("dispersion.p95", math.inf)
    file.write_text(json.dumps({"schema": "semdiag.check/1", "models": tracked_numbers(findings)}))
    assert drift(findings, read_baseline(file)) == []


def test_a_model_that_is_gone_and_other_samples_are_seen(findings):
    gone = [
        {**entry, "model": "elsewhere", "weights_sha256": "", "seed": 99}
        for entry in tracked_numbers(findings)[:1]
    ]
    assert "was not measured" in drift(findings, gone)[0].words
    fewer = [{**entry, "samples": 5} for entry in tracked_numbers(findings)]
    with pytest.raises(InputError, match="--samples 5"):
        drift(findings, fewer)


@pytest.fixture
def twins(measured):
    """A full and a top-k model that share their weights, as two runs of a seed do before training."""
    return Findings(measured.replace(models=measured.models.assign(weights_sha256="a" * 64)))


def at(findings, places):
    """The entries of a baseline, of the same models as if they had lain elsewhere."""
    return [{**e, "model": f"{place}/last.pt"} for e, place in zip(findings(tracked_numbers), places, strict=True)]


def test_models_that_share_weights_are_not_taken_for_each_other(twins):
    full, topk = at(twins, ("full", "topk"))
    assert full["numbers"] != topk["numbers"]
    older = [{name: entry[name] for name in OLDER} for entry in (full, topk)]
    for baseline in ([full, topk], [topk, full], older):
        assert drift(twins, baseline) == []
    topk_alone = Findings(twins.measurements.of(twins.measurements.models["model"][1]))
    (gone,) = drift(topk_alone, older)
    assert gone.words == "full/last.pt is in the baseline and was not measured"


OLDER = ("model", "sha256", "samples", "weights_sha256", "task", "attention", "k", "seed", "snapshot", "numbers")


def test_where_several_models_could_be_one_nobody_can_tell(measured, tiny_runs):
    first = measured.of(str(tiny_runs.full))

    def moved_to(path):
        names = {name: getattr(first, name).assign(model=path) for name in ("models", "queries", "loads")}
        return first.replace(**names, history=first.history.assign(model=path))

    both = Findings(measured.concat([moved_to("a.pt"), moved_to("b.pt")]))
    one, two = both(tracked_numbers)
    assert drift(both, [two, one]) == []  # where they lie tells them apart
    (unclear,) = drift(both, [{**one, "model": "c.pt"}])
    assert unclear.words.startswith("it is unclear whether c.pt of the baseline is a.pt or b.pt")
    assert json.dumps(verify(both, [], [{**one, "model": "c.pt"}]).summary(), allow_nan=False)
    alone = Findings(moved_to("c.pt"))
    assert [m.among for m in drift(alone, [one, two])] == [("c.pt",), ("c.pt",)]


def test_a_model_of_another_file_name_or_trained_anew_is_still_the_same(findings):
    renamed = [{**entry, "snapshot": "best"} for entry in at(findings, ("full", "topk"))]
    anew = [{**entry, "weights_sha256": "b" * 64} for entry in at(findings, ("full", "topk"))]
    other_rate = [{**entry, "setting": "learning rate 1"} for entry in anew]
    here = [{**entry, "weights_sha256": "b" * 64, "seed": 99} for entry in findings(tracked_numbers)]
    for baseline in (renamed, anew, other_rate, here):
        assert drift(findings, baseline) == []


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema": "semdiag.check/2"}', '{"schema": "semdiag.check/2", "models": [{}]}']
)
def test_what_is_no_baseline_is_refused(tmp_path, content):
    file = tmp_path / "baseline.json"
    file.write_text(content)
    with pytest.raises(InputError, match="Make one with: semdiag check --json"):
        read_baseline(file)
    with pytest.raises(InputError, match="does not exist"):
        read_baseline(tmp_path / "none.json")
