"""``--jobs`` and ``--ray``: what they refuse, and that they change no byte but the command's."""

import json
import shutil
import sys
import warnings

import pytest

from semdiag.measuring.survey import survey
from semdiag.questions.registry import QUESTIONS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--jobs", "0"], "--jobs must be at least 1. Got 0."),
        (["--from", "there", "--jobs", "2"], "--from draws saved measurements as they are: leave out --jobs."),
    ],
)
def test_what_makes_no_sense_is_refused(here, refusal, words, said):
    assert refusal("report", *words) == said


@pytest.mark.slow
def test_fewer_processes_than_asked_for_are_said_whatever_python_does_with_warnings(tiny_runs, here, run_semdiag):
    warnings.simplefilter("error")
    words = ("--jobs", 1000, "--samples", 2, "--figures", "none", "--out", "page", "--json")
    outcome = run_semdiag("dispersion", tiny_runs.full, *words)
    assert outcome.code == 0, outcome.err
    assert "semdiag: 1 of 1,000 processes are used: there is no more to divide among processes." in outcome.err


def test_without_ray_the_pip_command_is_told(here, refusal, tiny_runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    line = refusal("dispersion", tiny_runs.full, "--ray", "auto", "--quiet")
    assert line == "--ray needs Ray: pip install ray"


def test_commands_that_measure_one_model_after_the_other_have_both():
    commands = {name: question for name, question in QUESTIONS.items() if question.help}
    without = {name for name, each in commands.items() if {"jobs", "ray"} <= set(each.leave_out)}
    assert without == {"compare", "convergence", "indexer", "look", "retrieval", "selections"}


@pytest.mark.parametrize(
    ("command", "checkpoints", "cores", "apart"),
    [("overlap", 4, 2, True), ("overlap", 3, 2, False), ("overlap", 4, 1, False), ("dispersion", 4, 2, False)],
)
def test_by_default_many_checkpoints_with_more_than_statistics_get_a_process_a_core(
    here, run_semdiag, tiny_runs, monkeypatch, command, checkpoints, cores, apart
):
    asked = []

    def measure_in_processes(loaded, conditions, progress, *, jobs, ray):
        asked.append((jobs, ray))
        return survey(loaded, conditions, progress)

    monkeypatch.setattr("semdiag_files.workers.cores", lambda: cores)
    monkeypatch.setattr("semdiag.commands.measuring.measure_in_processes", measure_in_processes)
    for number in range(checkpoints):
        shutil.copytree(tiny_runs.topk, here / f"run-{number}")
    paths = sorted(here.glob("run-*"))
    outcome = run_semdiag(command, *paths, "--samples", 4, "--figures", "none", "--out", "page", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert asked == [(None, "")] * apart


@pytest.mark.slow
@pytest.mark.parametrize("where", [["--jobs", "2"], ["--ray", "auto", "--jobs", "2"]], ids=["jobs", "ray"])
def test_a_report_is_the_same_to_the_last_byte(here, run_semdiag, tiny_runs, where):
    """This process has one thread, as the others have."""
    if "--ray" in where:
        pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    words = "report", tiny_runs.full, tiny_runs.topk, "--samples", 20, "--keep-queries", "--figures", "none"
    written = []
    for out, more in (("one", []), ("two", where)):
        outcome = run_semdiag(*words, "--quiet", "--out", here / out, *more)
        assert (outcome.code, outcome.err) == (0, "")
        written.append({file.name: file.read_bytes() for file in (here / out / "data").iterdir()})
    one, two = written
    differing = {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}
    assert differing == {"provenance.json", "SHA256SUMS"}
    told = [json.loads(files["provenance.json"]) for files in written]
    assert [each.pop("command")[-len(where) :] == where for each in told] == [False, True]
    assert json.dumps(told[0]) == json.dumps(told[1])


@pytest.mark.slow
def test_the_masks_of_one_model_are_divided_and_not_a_byte_is_another(here, run_semdiag, tiny_runs, monkeypatch):
    """This process has one thread, as the others have."""
    monkeypatch.setattr("semdiag_files.workers.cores", lambda: 3)  # fewer would be said, and cut --jobs
    words = "k-sweep", tiny_runs.full, "--samples", 20, "--rerun", "--kinds", "topk,window,random"
    written = []
    for out, more in (("one", []), ("two", ["--jobs", "2"]), ("three", ["--jobs", "3"])):
        outcome = run_semdiag(*words, "--k", "2,6,8", "--json", "--figures", "none", "--out", here / out, *more)
        assert outcome.code == 0, outcome.err
        said = json.loads(outcome.out)
        assert said["provenance"].pop("command")[-len(more) :] == more or not more
        files = {path.name: path.read_bytes() for path in (here / out / "data").iterdir()}
        written.append((json.dumps(said), files))
    assert written[0] == written[1] == written[2]
    assert "rerun" in "".join(written[0][1])
