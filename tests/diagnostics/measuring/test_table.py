"""Declared tables: empty, made from rows and from parts, and what a file may not be."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semdiag.measuring.table import Table, column_types, read_parquet
from semdiag.selections.arrays import read_arrays
from semdiag_files import InputError, files

TABLE = Table(
    "things",
    "One row per thing.",
    {"model": "str", "layer": "int32", "size": "float64", "level": "float32", "holds": "bool"},
)
ROWS = [
    {"model": "a", "layer": 0, "size": 0.5, "level": 0.25, "holds": True},
    {"model": "b", "layer": 1, "size": float("inf"), "level": float("nan"), "holds": False},
]


def kinds(table):
    return column_types(table)


@pytest.fixture
def things():
    return TABLE.of_rows(ROWS)


def test_without_rows_it_still_has_its_columns():
    empty = TABLE.empty()
    assert empty.empty
    assert kinds(empty) == TABLE.columns
    for made in (TABLE.of_rows([]), TABLE.of_rows(iter(())), TABLE.of_parts([])):
        pd.testing.assert_frame_equal(made, empty)


def test_an_empty_table_is_made_anew_each_time():
    assert TABLE.empty() is not TABLE.empty()


def test_rows_get_the_declared_columns_in_their_order(things):
    assert kinds(things) == TABLE.columns
    assert list(things) == list(TABLE.columns)
    assert things["model"].tolist() == ["a", "b"]
    assert things["size"].tolist() == [0.5, np.inf]
    assert np.isnan(things["level"][1])


def test_rows_may_come_in_any_order_of_entries_with_further_ones_and_from_a_generator(things):
    turned = ({"note": "more", **dict(reversed(row.items()))} for row in ROWS)
    pd.testing.assert_frame_equal(TABLE.of_rows(turned), things)


def test_a_row_without_an_entry_is_an_error():
    with pytest.raises(KeyError, match="holds"):
        TABLE.of_rows([{name: value for name, value in ROWS[0].items() if name != "holds"}])


def test_parts_are_put_below_each_other(things):
    wide = things.astype({"layer": "int64", "level": "float64"}).assign(note="more")
    found = TABLE.of_parts(part for part in (wide[["holds", "size", "level", "layer", "model", "note"]], things))
    assert kinds(found) == TABLE.columns
    assert found["model"].tolist() == ["a", "b", "a", "b"]
    assert found.index.tolist() == [0, 1, 2, 3]


def test_parts_without_rows_change_nothing(things):
    pd.testing.assert_frame_equal(TABLE.of_parts([TABLE.empty(), things, TABLE.empty()]), things)
    pd.testing.assert_frame_equal(TABLE.of_parts([TABLE.empty()] * 2), TABLE.empty())


def test_a_part_without_a_column_is_an_error(things):
    with pytest.raises(KeyError, match="size"):
        TABLE.of_parts([things.drop(columns="size")])


def test_what_was_declared_passes(things, tmp_path):
    TABLE.check(things, "things.parquet")
    TABLE.check(TABLE.empty(), "things.parquet")
    for table in (things, TABLE.empty()):
        table.to_parquet(tmp_path / "things.parquet")
        TABLE.check(pd.read_parquet(tmp_path / "things.parquet"), "things.parquet")


@pytest.mark.parametrize("column", TABLE.columns)
def test_a_missing_column_is_named_with_its_file(things, column):
    message = rf"^a/things\.parquet lacks the column {column}\. Measure again with this version of semdiag\.$"
    for table in (things, TABLE.empty()):
        with pytest.raises(InputError, match=message):
            TABLE.check(table.drop(columns=column), "a/things.parquet")


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("model", [1, 2]),
        ("model", [True, False]),
        ("layer", ["0", "1"]),
        ("layer", [True, False]),
        ("layer", [0.0, 1.0]),
        ("model", ["a", 1]),
        ("size", [True, False]),
        ("size", ["small", "large"]),
        ("size", [None, None]),
        ("holds", ["yes", "no"]),
        ("holds", [1, 0]),
    ],
)
def test_a_column_of_another_kind_is_named_with_its_file(things, column, values):
    wrong = things.assign(**{column: values})
    message = rf"^a/things\.parquet has {wrong[column].dtype} in the column {column}, which should be .+\.$"
    with pytest.raises(InputError, match=message):
        TABLE.check(wrong, "a/things.parquet")


def test_of_several_wrong_columns_the_first_is_named(things):
    wrong = things.drop(columns="holds").assign(layer=["0", "1"])
    with pytest.raises(InputError, match="in the column layer, which should be int32"):
        TABLE.check(wrong, "things.parquet")


@pytest.mark.parametrize(
    "older",
    [
        {"layer": "int64"}, {"layer": "int8"}, {"layer": "Int64"}, {"size": "int64"},
        {"size": "float32"}, {"level": "float64"}, {"size": "Float64"},
        {"model": "object"}, {"model": "category"}, {"holds": "boolean"},
    ],
)  # fmt: skip
def test_other_precisions_of_older_files_are_read(things, older):
    finite = things.replace({"size": {np.inf: 1.0, 0.5: 2.0}})
    TABLE.check(finite.astype(older), "things.parquet")


def test_missing_words_are_no_fault(things):
    TABLE.check(things.astype({"model": "object"}).replace({"model": {"b": None}}), "things.parquet")


def test_further_columns_are_no_fault(things):
    TABLE.check(things.assign(note="more"), "things.parquet")


def test_the_kind_of_a_column_without_rows_says_nothing():
    """An empty column is often read back as text or as numbers."""
    TABLE.check(pd.DataFrame({column: [] for column in TABLE.columns}), "things.parquet")


def test_a_text_that_a_file_repeats_is_counted_as_often_as_it_stands_there(tmp_path, monkeypatch):
    """A dictionary holds it once: 100 KB may declare gigabytes."""
    path = tmp_path / "models.parquet"
    pd.DataFrame({"model": ["x" * 10_000] * 2000, "layer": [0] * 2000}).to_parquet(path, index=False)
    assert path.stat().st_size < 100_000
    assert len(read_parquet(path)) == 2000
    monkeypatch.setattr(files, "_memory", lambda: 4 * 19_999_999)
    with pytest.raises(InputError, match=r"models\.parquet, unpacked, would take"):
        read_parquet(path)


@pytest.mark.slow
@pytest.mark.parametrize("dictionary", [True, False])
def test_texts_that_are_almost_only_repetition_are_refused_before_they_are_unpacked(tmp_path, dictionary):
    """Half a gigabyte from some kilobytes."""
    path = tmp_path / "models.parquet"
    group = pa.table({"model": ["x" * 2**20] * 32})
    with pq.ParquetWriter(path, group.schema, compression="zstd", use_dictionary=dictionary) as writer:
        for _ in range(16):
            writer.write_table(group)
    with pytest.raises(InputError, match=r"unpacks to 512 MiB from .*: it is almost only repetition\."):
        read_parquet(path)
    assert pa.default_memory_pool().max_memory() < 2**28
    with pytest.raises(InputError, match="the column model holds texts, not numbers"):
        read_arrays(path, ["model"])


def test_lists_in_a_column_are_refused(tmp_path):
    """A row may hold as many values as it likes, and no table of ours holds any."""
    path = tmp_path / "models.parquet"
    pd.DataFrame({"k": [np.zeros(10_000, np.int64)] * 3}).to_parquet(path, index=False)
    with pytest.raises(ValueError, match="columns of lists or structs"):
        read_parquet(path)


EVERY_FOOTER = """
import sys
from pathlib import Path
from semdiag.selections.arrays import read_arrays
from semdiag.measuring.table import read_parquet

content = (Path(sys.argv[1]) / "good.parquet").read_bytes()
end, outcomes = len(content) - 8, set()
for place in range(end - int.from_bytes(content[end : end + 4], "little"), end):
    byte = 1 + place % 2
    (Path(sys.argv[1]) / "bad.parquet").write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
    try:
        outcomes.add(len(read_parquet(Path(sys.argv[1]) / "bad.parquet")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        outcomes.add(type(error).__name__)
print(outcomes)
"""


@pytest.mark.slow
def test_no_damaged_footer_ends_the_process(tmp_path):
    """Pyarrow aborts on some of them where their columns' metadata are asked for."""
    table = pd.DataFrame({"model": ["a", "b"] * 20, "share": [0.5] * 40, "rows": range(40)})
    table.to_parquet(tmp_path / "good.parquet", index=False)
    words = [sys.executable, "-c", EVERY_FOOTER, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert "40" in done.stdout
    assert "ArrowInvalid" in done.stdout
