"""The page on adding a question, followed step by step: one file, and one line in the registry."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from semdiag.commands.main import add
from semdiag.presenting.question import Question
from semdiag.questions import registry

_PAGE = (Path(__file__).parents[3] / "docs" / "design.md").read_text(encoding="utf-8")
_STEPS = re.findall(r"   ```python\n(.*?)   ```\n", _PAGE.partition("## Adding a question")[2], flags=re.S)
_CACHED = registry.reported, registry.figures


@pytest.fixture
def peaks(tmp_path, monkeypatch):
    """The question of the page, registered while the test runs."""
    code, line = (re.sub(r"^   ", "", step, flags=re.M) for step in _STEPS)
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
    assert "How many queries look at one key?" in page
    assert "A weight above one half may still be a sink." in page
    assert (here / "out" / "figures" / "peaks.svg").is_file()
    assert "peaks" in registry.reported()  # and so in reports
