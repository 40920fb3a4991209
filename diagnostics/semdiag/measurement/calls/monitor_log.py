"""The rows of a training monitor, in memory and in a file that grows with them."""

from pathlib import Path
from typing import Any

import pandas as pd

from semdiag_models import InputError


class MonitorLog:
    """Rows that are added step by step, to a CSV file line by line or to a parquet file that is replaced.

    Args:
        path: ``.csv`` or ``.parquet``; None keeps the rows in memory only.
        columns: names of the columns.

    Raises:
        InputError: if the ending is another one, the folder does not exist, or the file has other columns.
    """

    def __init__(self, path: Path | None, columns: list[str]) -> None:
        self.path, self.columns = path, columns
        self._rows: list[dict[str, Any]] = []
        self._earlier = pd.DataFrame(columns=columns)
        if path is None:
            return
        if path.suffix not in (".csv", ".parquet"):
            raise InputError(f"A monitor writes .csv or .parquet. Got {path}.")
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: there is no folder {path.parent}.")
        if path.exists():
            self._earlier = _read(path, columns)

    def table(self) -> pd.DataFrame:
        """Return all rows, those of the continued file first."""
        own = pd.DataFrame(self._rows, columns=self.columns)
        if self._earlier.empty:
            return own
        return pd.concat([self._earlier, own], ignore_index=True) if len(own) else self._earlier.copy()

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Add rows, to the file too.

        Args:
            rows: a value or None for every column.
        """
        self._rows += rows
        if self.path is None or not rows:
            return
        if self.path.suffix == ".csv":
            new = pd.DataFrame(rows, columns=self.columns)
            new.to_csv(self.path, mode="a", index=False, header=not self.path.exists())
        else:
            unfinished = self.path.with_name(f".{self.path.name}.unfinished")
            self.table().to_parquet(unfinished, index=False)
            unfinished.replace(self.path)


def _read(path: Path, columns: list[str]) -> pd.DataFrame:
    try:
        table = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be continued ({str(error).splitlines()[0]}). Name a new file.") from None
    if list(table) != columns:
        raise InputError(
            f"{path} cannot be continued: its columns are {', '.join(map(str, table))}, "
            f"not {', '.join(columns)}. Name a new file."
        )
    return table
