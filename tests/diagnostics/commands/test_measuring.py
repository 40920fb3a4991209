"""What the measuring commands share: reading options, naming folders, writing every query."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from semdiag.commands import measuring
from semdiag.commands.measuring import output_folder
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.presenting.options import whole_numbers
from semdiag.questions.registry import QUESTIONS
from semdiag.reporting.folder import check_folder
from semdiag_files import InputError


def test_the_command_line_can_be_typed_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/semdiag", "info", "a folder/last.pt"])
    assert measuring.command_line() == "semdiag info 'a folder/last.pt'"


@pytest.mark.parametrize(
    ("text", "numbers"), [("5", (5,)), ("16, 4,8,4", (4, 8, 16)), ("", ()), (" , ", ()), ("-1", (-1,))]
)
def test_whole_numbers_come_sorted_and_once(text, numbers):
    assert whole_numbers(text, "--k") == numbers


@pytest.mark.parametrize("text", ["5;6", "2.5", "x"])
def test_other_numbers_are_refused(text):
    with pytest.raises(InputError, match=f"^--k takes whole numbers .* Got '{text}'"):
        whole_numbers(text, "--k")


@pytest.mark.parametrize(
    ("text", "formats"), [("png", ("png",)), ("svg, pdf", ("svg", "pdf")), ("none", ()), ("", ())]
)
def test_figure_formats_are_read(text, formats):
    assert measuring.figure_formats(text) == formats


def test_a_configuration_is_a_json_object(tmp_path):
    (tmp_path / "config.json").write_text('{"mask_size": 5}')
    assert measuring.read_config(tmp_path / "config.json") == {"mask_size": 5}
    assert measuring.read_config(None) is None
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"config\.json cannot be read as JSON"):
        measuring.read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("models", "name"),
    [
        (["checkpoints/even-pairs-topk-5-seed-1/last.pt"], "dispersion-even-pairs-topk-5-seed-1"),
        (["checkpoints/even-pairs-topk-5-seed-1"], "dispersion-even-pairs-topk-5-seed-1"),
        (["last.pt"], "dispersion-last"),
        (["epoch-0.pt"], "dispersion-epoch-0"),
        (["runs/a/epoch-0.pt"], "dispersion-a-epoch-0"),
        (["a.pt", "b.pt", "c.pt"], "dispersion-3-models"),
        (["hf:models/MiniLM"], "dispersion-hf-MiniLM"),
        (["mypkg.models:a"], "dispersion-mypkg.models-a"),
        (["mypkg.models:b"], "dispersion-mypkg.models-b"),
    ],
)
def test_a_report_is_named_after_its_models(here, models, name):
    assert output_folder("dispersion", models, None) == Path("reports") / name


def test_no_report_takes_the_place_of_one_on_other_models(here, capsys):
    mine, yours = ["a/x.pt", "b/x.pt"], ["c/x.pt", "d/x.pt"]
    first = output_folder("report", mine, None)
    first.mkdir(parents=True)
    (first / "summary.json").write_text(json.dumps({"results": [{"model": model} for model in mine]}))
    assert output_folder("report", mine, None) == first
    other = output_folder("report", yours, None)
    assert other.parent == first.parent
    assert re.fullmatch(r"report-2-models-[0-9a-f]{8}", other.name)
    assert output_folder("report", yours, None) == other
    assert capsys.readouterr().err == ""
    assert output_folder("report", yours, first) == first
    assert capsys.readouterr().err == f"Replaces in {first}: a report on a/x.pt, b/x.pt.\n"


@pytest.fixture(scope="module")
def found(tiny_runs):
    return survey([tiny_runs.topk, tiny_runs.full], Conditions(samples=4, dtype="float64"))


@pytest.mark.slow
def test_every_query_and_every_load_is_written(found, tmp_path):
    measuring.write_per_query(tmp_path / "all.parquet", found)
    queries, loads = pd.read_parquet(tmp_path / "all.parquet"), pd.read_parquet(tmp_path / "all.load.parquet")
    pd.testing.assert_frame_equal(queries, found.queries, check_exact=True)
    pd.testing.assert_frame_equal(loads, found.loads, check_exact=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["all.load.parquet", "all.parquet"]


def test_if_one_table_cannot_be_written_neither_is(found, tmp_path, monkeypatch):
    write = pd.DataFrame.to_parquet

    def fill_the_disk(table, path, **options):
        write(table, path, **options)
        if "load" in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fill_the_disk)
    with pytest.raises(InputError, match=r"all\.parquet cannot be written: No space left on device\.$"):
        measuring.write_per_query(tmp_path / "all.parquet", found)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_place_of_the_file_is_refused(found, tmp_path):
    (tmp_path / "all.parquet").mkdir()
    with pytest.raises(InputError, match=r"all\.parquet cannot be written: Is a directory\.$"):
        measuring.write_per_query(tmp_path / "all.parquet", found)
    assert [file.name for file in tmp_path.iterdir()] == ["all.parquet"]


def test_names_for_every_query_are_checked_before_anything_is_measured(tmp_path):
    measuring.check_per_query(None)
    measuring.check_per_query(Path("here.parquet"))
    measuring.check_per_query(tmp_path / "there.parquet")
    with pytest.raises(
        InputError, match=r"^--per-query takes a file name that ends in \.parquet\. Got all\.csv\.$"
    ):
        measuring.check_per_query(Path("all.csv"))
    with pytest.raises(InputError, match="there is no folder"):
        measuring.check_per_query(tmp_path / "nowhere" / "all.parquet")


def test_measuring_keeps_the_command_that_was_typed(tiny_runs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["semdiag", "check", "x"])
    asked = measuring.TypedRequest(QUESTIONS["dispersion"], {"quiet": True}, frozenset())
    found, _ = asked.measured([tiny_runs.full], Conditions(samples=4))
    measurements = found.measurements
    assert measurements.provenance["command"] == ["semdiag", "check", "x"]
    assert json.dumps(measurements.provenance)
    assert np.isposinf(measurements.queries["separation"]).all()


@pytest.mark.parametrize("out", [None, "mine"])
def test_a_page_is_this_commands_alone_before_anything_is_measured(out, tiny_runs, here):
    values = {"quiet": True, "out": out and Path(out)}
    asked = measuring.TypedRequest(QUESTIONS["dispersion"], values, frozenset())
    place = Path(out or output_folder("dispersion", [str(tiny_runs.full)], None))

    def survey_meanwhile(loaded, conditions, *_):
        with pytest.raises(InputError, match=rf"{place.name} is in use"):
            check_folder(place, False)
        return survey(loaded, conditions)

    asked.measured([tiny_runs.full], Conditions(samples=4), survey_meanwhile)
    assert asked.folder.path == place
    asked.resources.close()
    check_folder(place, False)
