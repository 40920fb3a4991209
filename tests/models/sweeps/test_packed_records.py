"""Records of a finished study come back from two tables as their files held them."""

import json

import pandas as pd
import pytest
from pack_records import HISTORIES, RUNS, pack, read_packed

from semdiag_files import InputError

SCHEMA = "semdiag.run/1"


def record(name, epochs, **more):
    history = {"epoch": [*range(1, epochs + 1)], "train_loss": [1 / (n + 3) for n in range(epochs)]}
    return {"schema": SCHEMA, "run": name, "model": {"k": None, "dropout": 0.01}, "history": history, **more}


@pytest.fixture
def folder(tmp_path):
    for each in (record("b", 3), record("a", 2, weights="é", training={"snapshots": [], "text": None})):
        (tmp_path / f"{each['run']}.json").write_text(json.dumps(each), encoding="utf-8")
    return tmp_path


def test_records_come_back_as_they_were(folder):
    before = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in "ab"}
    assert pack(folder, SCHEMA) == 2
    assert sorted(path.name for path in folder.iterdir()) == [HISTORIES, RUNS]
    for name, content in before.items():
        # As text: whole numbers stay whole, and every digit stays.
        assert json.dumps(read_packed(folder)[name], sort_keys=True) == json.dumps(content, sort_keys=True)
    assert read_packed(folder).keys() == {"a", "b"}
    assert read_packed(folder / "nowhere") == {}


def test_more_records_join_those_that_are_packed(folder):
    pack(folder, SCHEMA)
    (folder / "c.json").write_text(json.dumps(record("c", 1)), encoding="utf-8")
    assert pack(folder, SCHEMA) == 3
    assert read_packed(folder)["a"]["weights"] == "é"
    assert read_packed(folder)["c"] == record("c", 1)


@pytest.mark.parametrize(
    "content", ["[]", '{"schema": "other", "run": "c"}', '{"schema": "semdiag.run/1", "run": "d"}', "{"]
)
def test_what_is_no_record_is_refused_and_nothing_changes(folder, content):
    (folder / "c.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError):
        pack(folder, SCHEMA)
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json", "c.json"]


def test_a_record_that_would_not_come_back_stays_a_file(folder):
    """A history of unlike columns cannot be told apart in one table: whole numbers would become others."""
    odd = record("c", 2)
    odd["history"]["train_loss"] = [1, 2]
    (folder / "c.json").write_text(json.dumps(odd), encoding="utf-8")
    with pytest.raises(InputError, match="the record c would not read back unchanged"):
        pack(folder, SCHEMA)
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json", "c.json"]


@pytest.mark.parametrize("name", [RUNS, HISTORIES])
def test_a_damaged_table_is_refused(folder, name):
    pack(folder, SCHEMA)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="holds no records of runs"):
        read_packed(folder)
    pd.DataFrame({"run": ["a"]}).to_parquet(folder / name)
    with pytest.raises(InputError, match="holds no records of runs"):
        read_packed(folder)
