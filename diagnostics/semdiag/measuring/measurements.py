"""Measurements: tidy tables, saved and loaded, from which everything else is derived."""

import json
from collections.abc import Collection, Iterable
from html import escape
from pathlib import Path
from typing import Any, Self, cast

import pandas as pd

from semdiag.capturing.pretrained import first_line
from semdiag.measuring.percentiles import percentile_rows
from semdiag.measuring.row_sample import SKETCHES
from semdiag.measuring.table import (
    CALLS,
    CORE,
    DEFAULTS,
    HEADS,
    REMARKS,
    SKIPPED,
    TABLES,
    Table,
    read_parquet,
    rows_of_model,
)  # fmt: skip
from semdiag.measuring.words import counted
from semdiag_files import MEBIBYTE, InputError, read_bytes, read_json
from semdiag_models import sha256

SUMS = "SHA256SUMS"


def write_sums(folder: Path, names: Collection[str]) -> None:
    """Write the SHA-256 of files to ``SHA256SUMS`` beside them; ``sha256sum -c`` can check it."""
    lines = [f"{sha256(folder / name)}  {name}\n" for name in sorted(names)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _recorded_sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that :func:`write_sums` recorded, by name; empty without its file."""
    if not (folder / SUMS).exists():
        return {}
    lines = read_bytes(folder / SUMS, MEBIBYTE).decode("utf-8", errors="replace").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _check_sums(folder: Path) -> None:
    """Refuse files that differ from those of :func:`write_sums`, or that it did not record."""
    recorded = _recorded_sums(folder)
    if not recorded:
        return
    needed = (*(f"{table}.parquet" for table in TABLES), "provenance.json")
    for name in sorted({*recorded, *needed, *(path.name for path in folder.glob("*.parquet"))}):
        there = Path(name).name == name and (folder / name).is_file()  # no file elsewhere is opened
        if not there or name not in recorded or sha256(folder / name) != recorded[name]:
            raise InputError(
                f"{folder / name} differs from what {SUMS} beside it recorded: it is damaged, missing or changed. "
                f"Restore it from a copy, or remove {SUMS} if the change is intended."
            )


EVERYWHERE = (CALLS, HEADS, REMARKS, SKIPPED, SKETCHES)  # further tables of every forward pass
_OF_EVERY_PASS = {table.name: table for table in EVERYWHERE}


class Measurements:
    """All measurements of one or several models.

    Every measured table is an attribute and has the column ``model`` (the path as the user named it). Layers,
    heads and positions count from 0; scores are in nats. ``measurements[TABLE]`` is a declared table, which has
    no rows if it was not measured.

    Args:
        models: one row per model: path, origin, task, attention, other settings, sizes, samples, drawn (queries
            per sample and head of the longest sequence; 0 for all), share (of the queries that were looked at),
            share_kept (of these, in the table of queries), accuracy, numbers of attention layers found and
            captured, residual. For an external model, unknown entries are missing, blocks are its attention
            layers, and attention is ``full``, ``causal`` or ``masked``.
        queries: one row per query: sample, layer, head, query, keys (n_i), kept (k_i), dispersion, separation
            (+inf if nothing is dropped), largest_weight; for models with hashes or clusters recall (of the k
            largest scores); and dispersion_kK, separation_kK, weight_kept_kK for each counterfactual K.
        loads: one row per key: sample, layer, head, key, load, load_kK, and the weight received, Σ_i p_ij.
        history: one row per epoch of each training run.
        non_finite: one row per sample, layer and head with scores that are NaN or infinite, and how many.
        provenance: versions, device, dtype, seed, command.
        tables: further tables by name.
    """

    models: pd.DataFrame
    queries: pd.DataFrame
    loads: pd.DataFrame
    history: pd.DataFrame
    non_finite: pd.DataFrame
    provenance: dict[str, Any]

    def __init__(
        self,
        models: pd.DataFrame,
        queries: pd.DataFrame,
        loads: pd.DataFrame,
        history: pd.DataFrame,
        non_finite: pd.DataFrame,
        provenance: dict[str, Any] | None = None,
        **tables: pd.DataFrame,
    ) -> None:
        self.models = models.assign(**{name: x for name, x in DEFAULTS.items() if name not in models})
        self.queries = queries
        self.loads = loads
        self.history = history
        self.non_finite = non_finite
        self.provenance = {} if provenance is None else provenance
        self._tables = tables

    def __getitem__(self, table: Table) -> pd.DataFrame:
        """Return a declared table, without rows if it was not measured."""
        if table.name in TABLES:
            return cast("pd.DataFrame", getattr(self, table.name))
        if table.name in self._tables:
            return self._tables[table.name]
        return table.empty()

    def __contains__(self, name: str) -> bool:
        """Return whether a table was measured and has rows."""
        return len(self._by_name().get(name, ())) > 0

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in self._tables:
            return self._tables[name]
        if name in _OF_EVERY_PASS:
            return _OF_EVERY_PASS[name].empty()
        raise AttributeError(
            f"These measurements have no table {name!r}. They have {', '.join(self._by_name())}; a probe like "
            "semdiag.k_sweep makes more."
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_OF_EVERY_PASS, *self._tables]

    def __repr__(self) -> str:
        measured = [
            f"{name} ({counted(len(table), 'row')})" for name, table in self._by_name().items() if len(table)
        ]
        return f"Measurements of {counted(len(self.models), 'model')}: {', '.join(measured)}"

    def _by_name(self) -> dict[str, pd.DataFrame]:
        """Return every table that was measured, with or without rows."""
        return {name: getattr(self, name) for name in TABLES} | self._tables

    def replace(self, provenance: dict[str, Any] | None = None, /, **tables: pd.DataFrame) -> Self:
        """Return these measurements with some tables, or the provenance, replaced or added."""
        kept_provenance = self.provenance if provenance is None else provenance
        return type(self)(**{**self._by_name(), **tables}, provenance=kept_provenance)

    @classmethod
    def concat(cls, parts: Iterable[Self]) -> Self:
        """Join measurements, with the provenance on which all agree; none, or a model twice, is an InputError."""
        parts = list(parts)
        if not parts:
            raise InputError("There are no measurements to join.")
        paths = [path for part in parts for path in part.models["model"]]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise InputError(f"{twice[0]} is named twice.")
        tables: dict[str, list[pd.DataFrame]] = {}
        for part in parts:
            for name, table in part._by_name().items():
                tables.setdefault(name, []).append(table)
        joined = {name: _joined(parts_of_table) for name, parts_of_table in tables.items()}
        return cls(**joined, provenance=_agreed([part.provenance for part in parts]))

    def save(self, folder: Path | str) -> None:
        """Write one parquet file per measured table, ``provenance.json``, and the ``SHA256SUMS`` of all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        recorded = _recorded_sums(folder)
        if {"models.parquet", "provenance.json"} <= recorded.keys():  # earlier measurements
            for name in recorded:
                (folder / Path(name).name).unlink(missing_ok=True)
        (folder / SUMS).unlink(missing_ok=True)
        files = ["provenance.json"]
        for name, table in self._by_name().items():
            if name in TABLES or len(table):
                files.append(f"{name}.parquet")
                table.to_parquet(folder / files[-1], index=False)
        (folder / "provenance.json").write_text(json.dumps(self.provenance, indent=1) + "\n", encoding="utf-8")
        write_sums(folder, files)

    @classmethod
    def load(cls, folder: Path | str, declared: Iterable[Table] = ()) -> Self:
        """Read what :meth:`save` wrote; files and columns that are missing, damaged or wrong are an InputError.

        declared: tables, beyond those of every forward pass, whose columns are checked.
        """
        folder = Path(folder)
        _check_sums(folder)
        recorded = _recorded_sums(folder) or [path.name for path in folder.glob("*.parquet")]
        files = {Path(name).stem: folder / name for name in sorted(recorded) if name.endswith(".parquet")}
        files |= {name: folder / f"{name}.parquet" for name in TABLES}  # a missing one is an error
        try:
            tables = {name: read_parquet(file) for name, file in files.items()}
            provenance = read_json(folder / "provenance.json")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{folder} does not hold saved measurements ({first_line(error)}). "
                "Make them with: semdiag report --keep-queries."
            ) from None
        for table in (*CORE, *EVERYWHERE, *declared):
            if table.name in tables:
                table.check(tables[table.name], str(files[table.name]))
        _check_together(folder, tables, provenance)
        return cls(**tables, provenance=provenance)

    def of(self, model: str) -> Self:
        """Return the measurements of one model, a value of the column ``model``."""
        of_model = {name: rows_of_model(table, model) for name, table in self._by_name().items()}
        return type(self)(**of_model, provenance=self.provenance)

    def _repr_html_(self) -> str:
        columns = ["layer", "head", "queries", "mean", "p50", "p95", "p100"]
        text = ""
        for row in self.models.itertuples():
            rows = self.queries[self.queries["model"] == row.model]
            table = percentile_rows(rows, "dispersion", "layer", "head").sort_values(["layer", "head"])
            text += f"<p>{escape(f'Semantic dispersion (nats), {row.task} {row.attention}: {row.model}')}</p>"
            text += table[columns].to_html(index=False, float_format="{:.3g}".format)
        return text


def _joined(parts: list[pd.DataFrame]) -> pd.DataFrame:
    """Join the parts of a table that have rows."""
    with_rows = [part for part in parts if len(part)] or parts[:1]
    return pd.concat(with_rows, ignore_index=True)


def _agreed(provenances: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entries on which all agree."""
    first, *later = provenances
    return {name: x for name, x in first.items() if all(name in each and each[name] == x for each in later)}


def _check_together(folder: Path, tables: dict[str, pd.DataFrame], provenance: Any) -> None:
    models = tables["models"]["model"]
    if not isinstance(provenance, dict):
        raise InputError(f"{folder / 'provenance.json'} must hold a JSON object.")
    if not len(models) or models.isna().any() or models.duplicated().any():
        raise InputError(f"{folder / 'models.parquet'} must list every model once, and at least one.")
    for name, table in tables.items():
        if "model" not in table:
            raise InputError(f"{folder / name}.parquet is no table of measurements: it lacks the column model.")
        if not table["model"].isin(models).all():
            raise InputError(f"{folder / name}.parquet names a model that models.parquet does not list.")
