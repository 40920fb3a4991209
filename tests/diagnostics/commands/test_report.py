"""``semdiag report``: what the command adds to the report itself."""

import json
import re

import numpy as np
import pytest
import torch

from semdiag.measuring.measurements import Measurements

FEW = ("--samples", 8, "--figures", "none")


@pytest.mark.slow
def test_a_report_on_every_run_here(run_semdiag, here, tiny_runs, monkeypatch):
    monkeypatch.setenv("SEMDIAG_CHECKPOINTS", str(tiny_runs.folder))
    outcome = run_semdiag("report", *FEW, "--k", "2")
    assert outcome.code == 0
    page = here / "reports" / "report-2-models" / "index.html"
    assert page.is_file()
    assert not list(here.rglob("queries.parquet"))
    assert outcome.out.endswith(f"Report: {page.relative_to(here)}\n")
    assert "Report" not in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "k"), [(("--k", "4,2"), 2), ((), 5)])
def test_the_masks_of_a_model_without_masks_are_those_of_the_smallest_k(run_semdiag, here, tiny_runs, asked, k):
    outcome = run_semdiag("report", tiny_runs.full, *FEW, *asked, "--json", "--quiet", "--out", "out")
    found = json.loads(outcome.out)
    assert found["provenance"]["mask_noise"]["k"] == k
    assert any(f"of the masks that top-{k} would choose in 1 model" in said for said in found["verdict"])
    assert f"that top-{k} would choose" in found["glances"]["mask-stability"]["words"]
    assert f"the mask that top-{k} would choose" in found["details"]["mask-stability"][1]


@pytest.mark.slow
def test_a_report_is_redrawn_from_what_was_kept(run_semdiag, here, tiny_runs):
    kept = (tiny_runs.topk, *FEW, "--out", "first", "--keep-queries", "--quiet", "--json")
    first = run_semdiag("report", *kept)
    assert (first.code, first.err, first.out.count("\n")) == (0, "", 1)
    found = json.loads(first.out, parse_constant=pytest.fail)
    assert found == json.loads((here / "first" / "summary.json").read_text(encoding="utf-8"))
    for kept_in in ("first", "first/data"):
        words = ("--from", kept_in, "--out", "second", "--figures", "none", "--quiet", "--json")
        again = run_semdiag("report", *words)
        assert (again.code, again.err) == (0, "")
        assert json.loads(again.out)["results"] == found["results"]
        assert (here / "second" / "index.html").is_file()
    assert [*Measurements.load("first/data").models["model"]] == [str(tiny_runs.topk / "last.pt")]


def test_what_cannot_change_saved_measurements_is_refused(refusal, here):
    line = refusal(
        "report", "--from", "data", "--samples", 7, "--noise", 0.5, "--k", 2, "--thorough", "--out", "x"
    )
    said = "--k, --noise, --samples, --thorough"
    assert line == f"--from draws saved measurements as they are: leave out {said}."
    assert refusal("report", "--from", "data", "--samples", 500).endswith("leave out --samples.")  # the default


@pytest.mark.slow
def test_a_default_k_is_lowered_to_inputs_that_are_shorter(run_semdiag, refusal, here, tiny_runs):
    np.save(here / "short.npy", np.array([[0, 1, 1], [1, 0, 1]] * 5))
    words = "report", tiny_runs.full, "--inputs", "short.npy"
    assert run_semdiag(*words, "--out", "page", "--figures", "none").code == 0
    within = (here / "page" / "data" / "within.csv").read_text(encoding="utf-8").splitlines()
    assert {row.split(",")[within[0].split(",").index("k")] for row in within[1:]} == {"3"}
    assert refusal(*words, "--k", "5") == "k must lie in 1 … 3, the length of the inputs. Got k=5."


