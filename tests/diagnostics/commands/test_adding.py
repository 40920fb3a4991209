"""The page on adding, followed step by step: a question is a file and a line, a metric an entry and an oracle."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import torch

import semdiag
from semdiag import Monitor
from semdiag.commands.main import add
from semdiag.measuring import metrics
from semdiag.presenting.question import Question
from semdiag.questions import registry

_PAGE = (Path(__file__).parents[3] / "docs" / "design.md").read_text(encoding="utf-8")
_TESTS = Path(__file__).parents[1] / "measuring" / "test_metrics.py"
_CACHED = registry.reported, registry.figures


def steps(heading):
    """The code of a section of the page."""
    section = _PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    codes = re.findall(r"   ```python\n(.*?)   ```\n", section, flags=re.S)
    return [re.sub(r"^   ", "", code, flags=re.M) for code in codes]


@pytest.fixture
def peaks(tmp_path, monkeypatch):
    """The question of the page, registered while the test runs."""
    code, line = steps("Adding a question")
    (tmp_path / "peaks.py").write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("added.peaks", tmp_path / "peaks.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "added.peaks", module)
    spec.loader.exec_module(module)
    question = eval(line.strip().rstrip(","), {"Question": Question, "__package__": "added"})
    monkeypatch.setitem(registry.QUESTIONS, question.name, question)
    for cached in _CACHED:
        cached.cache_clear()
    yield question
    for cached in _CACHED:
        cached.cache_clear()


@pytest.mark.slow
def test_a_question_is_one_file_and_one_line(peaks, run_semdiag, here, tiny_runs, monkeypatch):
    from semdiag.commands import main

    monkeypatch.setattr(main.app, "registered_commands", [*main.app.registered_commands])
    add(peaks)
    words = ("--samples", 8, "--out", "out", "--figures", "svg")
    outcome = run_semdiag("peaks", tiny_runs.full, *words, "--json", "--per-query", "all.parquet")
    assert outcome.code == 2  # an option that it does not take
    outcome = run_semdiag("peaks", tiny_runs.full, *words, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["schema"] == "semdiag.peaks/2"
    (result,) = found["results"]
    csv = pd.read_csv(here / "out" / "data" / "peaks.csv")
    assert [row["peaked"] for row in result["heads"]] == pytest.approx(csv["peaked"].tolist())
    assert result["model"] == csv["model"].iloc[0]
    assert f"{100 * csv['peaked'].max():.1f}% at most." in outcome.err  # the terminal, beside JSON
    assert "peaked" in outcome.err
    page = (here / "out" / "index.html").read_text(encoding="utf-8")
    assert "How many queries have scores far apart?" in page
    assert "A wide range may come from a single key." in page
    assert (here / "out" / "figures" / "peaks.svg").is_file()
    assert "peaks" in registry.reported()  # and so in reports


@pytest.fixture
def effective_keys(monkeypatch):
    """The metric of the page while the test runs, and the tests that have its oracle."""
    entry, oracle = steps("Adding a metric")
    spec = importlib.util.spec_from_file_location("added.test_metrics", _TESTS)
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    metric = eval(entry, vars(metrics).copy())
    monkeypatch.setitem(metrics.METRICS, metric.name, metric)
    tests.ORACLES |= eval(f"{{{oracle.strip()}}}", vars(tests).copy())
    return metric, tests


def test_a_metric_is_one_entry_and_one_oracle(effective_keys):
    metric, tests = effective_keys
    tests.test_every_metric_has_one_oracle()
    tests.test_a_metric_says_all_that_its_places_need(metric)
    for kind in tests.KINDS:
        tests.test_measured_columns_are_those_of_the_oracle(metric.name, kind)
        tests.test_a_capture_tells_every_metric_of_rows(metric.name, kind)
        tests.test_a_monitor_has_every_metric_of_heads_and_alarms_for_it(metric.name, kind)
        tests.test_values_lie_within_the_limits(metric.name, kind)


@pytest.mark.slow
def test_a_metric_that_was_added_is_listed_written_ruled_and_watched(effective_keys, run_semdiag, here, tiny_runs):
    name = effective_keys[0].name
    assert name in run_semdiag("list", "metrics").out
    words = ("--samples", 8, "--figures", "none", "--out", "out", "--per-query", "all.parquet")
    assert run_semdiag("dispersion", tiny_runs.full, *words).code == 0
    written = pd.read_parquet(here / "all.parquet")[name]
    percentiles = pd.read_csv(here / "out" / "data" / f"{name}.csv").set_index("layer")
    assert percentiles.loc["all", "p50"] == pytest.approx(written.quantile(0.5))
    below, above = written.quantile(0.5) - 0.001, written.quantile(0.5) + 0.001
    rules = ("--rule", f"{name}.p50 > {below}", "--rule", f"{name}.p50 > {above}")
    outcome = run_semdiag("check", tiny_runs.full, "--samples", 8, *rules, "--json")
    assert [rule["passed"] for rule in json.loads(outcome.out)["rules"]] == [True, False]
    model, alarms = tiny_model(tiny_runs), []
    with Monitor(model, every=1, path="all-rows.csv", alarm={name: 1.0}, on_alarm=alarms.append):
        model(torch.zeros(2, model.config.length, dtype=torch.int64))
    assert {alarm.quantity for alarm in alarms} == {name}
    for file in ("all-rows.csv", "all-rows-heads.csv"):
        assert (pd.read_csv(here / file)[name] > 1).any()


def tiny_model(tiny_runs):
    return semdiag.load(tiny_runs.full).module.train()


@pytest.mark.slow
def test_the_question_of_the_page_passes_the_tests_of_every_question(tmp_path):
    root = Path(__file__).parents[3]
    shutil.copytree(root / "diagnostics", tmp_path / "diagnostics", ignore=shutil.ignore_patterns("__pycache__"))
    code, line = steps("Adding a question")
    questions = tmp_path / "diagnostics" / "semdiag" / "questions"
    (questions / "peaks.py").write_text(code, encoding="utf-8")
    entries = (questions / "registry.py").read_text(encoding="utf-8")
    pasted = entries.replace('    "convergence",\n', f'    "convergence",\n    {line.strip()},\n')
    (questions / "registry.py").write_text(pasted, encoding="utf-8")
    with (root / "pyproject.toml").open("rb") as file:
        paths = tomllib.load(file)["tool"]["pytest"]["ini_options"]["pythonpath"]
    places = [tmp_path / "diagnostics", *(root / path for path in paths if path != "diagnostics")]
    tests = [f"tests/diagnostics/questions/{name}.py" for name in ("test_figures", "test_registry")]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "", "-k", "peaks or not ["]
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-o", f"pythonpath={' '.join(map(str, places))}", *tests],
        cwd=root,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert int(re.search(r"(\d+) passed", outcome.stdout)[1]) > 20
