"""Reads and packs the records of finished studies: two tables each, once every record has come back unchanged.

python experiments/pack_records.py experiments/speed experiments/dose
"""

import argparse
import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from semdiag.commands.sweep_results import SCHEMA
from semdiag.commands.sweep_results import read_history as history_of
from semdiag_files import InputError, read_bytes, read_json
from semdiag_models.sweep import SweepRun

RUNS, HISTORIES = "runs.parquet", "histories.parquet"  # tables of the records of a finished study


def read_history(folder: Path, run: SweepRun) -> dict[str, list[float]] | None:
    """Return the history in a run's record: its file, or the tables of a finished study."""
    path = folder / f"{run.name}.json"
    content = read_json(path) if path.exists() else read_packed(folder).get(run.name)
    return None if content is None else history_of(path, content, run)


def read_packed(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records in a folder's two tables by run; none without tables."""
    paths = folder / RUNS, folder / HISTORIES
    if not all(path.exists() for path in paths):
        return {}
    return read_tables(*paths, *(path.stat().st_mtime_ns for path in paths))


@lru_cache(maxsize=4)
def read_tables(runs: Path, histories: Path, *stamps: int) -> dict[str, dict[str, Any]]:
    """Return the records in two tables by run; kept until a stamp changes."""
    try:
        tables = [pd.read_parquet(io.BytesIO(read_bytes(path))) for path in (runs, histories)]
        found = {
            name: {str(column): rows[column].tolist() for column in rows if column != "run"}
            for name, rows in tables[1].groupby("run", sort=False)
        }
        pairs = zip(tables[0]["run"], tables[0]["record"], strict=True)
        return {name: {**json.loads(record), "history": found[name]} for name, record in pairs}
    except InputError:
        raise
    except Exception as error:  # on damaged files the library raises anything
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{runs.parent} holds no records of runs ({why}).") from None


def pack(folder: Path, schema: str) -> int:
    """Replace the record files of a folder by two tables, after a check that every record reads back unchanged."""
    files = sorted(folder.glob("*.json"))
    records = dict(read_packed(folder))
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
        back = read_tables(*written, *(path.stat().st_mtime_ns for path in written))
        wrong = [name for name, record in records.items() if not _same(back[name], record)]
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


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two records are equal, entry by entry, including number types."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def main() -> None:
    """Pack each folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of semdiag sweep --records")
    for folder in parser.parse_args().folders:
        print(f"{folder}: {pack(folder, SCHEMA)} runs")


if __name__ == "__main__":
    main()
