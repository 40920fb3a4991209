"""Keep the rows of a training monitor, in memory and in a growing file."""

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from semdiag.capturing.pretrained import first_line
from semdiag.measuring.calls.monitor_faults import warn
from semdiag.measuring.calls.monitor_heads import head_columns, quantities_among
from semdiag.measuring.csv_tables import csv_text, from_csv_text
from semdiag.measuring.table import read_parquet
from semdiag_models import InputError
from semdiag_models.reading import open_file
from semdiag_models.run_lock import RunLock


class MonitorLog:
    """Rows that are added step by step: appended to a CSV file, or to a parquet file that is rewritten."""

    def __init__(self, path: Path | None, columns: list[str], first_step: int | None) -> None:
        self.path, self.columns = path, columns
        self._rows: list[dict[str, Any]] = []
        self._written = self._size = 0  # rows written, and bytes of the file since
        self._earlier = pd.DataFrame(columns=columns)
        self._lock: RunLock | None = None
        if path is None:
            return
        if path.suffix not in (".csv", ".parquet"):
            raise InputError(f"A monitor writes .csv or .parquet. Got {path}.")
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: there is no folder {path.parent}.")
        self.open()
        try:
            last = pd.to_numeric(self._earlier["step"], errors="coerce").max()
        except OverflowError as error:
            self._release()
            raise InputError(
                f"{path} cannot be continued (a step: {first_line(error)}). Name a new file."
            ) from None
        if first_step is not None and last >= first_step:
            warnings.warn(
                f"{path} goes up to step {last}, but this monitor starts at step {first_step}: steps may occur "
                "twice. Continue it with Monitor(…, first_step=…), or name a new file.",
                stacklevel=4,
            )

    def open(self) -> None:
        """Lock the file and read its rows; nothing happens if the log is already open."""
        if self.path is None or self._lock is not None:
            return
        with suppress(OSError, NotImplementedError):  # on file systems without locks
            self._lock = RunLock(self.path.parent, self.path.name)
        try:
            _check_writable(self.path)
            if self.path.exists():
                self._earlier = _read(self.path, self.columns)
                self._rows, self._written = self._rows[self._written :], 0
                self._size = self.path.stat().st_size
        except InputError:
            self._release()
            raise

    def close(self) -> None:
        """Write the remaining rows and unlock the file."""
        try:
            self.write()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def table(self) -> pd.DataFrame:
        """Return all rows, those of the continued file first."""
        own = pd.DataFrame(self._rows, columns=self.columns)
        if self._earlier.empty:
            return own
        return pd.concat([self._earlier, own], ignore_index=True) if len(own) else self._earlier.copy()

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Add rows, also to the file."""
        self._rows += rows
        self.write()

    def write(self) -> None:
        """Write the rows that are not in the file yet."""
        new = self._rows[self._written :]
        if self.path is None or not new:
            return
        if self.path.suffix == ".csv":
            if self._size and (not self.path.exists() or self.path.stat().st_size < self._size):
                warn(
                    f"{self.path} was removed or shortened during training: it goes on with step "
                    f"{new[0]['step']}. The monitor's table still holds the earlier rows.",
                    stacklevel=6,
                )
            _append(self.path, pd.DataFrame(new, columns=self.columns))
            self._size = self.path.stat().st_size
        else:
            unfinished = _unfinished(self.path)
            try:
                self.table().to_parquet(unfinished, index=False)
                unfinished.replace(self.path)
            finally:
                unfinished.unlink(missing_ok=True)
        self._written = len(self._rows)


def _check_writable(path: Path) -> None:
    target = path if path.suffix == ".csv" else _unfinished(path)
    new = not target.exists()
    try:
        target.open("ab").close()
        if new:
            target.unlink()
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.") from None


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


def _append(path: Path, table: pd.DataFrame) -> None:
    """Append lines to a CSV file, all or none."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            left = csv_text(table, header=end == 0).encode()
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(end)
            raise


def _read(path: Path, columns: list[str]) -> pd.DataFrame:
    torn = 0
    try:
        if path.suffix == ".csv":
            with open_file(path) as file:
                content = file.read()
            torn = len(content) - content.rfind(b"\n") - 1
            if torn == len(content) and ",".join(columns).encode().startswith(content):
                table = pd.DataFrame(columns=columns)  # not even the header is complete
            else:
                table = from_csv_text(content[: len(content) - torn])
        else:
            table = read_parquet(path)
    except (OSError, ValueError, OverflowError) as error:  # pandas 3.0 reads no whole number of 400 digits
        raise InputError(f"{path} cannot be continued ({first_line(error)}). Name a new file.") from None
    if list(table) != columns:
        raise InputError(
            f"{path} cannot be continued: its columns are {', '.join(map(str, table))[:200]}, "
            f"not {', '.join(columns)}. Name a new file."
        )
    if torn:
        os.truncate(path, path.stat().st_size - torn)
        warnings.warn(f"The last line of {path} was incomplete and is left out.", stacklevel=6)
    return table


def read_heads(path: Path) -> pd.DataFrame:
    """Read the table of heads of a monitor."""
    heads = path if path.stem.endswith("-heads") else path.with_name(f"{path.stem}-heads{path.suffix}")
    if heads.suffix not in (".csv", ".parquet"):
        raise InputError(f"A monitor writes .csv or .parquet. Got {path}.")
    if not heads.exists():
        raise InputError(f"{heads} does not exist: a Monitor with path=… writes it beside its table of layers.")
    try:
        if heads.suffix == ".csv":
            with open_file(heads) as file:
                table = from_csv_text(file.read())
        else:
            table = read_parquet(heads)
        if missing := [name for name in head_columns(()) if name not in table]:
            raise InputError(f"{heads} is not a monitor's table of heads: it lacks the column {missing[0]}.")
        places = ["step", "layer", "head", "occurrence"]
        numbers = [*places, *quantities_among(map(str, table))]
        table[numbers] = table[numbers].apply(pd.to_numeric)
        table["alarm"] = [alarm if isinstance(alarm, str) else "" for alarm in table["alarm"]]
        whole = dict.fromkeys(places, "int64") | dict.fromkeys(numbers[len(places) :], "float64")
        return table.dropna(subset=places).astype(whole)
    except InputError:
        raise
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{heads} cannot be read ({first_line(error)}).") from None
