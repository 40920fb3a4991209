"""Files, terminals and kills: what a user meets on a bad day is one line, and never half a report."""

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest
import torch
from rich.text import Text
from torch import nn

from semdiag import Monitor, load, measure
from semdiag.capturing.pretrained import find_folder
from semdiag.commands.main import main
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.terminal import escaped, terminal
from semdiag.reporting.folder import MARKER
from semdiag.reporting.report import write_report
from semdiag_files import InputError
from semdiag_models import weights_sha256

EVERY_CASE = bool(os.environ.get("SEMDIAG_EVERY_CASE"))


@pytest.fixture(scope="module")
def kept_once(tiny_runs, tmp_path_factory):
    """The folder of measurements that a report of one model keeps. Do not write to it."""
    folder = tmp_path_factory.mktemp("kept") / "report"
    words = ("--samples", "8", "--figures", "none", "--quiet", "--keep-queries", "--out", str(folder))
    with pytest.MonkeyPatch.context() as patch, suppress(SystemExit):
        patch.setattr(sys, "argv", ["semdiag", "report", str(tiny_runs.full), *words])
        main()
    return folder / "data"


@pytest.fixture
def kept(kept_once, here):
    """The same, free to be doctored."""
    shutil.copytree(kept_once, here / "kept" / "data")
    (here / "kept" / "data" / "SHA256SUMS").unlink()
    return here / "kept" / "data"


@pytest.mark.parametrize(
    ("table", "column", "value", "message"),
    [
        ("queries", "dispersion", -1.0, "holds a value of dispersion that is not between 0 and inf."),
        ("queries", "layer", -7, "holds a value of layer that is not between -1 and"),
        ("models", "accuracy", 3.0, "holds a value of accuracy that is not between 0 and 1."),
        ("models", "heads", 0, "holds a value of heads that is not between 1 and"),
        ("queries", "model", "another", "names a model that models.parquet does not list."),
    ],
)
def test_values_that_no_measurement_has_are_refused(refusal, kept, table, column, value, message):
    file = kept / f"{table}.parquet"
    content = pd.read_parquet(file)
    content[column] = np.where(np.arange(len(content)) == 0, value, content[column])
    content.to_parquet(file, index=False)
    assert message in refusal("report", "--from", kept, "--out", "again", "--figures", "none")


def test_a_flipped_bit_of_kept_measurements_is_refused_in_one_line(refusal, here, kept_once):
    shutil.copytree(kept_once, here / "kept" / "data")
    file = here / "kept" / "data" / "queries.parquet"
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    line = refusal("report", "--from", "kept", "--out", "again", "--figures", "none")
    assert line.startswith("kept/data/queries.parquet differs from what SHA256SUMS beside it recorded")


