"""What a terminal shows: tables as wide as it is, progress, completion, hints about what was meant."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import semdiag
from semdiag.measuring.words import count, decimals, interval, number, percent, plain, text
from semdiag.presenting import options
from semdiag.presenting.progress import Stages
from semdiag.presenting.tables import NEVER, Column, NumberTable, wide_console
from semdiag_models import ATTENTIONS, TASKS

HEADS = ["layer", "head", *(f"quantity {n} p50" for n in range(9)), "share"]
ROWS = [("3", "0", *(f"{-1.23e-05 * 10**n:.3g}" for n in range(9)), "100.0%"), ("all", "", *["–"] * 9, "0.0%")]


def table_of(heads, *rows, names=0, least=(), kept=(), title=""):
    """A table of cells: which columns are names, go first, and stay."""
    columns = [
        Column(str(at), head, text if at < names else plain, NEVER if head in kept else 1 + least.index(head))
        if head in (*least, *kept)
        else Column(str(at), head, text if at < names else plain)
        for at, head in enumerate(heads)
    ]
    return NumberTable(columns, [{str(at): cell for at, cell in enumerate(row)} for row in rows], title)


def printed(table, width):
    shown = io.StringIO()
    Console(file=shown, width=width).print(table)
    return shown.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
def test_a_table_shows_every_number_whole_or_not_at_all(width):
    title = "a title that is longer than the narrowest of these terminals"
    said = printed(table_of(HEADS, *ROWS, names=2, title=title), width)
    assert max(map(len, said.splitlines())) <= width
    shown = [cell for cell in ROWS[0] if cell in said.split()]
    left_out = " ".join(said.split()).partition("Left out to fit ")[2]
    assert len(shown) + left_out.count("quantity") + left_out.count("share") == len(HEADS)
    assert "…" not in said
    assert bool(left_out) == (width < 120)


def test_what_matters_least_goes_first():
    row = "0", "1.234567", "2.345678", "3.456789"
    table = table_of(["layer", "mean", "p50", "p95"], row, names=1, least=["mean"])
    assert "1.234567" not in (said := printed(table, 30))
    assert "2.345678" in said
    assert "3.456789" in said


def test_the_answer_is_never_left_away():
    row = "3", "1.234567", "2.345678", "3.456789", "yes"
    table = table_of(["k", "p5", "p50", "p95", "met"], row, names=1, least=["p5"], kept=["met"])
    said = printed(table, 30)
    assert {"2.345678", "3.456789", "yes"} <= set(said.split())
    assert left_away(said.splitlines()) == {"p5"}
    assert left_away(printed(table, 10).splitlines()) == {"p5", "p50", "p95"}


def test_answers_that_do_not_fit_beside_each_other_are_not_cut():
    """At 40 columns the mask's name was gone, and 0.997 read 0.9."""
    row = "random", "1.234567", "2.345678", "3.456789"
    said = printed(table_of(["mask", "p5", "p50", "p95"], row, names=1, kept=["p5", "p50", "p95"]), 30)
    assert {"random", "1.234567", "2.345678"} <= set(said.split())
    assert left_away(said.splitlines()) == {"p95"}


def test_a_column_without_a_value_is_left_away_unless_it_is_asked_about():
    table = table_of(["layer", "p50", "p95", "met"], ("0", "1.5", "–", "–"), ("1", "–", "–", "–"), kept=["met"])
    assert table.columns == ["layer", "p50", "met"]
    assert left_away(printed(table, 80).splitlines()) == set()


def test_a_column_that_no_row_has_is_an_error_and_an_entry_of_nothing_is_none():
    column = Column("load.largest", form=plain)
    assert column.cell({"load": None}) == "–"
    assert column.cell({"load": {"largest": 0.5}}) == "0.5"
    for wrong in ({"loads": {"largest": 1}}, {"load": {"smallest": 1}}):
        with pytest.raises(KeyError):
            column.cell(wrong)


@pytest.mark.parametrize("form", [count, decimals, number, percent])
def test_a_number_that_is_not_known_is_a_dash_and_infinity_is_said(form):
    assert [form(value) for value in (None, float("nan"))] == ["–", "–"]
    assert form("inf") == ("inf%" if form is percent else "inf")
    assert number("inf", infinite="–") == number("-inf", infinite="–") == "–"


