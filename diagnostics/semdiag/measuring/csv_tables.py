"""Write tables as CSV, so that a spreadsheet shows their texts and never runs them as formulas."""

from collections.abc import Callable
from io import BytesIO

import pandas as pd

from semdiag_models.plain_text import csv_cell, from_csv_cell

_MOST_COLUMNS = 10_000


def csv_text(table: pd.DataFrame, header: bool = True) -> str:
    """Return a table as CSV text; see :func:`~semdiag_models.plain_text.csv_cell`."""
    return _with_texts(table, csv_cell).to_csv(index=False, header=header, lineterminator="\n")


def from_csv_text(content: bytes) -> pd.DataFrame:
    r"""Undo :func:`csv_text`; escapes stay escapes."""
    cells = 1 + max(line.count(b",") for line in content.splitlines() or [b""])
    if cells > _MOST_COLUMNS:
        raise ValueError(f"a line has {cells:,} cells; a table has up to {_MOST_COLUMNS:,} columns")
    return _with_texts(pd.read_csv(BytesIO(content)), from_csv_cell)


def _with_texts(table: pd.DataFrame, change: Callable[[str], str]) -> pd.DataFrame:
    changed = table.copy(deep=False)
    for name in table:
        if not pd.api.types.is_numeric_dtype(table[name]):
            changed[name] = table[name].map(lambda value: change(value) if isinstance(value, str) else value)
    return changed