@pytest.mark.slow
def test_no_mutated_folder_is_an_error_of_ours(run_semdiag, kept):
    """A column lost, made text, negated or huge is refused, or drawn; by day each suffers one of these."""
    changes = (
        None,
        lambda column: column.astype(str),
        lambda column: -column if pd.api.types.is_numeric_dtype(column) and column.dtype != bool else column,
        lambda column: pd.Series([10**9] * len(column)),
    )
    codes = []
    for table in ("models", "queries"):
        file = kept / f"{table}.parquet"
        before = file.read_bytes()
        content = pd.read_parquet(file)
        for n, column in enumerate(content):
            for change in changes if EVERY_CASE else changes[n % 4 : n % 4 + 1]:
                changed = content.drop(columns=column)
                if change is not None:
                    changed[column] = change(content[column])
                changed.to_parquet(file, index=False)
                outcome = run_semdiag("report", "--from", kept, "--out", "again", "--figures", "none", "--quiet")
                codes.append(outcome.code)
        file.write_bytes(before)
    assert len(codes) > (100 if EVERY_CASE else 25)
    assert set(codes) <= {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "words"), [("cp1252", ["list"]), ("ascii", ["--help"]), ("ascii", ["check", "--help"])]
)
def test_help_can_be_printed_in_any_encoding(encoding, words):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "semdiag", *words]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def killed_report(findings, folder, moment):
    """What a process leaves that is killed before or after the first of a report's two renames."""
    write_report(findings, folder, "old", formats=())
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir()
    (partial / MARKER).touch()
    (partial / "index.html").write_text("half")
    if moment == "between":
        folder.rename(folder.with_name(f".{folder.name}.old"))


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_report_that_was_killed_is_put_right_at_the_next_start(made_up, tmp_path, moment, monkeypatch):
    from semdiag.reporting import report

    findings = Findings(made_up(("a/last.pt", range(8), {})))
    killed_report(findings, tmp_path / "r", moment)
    monkeypatch.setattr(report, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(InputError, match="No space left"):
        write_report(findings, tmp_path / "r", "new", formats=())
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert "old" in (tmp_path / "r" / "index.html").read_text(encoding="utf-8")


def test_what_a_file_says_does_not_steer_the_terminal(run_semdiag, here, tiny_runs):
    content = torch.load(tiny_runs.full / "last.pt", weights_only=True)
    content["provenance"]["command"] = "train \x1b]0;title\x07 \x1b[31mred \x9b2J"
    torch.save(content, "odd.pt")
    outcome = run_semdiag("info", "odd.pt")
    assert outcome.code == 0
    assert not set("\x1b\x07\x9b") & set(outcome.out)
    assert r"\x1b]0;title" in outcome.out
    assert "\x1b" not in run_semdiag("info", "\x1b[31mnowhere.pt").err
    assert escaped("a\tb\nc\r\u202e") == "a\tb\nc\\r\\u202e"


def test_colours_of_our_own_still_reach_the_terminal(capsys, monkeypatch):
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLORTERM", ""), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
    terminal().print(Text.assemble(("x", "red"), "\x1b[2J"))
    assert capsys.readouterr().out == "\x1b[31mx\x1b[0m\\x1b[2J\n"


def test_a_reader_that_leaves_is_no_failed_check(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):  # rich would leave with exit code 1
        terminal().print("a table")


@pytest.mark.parametrize("spec", ["hf:__main__", "hf:sys", "hf:nowhere"])
def test_names_that_are_no_packages_with_models_are_refused(spec):
    with pytest.raises(InputError, match="there is no folder"):
        find_folder(spec)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dispersion", "{}", "--batch-size", 10**20], "batch_size must be at most 1000000000."),
        (["dispersion", "{}", "--samples", 10**20], "samples must be at most 1000000000."),
        (["train", "parity", "--batch-size", 10**20], "batch_size must lie in"),
        (["info", "nowhere-\udcff.pt"], "does not exist."),
    ],
)
def test_wild_options_are_refused(refusal, here, tiny_runs, words, message):
    assert message in refusal(*(tiny_runs.full if word == "{}" else word for word in words))


def test_a_name_that_is_no_text_is_refused_where_it_cannot_be_written(refusal, here, tiny_runs):
    name = "odd-\udcff.pt"
    with open(name, "wb") as file:
        file.write((tiny_runs.full / "last.pt").read_bytes())
    line = refusal("dispersion", name, "--samples", 4, "--out", "out", "--per-query", "q.parquet")
    assert "holds bytes that are not text here. Rename the file" in line


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names are UTF-8 there, whatever the locale")
def test_a_name_that_another_locale_could_read_is_refused_with_both_remedies(run_semdiag, here, tiny_runs):
    (here / "ü.pt").write_bytes((tiny_runs.full / "last.pt").read_bytes())
    words = ("dispersion", "ü.pt", "--samples", "4", "--quiet")
    assert run_semdiag(*words, "--figures", "none").code == 0  # in UTF-8
    refused = subprocess.run(
        [sys.executable, "-m", "semdiag", *words], capture_output=True, encoding="utf-8", timeout=60, check=False,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"},
    )  # fmt: skip
    if int(pd.__version__.split(".")[0]) < 3:  # whose tables hold such a name
        assert refused.returncode == 0
        return
    assert refused.returncode == 2
    assert "not text here. Rename the file, or set PYTHONUTF8=1 if it is UTF-8." in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_an_interruption_while_the_program_is_loaded_is_one_line():
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from semdiag.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, b"semdiag: interrupted\n")


def test_arguments_of_python_functions_are_refused_as_such(tiny_runs):
    model = load(tiny_runs.full)
    tokens = torch.zeros(3, 12, dtype=torch.int64)
    with pytest.raises(InputError, match=r"batch_size must be at least 1\. Got 0\."):
        measure(model, tokens, batch_size=0)
    with pytest.raises(InputError, match=r"Got 2 for 3 samples\."):
        measure(model, tokens, labels=torch.zeros(2))
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="No cuda device here"):
            measure(model, tokens, device="cuda:0")
    for wrong in (nn.Linear, nn.Linear(2, 2)):
        with pytest.raises(InputError, match=r"A monitor watches a module|has no attention to watch"):
            Monitor(wrong)


@pytest.mark.slow
def test_a_baseline_travels_with_the_weights(run_semdiag, here, tiny_runs):
    """By an absolute path, or from another folder, a checkpoint is the same one."""
    words = ("--rule", "dispersion.p50 < 1000", "--samples", 8, "--quiet")
    first = run_semdiag("check", tiny_runs.full, *words, "--json")
    (here / "base.json").write_text(first.out)
    (here / "copy").mkdir()
    (here / "copy" / "last.pt").write_bytes((tiny_runs.full / "last.pt").read_bytes())
    again = run_semdiag("check", "copy/last.pt", *words, "--baseline", "base.json")
    assert (again.code, again.err) == (0, "")


