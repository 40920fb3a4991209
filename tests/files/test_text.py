"""Cells of CSV files: no formulas, no control characters, and the same text again."""

import csv
import io

from hypothesis import example, given
from hypothesis import strategies as st

from semdiag.commands.sweep_results import RunResult, write_results
from semdiag_files import csv_cell, from_csv_cell, visible


@given(st.text(st.sampled_from("=+-@\t\r\n '\"1.e,\uff1d\x1b\u202eä"), max_size=8))
@example("-inf")
@example("-1.5")
@example("'-1.5")
@example("=1")
@example("\t=1")
def test_a_cell_is_no_formula_and_gives_its_text_again(text):
    cell = csv_cell(text)
    file = io.StringIO(newline="")
    csv.writer(file).writerow([cell, "end"])
    assert next(csv.reader(io.StringIO(file.getvalue(), newline=""))) == [cell, "end"]
    begins = cell.lstrip()[:1] or cell[:1]
    if (begins and begins in "=+-@\uff1d") or cell[:1] in {"\t", "\r", "\n"}:
        float(cell)
    assert from_csv_cell(cell) in (visible(text), text)


def test_no_text_of_a_sweep_is_a_formula_in_its_results(tmp_path):
    """Problems quote paths and messages of libraries; the JSON beside it is exact."""
    numbers = {"holdout_accuracy": None, "best_holdout_accuracy": None, "seconds": -0.5}
    row = RunResult(**dict.fromkeys(RunResult.__dataclass_fields__, "") | numbers | {"problem": "=1+1\x1b[2J"})
    write_results(tmp_path, [row], {})
    (cells,) = csv.DictReader(io.StringIO((tmp_path / "results.csv").read_bytes().decode(), newline=""))
    assert (cells["problem"], cells["seconds"]) == (r"'=1+1\x1b[2J", "-0.5")
    assert r'"problem": "=1+1\u001b[2J"' in (tmp_path / "results.json").read_text(encoding="utf-8")
