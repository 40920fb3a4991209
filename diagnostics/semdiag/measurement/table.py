"""What a table of measurements is: its name, columns and their types, declared where it is measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from semdiag_models import InputError


@dataclass(frozen=True, eq=False)
class Table:
    """A table, and what its columns hold.

    Attributes:
        name: under which it stands in :class:`~semdiag.measurement.measurements.Measurements`, and of its file.
        about: what a row is, and the columns that do not explain themselves, with units.
        columns: pandas types by name; scores are in nats, layers, heads and positions count from 0.
    """

    name: str
    about: str
    columns: Mapping[str, str]

    def empty(self) -> pd.DataFrame:
        """The table without rows."""
        return self.of_rows([])

    def of_rows(self, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
        """The table with rows that have its columns.

        Args:
            rows: dictionaries; further entries are left out.
        """
        listed = list(rows)
        table = pd.DataFrame({column: [row[column] for row in listed] for column in self.columns})
        return table.astype(dict(self.columns))

    def of_parts(self, parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
        """The table of parts that have its columns, one below the other.

        Args:
            parts: data frames; further columns are left out. None: the empty table.
        """
        listed = list(parts)
        if not listed:
            return self.empty()
        return pd.concat(listed, ignore_index=True)[list(self.columns)].astype(dict(self.columns))

    def check(self, table: pd.DataFrame, where: str) -> None:
        """Refuse a table read from a file that lacks a column or has one of another kind.

        Args:
            table: as read.
            where: the file, for the message.

        Raises:
            InputError: naming the first such column.
        """
        for column, wanted in self.columns.items():
            if column not in table:
                raise InputError(f"{where} lacks the column {column}. Measure again with this version of semdiag.")
            found = table[column].dtype
            if len(table) and _kind(pd.Series(dtype=wanted).dtype) != _kind(found):
                raise InputError(f"{where} holds {found} in the column {column}, where {wanted} belongs.")


def _kind(dtype: Any) -> str:
    """Numbers of any precision are of one kind, so that older files are read."""
    if pd.api.types.is_bool_dtype(dtype):
        return "bool"
    return "number" if pd.api.types.is_numeric_dtype(dtype) else "text"