@pytest.mark.slow
def test_a_retrained_model_is_matched_by_task_attention_and_seed(run_semdiag, here, tiny_runs):
    words = ("--rule", "dispersion.p50 < 1000", "--samples", 8, "--quiet")
    document = json.loads(run_semdiag("check", tiny_runs.full, *words, "--json").out)
    document["models"][0] |= {"weights_sha256": "0" * 64, "model": "elsewhere/last.pt"}
    document["models"][0]["numbers"]["dispersion.p50"] *= 3
    (here / "base.json").write_text(json.dumps(document))
    again = run_semdiag("check", tiny_runs.full, *words, "--baseline", "base.json")
    assert again.code == 1
    assert "dispersion.p50 was" in again.err


def test_a_model_without_a_partner_is_told_how_to_train_one(refusal, tiny_runs):
    for one in (tiny_runs.full, tiny_runs.topk):
        line = refusal("check", one, "--samples", 8)
        assert line.startswith(f"{one / 'last.pt'} has no partner: ")
        assert line.endswith(
            "Train the other one with semdiag train, and the options of this one, which semdiag info shows."
        )


@pytest.mark.slow
def test_verdicts_are_written_as_junit(run_semdiag, here, tiny_runs):
    from xml.etree import ElementTree

    words = (tiny_runs.full, "--samples", 8, "--quiet", "--junit", "check.xml")
    assert run_semdiag("check", *words, "--rule", "dispersion.p50 < 1000").code == 0
    suite = ElementTree.parse(here / "check.xml").getroot()
    assert (suite.tag, suite.get("failures")) == ("testsuite", "0")
    assert run_semdiag("check", *words, "--rule", "dispersion.p50 > 1000").code == 1
    suite = ElementTree.parse(here / "check.xml").getroot()
    assert suite.get("failures") == str(len(suite.findall("testcase/failure"))) == "1"
    assert int(suite.get("tests")) == len(suite.findall("testcase"))
    assert suite.find("testcase/failure").get("message").startswith("dispersion.p50 > 1000 fails, ")


def test_info_verifies_the_hash_of_the_weights(run_semdiag, here, tiny_runs):
    def said(path):
        outcome = run_semdiag("info", path, "--json")
        return outcome.code, json.loads(outcome.out)["checkpoint"]

    content = torch.load(tiny_runs.full / "last.pt", weights_only=True)
    code, facts = said(tiny_runs.full / "last.pt")
    assert (code, facts["verified"]) == (0, "as recorded in file")
    assert facts["weights"] == weights_sha256(content["model_state"]) == content["weights_sha256"]
    (here / "runs" / "a").mkdir(parents=True)
    torch.save({**content, "new field": 1}, "runs/a/last.pt")
    entry = {"run": "a", "weights_sha256": {"last.pt": facts["weights"]}}
    (here / "runs" / "manifest.json").write_text(json.dumps([entry]))
    assert said("runs/a/last.pt")[1]["verified"] == "as recorded in file and manifest"
    content["model_state"]["head.bias"][0] += 1
    torch.save(content, "runs/a/last.pt")
    code, facts = said("runs/a/last.pt")
    assert (code, facts["verified"]) == (1, "NOT those recorded in file and manifest")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dispersion", "check"])
def test_who_measures_weights_that_are_not_the_recorded_ones_is_told(run_semdiag, here, tiny_runs, command):
    content = torch.load(tiny_runs.full / "last.pt", weights_only=True)
    content["model_state"]["head.bias"][0] += 1
    torch.save(content, "other.pt")
    more = ("--rule", "dispersion.p50 < 1000") if command == "check" else ("--figures", "none")
    said = {path: run_semdiag(command, path, "--samples", 6, *more).err for path in ("other.pt", tiny_runs.full)}
    assert "semdiag: other.pt: the weights are not those recorded in file.\n" in said["other.pt"]
    assert "recorded" not in said[tiny_runs.full]


def test_snapshots_say_on_which_processor_they_were_made(tiny_runs):
    provenance = load(tiny_runs.full).provenance
    assert provenance["processor"]
    assert provenance["threads"] >= 1


def test_samples_that_a_file_declares_are_counted_before_they_are_drawn(refusal, here, tiny_runs):
    content = torch.load(tiny_runs.full / "last.pt", weights_only=True)
    content["config"]["training"] |= {"train_samples": 10**9 // 12 - 100, "holdout_samples": 40}
    content["config"]["model"]["length"] = 2000
    torch.save(content, "odd.pt")
    assert "odd.pt declares would take" in refusal("dispersion", "odd.pt", "--samples", 4)
