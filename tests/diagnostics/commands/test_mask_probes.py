"""``semdiag mask-stability`` and ``semdiag k-sweep``: options, tables, JSON, refusals."""

import json

import numpy as np
import pandas as pd
import pytest

import semdiag

FEW = ("--samples", 8, "--figures", "none")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["mask-stability", "k-sweep"])
def test_json_is_one_object_and_tables_go_to_stderr(run_semdiag, here, tiny_runs, command):
    outcome = run_semdiag(command, tiny_runs.full, tiny_runs.topk, *FEW, "--json", "--out", here / "out")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("\n") == 1
    found = json.loads(outcome.out)
    assert found["schema"] == f"semdiag.{command}/2"
    assert len(found["results"]) == 2
    assert f"{tiny_runs.full}/last.pt" in outcome.err
    assert "…" not in outcome.out
    page = (here / "out" / "index.html").read_text(encoding="utf-8")
    assert {"mask-stability": "Do masks survive noise?", "k-sweep": "What would sparse attention cost"}[
        command
    ] in page
    quiet = run_semdiag(command, tiny_runs.full, *FEW, "--quiet", "--out", here / "quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")


@pytest.mark.slow
def test_masks_at_several_levels_are_deterministic(run_semdiag, here, tiny_runs):
    words = ("mask-stability", tiny_runs.full, tiny_runs.topk, *FEW, "--noise", "0.1,0.01", "--k", 3, "--draws", 2)
    first, second = (run_semdiag(*words, "--json", "--out", here / name) for name in "ab")
    found = json.loads(first.out)
    assert json.loads(second.out)["results"] == found["results"]
    other = json.loads(run_semdiag(*words, "--json", "--seed", 1, "--out", here / "c").out)
    assert other["results"] != found["results"]
    for result in found["results"]:
        assert [level["noise"] for level in result["levels"]] == [0.01, 0.1]
        assert result["certified_changed"] == 0
        assert result["certified_rows"] > 0
        for level in result["levels"]:
            assert len(level["layers"]) == tiny_runs.blocks * tiny_runs.heads
            assert level["all"]["draws"] == 2
            assert 0 <= level["all"]["certified"] <= level["all"]["exact"] <= level["all"]["agreement"] <= 1
            assert level["output"]["accuracy_after"] is not None
    full, topk = found["results"]
    assert "top-3 would choose" in full["mask"]
    assert topk["mask"] == "the model's own mask, k = 3"
    assert "Certified rows that changed: 0 of" in first.err
    table = pd.read_csv(here / "a" / "data" / "mask_stability.csv")
    assert set(table["level"]) == {0.01, 0.1}


@pytest.mark.parametrize("command", ["mask-stability", "overlap", "dispersion"])
def test_a_k_that_no_query_has_keys_for_is_refused_by_every_command(refusal, here, tiny_runs, command):
    line = refusal(command, tiny_runs.topk, tiny_runs.full, *FEW, "--k", 13, "--quiet")
    assert line.startswith("k must lie in 1 … 12, the l")
    assert line.endswith(". Got k=13.")


