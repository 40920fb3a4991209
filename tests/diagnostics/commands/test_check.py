"""``semdiag check``: the gate that a build can stand on."""

import json
import shutil
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

GATED = ["p50", "p75", "p90", "p95"]


@pytest.fixture
def pair(tiny_runs, tmp_path):
    """Copies of both runs, free to be doctored."""
    for attention in ("full", "topk"):
        shutil.copytree(getattr(tiny_runs, attention), tmp_path / "runs" / attention)
    return tmp_path / "runs"


def doctor(folder, factor):
    """Scale the queries of a run's last snapshot, and with them its scores."""
    content = torch.load(folder / "last.pt", weights_only=True)
    for name, tensor in content["model_state"].items():
        if ".attention.qkv." in name:
            tensor[: len(tensor) // 3] *= factor
    torch.save(content, folder / "last.pt")


@pytest.mark.slow
def test_a_pair_with_smaller_dispersion_under_topk_passes(run_semdiag, pair):
    outcome = run_semdiag("check", pair, "--samples", 20)
    assert (outcome.code, outcome.err) == (0, "semdiag: measuring 2 models in 4 stages.\n")
    assert "even-pairs, topk-3, seed 7" in outcome.out
    assert "1 of 1 pair passes; 4 of 4 invariants hold." in outcome.out
    assert "FAILS" not in outcome.out


@pytest.mark.slow
def test_a_doctored_pair_fails(run_semdiag, pair):
    doctor(pair / "topk", 100)
    outcome = run_semdiag("check", pair, "--samples", 20)
    assert outcome.code == 1
    assert "semdiag: even-pairs, topk-3, seed 7: δ_h < δ_s fails at p50, p75, p90, p95.\n" in outcome.err
    assert "0 of 1 pair passes; 4 of 4 invariants hold." in outcome.out


@pytest.mark.slow
def test_a_failure_is_said_even_when_quiet_and_a_pass_is_not(run_semdiag, pair):
    assert run_semdiag("check", pair, "--samples", 20, "--quiet").err == ""
    doctor(pair / "full", 0.01)
    outcome = run_semdiag("check", pair, "--samples", 20, "--quiet")
    assert outcome.code == 1
    assert outcome.err.splitlines() == [
        "semdiag: even-pairs, topk-3, seed 7: δ_h < δ_s fails at p50, p75, p90, p95.",
        "semdiag: even-pairs, topk-3, seed 7: δ_h < δ_s fails at the median of 2 of 2 layers (0, 1).",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "code"), [(1, 0), (100, 1)])
def test_json_holds_every_pair_of_numbers(run_semdiag, pair, factor, code):
    doctor(pair / "topk", factor)
    outcome = run_semdiag("check", pair, "--samples", 20, "--json")
    assert outcome.code == code
    assert outcome.out.count("\n") == 1
    found = json.loads(outcome.out)
    assert (found["schema"], found["gated"], len(found["results"])) == ("semdiag.check/2", GATED, 1)
    result = found["results"][0]
    assert result["full"] == str(pair / "full" / "last.pt")
    assert result["topk"] == str(pair / "topk" / "last.pt")
    assert list(result["delta_s"]) == list(result["delta_h"]) == [*GATED, "p100"]
    assert result["passed"] == (code == 0)
    assert all((result["delta_h"][p] < result["delta_s"][p]) == (code == 0) for p in GATED)
    assert found["provenance"]["samples"] == 20


def test_a_missing_partner_is_no_pass(refusal, pair):
    shutil.rmtree(pair / "topk")
    assert "full/last.pt has no partner: a full and a top-k checkpoint" in refusal("check", pair, "--samples", 5)


