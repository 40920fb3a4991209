"""Declared tables: columns, types and ranges, the tables of every forward pass, and their files."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from semdiag_models import InputError
from semdiag_models.reading import check_packed, csv_cell, from_csv_cell, open_file, require_memory

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
}  # kinds accepted for a declared kind
_COUNT = 0, 2**31 - 1
_RANGES: dict[str, tuple[float, float]] = {  # ranges of columns with the same meaning in every table
    **dict.fromkeys(
        ("sample", "query", "key", "keys", "kept", "load", "scores", "times", "draws", "drawn"), _COUNT
    ),
    **dict.fromkeys(("layer", "head"), (-1, 2**31 - 1)),
    **dict.fromkeys(("blocks", "heads", "samples", "width"), (1, 2**31 - 1)),
    "length": _COUNT,  # 0: inputs that --lengths did not cut
    **dict.fromkeys(("attention_found", "attention_captured"), _COUNT),
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

    def __post_init__(self) -> None:
        unknown = set(self.columns.values()) - set(_KINDS)
        if unknown:
            raise ValueError(f"Columns must be of types {', '.join(_KINDS)}. Got {sorted(unknown)[0]}.")

    def empty(self) -> pd.DataFrame:
        """Return the table without rows."""
        return self._without_rows.copy()

    @cached_property
    def _without_rows(self) -> pd.DataFrame:
        return self.of_rows([])

    def of_rows(self, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
        """Return the table with these rows; ignore entries that are no column."""
        listed = list(rows)
        table = pd.DataFrame({column: [row[column] for row in listed] for column in self.columns})
        return self._typed(table)

    def of_parts(self, parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
        """Return the concatenation of parts, without undeclared columns; empty without parts."""
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


def columns_of(text: str) -> dict[str, str]:
    """Read ``"model str; layer head int32"``: the types of columns by name."""
    groups = (group.split() for group in text.split(";"))
    return {name: kind for *names, kind in groups for name in names}


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


# Names that the version before wrote, as regular expressions, and their new names.
_OLDER = {r"mass(_k\d+|_without_first)?": r"weight_kept\1", r"first_key(_k\d+)?": r"keeps_first\1"}


def with_new_names(table: pd.DataFrame, older: Mapping[str, str] = _OLDER) -> pd.DataFrame:
    """Return a table with the new names of columns and quantities that the version before wrote."""
    for name, new in older.items():
        table = table.set_axis([re.sub(f"^{name}$", new, str(column)) for column in table], axis=1)
        if "quantity" in table:
            table = table.assign(quantity=table["quantity"].replace(f"^{name}$", new, regex=True))
    return table


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
        except Exception as error:  # pandas' own metadata may hold anything
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


_PLACE = {"model": "str", **dict.fromkeys(("sample", "layer", "head"), "int32")}
# Tables of every measurement, with their required columns.
CORE = (
    Table(
        "models",
        "One row per model.",
        {
            **dict.fromkeys(("model", "sha256", "source", "snapshot", "task", "attention", "inputs"), "str"),
            **dict.fromkeys(("k", "seed", "epoch", "width"), "Int64"),
            **dict.fromkeys(("blocks", "heads", "length", "parameters", "samples"), "int64"),
            **dict.fromkeys(("attention_found", "attention_captured"), "int64"),
            **dict.fromkeys(("accuracy", "residual"), "float64"),
        },
    ),
    Table(
        "queries",
        "One row per query.",
        {
            **_PLACE,
            **dict.fromkeys(("query", "keys", "kept"), "int32"),
            **dict.fromkeys(("dispersion", "separation"), "float32"),
        },
    ),
    Table("loads", "One row per key.", {**_PLACE, "key": "int32", "load": "int32"}),
    Table("history", "One row per epoch of each training run.", {"model": "str", "epoch": "float64"}),
    Table(
        "non_finite",
        "One row per sample, layer and head with scores that are not finite.",
        {**_PLACE, "scores": "int64"},
    ),
)
TABLES = tuple(table.name for table in CORE)
# Values of columns of ``models`` that older folders and models of other kinds lack.
DEFAULTS: dict[str, Any] = {
    "global_tokens": 0, "weights_sha256": "", "norm": "pre", "pooling": "mean", "setting": "usual",
    "drawn": 0, "share": 1.0, "share_kept": 1.0, "residual_over_rounding": math.nan, "rounding": math.nan,
}  # fmt: skip
# Values of columns of other tables that older folders lack.
LATER: dict[str, dict[str, Any]] = {
    "remarks": {"code": "", "severity": "note"},
    "rerun": {"kept": math.nan, "keys": math.nan},
    "calls": {"residual_over_rounding": math.nan, "rounding": math.nan},
}
GONE = ("along", "predictors", "lengths", "end_points", "rerun_quarters")  # older folders' tables, unread
# Those of them that enter calculations.
SHARES = Table("models", "One row per model.", {"drawn": "int64", "share": "float64", "share_kept": "float64"})
RESIDUALS = "residual", "residual_over_rounding", "rounding"
CALLS = Table(
    "calls",
    (
        "One row per attention layer (a module, and which of its calls in a forward pass): how it was captured, "
        "its mask, heads, number of calls and largest residual, relative to the largest output and in units of "
        "the possible effect of rounding, which itself is relative to the largest output."
    ),
    {
        "model": "str",
        "layer": "int64",
        "module": "str",
        "occurrence": "int64",
        **dict.fromkeys(("mechanism", "mask"), "str"),
        **dict.fromkeys(("heads", "key_heads"), "int64"),
        "width": "Int64",  # unknown where the scores alone are known
        "calls": "int64",
        **dict.fromkeys(RESIDUALS, "float64"),
    },
)
HEADS = Table(
    "heads",
    (
        "One row per head of a layer, means over its queries: entropy of the attention weights (nats; a learned "
        "sink included), and the weight on the first key that is not padding. Further, shares of the queries: "
        "keeps_first, that keep this key; keeps_first_kK, that have it among their K largest scores."
    ),
    {
        "model": "str",
        **dict.fromkeys(("layer", "head", "queries"), "int64"),
        **dict.fromkeys(("entropy", "first_weight"), "float64"),
    },
)
REMARKS = Table(
    "remarks",
    (
        "One row per remark on captured attention, such as a mask that adds -10,000. code: its kind; severity: "
        "warning if it invalidates an answer or concerns the user's request, else note."
    ),
    {**dict.fromkeys(("model", "module", "text", "code", "severity"), "str"), "times": "int64"},
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
    {**dict.fromkeys(("model", "module", "operation", "reason"), "str"), "times": "int64"},
)

_MOST_COLUMNS = 10_000


def csv_text(table: pd.DataFrame, header: bool = True) -> str:
    """Return a table as CSV text; see :func:`~semdiag_models.reading.csv_cell`."""
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
