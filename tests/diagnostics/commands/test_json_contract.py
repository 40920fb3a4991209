"""What docs/README.md says of every command's ``--json`` holds of every command that has it."""

import inspect
import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from semdiag.commands.main import app
from semdiag.measuring.findings.findings import MODEL_FACTS

PROMISE = (
    "Every object has these keys: - `schema`: the command and a version, like `semdiag.bounds/2`. - `provenance`: "
    "versions, command, inputs, options. `provenance.command` is a list of words; in `sweep`, as in its "
    "`results.json`, it is one string. In `info`, `provenance` is what the checkpoint says of its training. - "
    "`results`: one entry per model, with `model`, `task`, `attention`, `k` and the rest of what is known of it. "
    "In `check` an entry is a pair (`full`, `topk`), in `compare` a model beside its `base`, in `sweep` a run "
    "(`run`), in `selections` a file (`file`) or two (`file`, `against`)."
)
FEW = ("--samples", 6)
NAMES = ("dispersion", "separation", "stability", "mask-stability", "bounds", "overlap", "k-sweep")
WORDS = {
    **dict.fromkeys((*NAMES, "report", "check", "convergence"), FEW),
    "landscape": (*FEW, "--grid", 3),
    "lipschitz": (*FEW, "--planes", 2, "--directions", 2, "--draws", 5),
}
SWEEP = """length = 12
blocks = 1
width = 8
mlp_width = 8
head_width = 8
train_samples = 40
holdout_samples = 40
epochs = 1
task = "even-pairs"
[grid]
attention = ["full", {attention = "topk", k = 3}]
"""


def test_the_promise_stands_in_the_documentation_and_every_command_with_json_is_here():
    documented = Path(__file__).parents[3] / "docs" / "README.md"
    assert PROMISE in " ".join(documented.read_text(encoding="utf-8").split())
    with_json = {c.name for c in app.registered_commands if "as_json" in inspect.signature(c.callback).parameters}
    assert with_json == {*WORDS, "compare", "indexer", "info", "retrieval", "selections", "sweep"}, (
        "a new command with --json needs a line in WORDS"
    )


def left_away(lines):
    """Headings of the columns that tables had no room for."""
    said = re.split(r"Left out to fit \d+ columns: ", " ".join(" ".join(lines).split()))[1:]
    return {name for part in said for name in part.split(".")[0].split(", ")}


def keeps_the_promise(text, per, command):
    """The one object of a text, which holds what the promise says; command is the type of provenance.command."""
    found = json.loads(text)
    assert found["schema"].startswith("semdiag.")
    assert isinstance(found["provenance"]["command"], command)
    assert found["results"]
    for entry in found["results"]:
        assert {*per} <= {*entry}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_a_measuring_command_keeps_the_promise(run_semdiag, here, tiny_runs, name, monkeypatch):
    """One object on stdout; its tables go to stderr, and fit a terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    figures = () if name == "check" else ("--figures", "none")
    outcome = run_semdiag(name, tiny_runs.full, tiny_runs.topk, *WORDS[name], *figures, "--json")
    assert outcome.out.count("\n") == 1
    lines = outcome.err.splitlines()
    if name not in ("check", "convergence", "report"):
        assert f"{tiny_runs.full}/last.pt" in outcome.err
    if name in NAMES:
        tables = [line for line in lines if ("  " in line.strip() or "─" in line) and line[0] != "/"]
        assert tables or name == "k-sweep"  # which shows its table with --all
        assert max(map(cell_len, tables), default=0) <= 80
        assert not {"W met", "X met", "agreement", "response", "mask better?", "interval"} & left_away(lines)
    assert outcome.code in ((0, 1) if name == "check" else (0,)), outcome.err
    per = ("full", "topk") if name == "check" else MODEL_FACTS
    found = keeps_the_promise(outcome.out, per, list)
    if name == "lipschitz":
        assert [pair["label"] for pair in found["pairs"]] == ["even-pairs, topk-3, seed 7"]
    if name != "check":
        assert [(entry["attention"], entry["k"]) for entry in found["results"]] == [("full", None), ("topk", 3)]
        assert [Path(entry["model"]).parent for entry in found["results"]] == [tiny_runs.full, tiny_runs.topk]


@pytest.mark.slow
def test_a_comparison_keeps_the_promise(run_semdiag, here, tiny_runs):
    words = ("compare", tiny_runs.full, tiny_runs.topk, *FEW, "--figures", "none", "--json", "--quiet")
    found = keeps_the_promise(run_semdiag(*words).out, (*MODEL_FACTS, "base"), list)
    assert [Path(entry["model"]).parent for entry in found["results"]] == [tiny_runs.topk]


def test_info_keeps_the_promise(run_semdiag, tiny_runs):
    found = keeps_the_promise(run_semdiag("info", tiny_runs.topk, "--json").out, MODEL_FACTS, str)
    (entry,) = found["results"]
    assert (entry["task"], entry["attention"], entry["k"]) == ("even-pairs", "topk", 3)
    assert found["provenance"]["command"] == "made by the tests"


@pytest.mark.parametrize("dry", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_sweep_keeps_the_promise(run_semdiag, here, dry):
    (here / "sweep.toml").write_text(SWEEP, encoding="utf-8")
    words = ("sweep.toml", "--out", "out", "--jobs", 1, "--json", "--quiet")
    outcome = run_semdiag("sweep", *words, *("--dry-run",) * dry)
    assert outcome.code == 0, outcome.err
    per = ("run", "task", "attention", "k", "seed")
    found = keeps_the_promise(outcome.out, per, str)
    assert [(entry["attention"], entry["k"]) for entry in found["results"]] == [("full", None), ("topk", 3)]
    if not dry:
        on_disk = (here / "out" / "results.json").read_text(encoding="utf-8")
        assert keeps_the_promise(on_disk, per, str) == found