@pytest.mark.slow
def test_runs_whose_padding_counts_are_partners_by_the_length_of_their_samples(run_semdiag, here):
    words = "even-pairs --length 7 --pad-as-token --train-samples 20 --holdout-samples 20 --epochs 1 --blocks 1"
    for attention in ("full", "topk --k 5"):
        out = ("--quiet", "--out", attention[:4])
        assert run_semdiag("train", *words.split(), "--attention", *attention.split(), *out).code == 0
    outcome = run_semdiag("check", "full", "topk", "--exit-zero")
    assert "of 1 pair passes" in outcome.out
    assert "tokens long" not in outcome.err  # they are measured on what they were trained on


def test_a_partner_of_another_seed_is_none(refusal, pair):
    content = torch.load(pair / "topk" / "last.pt", weights_only=True)
    content["config"]["training"]["seed"] = 8
    torch.save(content, pair / "topk" / "last.pt")
    assert "has no partner" in refusal("check", pair, "--samples", 5)


@pytest.mark.slow
def test_other_attentions_are_not_gated(refusal, run_semdiag, pair):
    for name in ("topk", "banded"):
        content = torch.load(pair / "topk" / "last.pt", weights_only=True)
        content["config"]["model"]["attention"] = "banded"
        (pair / name).mkdir(exist_ok=True)
        torch.save(content, pair / name / "last.pt")
    shutil.rmtree(pair / "full")
    assert "There is no full or top-k checkpoint to pair." in refusal("check", pair, "--samples", 5)


def test_nothing_there_says_how_to_make_one(refusal, here):
    assert refusal("check") == (
        "No checkpoint in checkpoints. Make one in a minute with: "
        "semdiag train even-pairs --attention topk --k 5 --epochs 5"
    )


@pytest.mark.slow
def test_without_models_the_folder_of_the_environment_is_checked(run_semdiag, here, pair, monkeypatch):
    monkeypatch.setenv("SEMDIAG_CHECKPOINTS", str(pair))
    assert run_semdiag("check", "--samples", 5, "--quiet").code == 0
    assert list(here.iterdir()) == [pair]


