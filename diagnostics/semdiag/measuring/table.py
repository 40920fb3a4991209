"""Declared tables: columns, types and ranges, the tables of every forward pass, and their files."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from semdiag_files import InputError, check_packed, csv_cell, from_csv_cell, open_file, require_memory

if TYPE_CHECKING:
    import pyarrow

_KINDS = dict.fromkeys(("int32", "int64", "Int64"), "int") | dict.fromkeys(("float32", "float64"), "float")
_KINDS |= {"bool": "bool", "str": "text"}
_COUNT = 0, 2**31 - 1
_RANGES: dict[str, tuple[float, float]] = {  # ranges of columns with the same meaning in every table
    **dict.fromkeys(("sample", "query", "key", "keys", "kept", "load", "scores", "times", "draws"), _COUNT),
    **dict.fromkeys(("drawn", "attention_found", "attention_captured", "length"), _COUNT),  # length 0: not cut
    **dict.fromkeys(("layer", "head"), (-1, 2**31 - 1)),
    **dict.fromkeys(("blocks", "heads", "samples", "width"), (1, 2**31 - 1)),
    **dict.fromkeys(("dispersion", "residual", "residual_over_rounding", "rounding"), (0, float("inf"))),
    **dict.fromkeys(("accuracy", "share", "share_kept"), (0, 1)),
}
_OLD = int(pd.__version__.partition(".")[0]) < 3  # older pandas has no type for texts
ALL = -1  # layer or head of a row about all of them


@dataclass(frozen=True, eq=False)
class Table:
    """The declaration of a table."""

    name: str  # name of the attribute of :class:`~semdiag.measuring.measurements.Measurements`, and of the file
    about: str  # meaning of a row, and of columns that need explanation, with units
    columns: Mapping[str, str]  # pandas types by name, of the kinds bool, int, float and text

    def empty(self) -> pd.DataFrame:
        """Return the table without rows."""
        return self.of_rows([])

    def of_rows(self, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
        """Return the table with these rows; ignore entries that are no column."""
        listed = list(rows)
        return typed(pd.DataFrame({name: [row[name] for row in listed] for name in self.columns}), self.columns)

    def of_parts(self, parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
        """Return the concatenation of parts, without undeclared columns; empty without parts."""
        listed = list(parts)
        if not listed:
            return self.empty()
        return typed(pd.concat(listed, ignore_index=True)[list(self.columns)], self.columns)

    def check(self, table: pd.DataFrame, where: str) -> None:
        """Refuse a table from a file that lacks a column or has one of another type."""
        for column, declared in self.columns.items():
            if column not in table:
                raise InputError(f"{where} lacks the column {column}. Measure again with this version of semdiag.")
            if not len(table):
                continue
            kind = _KINDS[declared]
            if _kind(table[column]) not in (kind, "int" if kind == "float" else kind):
                raise InputError(
                    f"{where} has {table[column].dtype} in the column {column}, which should be {declared}."
                )
            _check_values(column, declared, table[column], where)


def columns_of(text: str) -> dict[str, str]:
    """Read ``"model str; layer head int32"``: the types of columns by name."""
    groups = (group.split() for group in text.split(";"))
    return {name: kind for *names, kind in groups for name in names}


@np.errstate(over="ignore")  # in diverged models, float32 overflows to infinity
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


def _check_values(name: str, declared: str, column: "pd.Series[Any]", where: str) -> None:
    if declared in ("bool", "int32", "int64") and column.isna().any():
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


def rows_of_model(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return the rows of one model, without a copy if they are contiguous, as in joined measurements."""
    of_model = (table["model"] == model).to_numpy(bool)
    first = int(of_model.argmax()) if of_model.size else 0
    count = int(of_model.sum())
    return table.iloc[first : first + count] if of_model[first : first + count].all() else table[of_model]


def read_parquet(path: Path) -> pd.DataFrame:
    """Read a table from a regular file."""
    import pyarrow as pa  # slow to import; not needed to measure one model
    import pyarrow.parquet as pq

    # Read from memory: on a damaged file, threads that wait for Python file reads would end the process.
    with open_file(path) as stored_file, pa.BufferReader(stored_file.read()) as file:
        opened = pq.ParquetFile(file)
        metadata = opened.metadata
        columns = [metadata.schema.column(c) for c in range(metadata.num_columns)]
        _check_columns(metadata.num_columns)
        if any(map(pa.types.is_nested, opened.schema_arrow.types)):
            raise ValueError("It has columns of lists or structs.")  # one row could hold any number of values
        # Not .column(c): on damaged metadata of a chunk, it ends the process
        groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
        rows = max(metadata.num_rows, sum(group.num_rows for group in groups))
        stored = sum(group.total_byte_size for group in groups)
        require_memory(16 * rows * metadata.num_columns, f"{path}, unpacked,")
        check_packed(path, stored, file.size())
        texts = sorted(column.path for column in columns if column.physical_type == "BYTE_ARRAY")
        file.seek(0)
        expanded = _characters(pq.read_table(file, columns=texts, read_dictionary=texts))
        check_packed(path, expanded, file.size())
        file.seek(0)
        try:
            return pd.read_parquet(file)
        except Exception as error:  # pandas' own metadata may hold anything
            raise ValueError(f"pandas: {type(error).__name__} {' '.join(str(error).split())}") from None


