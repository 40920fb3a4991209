"""``--queries`` and ``--max-queries`` on the command line: estimates, and what is refused by name."""

import json

import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings, find_pairs
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.bounds.corollary import pair_percentiles
from semdiag.questions.dispersion.answer import dispersion_gate
from semdiag_files import InputError

FEW = ("--samples", 12, "--figures", "none")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dispersion", "separation"])
def test_estimates_have_intervals_that_name_their_target(run_semdiag, here, tiny_runs, command):
    outcome = run_semdiag(command, tiny_runs.full, "--k", 2, "--queries", 4, *FEW, "--out", here / "out", "--json")
    assert outcome.code == 0, outcome.err
    assert "over sampled queries" in " ".join(outcome.err.split())
    found = json.loads(outcome.out)["results"][0]["sampled"]
    assert (found["queries"], found["share"], found["extremes_and_loads"]) == (4, 4 / 12, "over sampled queries")
    mass = [row for row in found["estimates"] if (row["quantity"], row["statistic"]) == ("weight_kept_k2", "mean")]
    assert [row["target"] for row in mass] == ["all queries of these inputs", "inputs like these"]
    assert all(row["low"] < row["estimate"] < row["high"] for row in mass)
    table = pd.read_csv(here / "out" / "data" / "estimates.csv")
    assert {"dispersion", "separation", "weight_kept_k2"} <= set(table["quantity"])


@pytest.mark.slow
def test_a_report_judges_no_bound_no_certificate_and_no_pair(run_semdiag, here, tiny_runs):
    outcome = run_semdiag("report", tiny_runs.full, tiny_runs.topk, "--queries", 4, *FEW, "--out", here / "out")
    assert outcome.code == 0, outcome.err
    found = json.loads((here / "out" / "summary.json").read_text(encoding="utf-8"))
    assert not found["pairs"]
    assert any("the scores of a query span" in words for words in found["verdict"])
    assert any(words.startswith("Pairs of models are not judged: a verdict needs") for words in found["verdict"])
    assert any(words.startswith("Estimated: ") for words in found["verdict"])
    remarks = [remark for row in found["results"] for remark in row["capture"]["remarks"]]
    said = {(remark["code"], remark["severity"]): remark["text"] for remark in remarks}
    for name, severity in (("bounds", "note"), ("secants", "warning"), ("mask stability", "note")):
        expected = f"{name} not available, because it needs every query, but --queries drew only some"
        assert said[f"no-{name.replace(' ', '-')}", severity] == expected
    assert "the paper's conditions, which need extremes" in found["details"]["k-sweep"][0]
    assert not (here / "out" / "data" / "corollary.csv").exists()


@pytest.mark.slow
def test_the_sweep_judges_no_k(run_semdiag, here, tiny_runs):
    outcome = run_semdiag("k-sweep", tiny_runs.full, "--queries", 4, *FEW, "--json", "--quiet")
    found = json.loads(outcome.out)["results"][0]
    assert found["conditions"] == []
    assert {row["quantity"] for row in found["sampled"]["estimates"]} == {
        "dispersion",
        "ratio",
        "separation",
        "weight_kept",
        "weight_kept_without_first",
        "head_change",
        "stream_change",
    }


@pytest.mark.slow
@pytest.mark.parametrize("models", [("full", "topk"), ("full",)])
@pytest.mark.parametrize("command", ["k-sweep", "report"])  # which has those of dispersion and separation
def test_every_command_draws_its_figures(run_semdiag, here, tiny_runs, command, models):
    """Fails while the empty table of conditions of a k-sweep holds objects, not numbers."""
    words = [command, *(getattr(tiny_runs, name) for name in models), "--samples", 12, "--figures", "png"]
    words += ["--rerun"] if command == "k-sweep" else []
    outcome = run_semdiag(*words, "--queries", 4, "--out", here / "out", "--quiet")
    assert outcome.code == 0, outcome.err
    figures = json.loads((here / "out" / "summary.json").read_text(encoding="utf-8"))["figures"]
    drawn = {name for name, files in figures.items() if files}
    assert {"k-sweep": {"cost"}, "report": {"dispersion_by_layer"}}.get(command, set()) <= drawn
    assert drawn
    assert all((here / "out" / file).stat().st_size for files in figures.values() for file in files)