def test_formats_by_hand():
    assert (count(1234567), percent(0.1234), percent(0.00034, ".2f"), percent(1 / 3, ".3g")) == (
        "1,234,567", "12.3%", "0.03%", "33.3%",
    )  # fmt: skip
    assert (number(12345), number(1234.5), number(2.0), number(math.nan, unknown="none")) == (
        "12345", "1,230", "2", "none",
    )  # fmt: skip
    assert (decimals(-0.125), decimals(0.0004), decimals(0.0004, 4), decimals(0)) == (
        "-0.12", "0.0004", "0.0004", "0.00",
    )  # fmt: skip


def test_names_are_broken_at_hyphens_before_a_column_is_left_away():
    name = "missing-duplicate-banded-5-global-1-seed-153476998"
    rows = (name, "done", "100", "99.5%"), ("parity-full-seed-1", "failed", "7", "50.0%")
    table = table_of(["run", "status", "epochs", "best"], *rows, names=2, least=["best"])
    whole, broken, narrow = (printed(table, width) for width in (80, 60, 28))
    assert name in whole
    lines = broken.splitlines()
    parts = [line.split()[0] for line in lines if line.split() and line.split()[0] in name]
    assert (len(parts), "".join(parts)) == (2, name)
    assert "99.5%" in broken
    assert "no room" not in broken
    assert "parity-full-seed-1 " in broken  # which fits
    assert left_away(narrow.splitlines()) == {"best"}  # every part of a name is on a line of its own already
    assert "153476998" in narrow


def test_the_name_of_a_module_is_broken_at_its_dots():
    table = table_of(["keys of", "margin"], ("model.layers.0.self_attn.indexer", "0.038"), names=1)
    words = [line.split()[0] for line in printed(table, 26).splitlines() if line.split()]
    assert words[2:] == ["model.layers.0.", "self_attn.", "indexer"]


def left_away(lines):
    """Headings of the columns that tables had no room for."""
    said = re.split(r"Left out to fit \d+ columns: ", " ".join(" ".join(lines).split()))[1:]
    return {name for part in said for name in part.split(".")[0].split(", ")}


def test_an_interval_is_one_word_unless_a_sign_stands_in_it():
    assert interval(92.61, 93.08) == "92.6–93.1"
    assert interval(-0.5, -0.25) == "-0.5 to -0.25"


def test_the_ends_of_an_interval_are_told_apart():
    assert interval(0.1496, 0.1504) == "0.1496–0.1504"
    assert interval(0.15001, 0.15002) == "0.15001–0.15002"
    assert interval(0.15, 0.15) == "0.15–0.15"  # they are the same
    assert interval(float("nan"), float("nan")) == "–"


HOSTILE = ":llama:[red]\x1b]0;t\x9b2J\x1b[31m"  # as a name in data; a folder may be called so
SHOWN = r":llama:[red]\x1b]0;t\x9b2J\x1b[31m"
_TWO = ("check", "compare", "dispersion", "convergence")
_EACH = ("info", "k-sweep", "look", "bounds", "selections")


def as_it_is(said):
    """Whether the name is shown with its escapes, and nothing of it was obeyed or replaced."""
    joined = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\s", "", said)  # without the console's own colours
    return SHOWN in joined and not {"\U0001f999", "\x07", "\x9b"} & set(said) and "\x1b]" not in said


@pytest.mark.slow
@pytest.mark.parametrize("command", [*_TWO, *_EACH])
def test_names_from_data_are_shown_as_they_are(run_semdiag, here, tiny_runs, monkeypatch, command):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal, with bars
    monkeypatch.setenv("COLUMNS", "500")
    for run in (tiny_runs.full, tiny_runs.topk):
        shutil.copytree(run, here / HOSTILE / run.name)
    words = [f"{HOSTILE}/full", *([f"{HOSTILE}/topk"] if command in _TWO else ())]
    if command == "selections":
        scores = np.arange(12.0).reshape(3, 4)
        np.savez(here / f"{HOSTILE}.npz", scores=scores, indices=np.array([[3, 2]] * 3))
        words = [f"{HOSTILE}.npz"]
    limited = command not in ("info", "convergence", "selections", "look")
    measured = [*words, *(("--samples", 5) if limited else ())]
    pages = [] if command in ("info", "check", "selections", "look") else ["--figures", "none", "--out", "out"]
    outcome = run_semdiag(command, *measured, *pages)
    assert outcome.code in (0, 1), outcome
    assert as_it_is(outcome.out + outcome.err), outcome


