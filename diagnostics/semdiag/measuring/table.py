"""Tables of measurements: name, columns and types, declared where they are measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from semdiag_models import InputError
from semdiag_models.reading import check_packed, open_file, require_memory

if TYPE_CHECKING:
    import pyarrow

_KINDS = {
    **dict.fromkeys(("int32", "int64", "Int64"), "int"),
    **dict.fromkeys(("float32", "float64"), "float"),
    "bool": "bool",
    "str": "text",
}
_READ_AS = {
    "text": ("text",),
    "bool": ("bool",),
    "int": ("int",),
    "float": ("float", "int"),
}  # kinds accepted for a declared one
_COUNT = 0, 2**31 - 1
_RANGES: dict[str, tuple[float, float]] = {  # for columns with the same meaning in every table
    **dict.fromkeys(
        ("sample", "query", "key", "keys", "kept", "load", "scores", "times", "draws", "drawn"), _COUNT
    ),
    **dict.fromkeys(("layer", "head"), (-1, 2**31 - 1)),
    **dict.fromkeys(("blocks", "heads", "length", "samples", "width"), (1, 2**31 - 1)),
    **dict.fromkeys(("attention_found", "attention_captured"), _COUNT),
    **dict.fromkeys(("dispersion", "residual", "residual_over_rounding", "rounding"), (0, float("inf"))),
    **dict.fromkeys(("accuracy", "share", "share_kept"), (0, 1)),
}
_OLD = int(pd.__version__.partition(".")[0]) < 3  # older pandas has no type for texts
ALL = -1  # as layer or head: the row is about all of them


@dataclass(frozen=True, eq=False)
class Table:
    """The declaration of a table."""

    name: str  # of the attribute of :class:`~semdiag.measuring.measurements.Measurements`, and of its file
    about: str  # what a row is, and the columns that need explanation, with units
    columns: Mapping[str, str]  # pandas types by name, of the kinds bool, int, float and text

    def __post_init__(self) -> None:
        unknown = set(self.columns.values()) - set(_KINDS)
        if unknown:
            raise ValueError(f"Columns must be of types {', '.join(_KINDS)}. Got {sorted(unknown)[0]}.")

    def empty(self) -> pd.DataFrame:
        """Return the table without rows."""
        return self.of_rows([])

    def of_rows(self, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
        """Return the table with these rows; entries that are no column are ignored."""
        listed = list(rows)
        table = pd.DataFrame({column: [row[column] for row in listed] for column in self.columns})
        return self._typed(table)

    def of_parts(self, parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
        """Return the concatenation of parts, without columns that are not declared; empty without parts."""
        listed = list(parts)
        if not listed:
            return self.empty()
        return self._typed(pd.concat(listed, ignore_index=True)[list(self.columns)])

    def _typed(self, table: pd.DataFrame) -> pd.DataFrame:
        with np.errstate(over="ignore"):  # in diverged models, float32 overflows to infinity
            return typed(table, self.columns)

    def check(self, table: pd.DataFrame, where: str) -> None:
        """Refuse a table from a file that lacks a column or has one of another type."""
        for column, wanted in self.columns.items():
            if column not in table:
                raise InputError(f"{where} lacks the column {column}. Measure again with this version of semdiag.")
            if len(table) and _kind(table[column]) not in _READ_AS[_KINDS[wanted]]:
                raise InputError(
                    f"{where} has {table[column].dtype} in the column {column}, which should be {wanted}."
                )
            if len(table):
                _check_values(column, wanted, table[column], where)


def typed(table: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """Return a table with the declared column types; missing texts stay missing."""
    if _OLD:
        table = table.astype({name: kind for name, kind in columns.items() if kind != "str"})
        texts = {name: table[name].astype(object) for name, kind in columns.items() if kind == "str"}
        return table.assign(**{name: text.where(text.isna(), text.map(str)) for name, text in texts.items()})
    return table.astype(dict(columns))


def column_types(table: pd.DataFrame) -> dict[str, str]:
    """Return the types of a table's columns by name, in declared form: texts are ``str`` in every pandas."""
    kinds = {str(name): str(kind) for name, kind in table.dtypes.items()}
    return {name: "str" if _OLD and kind == "object" else kind for name, kind in kinds.items()}


def _check_values(name: str, wanted: str, column: "pd.Series[Any]", where: str) -> None:
    """Refuse impossible values: a missing whole number, a count below 0, a share above 1."""
    if wanted in ("bool", "int32", "int64") and column.isna().any():
        raise InputError(f"{where} has no value in a row of the column {name}.")
    least, most = _RANGES.get(name, (None, None))
    if least is not None and ((column < least) | (column > most)).any():
        raise InputError(f"{where} holds a value of {name} that is not between {least} and {most}.")


def _kind(column: "pd.Series[Any]") -> str:
    """Return ``bool``, ``int``, ``float`` or ``text``, in any precision and with gaps; else pandas' name."""
    types = pd.api.types
    tests = {"bool": types.is_bool_dtype, "int": types.is_integer_dtype, "float": types.is_float_dtype}
    for kind, is_of in tests.items():
        if is_of(column.dtype):
            return kind
    if isinstance(column.dtype, pd.StringDtype):
        return "text"
    inferred = types.infer_dtype(column.astype(object), skipna=True)
    return "text" if inferred in ("string", "empty") else inferred  # before pandas 3, texts that are all missing


def rows_of(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return the rows of one model, without a copy if they are contiguous, as in joined measurements."""
    own = (table["model"] == model).to_numpy(bool)
    first, count = int(own.argmax()) if own.size else 0, int(own.sum())
    return table.iloc[first : first + count] if own[first : first + count].all() else table[own]


def read_parquet(path: Path) -> pd.DataFrame:
    """Read a table from a regular file."""
    import pyarrow as pa  # slow to import; not needed to measure one model
    import pyarrow.parquet as pq

    # Read from memory: on a damaged file, threads that wait for Python file reads would end the process.
    with open_file(path) as whole, pa.BufferReader(whole.read()) as file:
        opened = pq.ParquetFile(file)
        known = opened.metadata
        columns = [known.schema.column(c) for c in range(known.num_columns)]
        if any(map(pa.types.is_nested, opened.schema_arrow.types)):
            raise ValueError("It has columns of lists or structs.")  # one row could hold any number of values
        # Not .column(c): on damaged metadata of a chunk, it ends the process
        groups = [known.row_group(g) for g in range(known.num_row_groups)]
        rows = max(known.num_rows, sum(group.num_rows for group in groups))
        stored = sum(group.total_byte_size for group in groups)
        require_memory(16 * rows * known.num_columns, f"{path}, unpacked,")
        check_packed(path, stored, file.size())
        texts = sorted(column.path for column in columns if column.physical_type == "BYTE_ARRAY")
        file.seek(0)
        expanded = _characters(pq.read_table(file, columns=texts, read_dictionary=texts))
        check_packed(path, expanded, file.size())
        file.seek(0)
        try:
            return pd.read_parquet(file)
        except Exception as error:  # pandas' own metadata may say anything
            raise ValueError(f"pandas: {type(error).__name__} {error}") from None


def _characters(texts: "pyarrow.Table") -> int:
    """Return the bytes of texts when expanded: a file stores a text once, however often it is repeated."""
    import pyarrow as pa
    import pyarrow.compute as pc

    size = 0
    for chunk in (
        chunk for column in texts.columns for chunk in column.chunks if pa.types.is_dictionary(chunk.type)
    ):
        size += pc.sum(pc.take(pc.binary_length(chunk.dictionary), chunk.indices)).as_py() or 0
    return size