def made_of(value, source, target):
    """A run's last snapshot with every parameter multiplied by the value."""
    content = torch.load(source / "last.pt", weights_only=True)
    content["model_state"] = {name: tensor * value for name, tensor in content["model_state"].items()}
    torch.save(content, target)


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), 1e38])
def test_a_diverged_run_is_reported_as_one(run_semdiag, here, tiny_runs, value):
    made_of(value, tiny_runs.full, here / "full.pt")
    made_of(value, tiny_runs.topk, here / "topk.pt")
    outcome = run_semdiag(
        "report", "full.pt", "topk.pt", "--samples", 4, "--figures", "none", "--out", "out", "--json"
    )
    assert outcome.code == 0
    said = " ".join(json.loads(outcome.out)["verdict"])
    assert ("Diverged: " in said) == (value != value)


@pytest.mark.slow
def test_of_a_head_whose_scores_are_no_numbers_nothing_is_said_nor_of_the_whole(run_semdiag, here, tiny_runs):
    content = torch.load(tiny_runs.full / "last.pt", weights_only=True)
    content["model_state"]["blocks.1.attention.qkv.weight"][0, 0] = float("nan")
    torch.save(content, here / "full.pt")
    outcome = run_semdiag("dispersion", "full.pt", "--samples", 4, "--figures", "none", "--json")
    assert outcome.code == 0
    (result,) = json.loads(outcome.out)["results"]
    assert [row["p50"] is None for row in result["layers"]] == [False, False, True, False]
    assert result["all"]["p50"] is None
    assert result["all"]["undefined"] == result["all"]["queries"] > 0
    said = [line for line in outcome.err.splitlines() if line.startswith("semdiag: Diverged: ")]
    assert len(said) == 1
    assert "of full.pt are NaN or infinite, first in layer 1, head 0, so what is reported" in said[0]
    page = (here / "reports" / "dispersion-full" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\bnan\b", page)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["mask-stability", "k-sweep", "bounds", "landscape", "overlap"])
def test_a_probe_of_a_diverged_run_is_no_error_of_ours(run_semdiag, here, tiny_runs, command):
    made_of(float("nan"), tiny_runs.topk, here / "topk.pt")
    assert run_semdiag(command, "topk.pt", "--samples", 4, "--figures", "none", "--out", "out").code == 0


def without_numbers(source, target):
    """A run's last snapshot whose attention is sound and whose first logit is NaN."""
    content = torch.load(source / "last.pt", weights_only=True)
    content["model_state"]["head.bias"][0] = float("nan")
    torch.save(content, target)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["mask-stability", "dispersion"])
def test_logits_that_are_no_numbers_are_wrong_answers_and_said_to_be(run_semdiag, here, tiny_runs, command):
    without_numbers(tiny_runs.topk, here / "topk.pt")
    outcome = run_semdiag(command, "topk.pt", "--samples", 4, "--figures", "none", "--out", "out", "--json")
    assert outcome.code == 0
    assert outcome.err.count("semdiag: topk.pt: logits are NaN for 4 of 4 samples: they count as wrong.") == 1
    found = json.loads(outcome.out)
    (result,) = found["results"]
    if command == "mask-stability":
        outputs = [level["output"] for level in result["levels"]]
        assert {(o["logit_change"], o["flipped"], o["accuracy_before"], o["accuracy_after"]) for o in outputs} == {
            (None, 0, 0, 0)
        }
        said = " ".join(outcome.err.split())
        assert "some logits are not numbers, 0.00% of the predictions change, accuracy 0.0% → 0.0%" in said


@pytest.mark.slow
def test_noise_beyond_all_numbers_is_no_error_of_ours(run_semdiag, here, tiny_runs):
    outcome = run_semdiag(
        "mask-stability", tiny_runs.topk, "--samples", 4, "--figures", "none", "--out", "out", "--noise", "1e300"
    )
    assert outcome.code == 0
    assert "Noise 1e+300: some logits are not numbers, " in " ".join(outcome.out.split())