def test_refusals_and_trainings_show_names_as_they_are(run_semdiag, refusal, here):
    assert as_it_is(refusal("info", f"hf:{HOSTILE}"))
    assert as_it_is(refusal("info", HOSTILE))
    assert as_it_is(refusal("train", HOSTILE))
    small = ("--length", 8, "--width", 8, "--blocks", 1, "--train-samples", 10, "--holdout-samples", 10)
    assert as_it_is(run_semdiag("train", "even-pairs", *small, "--epochs", 1, "--out", HOSTILE).out)


def test_tables_and_bars_show_texts_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "500")
    table = NumberTable([Column("a", HOSTILE, text)], [{"a": HOSTILE}], title=HOSTILE, caption=HOSTILE)
    wide_console().print(table)
    assert as_it_is(capsys.readouterr().out)
    with Stages(HOSTILE, 1, quiet=False) as bar:
        bar.announce(HOSTILE, 1)
        bar._bar.refresh()
    assert as_it_is(capsys.readouterr().err)


def test_there_is_one_console():
    """Every text goes through the console that obeys none: no other is made, and no bar reads markup."""
    sources = {path: path.read_text(encoding="utf-8") for path in Path(semdiag.__file__).parent.rglob("*.py")}
    maker = re.compile(r"^(?!\s+>>>).*\b(?:Console|Careful)\((?!Console)", re.M)
    made = [path.name for path, source in sources.items() if maker.search(source)]
    assert made == ["terminal.py"]
    columns = [c for source in sources.values() for c in re.findall(r"TextColumn\([^)]*\)", source)]
    assert columns
    assert all("markup=False" in column for column in columns)


