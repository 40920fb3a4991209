"""``semdiag dispersion`` and ``semdiag separation``."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions import percentile_tables, registry

FEW = ("--samples", 8, "--figures", "none")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dispersion", "separation"])
def test_json_is_the_summary_of_the_same_survey(run_semdiag, strict, here, tiny_runs, command):
    outcome = run_semdiag(command, tiny_runs.full, tiny_runs.topk, "--k", "2,5", *FEW, "--json", "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    found = strict(outcome.out)
    files = [tiny_runs.full / "last.pt", tiny_runs.topk / "last.pt"]
    expected = registry.QUESTIONS[command].json(Findings(survey(files, Conditions(samples=8, k=(2, 5)))))
    assert found["schema"] == f"semdiag.{command}/2"
    assert found["results"] == json.loads(json.dumps(expected["results"]))
    assert [within["k"] for within in found["results"][0]["within_model"]] == [2, 5]
    assert f"{command} {tiny_runs.full}" in str(found["provenance"]["command"]).replace("', '", " ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("dispersion", ["dispersion δ (nats)"]),
        ("separation", ["separation Δ (nats)", "key load (queries)", "≤ 0"]),
    ],
)
def test_tables_go_to_stdout_and_progress_to_stderr(run_semdiag, here, tiny_runs, command, shown):
    outcome = run_semdiag(command, tiny_runs.full, "--k", "2", *FEW)
    assert (outcome.code, outcome.err) == (0, "semdiag: measuring 1 model in 1 stage.\n")
    said = " ".join(outcome.out.split())  # a long title is folded
    assert all(words in said for words in (*shown, "p50", "p100", "0 k=2", "all k=2"))
    assert "Page: " in outcome.out
    assert "…" not in outcome.out  # no number is cut short


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dispersion", "separation", "stability", "overlap", "mask-stability"])
def test_the_answer_comes_first(run_semdiag, here, tiny_runs, command):
    outcome = run_semdiag(command, tiny_runs.topk, *FEW, "--out", "out")
    verdict = json.loads((here / "out" / "summary.json").read_text(encoding="utf-8"))["verdict"]
    assert outcome.out.splitlines()[0] == verdict[0]  # in a file a sentence is a line, however long


@pytest.mark.slow
def test_with_json_tables_still_go_to_stderr(run_semdiag, strict, here, tiny_runs):
    outcome = run_semdiag("dispersion", tiny_runs.topk, *FEW, "--json")
    assert strict(outcome.out)["results"]
    assert "dispersion δ (nats)" in outcome.err


@pytest.mark.slow
def test_numbers_in_the_table_are_those_of_the_summary(run_semdiag, strict, here, tiny_runs):
    outcome = run_semdiag("dispersion", tiny_runs.topk, *FEW, "--json")
    pooled = strict(outcome.out)["results"][0]["all"]
    row = next(line for line in outcome.err.splitlines() if line.split()[:1] == ["all"])
    assert row.split()[1:] == [
        f"{pooled[name]:.3g}" for name in ("mean", "p5", "p50", "p75", "p90", "p95", "p100")
    ]


@pytest.mark.slow
def test_the_share_of_separations_that_are_not_positive_is_of_those_there_are(
    run_semdiag, strict, here, tiny_runs
):
    outcome = run_semdiag("separation", tiny_runs.full, *FEW, "--k", 2, "--json")
    rows = [line.split() for line in outcome.err.partition("key load")[0].splitlines()]
    undefined = next(row for row in rows if row[:2] == ["all", "–"])
    assert set(undefined[1:]) == {"–"}  # full attention drops nothing
    (within,) = strict(outcome.out)["results"][0]["within_model"]
    numbers = within["all"]["separation"]
    share = numbers["not_positive"] / (numbers["queries"] - numbers["undefined"])
    assert next(row for row in rows if row[:2] == ["all", "k=2"])[-1] == f"{share:.1%}"


@pytest.mark.slow
def test_paths_that_look_like_markup_are_shown_as_they_are(run_semdiag, here, tiny_runs):
    shutil.copytree(tiny_runs.topk, here / "[bold]run[" / "red]")
    outcome = run_semdiag("dispersion", "[bold]run[/red]", *FEW)
    assert outcome.code == 0
    assert "[bold]run[/red]" in outcome.out.replace("\n", "")


@pytest.mark.slow
def test_the_default_number_of_samples_is_lowered_to_what_a_run_held_out_and_this_is_said(
    run_semdiag, here, tiny_runs
):
    held_out = tiny_runs.holdout_samples  # fewer than the 500, 100 and 50 of the defaults below
    few = ("--figures", "none", "--out", "out", "--json")
    for words in (("dispersion",), ("convergence",), ("overlap",), ("k-sweep", "--max-k", 2)):
        outcome = run_semdiag(words[0], tiny_runs.full, *words[1:], *few)
        assert outcome.code == 0, outcome.err
        said = f"semdiag: measured on {held_out} samples: the run held out no more.\n"
        assert outcome.err.count(said) == 1
        assert json.loads(outcome.out)["provenance"]["samples"] == held_out
    quiet = run_semdiag("dispersion", tiny_runs.full, *few, "--quiet")
    assert (quiet.code, quiet.err) == (0, "")


@pytest.mark.slow
def test_a_number_of_samples_that_was_typed_is_not_lowered(run_semdiag, refusal, here, tiny_runs):
    line = refusal("dispersion", tiny_runs.full, "--samples", 500)
    assert (
        line
        == f"{tiny_runs.full}/last.pt has 40 held-out samples; --samples must not be larger. Got --samples 500."
    )
    outcome = run_semdiag("dispersion", tiny_runs.full, "--samples", 8, "--figures", "none")
    assert "held out" not in outcome.err


@pytest.mark.slow
def test_a_k_that_has_no_effect_is_refused_and_beside_full_models_said(run_semdiag, refusal, here, tiny_runs):
    for command in ("dispersion", "separation", "report", "mask-stability", "overlap"):
        line = refusal(command, tiny_runs.topk, *FEW, "--k", 2)
        said = (
            f"--k applies only to models that attend to every key: {tiny_runs.topk}/last.pt has a mask of its own."
        )
        assert line == said
    assert not list(here.iterdir())
    both = run_semdiag("dispersion", tiny_runs.full, tiny_runs.topk, *FEW, "--k", 2)
    assert both.code == 0
    said = f"semdiag: --k applies only to models that attend to every key, not to {tiny_runs.topk}/last.pt.\n"
    assert both.err.count(said) == 1
    for words in ((tiny_runs.full, *FEW, "--k", 2), (tiny_runs.topk, *FEW)):
        assert "--k" not in run_semdiag("dispersion", *words).err


@pytest.mark.slow
def test_figures_and_tables_go_to_reports_by_default_and_to_out_on_request(run_semdiag, here, tiny_runs):
    assert run_semdiag("dispersion", tiny_runs.topk, *FEW, "--quiet").code == 0
    assert (here / "reports" / "dispersion-topk" / "index.html").is_file()
    assert run_semdiag("dispersion", tiny_runs.topk, *FEW, "--quiet", "--out", "my own/place").code == 0
    assert (here / "my own" / "place" / "index.html").is_file()
    assert sorted(path.name for path in here.iterdir()) == ["my own", "reports"]


@pytest.mark.slow
def test_figures_come_in_the_formats_asked_for(run_semdiag, here, tiny_runs):
    assert run_semdiag("dispersion", tiny_runs.topk, "--samples", 8, "--figures", "svg", "--out", "out").code == 0
    assert {path.suffix for path in (here / "out" / "figures").iterdir()} == {".svg"}


@pytest.mark.slow
def test_every_query_is_written_on_request(run_semdiag, here, tiny_runs):
    words = (
        "separation",
        tiny_runs.full,
        tiny_runs.topk,
        *FEW,
        "--dtype",
        "float64",
        "--per-query",
        "all.parquet",
    )
    assert run_semdiag(*words, "--quiet").code == 0
    queries, loads = pd.read_parquet("all.parquet"), pd.read_parquet("all.load.parquet")
    contract = ["sample", "layer", "head", "query", "keys", "dispersion", "separation"]
    assert [name for name in queries if name in contract] == contract
    assert [name for name in loads if name in ("sample", "layer", "head", "key", "load", "received")] == list(
        loads.columns[1:]
    )
    assert queries.columns[0] == loads.columns[0] == "model"
    assert queries["separation"].dtype == queries["dispersion"].dtype == "float64"
    full = queries[queries["model"] == str(tiny_runs.full / "last.pt")]
    topk = queries[queries["model"] == str(tiny_runs.topk / "last.pt")]
    assert np.isposinf(full["separation"]).all()
    assert np.isfinite(topk["separation"]).all()
    assert len(queries) == 2 * 8 * 12 * 2 * 2
    assert queries[["sample", "layer", "head", "query"]].min().tolist() == [0, 0, 0, 0]


@pytest.mark.slow
def test_a_checkpoint_of_the_papers_code_is_measured(run_semdiag, strict, here, paper_code):
    np.save(here / "tokens.npy", paper_code.true["tokens"].numpy())
    words = (
        "--config",
        paper_code.config_file,
        "--inputs",
        "tokens.npy",
        "--dtype",
        "float64",
        "--figures",
        "none",
    )
    outcome = run_semdiag("dispersion", paper_code.checkpoint, *words, "--json", "--quiet")
    assert outcome.code == 0
    pooled = strict(outcome.out)["results"][0]["all"]
    true = paper_code.true["dispersion"].numpy()
    assert pooled["p50"] == pytest.approx(np.median(true), abs=1e-9)
    assert pooled["p100"] == pytest.approx(true.max(), abs=1e-9)


@pytest.mark.slow
def test_the_keys_of_json_that_docs_readme_names_are_there(run_semdiag, here, tiny_runs):
    few = ("--samples", 8, "--quiet", "--json")
    spread, gap = (
        json.loads(run_semdiag(command, tiny_runs.full, *few, "--figures", "none", "--k", 2).out)
        for command in ("dispersion", "separation")
    )
    for found in (spread, gap):
        assert {"schema", "provenance", "results"} <= found.keys()
        (entry,) = found["results"]
        assert {"model", "task", "attention", "k", "layers", "all", "within_model", "capture"} <= entry.keys()
        assert {"found", "captured", "residual", "skipped", "remarks"} <= entry["capture"].keys()
        assert {"k", "layers", "all"} == entry["within_model"][0].keys()
    numbers = {"queries", "mean", "p0", "p50", "p100", "undefined"}
    assert numbers | {"layer", "head"} <= spread["results"][0]["layers"][0].keys()
    assert numbers <= gap["results"][0]["all"]["separation"].keys()
    assert {"mean", "p50"} <= gap["results"][0]["all"]["load"].keys()
    gate = json.loads(run_semdiag("check", tiny_runs.full, tiny_runs.topk, *few).out)
    named = {"passed", "failures", "results", "invariants", "rules", "drift", "models", "schema", "provenance"}
    assert named <= gate.keys()
    assert {"delta_s", "delta_h", "passed"} <= gate["results"][0].keys()


@pytest.mark.slow
def test_beside_json_the_tables_go_to_stderr(run_semdiag, here, tiny_runs):
    outcome = run_semdiag("dispersion", tiny_runs.full, "--json", *FEW)
    assert json.loads(outcome.out)["schema"] == "semdiag.dispersion/2"
    assert "dispersion δ (nats)" in outcome.err
    assert "Page: " in outcome.err


def heads(shown):
    """Rows of heads in a printed table."""
    return [line for line in shown.splitlines() if line.split()[:2] and all(w.isdigit() for w in line.split()[:2])]


@pytest.mark.slow
def test_of_many_heads_the_furthest_out_are_shown_and_all_with_all(run_semdiag, here, tiny_runs, monkeypatch):
    monkeypatch.setattr(percentile_tables, "_MOST_HEADS", 3)
    monkeypatch.setattr(percentile_tables, "_EXTREME", 1)
    few = run_semdiag("dispersion", tiny_runs.full, *FEW).out
    every = run_semdiag("dispersion", tiny_runs.full, "--all", *FEW).out
    assert (len(heads(few)), len(heads(every))) == (2, 4)
    medians = {tuple(line.split()[:2]): float(line.split()[4]) for line in heads(every)}
    (least, _), *_, (most, _) = sorted(medians.items(), key=lambda item: item[1])
    assert {tuple(line.split()[:2]) for line in heads(few)} == {least, most}
    said = " ".join(few.split())
    assert f"largest in head {most[1]} of layer {most[0]}" in said
    assert f"smallest in head {least[1]} of layer {least[0]}" in said
    assert "2 rows are not shown: --all shows them" in said
    assert "not shown" not in every


@pytest.mark.slow
def test_separation_of_a_model_that_keeps_every_key_asks_for_a_k(run_semdiag, here, tiny_runs):
    shown = " ".join(run_semdiag("separation", tiny_runs.full, *FEW).out.split())
    assert "every query keeps every key, so no key is separated from others. Add" in shown
    assert "key load (queries)" not in shown
