"""``semdiag report``: what the command adds to the report itself."""

import json

import pytest

from semdiag.measurement.measurements import Measurements

FEW = ("--samples", 8, "--figures", "none")


def test_a_report_on_every_run_here(run_semdiag, here, tiny_runs, monkeypatch):
    monkeypatch.setenv("SEMDIAG_CHECKPOINTS", str(tiny_runs.folder))
    outcome = run_semdiag("report", *FEW, "--k", "2")
    assert (outcome.code, outcome.out) == (0, "")
    page = here / "reports" / "report-2-models" / "index.html"
    assert page.is_file()
    assert outcome.err.endswith(f"Report: {page.relative_to(here)}\n")


def test_json_is_the_summary_beside_the_page(run_semdiag, here, tiny_runs):
    words = (tiny_runs.full, tiny_runs.topk, *FEW, "--out", "out", "--json", "--quiet")
    outcome = run_semdiag("report", *words)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("\n") == 1
    found = json.loads(outcome.out, parse_constant=pytest.fail)
    assert found == json.loads((here / "out" / "summary.json").read_text(encoding="utf-8"))


def test_a_report_is_redrawn_from_what_was_kept(run_semdiag, here, tiny_runs):
    kept = (tiny_runs.full, tiny_runs.topk, *FEW, "--out", "first", "--keep-queries", "--quiet", "--json")
    first = run_semdiag("report", *kept)
    assert first.code == 0
    again = run_semdiag(
        "report", "--from", "first/data", "--out", "second", "--figures", "none", "--quiet", "--json"
    )
    assert (again.code, again.err) == (0, "")
    assert json.loads(again.out)["results"] == json.loads(first.out)["results"]
    assert (here / "second" / "index.html").is_file()
    assert set(Measurements.load("first/data").models["model"]) == set(
        map(str, tiny_runs.folder.glob("*/last.pt"))
    )


def test_queries_are_kept_on_request_only(run_semdiag, here, tiny_runs):
    assert run_semdiag("report", tiny_runs.full, *FEW, "--out", "out", "--quiet").code == 0
    assert not list(here.rglob("queries.parquet"))