def _characters(texts: "pyarrow.Table") -> int:
    """Return the bytes of texts when expanded: a file stores a text once, however often it is repeated."""
    import pyarrow as pa
    import pyarrow.compute as pc

    chunks = (x for column in texts.columns for x in column.chunks if pa.types.is_dictionary(x.type))
    return sum(pc.sum(pc.take(pc.binary_length(x.dictionary), x.indices)).as_py() or 0 for x in chunks)


_PLACE = columns_of("model str; sample layer head int32")
# Tables of every measurement, with their required columns.
CORE = (
    Table(
        "models",
        "One row per model.",
        columns_of(
            "model sha256 source snapshot task attention inputs str; k seed epoch width Int64; blocks heads "
            "length parameters samples drawn attention_found attention_captured int64; "
            "accuracy residual share share_kept float64"
        ),
    ),
    Table(
        "queries",
        "One row per query.",
        _PLACE | columns_of("query keys kept int32; dispersion separation float32"),
    ),
    Table("loads", "One row per key.", _PLACE | columns_of("key load int32")),
    Table("history", "One row per epoch of each training run.", columns_of("model str; epoch float64")),
    Table(
        "non_finite",
        "One row per sample, layer and head with scores that are not finite.",
        _PLACE | columns_of("scores int64"),
    ),
)
TABLES = tuple(table.name for table in CORE)
# Values of columns of ``models`` that models of other kinds lack.
DEFAULTS: dict[str, Any] = {
    "global_tokens": 0, "weights_sha256": "", "norm": "pre", "pooling": "mean", "setting": "usual",
    "drawn": 0, "share": 1.0, "share_kept": 1.0, "residual_over_rounding": math.nan, "rounding": math.nan,
}  # fmt: skip
RESIDUALS = "residual", "residual_over_rounding", "rounding"
CALLS = Table(
    "calls",
    (
        "One row per attention layer (a module, and which of its calls in a forward pass): how it was captured, "
        "its mask, heads, number of calls and largest residual, relative to the largest output and in units of "
        "the possible effect of rounding, which itself is relative to the largest output."
    ),
    # the width is unknown where the scores alone are known
    columns_of(
        "model str; layer int64; module str; occurrence int64; mechanism mask str; heads key_heads int64; width "
        "Int64; calls int64; residual residual_over_rounding rounding float64"
    ),
)
HEADS = Table(
    "heads",
    (
        "One row per head of a layer, means over its queries: entropy of the attention weights (nats; a learned "
        "sink included), and the weight on the first key that is not padding. Further, shares of the queries: "
        "keeps_first, that keep this key; keeps_first_kK, that have it among their K largest scores."
    ),
    columns_of("model str; layer head queries int64; entropy first_weight float64"),
)
REMARKS = Table(
    "remarks",
    (
        "One row per remark on captured attention, such as a mask that adds -10,000. code: its kind; severity: "
        "warning if it invalidates an answer or concerns the user's request, else note."
    ),
    columns_of("model module text code severity str; times int64"),
)
# A remark on models whose mask separates the tokens that decide the label.
OUT_OF_REACH_CODE = "out-of-reach"
OUT_OF_REACH = (
    "with this mask, no weights can be right on every input of the task: pooling and head are additive, and no "
    "output sees all the tokens that together decide the label"
)
SKIPPED = Table(
    "skipped",
    "One row per operation that looks like attention but was not captured, with the reason.",
    columns_of("model module operation reason str; times int64"),
)

_MOST_COLUMNS = 10_000


def csv_text(table: pd.DataFrame, header: bool = True) -> str:
    """Return a table as CSV text; see :func:`~semdiag_files.csv_cell`."""
    return _with_texts(table, csv_cell).to_csv(index=False, header=header, lineterminator="\n")


def from_csv_text(content: bytes) -> pd.DataFrame:
    r"""Undo :func:`csv_text`; escapes stay escapes."""
    _check_columns(1 + max(line.count(b",") for line in content.splitlines() or [b""]))
    return _with_texts(pd.read_csv(BytesIO(content)), from_csv_cell)


def _check_columns(columns: int) -> None:
    if columns > _MOST_COLUMNS:
        raise ValueError(f"a line has {columns:,} cells; a table has up to {_MOST_COLUMNS:,} columns")


def _with_texts(table: pd.DataFrame, change: Callable[[str], str]) -> pd.DataFrame:
    changed = table.copy(deep=False)
    for name in table:
        if not pd.api.types.is_numeric_dtype(table[name]):
            changed[name] = table[name].map(lambda value: change(value) if isinstance(value, str) else value)
    return changed