@pytest.mark.slow
def test_measurements_that_were_to_be_kept_are_when_a_figure_fails(run_semdiag, here, tiny_runs, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such figure")

    with monkeypatch.context() as broken:
        broken.setattr("semdiag.reporting.report.save_figure", fail)
        for keep in ([], ["--keep-queries"]):
            words = "report", tiny_runs.full, "--samples", 4, "--figures", "png", "--out", "out", *keep
            outcome = run_semdiag(*words)
            assert outcome.code == 70
            assert "RuntimeError: no such figure" in outcome.err
            assert [path.name for path in (here / "out").iterdir()] == ["unfinished"]  # the runs with masks
            assert len(list(here.iterdir())) == 1 + len(keep)
    (saved,) = (path for path in here.iterdir() if path.name != "out")
    again = run_semdiag("report", "--from", saved, "--figures", "none", "--out", "out", "--quiet")
    assert again.code == 0, again.err


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"queries": 4}, {"max_queries": 50}])
def test_the_gate_and_the_corollary_refuse_what_they_do_not_rest_on(tiny_runs, more):
    files = [run / "last.pt" for run in (tiny_runs.full, tiny_runs.topk)]
    findings = Findings(survey(files, Conditions(samples=8, **more)))
    with pytest.raises(InputError, match=r"^The gate needs every query"):
        dispersion_gate(findings)
    with pytest.raises(InputError, match=r"^Corollary 1 needs every query"):
        pair_percentiles(findings, find_pairs(findings.measurements.models)[0][0])


@pytest.mark.slow
def test_tables_of_more_than_are_kept_come_from_the_sketch(run_semdiag, here, tiny_runs):
    words = "dispersion", tiny_runs.full, *FEW, "--json"
    whole = json.loads(run_semdiag(*words, "--quiet").out)["results"][0]
    outcome = run_semdiag(*words, "--max-queries", 60)
    assert "Sampled: " in outcome.err
    found = json.loads(outcome.out)["results"][0]
    for ours, exact in zip([*found["layers"], found["all"]], [*whole["layers"], whole["all"]], strict=True):
        assert {name: ours[name] for name in ("queries", "p0", "p100")} == {
            name: exact[name] for name in ("queries", "p0", "p100")
        }
        assert ours["mean"] == pytest.approx(exact["mean"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "signs"), [("dispersion", "δ"), ("separation", "Δ"), ("report", "δΔ"), ("k-sweep", "δ")]
)
def test_the_median_of_what_was_asked_for_is_estimated(run_semdiag, here, tiny_runs, command, signs):
    """Fails where ``sampling_sentences`` is not told the quantities, by metric_command.py or report.py."""
    outcome = run_semdiag(command, tiny_runs.topk, "--queries", 4, *FEW, "--out", here / "out")
    assert outcome.code == 0, outcome.err
    verdict = json.loads((here / "out" / "summary.json").read_text(encoding="utf-8"))["verdict"]
    (page,) = (words for words in verdict if words.startswith("Estimated: "))
    shown = [" ".join(outcome.out.split())] * (command in ("dispersion", "separation"))
    for words in (page, *shown):
        assert [sign in signs for sign in "δΔ"] == [f"The median of {sign} is " in words for sign in "δΔ"], words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("some", "said"),
    [
        ((), None),
        (("--queries", 4), "{queries} drawn queries and {loads} keys; 33.33% of the queries were drawn."),
        (
            ("--max-queries", 60),
            "{queries} of 576 queries and {loads} of 576 keys; of more than --max-queries a random sample is "
            "kept.",
        ),
        (
            ("--queries", 4, "--max-queries", 60),
            "{queries} of 192 drawn queries and {loads} of 576 keys; 33.33% of the queries were drawn, and of "
            "more than --max-queries a random sample is kept.",
        ),
    ],
)
def test_a_file_of_some_queries_is_said_to_hold_some(run_semdiag, here, tiny_runs, some, said):
    """Fails where ``deliver`` (commands/measuring.py) says nothing of ``partial_sentences``."""
    outcome = run_semdiag("dispersion", tiny_runs.full, *FEW, *some, "--per-query", "every.parquet")
    assert outcome.code == 0, outcome.err
    rows = {
        n: len(pd.read_parquet(here / f))
        for n, f in (("queries", "every.parquet"), ("loads", "every.load.parquet"))
    }
    words = " ".join(outcome.err.split())
    assert ("every.parquet does not hold everything: " in words) == (said is not None)
    assert said is None or said.format(**rows) in words
    again = run_semdiag("dispersion", tiny_runs.full, *FEW, *some, "--per-query", "every.parquet", "--quiet")
    assert again.err == ""


def test_numbers_that_mean_nothing_are_refused(refusal, here, tiny_runs):
    assert refusal("dispersion", tiny_runs.full, "--queries", 1) == (
        "Queries to draw per sample and head must be at least 2. Got 1."
    )
    assert refusal("dispersion", tiny_runs.full, "--max-queries", 0) == "max_queries must be at least 50. Got 0."
