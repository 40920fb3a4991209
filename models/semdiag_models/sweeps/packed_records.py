"""Records of a finished study as two tables: the runs, and their histories."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from semdiag_models.errors import InputError
from semdiag_models.reading import MEBIBYTE, open_file, read_json

RUNS, HISTORIES = "runs.parquet", "histories.parquet"
_LARGEST = 64 * MEBIBYTE


def pack(folder: Path, schema: str) -> int:
    """Replace the record files of a folder by two tables, after verifying that every record reads back unchanged."""
    import pandas as pd

    files = sorted(folder.glob("*.json"))
    records = {name: _joined(folder, name) for name in _content(folder)}
    for file in files:
        record = read_json(file)
        if not isinstance(record, dict) or record.get("schema") != schema or record.get("run") != file.stem:
            raise InputError(f"{file} is no record of a run.")
        records[file.stem] = record
    if not records:
        raise InputError(f"{folder} holds no record of a run.")
    heads = [(name, json.dumps({**record, "history": None})) for name, record in sorted(records.items())]
    parts = [pd.DataFrame({"run": name, **record["history"]}) for name, record in sorted(records.items())]
    written = [folder / f".{name}.tmp" for name in (RUNS, HISTORIES)]
    try:
        for path, table in zip(
            written,
            (pd.DataFrame(heads, columns=["run", "record"]), pd.concat(parts, ignore_index=True)),
            strict=True,
        ):
            table.to_parquet(path, index=False, compression="zstd")
        back = _read(*written)
        wrong = [name for name, record in records.items() if not _same(_record(back, name), record)]
        if wrong:
            raise InputError(
                f"{folder}: the record {wrong[0]} would not read back unchanged. Nothing was changed."
            )
        for path, name in zip(written, (RUNS, HISTORIES), strict=True):
            path.replace(folder / name)
    finally:
        for path in written:
            path.unlink(missing_ok=True)
    for file in files:
        file.unlink()
    return len(records)


def read_packed(folder: Path, name: str) -> dict[str, Any] | None:
    """Read a record from the tables of a folder."""
    return _joined(folder, name) if name in _content(folder) else None


def _content(folder: Path) -> dict[str, str]:
    return _tables(folder)[0]


def _joined(folder: Path, name: str) -> dict[str, Any]:
    return _record(_tables(folder), name)


_Tables = tuple[dict[str, str], dict[str, dict[str, list[float]]]]


def _tables(folder: Path) -> _Tables:
    """Return the records without histories, and the histories, by run; empty without tables."""
    paths = folder / RUNS, folder / HISTORIES
    if not all(path.exists() for path in paths):
        return {}, {}
    stamps = tuple(path.stat().st_mtime_ns for path in paths)
    return _kept(paths, stamps)


@lru_cache(maxsize=4)
def _kept(paths: tuple[Path, Path], stamps: tuple[int, ...]) -> _Tables:
    return _read(*paths)


def _read(runs: Path, histories: Path) -> _Tables:
    import pandas as pd

    tables = []
    for path in (runs, histories):
        with open_file(path, _LARGEST) as file:
            try:
                tables.append(pd.read_parquet(file))
            except Exception as error:  # on damaged files the library raises anything
                raise InputError(f"{path} cannot be read as a table ({type(error).__name__}).") from None
    try:
        heads = {
            str(name): str(record) for name, record in zip(tables[0]["run"], tables[0]["record"], strict=True)
        }
        columns = [name for name in tables[1] if name != "run"]
        _ = tables[1]["epoch"]
        found = {
            str(name): {str(column): own[column].tolist() for column in columns}
            for name, own in tables[1].groupby("run", sort=False)
        }
    except KeyError as error:
        raise InputError(f"{runs.parent} holds no records of runs: a table lacks the column {error}.") from None
    return heads, found


def _record(tables: _Tables, name: str) -> dict[str, Any]:
    heads, histories = tables
    try:
        return {**json.loads(heads[name]), "history": histories[name]}
    except (KeyError, ValueError, TypeError):
        raise InputError(f"The record of {name} is damaged.") from None


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two records are equal, entry by entry, including number types."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
