"""``semdiag stability`` and ``semdiag bounds``: options, tables, JSON; the page is the report's own matter."""

import json
import re

import pytest
import torch

FEW = ("--samples", 8, "--figures", "none")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stability", "bounds"])
def test_json_is_one_object_and_tables_go_to_stderr(run_semdiag, sections, tiny_runs, command):
    outcome = run_semdiag(command, tiny_runs.full, tiny_runs.topk, *FEW, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("\n") == 1
    found = json.loads(outcome.out)
    assert found["schema"] == f"semdiag.{command}/2"
    assert found["provenance"]["dtype"] == "float64"
    assert len(found["results"]) == 2
    assert f"{tiny_runs.full}/last.pt" in outcome.err
    not_exceeded = {
        "stability": r": 0 of [\d,]+ exceed the bound",
        "bounds": r"constant \[point\]: 0 of [\d,]+ exceed the bound",
    }
    assert re.search(not_exceeded[command], " ".join(outcome.err.split()))
    assert "violated" not in outcome.err
    assert "…" not in outcome.err
    assert [asked[0] for asked in sections] == [[command]]
    quiet = run_semdiag(command, tiny_runs.full, *FEW, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")


@pytest.mark.slow
def test_several_noise_levels(run_semdiag, sections, tiny_runs):
    outcome = run_semdiag("stability", tiny_runs.topk, *FEW, "--noise", "0.1,0.01", "--json")
    found = json.loads(outcome.out)
    assert [r["noise"] for r in found["results"][0]["all"]["response"]] == [0.01, 0.1]
    assert found["provenance"]["noise"] == [0.01, 0.1]
    assert found["provenance"]["noise_samples"] == 8
    assert {"response", "0.01", "0.1"} <= set(outcome.err.split())
    assert [line.rpartition(": ")[2] for line in outcome.err.splitlines() if "softmax stability" in line] == [
        "softmax stability at noise 0.01",
        "softmax stability at noise 0.1",
    ]


@pytest.mark.parametrize("noise", ["", "0", "-1", "a lot", "inf", "nan"])
def test_wrong_noise_is_refused(refusal, sections, tiny_runs, noise):
    line = refusal("stability", tiny_runs.topk, f"--noise={noise}")
    assert line == f"--noise takes positive numbers separated by commas, like 0.01,0.1. Got {noise!r}."


@pytest.mark.slow
def test_pairs_are_shown(run_semdiag, sections, tiny_runs):
    outcome = run_semdiag("bounds", tiny_runs.full, tiny_runs.topk, *FEW, "--all")
    said = " ".join(outcome.out.split())
    for words in (
        "even-pairs, topk-3, seed 7",
        "left side < 1",
        "ln margin < 0",
        "layer 1",
    ):
        assert words in said


@pytest.mark.slow
def test_against_a_reference_that_is_no_full_model(run_semdiag, sections, tiny_runs):
    first = tiny_runs.topk / "epoch-0.pt"
    outcome = run_semdiag("bounds", first, tiny_runs.topk, "--against", tiny_runs.topk, *FEW, "--json")
    (pair,) = json.loads(outcome.out)["pairs"]
    assert pair["reference"] == str(tiny_runs.topk / "last.pt")
    assert pair["differences"] == ["snapshot last and initialisation"]
    assert "inconclusive" in {verdict["verdict"] for verdict in pair["verdicts"]}


def test_a_wrong_reference_is_refused(refusal, sections, tiny_runs, here):
    assert refusal("bounds", tiny_runs.full, "--against", tiny_runs.folder) == (
        f"--against takes one checkpoint. {tiny_runs.folder} holds 2."
    )
    assert "There is nothing to compare" in refusal("bounds", tiny_runs.full, "--against", tiny_runs.full)
    assert "does not exist" in refusal("bounds", tiny_runs.full, "--against", here / "no.pt")


@pytest.mark.slow
def test_given_inputs_have_no_labels_and_no_slopes(run_semdiag, sections, tiny_runs, here):
    import numpy as np

    np.save(here / "tokens.npy", np.array([[0, 1] * 6, [1, 1] * 6]))
    outcome = run_semdiag("bounds", tiny_runs.full, "--inputs", here / "tokens.npy", "--figures", "none")
    assert outcome.code == 0
    assert re.search(r"constant \[sound\]: inconclusive", " ".join(outcome.out.split()))


@pytest.mark.slow
def test_the_paper_code_fixture(run_semdiag, sections, paper_code, here):
    torch.save(paper_code.true["tokens"], here / "tokens.pt")
    words = (paper_code.checkpoint, "--config", paper_code.config_file, "--inputs", here / "tokens.pt", "--json")
    for command in ("stability", "bounds"):
        outcome = run_semdiag(command, *words)
        assert outcome.code == 0, outcome.err
        assert json.loads(outcome.out)["results"][0]["attention"] == "banded"