@pytest.mark.slow
def test_a_bar_is_drawn_for_people_only(run_semdiag, pair, monkeypatch):
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = run_semdiag("check", pair, "--samples", 20)
    assert shown.code == 0
    assert "measuring" in shown.err
    assert "\x1b[" in shown.err
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b[" not in run_semdiag("check", pair, "--samples", 20).out
    assert sys.stderr is not None


@pytest.mark.slow
def test_rules_are_judged_and_said(run_semdiag, pair):
    words = "--samples", 20, "--rule", "dispersion.p95 < 1000", "--rule", "dispersion.p50 < 0 attention=topk"
    outcome = run_semdiag("check", pair, *words)
    assert outcome.code == 1
    assert "2 of 3 rules hold." in outcome.out
    assert f"semdiag: {pair / 'topk' / 'last.pt'}: dispersion.p50 < 0 attention=topk fails, " in outcome.err


def test_with_a_rule_a_model_needs_no_partner(run_semdiag, pair):
    words = "--samples", 20, "--rule", "accuracy >= 0"
    assert run_semdiag("check", pair / "full", *words).code == 0


def test_a_wrong_rule_is_refused_before_anything_is_read(refusal, here):
    assert "cannot be read" in refusal("check", "nowhere.pt", "--rule", "dispersion")
    assert "none.json does not exist" in refusal("check", "nowhere.pt", "--baseline", "none.json")


@pytest.mark.slow
def test_exit_zero_says_what_fails_and_leaves_with_zero(run_semdiag, pair):
    doctor(pair / "topk", 100)
    outcome = run_semdiag("check", pair, "--samples", 20, "--quiet", "--exit-zero")
    assert outcome.code == 0
    assert "δ_h < δ_s fails at p50, p75, p90, p95." in outcome.err


@pytest.mark.slow
def test_a_baseline_of_itself_has_not_drifted_and_one_of_another_model_has(run_semdiag, pair, tmp_path):
    baseline = tmp_path / "baseline.json"
    baseline.write_text(run_semdiag("check", pair, "--samples", 20, "--json", "--quiet").out)
    same = run_semdiag("check", pair, "--samples", 20, "--baseline", baseline)
    assert same.code == 0
    assert "nothing has drifted" in same.out
    doctor(pair / "topk", 0.5)
    moved = run_semdiag("check", pair, "--samples", 20, "--baseline", baseline)
    assert moved.code == 1
    assert "dispersion.p50 was" in moved.err


@pytest.mark.slow
def test_a_model_that_the_baseline_does_not_hold_is_named_and_counted(run_semdiag, here, pair, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # so that no path is broken
    words = "check", pair, "--samples", 20
    known = json.loads(run_semdiag(*words, "--json", "--quiet").out)
    (here / "base.json").write_text(json.dumps({**known, "models": known["models"][:1]}))
    outcome = run_semdiag(*words, "--baseline", "base.json", "--json", "--junit", "check.xml")
    topk = str(pair / "topk" / "last.pt")
    assert outcome.code == 0
    assert f"not compared: {topk} is not in the baseline" in outcome.err
    assert "; 1 of 2 models compared, nothing has drifted." in outcome.err
    assert json.loads(outcome.out)["baseline"] == {"models": 2, "compared": 1, "new": [topk]}
    assert known["baseline"] is None
    suite = ElementTree.parse(here / "check.xml").getroot()
    assert suite.get("skipped") == "1"
    assert int(suite.get("tests")) == len(suite.findall("testcase"))
    assert [case.get("name") for case in suite.findall("testcase[skipped]")] == [topk]
    (here / "base.json").write_text(json.dumps(known))
    gone = run_semdiag("check", pair / "topk", "--samples", 20, "--baseline", "base.json")
    assert gone.code == 1
    assert "1 of 1 model compared, 1 model of the baseline not matched." in gone.out


@pytest.mark.slow
def test_a_failing_layer_is_named_and_fails_if_every_layer_must_hold(run_semdiag, pair):
    content = torch.load(pair / "topk" / "last.pt", weights_only=True)
    weights = content["model_state"]["blocks.0.attention.qkv.weight"]
    weights[: len(weights) // 3] *= 100
    torch.save(content, pair / "topk" / "last.pt")
    found = json.loads(run_semdiag("check", pair, "--samples", 20, "--json").out)
    layers = found["results"][0]["layers"]
    assert layers["failing"] == [n for n in (0, 1) if not layers["delta_h"][n] < layers["delta_s"][n]]
    assert 0 in layers["failing"]
    assert not layers["passed"]  # one of two is half
    assert "fails at the median of" in run_semdiag("check", pair, "--samples", 20, "--every-layer").err


def test_the_configuration_is_read_of_a_checkpoint_of_the_papers_code(run_semdiag, refusal, here, paper_code):
    np.save(here / "tokens.npy", paper_code.true["tokens"].numpy())
    words = ("check", paper_code.checkpoint, "--inputs", "tokens.npy", "--rule", "dispersion.p100 < 100")
    assert "--config" in refusal(*words)
    outcome = run_semdiag(*words, "--config", paper_code.config_file, "--json")
    assert outcome.code == 0, outcome.err
    (model,) = json.loads(outcome.out)["models"]
    assert model["numbers"]["dispersion.p50"] == pytest.approx(np.median(paper_code.true["dispersion"].numpy()))


def test_a_folder_for_the_verdicts_is_refused_before_anything_is_measured(refusal, here):
    (here / "folder").mkdir()
    line = refusal("check", "nowhere.pt", "--junit", "folder")
    assert line == "folder is a folder. Name a file with --junit FILE."


def test_a_tolerance_without_a_baseline_is_refused(refusal, pair):
    line = refusal("check", pair, "--tolerance", 0.1)
    assert line == "--tolerance applies to the numbers of a baseline: add --baseline FILE."