def test_progress_counts_every_stage(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Stages("measuring", 3, quiet=False) as bar:
        for stage, steps in (("a", 2), ("a: masks", 0), ("b", 1)):
            bar.announce(stage, steps)
            bar.advance(steps)
        whole, step = bar._bar.tasks
        assert (whole.completed, whole.total) == (2, 3)
        assert (step.description, step.completed, step.total) == ("b", 1, 1)


def test_a_survey_announces_each_plan(tiny_runs, recorder):
    from semdiag.measuring.measure import Conditions
    from semdiag.measuring.survey import survey
    from semdiag.questions.k_sweep.measure import KSweepPlan

    survey([tiny_runs.full], Conditions(samples=4, plans=(KSweepPlan(),)), recorder)
    assert [stage for stage, _ in recorder.stages] == [str(tiny_runs.full), f"{tiny_runs.full}: k-sweep"]


@pytest.mark.slow
def test_a_report_is_opened_on_request_only(run_semdiag, here, tiny_runs, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    words = ("report", tiny_runs.full, "--samples", 4, "--figures", "none", "--out", "out", "--quiet")
    assert run_semdiag(*words).code == 0
    assert opened == []
    assert run_semdiag(*words, "--open").code == 0
    assert opened == [(here / "out" / "index.html").as_uri()]


def test_completion_offers_the_names_of_the_registries():
    assert options.names(options.TASKS)("") == [*TASKS, "text"]
    assert tuple(ATTENTIONS) == options.ATTENTIONS
    assert options.names(options.ATTENTIONS)("b") == ["banded", "block", "bottomk"]


def test_completion_offers_runs_and_paths(here):
    for name in ("checkpoints/parity-1/last.pt", "checkpoints/listops-2/last.pt", "elsewhere/mine.pt"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    run = os.path.join("checkpoints", "parity-1")
    assert options.models("par") == [run]
    assert options.models("checkpoints/p") == [run]
    assert options.models("elsewhere/") == [os.path.join("elsewhere", "mine.pt")]
    assert options.models("nowhere/") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("semdiag train par", "parity"),
        ("semdiag train parity --attention to", "topk"),
        ("semdiag info che", "che"),
    ],
)
def test_the_shell_is_offered_them_without_torch(here, words, offered):
    (here / "checkpoint").touch()
    code = (
        "import sys\nsys.argv = ['semdiag']\nfrom semdiag.commands.main import main\n"
        "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    place = str(len(words.split()) - 1)
    asked = {"_SEMDIAG_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60, check=False,
        env={**os.environ, **asked},
    )  # fmt: skip
    assert done.stdout.split()[0].startswith(offered)
    assert done.stderr.splitlines()[-1] == "False"


def test_a_folder_of_hugging_face_is_to_be_named_as_one(refusal, here):
    (here / "bert").mkdir()
    (here / "bert" / "config.json").write_text("{}")
    (here / "bert" / "model.safetensors").touch()
    for command in ("info", "dispersion"):
        assert refusal(command, "bert") == "bert is a folder of the Hugging Face format: name it hf:bert"
    line = refusal("dispersion", "bert/model.safetensors")
    assert "holds weights without the model they belong to." in line
    assert "name its folder: hf:bert; for a model of your own write a function that builds it: " in line


def test_what_is_no_checkpoint_is_said(refusal, here):
    (here / "table.csv").write_text("1,2\n")
    assert refusal("info", "table.csv").startswith("table.csv is a table, not a model. Models are .pt files")
    torch.save({"state_dict": {"w": torch.zeros(2)}, "step": 3}, here / "theirs.pt")
    assert refusal("info", "theirs.pt").endswith("a function that builds it: package.module:function.")


def test_a_table_as_inputs_is_told_how_to_become_an_array(refusal, here, tiny_runs):
    (here / "ids.csv").write_text("1,2\n")
    line = refusal("dispersion", tiny_runs.full, "--inputs", "ids.csv")
    assert 'numpy.save("ids.npy", numpy.loadtxt("ids.csv", delimiter=",", dtype=int))' in line


def test_a_mistyped_run_is_told_the_nearest(refusal, here):
    (here / "checkpoints" / "parity-full-seed-1").mkdir(parents=True)
    (here / "checkpoints" / "parity-full-seed-1" / "last.pt").touch()
    run = os.path.join("checkpoints", "parity-full-seed-1")
    for named in ("checkpoints/parity-ful-seed-1", "parity-full-seed1"):
        assert refusal("dispersion", named) == f"{named} does not exist. Did you mean {run}?"


@pytest.mark.slow
def test_as_many_of_given_inputs_are_measured_as_are_asked_for(run_semdiag, refusal, here, tiny_runs):
    np.save(here / "tokens.npy", np.zeros((5, 12), dtype=np.int64))
    words = ("dispersion", tiny_runs.full, "--inputs", "tokens.npy", "--figures", "none")
    for asked, measured in (((), 5), (("--samples", 2), 2)):
        assert json.loads(run_semdiag(*words, *asked, "--json").out)["provenance"]["samples"] == measured
    said = "The inputs hold only 5 samples (tokens.npy (given)). Got samples=6."
    assert refusal(*words, "--samples", 6) == said


@pytest.mark.slow
def test_inputs_of_another_length_are_said(run_semdiag, here, tiny_runs):
    np.save(here / "short.npy", np.ones((2, 5), dtype=np.int64))
    few = ("--inputs", "short.npy", "--figures", "none", "--out", "out")
    outcome = run_semdiag("dispersion", tiny_runs.full, *few, "--json")
    said = "the inputs are 5 tokens long, but the model was trained on 12"
    assert f"semdiag: {tiny_runs.full}/last.pt: {said}.\n" in outcome.err
    assert said in json.dumps(json.loads(outcome.out))


@pytest.mark.slow
def test_of_several_k_those_that_fit_are_used(run_semdiag, here, tiny_runs):
    few = ("--samples", 4, "--figures", "none", "--out", "out", "--json", "--k", "4,16")
    outcome = run_semdiag("dispersion", tiny_runs.full, *few)
    assert outcome.code == 0
    assert "k = 16 is left out: no query has that many keys" in outcome.err
    [result] = json.loads(outcome.out)["results"]
    assert [within["k"] for within in result["within_model"]] == [4]


def test_a_full_disk_names_the_file(refusal, here, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    words = ("train", "parity", "--length", 8, "--train-samples", 8, "--holdout-samples", 4, "--epochs", 1)
    line = refusal(*words, "--width", 8, "--blocks", 1, "--mlp-width", 8, "--out", "run", "--quiet")
    assert line.endswith("cannot be read or written: No space left on device.")
    assert line.startswith("run")
