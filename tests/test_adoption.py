"""Files by which others adopt semdiag: the action, the release, the deposit, the article."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml", reason="comes with transformers")
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]


@pytest.fixture
def act(tmp_path):
    """Run the last step of the action as GitHub does: in bash, with its inputs in the environment."""
    (tmp_path / "semdiag").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m semdiag "$@"\n', encoding="utf-8")
    (tmp_path / "semdiag").chmod(0o755)
    step = ACTION["runs"]["steps"][-1]

    def run(**inputs):
        values = {name: facts.get("default") for name, facts in ACTION["inputs"].items()} | inputs
        env = {name: values[text.split("inputs.")[1].removesuffix(" }}")] for name, text in step["env"].items()}
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        command = [step["shell"], "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **env, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.slow
def test_the_action_fails_where_a_selection_is_wrong(act, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "docs" / "selections.py"))
    done = act(command="selections", arguments="kernels.npz\n--format\nbfloat16\n\n--quiet\n")
    assert done.returncode == 1, done.stderr
    assert act(command="selections", arguments="none of these.npz").returncode == 2


@pytest.mark.slow
def test_the_action_checks_a_model(act):
    model = ROOT / "checkpoints" / "even-pairs-topk-5-seed-153476998"
    for limit, code in ((1000, 0), (0, 1)):
        done = act(arguments=f"{model}\n--samples\n5\n--rule\ndispersion.p95 < {limit}\n")
        assert done.returncode == code, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["look", "check; touch hacked", "$(touch hacked)"])
def test_the_action_runs_no_other_command(act, tmp_path, command):
    done = act(command=command, arguments="x")
    assert done.returncode == 2
    assert command in done.stderr
    assert not (tmp_path / "hacked").exists()


def test_the_action_puts_no_input_into_a_script():
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step.get("run", "")


def test_only_the_job_that_publishes_may_speak_for_the_release():
    assert JOBS["publish"]["permissions"] == {"id-token": "write"}
    assert JOBS["publish"]["environment"]
    assert {JOBS[name]["needs"] for name in ("publish", "site")} == {"build"}
    assert "id-token" not in JOBS["build"]["permissions"]
    uploads = [
        step["with"]["path"] for step in JOBS["build"]["steps"] if "upload-artifact" in step.get("uses", "")
    ]
    downloads = [step["with"]["path"] for step in JOBS["publish"]["steps"] if "with" in step]
    assert uploads == downloads == ["dist"]


def test_the_deposit_and_the_citation_name_the_same():
    deposit = json.loads((ROOT / ".zenodo.json").read_text(encoding="utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert [one["name"] for one in deposit["creators"]] == [one["name"] for one in citation["authors"]]
    assert deposit["license"] == citation["license"]
    (related,) = deposit["related_identifiers"]
    assert related["identifier"] == citation["references"][0]["identifiers"][0]["value"]


def test_the_article_has_what_its_journal_asks_for():
    text = (ROOT / "paper" / "paper.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert (ROOT / "paper" / facts["bibliography"]).exists()
    assert {"title", "tags", "authors", "affiliations", "date"} <= set(facts)
    headings = re.findall(r"^# (.*)$", body, re.M)
    assert {"Summary", "Statement of need", "State of the field", "References"} <= set(headings)
    assert 250 <= len(body.split()) <= 1000
    bibliography = (ROOT / "paper" / "paper.bib").read_text(encoding="utf-8")
    assert set(re.findall(r"@(\w+\d{4})", body)) == set(re.findall(r"^@\w+\{(\w+),", bibliography, re.M))