@pytest.mark.slow
def test_masks_that_drop_nothing_are_not_compared_and_it_is_said(run_semdiag, here, tiny_runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # so that no sentence is broken
    outcome = run_semdiag("overlap", tiny_runs.full, *FEW, "--k", 12)
    assert outcome.code == 0
    assert "no two masks to compare (a query that drops no key has none)" in outcome.out
    assert "at random" not in outcome.out
    np.save(here / "short.npy", np.array([[0, 1, 1], [1, 0, 1]] * 5))  # shorter than a k that nobody named
    for command in ("mask-stability", "overlap"):
        words = (command, tiny_runs.full, "--inputs", here / "short.npy", "--figures", "none")
        assert run_semdiag(*words).code == 0


@pytest.mark.slow
def test_masks_in_number_formats_beside_noise_or_alone(run_semdiag, here, tiny_runs):
    words = ("mask-stability", tiny_runs.full, tiny_runs.topk, *FEW, "--precision", "bf16,fp8-e4m3", "--k", 3)
    alone, both = (
        run_semdiag(*words, *more, "--json", "--out", here / name)
        for name, more in (("alone", ()), ("both", ("--noise", 0.1)))
    )
    assert (alone.code, both.code) == (0, 0), alone.err + both.err
    results, beside = (json.loads(outcome.out)["results"] for outcome in (alone, both))
    assert [result["levels"] for result in results] == [[], []]
    assert [len(result["levels"]) for result in beside] == [1, 1]
    for result, same in zip(results, beside, strict=True):
        assert result["applicable"]
        assert result["precision"] == same["precision"]
        assert [found["format"] for found in result["precision"]] == ["bfloat16", "float8_e4m3fn"]
        for found in result["precision"]:
            assert [row["layer"] for row in found["layers"]] == list(range(tiny_runs.blocks))
            every = found["all"]
            assert (every["not_covered"], every["certified_changed"], every["why"]) == (0, 0, "")
            assert every["queries"] == sum(row["queries"] for row in found["layers"])
            assert 0 <= every["changed"] <= every["changed_or_tied"] <= 1 - every["certified"] + 1e-12  # of shares
    assert "top-3 would choose" in results[0]["mask"]
    assert results[1]["mask"] == "the model's own mask, k = 3"
    assert "bfloat16: Certified rows that changed: 0 of" in alone.err
    assert json.loads(alone.out)["provenance"]["mask_formats"] == ["bfloat16", "float8_e4m3fn"]
    table = pd.read_csv(here / "alone" / "data" / "mask_precision.csv")
    assert list(table.loc[table["layer"] == "all", "format"]) == ["bfloat16", "float8_e4m3fn"] * 2
    pages = {name: (here / name / "index.html").read_text(encoding="utf-8") for name in ("alone", "both")}
    assert [name for name, page in pages.items() if "Do masks survive noise?" in page] == ["both"]
    assert all("Do masks survive a number format?" in page for page in pages.values())


@pytest.mark.slow
def test_a_fixed_mask_is_not_applicable(run_semdiag, here, paper_code):
    import torch

    torch.save(paper_code.true["tokens"], here / "tokens.pt")
    words = (paper_code.checkpoint, "--config", paper_code.config_file, "--inputs", here / "tokens.pt", "--json")
    fixed = "not applicable: the mask of banded attention does not depend on the input"
    for command, said in (
        ("mask-stability", fixed),
        ("mask-stability --precision bf16", fixed),
        ("k-sweep", "Inconclusive: its mask does not rank keys by their scores."),
    ):
        outcome = run_semdiag(*command.split(), *words)
        assert outcome.code == 0, outcome.err
        assert said in " ".join(outcome.err.split())
        (result,) = json.loads(outcome.out)["results"]
        assert not result.get("applicable", False)
        assert not result.get("sweep", [])


@pytest.mark.slow
def test_a_sweep_tells_every_k_and_a_rerun_what_masks_change(run_semdiag, here, tiny_runs):
    outcome = run_semdiag("k-sweep", tiny_runs.full, *FEW, "--rerun", "--json", "--max-k", 4)
    (result,) = json.loads(outcome.out)["results"]
    changes = {(row["mask"], row["k"]) for row in result["rerun"]}
    assert changes == {("none", 0)} | {(mask, k) for mask in ("topk", "random") for k in (1, 2, 3, 4)}
    assert result["verdict"]["answer"] in ("plausible", "not without loss", "inconclusive")
    lines = [line for line in outcome.err.splitlines() if not line.startswith("semdiag: ")]
    assert lines[0].lower() == result["verdict"]["sentence"].lower()  # the answer is the first line
    assert "within this model, by k" in outcome.err
    assert "Within one model" in outcome.err
    table = pd.read_csv(here / "reports" / "k-sweep-full" / "data" / "k_sweep.csv")
    assert table["swept_k"].max() == 4
    rerun = pd.read_csv(here / "reports" / "k-sweep-full" / "data" / "k_sweep_rerun.csv")
    assert set(rerun["mask"]) == {"none", "topk", "random"}


@pytest.mark.slow
def test_a_sweep_of_a_top_k_model_without_a_rerun_says_why_it_cannot_tell(run_semdiag, here, tiny_runs):
    outcome = run_semdiag("k-sweep", tiny_runs.topk, *FEW, "--json", "--max-k", 11, "--min-keys", 12)
    (result,) = json.loads(outcome.out)["results"]
    said = " ".join(outcome.err.split())
    assert "no mask of top-k that drops keys was run" in result["verdict"]["sentence"]
    assert "trained with top-k attention, k = 3" in said


@pytest.mark.slow
def test_a_budget_is_written_and_read(run_semdiag, here, tiny_runs):
    outcome = run_semdiag(
        "k-sweep",
        tiny_runs.full,
        "--figures",
        "none",
        "--samples",
        16,
        "--max-k",
        4,
        "--k",
        "2,4",
        "--tolerance",
        5,
        "--budget",
        here / "budget.json",
    )
    assert outcome.code == 0, outcome.err
    said = " ".join(outcome.out.split())
    assert "chosen on samples 0 to 7 and run on 8 to 15, which had no part in the choice" in said
    content = json.loads((here / "budget.json").read_text(encoding="utf-8"))
    assert content["tolerance"] == 5
    keep = semdiag.read_budget(here / "budget.json")
    assert sorted(keep) == [("blocks.0.attention.core", 0), ("blocks.1.attention.core", 0)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mask-stability", "--noise", "a lot"), "--noise takes positive numbers"),
        (("mask-stability", "--draws", 0), "draws must be at least 1"),
        (("mask-stability", "--precision", "bf16,int4"), "Unknown number format 'int4'"),
        (("mask-stability", "--precision", "float64"), "against float64. Got float64."),
        (("mask-stability", "--precision", ","), "against float64. Got none."),
        (("k-sweep", "--max-k", 12), "must be below the number of keys, at most 12"),
        (("k-sweep", "--max-k", 0), "at least 1"),
        (("k-sweep", "--rerun", "--k", "0"), "k must be at least 1"),
        (("k-sweep", "--no-rerun", "--k", "3"), "--k is about runs with masks: leave out --no-rerun."),
        (("k-sweep", "--no-rerun", "--tolerance", 0.5), "--tolerance is about runs with masks: leave out"),
        (("k-sweep", "--rerun", "--tolerance", -1), "must be above 0"),
        (("k-sweep", "--budget", "budget.txt"), "--budget takes one MODEL"),
    ],
)
def test_bad_input_is_refused_in_one_line(refusal, here, tiny_runs, words, said):
    command, *rest = words
    assert said in refusal(command, tiny_runs.topk, "--samples", 8, *rest)
    assert list(here.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_overlap_runs_in_the_precision_asked_for(run_semdiag, here, tiny_runs, dtype):
    outcome = run_semdiag("overlap", tiny_runs.topk, *FEW, "--dtype", dtype, "--json", "--quiet")
    assert json.loads(outcome.out)["provenance"]["dtype"] == dtype


@pytest.mark.slow
def test_of_many_heads_the_least_stable_are_shown(run_semdiag, here):
    small = ("--length", 6, "--width", 10, "--mlp-width", 10, "--head-width", 4, "--blocks", 5, "--heads", 5)
    few = ("--epochs", 1, "--train-samples", 25, "--holdout-samples", 25, "--quiet", "--out", "run")
    assert run_semdiag("train", "even-pairs", *small, *few).code == 0
    asked = ("mask-stability", "run", "--k", 2, "--noise", 0.1, "--figures", "none", "--out")
    shown, every = run_semdiag(*asked, "a"), run_semdiag(*asked, "b", "--all")
    rows = [
        [line for line in outcome.out.splitlines() if line.startswith("   0.1 ")] for outcome in (shown, every)
    ]
    assert [len(lines) for lines in rows] == [6, 26]
    assert set(rows[0]) < set(rows[1])
    assert "20 rows are not shown" in shown.out
    assert "not shown" not in every.out
    table = pd.read_csv(here / "a" / "data" / "mask_stability.csv", dtype={"layer": str, "head": str})
    exact = table.query("head != 'all'").set_index(["layer", "head"])["exact"]
    least = exact.nsmallest(5).max()
    assert all(exact[tuple(line.split()[1:3])] <= least for line in rows[0][:-1])
