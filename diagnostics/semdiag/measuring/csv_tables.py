"""Write tables as CSV, so that a spreadsheet shows their texts and never runs them as formulas."""

from collections.abc import Callable
from io import BytesIO

import pandas as pd

from semdiag_models.plain_text import csv_cell, from_csv_cell

_MOST_COLUMNS = 10_000


def csv_text(table: pd.DataFrame, header: bool = True) -> str:
    """Return a table as CSV text; see :func:`~semdiag_models.plain_text.csv_cell`.

    Args:
        table: any; numbers are written unchanged, including infinite and negative ones.
        header: whether to write the columns' names first.

    Example:
        >>> print(csv_text(pd.DataFrame({"model": ["=1+1", "-0.5"], "size": [-1.5, float("-inf")]})), end="")
        model,size
        '=1+1,-1.5
        -0.5,-inf
    """
    return _with_texts(table, csv_cell).to_csv(index=False, header=header, lineterminator="\n")


def from_csv_text(content: bytes) -> pd.DataFrame:
    r"""Undo :func:`csv_text`; escapes stay escapes.

    Args:
        content: of the file.

    Raises:
        ValueError: if it is damaged, or a line has far more cells than any table's.

    Example:
        >>> from_csv_text(b"model\n'=1+1\na\n")["model"].tolist()
        ['=1+1', 'a']
    """
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
