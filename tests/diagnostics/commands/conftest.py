"""The program in this process, and what it says."""

import functools
import json
import re
import sys
from dataclasses import dataclass

import pytest
import typer

from semdiag.commands.main import main
from semdiag.reporting import report
from semdiag.reporting.folder import ReportFolder


@dataclass(frozen=True)
class Outcome:
    """Exit code and what was written to the two streams."""

    code: int
    out: str
    err: str


_get_command = typer.main.get_command  # it builds all commands anew at every call


@functools.cache
def _built(app, _):
    return _get_command(app)


@pytest.fixture
def run_semdiag(monkeypatch, capsys):
    """Call with the words after ``semdiag``: runs the program through its error border."""
    monkeypatch.setattr(typer.main, "get_command", lambda app: _built(app, len(app.registered_commands)))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["semdiag", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        return Outcome(left.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def refusal(run_semdiag):
    """Call like run_semdiag, with input that is wrong: the one line it is refused with."""

    def run(*words):
        outcome = run_semdiag(*words)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        said = re.sub(
            r"\Asemdiag: measuring \d+ models? in \d+ stages?\.\n", "", outcome.err
        )  # where it had begun
        assert said.startswith("semdiag: ")
        assert said.endswith("\n")
        assert said.count("\n") == 1, said
        return said.removeprefix("semdiag: ").removesuffix("\n")

    return run


@pytest.fixture
def sections(monkeypatch, here):
    """What the report was asked for."""
    asked = []

    def write(findings, folder, command, formats=(), keep_queries=False, sections=None, progress=None, look=None):
        folder = folder.path if isinstance(folder, ReportFolder) else folder
        asked.append((sections, findings.measurements, folder))
        place = getattr(folder, "path", folder)  # of a reserved folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "summary.json").write_text('{"verdict": []}', encoding="utf-8")
        return place / "index.html", {"verdict": []}

    monkeypatch.setattr(report, "write_report", write)
    return asked


@pytest.fixture
def strict():
    """Call with one JSON object on one line, without NaN and infinities: the object."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    def read(text):
        assert text.count("\n") == 1
        return json.loads(text, parse_constant=refuse)

    return read
