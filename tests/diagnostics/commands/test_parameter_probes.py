"""``semdiag landscape`` and ``semdiag lipschitz``: options, tables, JSON; and ``semdiag report --thorough``."""

import json
import re

import pytest

FEW = ("--samples", 8, "--figures", "none")
SMALL = {"landscape": ("--grid", 3), "lipschitz": ("--planes", 2, "--directions", 2, "--draws", 5)}


def test_landscape_in_json_is_a_matrix_per_quantity(run_semdiag, sections, tiny_runs):
    words = ("--grid", 3, "--planes", 2, "--json")
    found = json.loads(run_semdiag("landscape", tiny_runs.topk, *FEW, *words).out)
    planes = found["results"][0]["planes"]
    assert len(planes) == 2
    for plane in planes:
        assert plane["x"] == plane["y"] == [-1.0, 0.0, 1.0]
        assert [len(row) for row in plane["loss"]] == [3, 3, 3]
        assert plane["loss"][1][1] == plane["marks"][0]["loss"] == plane["checkpoint_loss"]
        assert plane["marks"][0]["place"] == "checkpoint"
        assert plane["cells"] == 9


@pytest.mark.slow
def test_lipschitz_compares_snapshots_of_different_epochs_with_one_of_them(run_semdiag, sections, tiny_runs):
    first = tiny_runs.topk / "epoch-0.pt"
    words = ("lipschitz", first, tiny_runs.topk, "--against", tiny_runs.full, *FEW, *SMALL["lipschitz"], "--json")
    outcome = run_semdiag(*words)
    found = json.loads(outcome.out)
    assert [asked[0] for asked in sections] == [["lipschitz"]]
    for result in found["results"]:
        assert result["groups"][0]["group"] == "all"
        assert all(g["gradient"]["p100"] > 0 for g in result["groups"])
        assert len(result["blocks"]) == tiny_runs.blocks
        assert {v["verdict"] for v in result["verdicts"]} <= {"holds", "inconclusive"}
    assert found["provenance"]["lipschitz_samples"] == 8
    assert "secants of" in outcome.err
    assert re.search(r": 0 of [\d,]+ exceed the bound", outcome.err)
    pairs = found["pairs"]
    assert [len(pair["ratios"]) for pair in pairs] == [7 * 4] * 2
    assert [pair["reference"] for pair in pairs] == [str(tiny_runs.full / "last.pt")] * 2
    assert [pair["other"] for pair in pairs] == [str(first), str(tiny_runs.topk / "last.pt")]
    assert pairs[0]["label"] == "even-pairs, topk-3, seed 7, initialisation against even-pairs, full, seed 7, last"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("landscape", "--grid", 4), "grid must be an odd number"),
        (("landscape", "--radius=-1"), "radius must be a positive number"),
        (("lipschitz", "--draws", 1), "draws must be at least 5"),
        (("report", "--from", ".", "--thorough"), "--from draws saved measurements"),
    ],
)
def test_wrong_options_are_one_line(refusal, sections, tiny_runs, words, message):
    models = () if words[0] == "report" else (tiny_runs.topk,)
    if words[0] == "report":
        assert message in refusal(*words)
        return
    assert message in refusal(words[0], *models, *words[1:])


def test_inputs_without_labels_are_refused_by_name(refusal, sections, tiny_runs, tmp_path):
    import numpy as np

    np.save(tmp_path / "ids.npy", np.zeros((2, 12), np.int64))
    for command in SMALL:
        assert "has no labels" in refusal(command, tiny_runs.topk, "--inputs", tmp_path / "ids.npy")


@pytest.mark.slow
def test_a_thorough_report_measures_both(run_semdiag, sections, tiny_runs, monkeypatch):
    from semdiag.questions.landscape.measure import LANDSCAPE, LandscapePlan
    from semdiag.questions.lipschitz.measure import LOSS_GRADIENTS, LipschitzPlan

    for plan in (LandscapePlan(grid=3), LipschitzPlan(8, 2, 2, 5)):
        chosen = classmethod(lambda cls, options, plan=plan: plan if options.thorough else None)
        monkeypatch.setattr(type(plan), "for_report", chosen)
    outcome = run_semdiag("report", tiny_runs.topk, *FEW, "--thorough", "--out", "there")
    assert outcome.code == 0, outcome.err
    assert len(sections[0][1].landscape) == 10
    assert len(sections[0][1].loss_gradients) == 6 * 7
    plain = run_semdiag("report", tiny_runs.topk, *FEW, "--out", "plain")
    assert plain.code == 0
    assert sections[1][1][LANDSCAPE].empty
    assert sections[1][1][LOSS_GRADIENTS].empty
