"""The page on adding, followed step by step: a question, a metric, and a kind of attention."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import torch

import semdiag
from semdiag import Monitor, questions
from semdiag.commands.main import add
from semdiag.measuring import metrics
from semdiag.questions import registry

ROOT = Path(__file__).parents[3]
_PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
_TESTS = Path(__file__).parents[1] / "measuring" / "test_metrics.py"
_CACHED = registry.reported, registry.figures


def steps(heading):
    """The code of a section of the page."""
    section = _PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    codes = re.findall(r"   ```python\n(.*?)   ```\n", section, flags=re.S)
    return [re.sub(r"^   ", "", code, flags=re.M) for code in codes]


def paste_question(folder):
    """Write the question's three files, and return its line of the registry."""
    *files, line = [*steps("Adding a question"), '"peaks",']
    place = folder / "peaks"
    place.mkdir()
    for name, code in zip(("__init__", "measure", "answer"), files, strict=True):
        (place / f"{name}.py").write_text(code, encoding="utf-8")
    return line


@pytest.fixture
def peaks(tmp_path, monkeypatch):
    """The question of the page, registered while the test runs."""
    paste_question(tmp_path)
    monkeypatch.setattr(questions, "__path__", [*questions.__path__, str(tmp_path)])
    question = importlib.import_module("semdiag.questions.peaks").QUESTION
    monkeypatch.setitem(registry.QUESTIONS, question.name, question)
    for cached in _CACHED:
        cached.cache_clear()
    yield question
    for cached in _CACHED:
        cached.cache_clear()
    for name in [name for name in sys.modules if name.startswith("semdiag.questions.peaks")]:
        del sys.modules[name]


@pytest.mark.slow
def test_a_question_is_three_files_and_one_line(peaks, run_semdiag, here, tiny_runs, monkeypatch):
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
    separate = ("--samples", 8, "--out", "other", "--figures", "none", "--per-query", "all.parquet")
    assert run_semdiag("dispersion", tiny_runs.full, *separate).code == 0
    heads = pd.read_parquet(here / "all.parquet").groupby(["layer", "head"])["dispersion"]
    naive = heads.apply(lambda spreads: (spreads > 5).mean())
    assert [row["peaked"] for row in result["heads"]] == pytest.approx(naive.tolist())
    assert [row["peaked"] for row in result["heads"]] == pytest.approx(csv["peaked"].tolist())
    assert result["model"] == csv["model"].iloc[0]
    assert f"{100 * csv['peaked'].max():.1f}% at most." in outcome.err  # the terminal, beside JSON
    page = (here / "out" / "index.html").read_text(encoding="utf-8")
    assert "How many queries have scores far apart?" in page
    assert "A single key may be the cause." in page
    assert (here / "out" / "figures" / "peaks.svg").is_file()
    assert "peaks" in registry.reported()  # and so in reports
    outcome = run_semdiag("peaks", tiny_runs.full, *words, "--apart", "0", "--json")
    assert all(row["peaked"] > 0.9 for row in json.loads(outcome.out)["results"][0]["heads"])


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


def pasted(file, table, code):
    """Add lines at the end of a table of a file."""
    before, start, rest = file.read_text(encoding="utf-8").partition(f"\n{table}")
    body, end, after = re.split(r"(\n[)}])", rest, maxsplit=1)
    lines = textwrap.indent(code.rstrip(), "    ")
    file.write_text(f"{before}{start}{body}\n{lines}{end}{after}", encoding="utf-8")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the repository with all that the page pastes."""
    tree = tmp_path_factory.mktemp("pasted") / "repository"
    tree.mkdir()
    copied = ("diagnostics", "models", "tests", "docs")
    for name in copied:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.name not in (*copied, ".git"):
            (tree / path.name).symlink_to(path)
    toolkit = tree / "diagnostics" / "semdiag"
    pasted(toolkit / "questions" / "registry.py", "_PLACES: ", paste_question(toolkit / "questions"))
    entry, oracle = steps("Adding a metric")
    metrics_file = toolkit / "measuring" / "metrics.py"
    code = metrics_file.read_text(encoding="utf-8").replace(
        "\n    )\n}  # fmt: skip", f"\n{entry.rstrip()},\n    )\n}}"
    )
    metrics_file.write_text(code, encoding="utf-8")
    pasted(tree / "tests" / "diagnostics" / "measuring" / "test_metrics.py", "ORACLES = ", oracle)
    kind, function, selector, reference = steps("Adding an attention kind")
    trainer = tree / "models" / "semdiag_models"
    pasted(trainer / "kinds.py", "ATTENTIONS = ", kind)
    pasted(trainer / "selection.py", "SELECTORS: ", selector)
    selection = trainer / "selection.py"
    code = selection.read_text(encoding="utf-8").replace("\nSELECTORS: ", f"\n{function}\n\nSELECTORS: ")
    selection.write_text(code, encoding="utf-8")
    pasted(tree / "tests" / "models" / "attention" / "test_selection.py", "REFERENCES = ", reference)
    run(tree, "docs/options.py")
    return tree


def run(tree, *words):
    """Run Python in the copy."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        paths = tomllib.load(file)["tool"]["pytest"]["ini_options"]["pythonpath"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / path) for path in paths)}
    outcome = subprocess.run([sys.executable, *words], cwd=tree, capture_output=True, text=True, env=environment)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


HOUSE_TESTS = {
    "peaks": ("diagnostics/questions/test_figures", "diagnostics/questions/test_registry"),
    "effective_keys": ("diagnostics/measuring/test_metrics", "diagnostics/commands/test_listing"),
    "strided": (
        "models/attention/test_selection", "models/test_config", "diagnostics/capturing/test_attention_kinds",
        "diagnostics/presenting/drawing/test_panels", "diagnostics/commands/test_listing",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("added", HOUSE_TESTS)
def test_what_the_page_adds_passes_the_tests_of_the_house(tree, added):
    tests = [f"tests/{name}.py" for name in HOUSE_TESTS[added]]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "", "-k", f"{added} or not ["]
    outcome = run(tree, "-m", "pytest", *options, *tests, "tests/test_legibility.py")
    assert int(re.search(r"(\d+) passed", outcome)[1]) > 15


@pytest.mark.slow
def test_a_run_with_the_added_kind_is_measured(tree, tmp_path):
    words = ("train", "even-pairs", "--attention", "strided", "--k", "3", "--epochs", "1", "--length", "8")
    run(tree, "-m", "semdiag", *words, "--train-samples", "50", "--holdout-samples", "20", "--out", str(tmp_path))
    found = json.loads(run(tree, "-m", "semdiag", "separation", str(tmp_path), "--json", "--figures", "none"))
    assert [(row["attention"], row["k"]) for row in found["results"]] == [("strided", 3)]
