"""Write tables as CSV, so that a spreadsheet shows their texts and never runs them as formulas."""

from collections.abc import Callable

import pandas as pd

from semdiag_models.plain_text import csv_cell, from_csv_cell


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


def from_csv_table(table: pd.DataFrame) -> pd.DataFrame:
    """Undo :func:`csv_text` after pandas has read the file; escapes stay escapes.

    Args:
        table: from :func:`pandas.read_csv`.

    Example:
        >>> from_csv_table(pd.DataFrame({"model": ["'=1+1", "a"]}))["model"].tolist()
        ['=1+1', 'a']
    """
    return _with_texts(table, from_csv_cell)


def _with_texts(table: pd.DataFrame, change: Callable[[str], str]) -> pd.DataFrame:
    changed = table.copy(deep=False)
    for name in table:
        if not pd.api.types.is_numeric_dtype(table[name]):
            changed[name] = table[name].map(lambda value: change(value) if isinstance(value, str) else value)
    return changed
