"""``semdiag convergence``."""

import csv
import json
import shutil

import pytest
import torch

from semdiag_models import read_checkpoint, write_checkpoint


@pytest.mark.slow
def test_the_runs_are_compared_and_written(run_semdiag, tiny_runs, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # so that no heading is broken
    words = "--samples", 20, "--target", 0.3, "--json"
    outcome = run_semdiag("convergence", tiny_runs.folder, *words, "--figures", "svg")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["schema"] == "semdiag.convergence/2"
    assert [run["arrival"] for run in found["runs"]] == [1, 1]
    assert [run["attention"] for run in found["runs"]] == ["full", "topk-3"]
    (pair,) = found["speed_ups"]
    assert (pair["low"], pair["high"], pair["known"]) == (1.0, 1.0, "exactly")
    assert "one seed: no interval" not in outcome.out  # one table is enough for one seed each
    folder = here / "reports" / "convergence-2-models"
    for name in (
        "runs",
        "speed_ups",
        "over_seeds",
    ):
        with (folder / "data" / f"{name}.csv").open(encoding="utf-8") as file:
            assert list(csv.DictReader(file))
    drawn = {path.stem for path in (folder / "figures").glob("*.svg")}
    assert drawn == {"training_curves", "training_curves-narrow"}  # the second is for telephones


@pytest.mark.slow
def test_copies_of_a_run_count_once_and_that_is_said(run_semdiag, tiny_runs, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("one", "two"):
        shutil.copytree(tiny_runs.folder, here / name)
    words = "--samples", 5, "--target", "even-pairs=1", "--figures", "none", "--json"
    outcome = run_semdiag("convergence", here / "one", here / "two", *words)
    assert len(json.loads(outcome.out)["runs"]) == 2
    said = "2 of 4 files are copies or other snapshots of a run that is shown"
    assert said in outcome.err
    assert said not in run_semdiag("convergence", here / "one", *words).out


@pytest.mark.slow
def test_a_run_that_never_arrives_is_said_and_not_dropped(run_semdiag, tiny_runs, here):
    outcome = run_semdiag(
        "convergence", tiny_runs.folder, "--samples", 5, "--target", "even-pairs=1", "--figures", "none", "--json"
    )
    assert outcome.err.count(f"not in {tiny_runs.epochs}") == 4  # in the answer, and in the table
    found = json.loads(outcome.out)
    assert [run["arrival"] for run in found["runs"]] == [None, None]
    assert (found["target"], found["targets"]) == (0.95, {"even-pairs": 1.0})
    assert "The target is 95% training accuracy, for even-pairs 100%." in outcome.err
    assert [(p["known"], p["high"]) for p in found["speed_ups"]] == [("unknown", "inf")]


@pytest.mark.slow
def test_an_unfinished_run_is_said_to_be_one(run_semdiag, tiny_runs, here):
    shutil.copytree(tiny_runs.full, here / "run")
    content = torch.load(here / "run" / "last.pt", weights_only=True)
    content["config"]["training"]["epochs"] = 9
    torch.save(content, here / "run" / "last.pt")
    outcome = run_semdiag("convergence", "run", "--samples", 5, "--figures", "none")
    assert outcome.code == 0
    assert f"Unfinished, so more may be known later: run/last.pt {tiny_runs.epochs} of 9 epochs." in outcome.out


@pytest.mark.slow
def test_a_run_that_has_not_begun_is_said_to_be_one(run_semdiag, tiny_runs, here):
    start = read_checkpoint(tiny_runs.full / "epoch-0.pt")
    (here / "run").mkdir()
    write_checkpoint(here / "run" / "last.pt", start)
    outcome = run_semdiag("convergence", "run", "--samples", 5)
    assert outcome.code == 0, outcome.err
    assert "not begun" in outcome.out


@pytest.mark.slow
def test_a_pair_that_has_not_begun_is_said_to_be_one(run_semdiag, tiny_runs, here):
    for name in ("full", "topk"):
        start = read_checkpoint(getattr(tiny_runs, name) / "epoch-0.pt")
        (here / name).mkdir()
        write_checkpoint(here / name / "last.pt", start)
    outcome = run_semdiag("convergence", "full", "topk", "--samples", 5, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("not begun") == 2
    assert json.loads(outcome.out)["over_seeds"] == []


@pytest.mark.slow
def test_the_model_file_is_as_it_was(run_semdiag, tiny_runs, here):
    before = (tiny_runs.topk / "last.pt").read_bytes()
    words = "--samples", 5, "--figures", "none", "--quiet"
    outcome = run_semdiag("convergence", tiny_runs.topk, *words)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    assert (tiny_runs.topk / "last.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--target", "1.5"), "--target is a training accuracy"),
        (("--target", "parity=0.5"), "Unknown task of --target 'parity'."),
        (("--target", "even-pairs=half"), "--target takes an accuracy like 0.95, or TASK=0.35 for one task."),
        (("--target", "even-pairs=2"), "--target is a training accuracy"),
        (("--target", "0"), "--target is a training accuracy"),
        (("--samples", "0"), "samples must be at least 1"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(refusal, tiny_runs, here, words, reason):
    assert reason in refusal("convergence", tiny_runs.full, *words)
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_a_model_without_history_is_no_run_and_beside_runs_is_left_out(run_semdiag, refusal, tiny_runs, here):
    content = torch.load(tiny_runs.full / "last.pt", weights_only=True)
    torch.save({**content, "history": {}}, here / "bare.pt")
    assert "has no training history" in refusal("convergence", "bare.pt", "--samples", 5)
    outcome = run_semdiag("convergence", "bare.pt", tiny_runs.full, "--samples", 5, "--figures", "none")
    assert outcome.code == 0
    assert "Left out, because they have no training history: bare.pt." in outcome.out
