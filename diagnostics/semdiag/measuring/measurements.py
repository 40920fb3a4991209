"""Measurements: tidy tables, saved and loaded, from which everything else is derived."""

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from semdiag.measuring.checksums import SUMS, check_sums, write_sums
from semdiag.measuring.counted import counted
from semdiag.measuring.percentiles import layer_table
from semdiag.measuring.schema import optional_tables
from semdiag.measuring.table import read_parquet, rows_of
from semdiag.measuring.tables import CORE, DEFAULTS, GONE, LATER, SHARES, TABLES
from semdiag_models import InputError
from semdiag_models.reading import read_json


class Measurements:
    """Everything measured on one or several models.

    Every table is an attribute and has the column ``model`` (the path as the user named it). Layers, heads and
    positions count from 0; scores are in nats. The first five tables always exist; the others, described in
    :func:`~semdiag.measuring.schema.optional_tables`, are empty if they were not measured.

    Args:
        models: one row per model: path, sha256, weights_sha256, source, snapshot, task, attention, k,
            global_tokens, norm, pooling, setting (other deviations from the defaults), seed, epoch, blocks, heads,
            length, parameters, samples, drawn (queries per sample and head of the longest sequence; 0 for all),
            share (of the queries that were looked at), share_kept (of these, in the table of queries), inputs,
            accuracy, number of attention layers found and captured, residual. For an external model, unknown
            entries are missing, blocks are its attention layers, and attention is ``full``, ``causal`` or
            ``masked``.
        queries: one row per query: sample, layer, head, query, keys (n_i), kept (k_i), dispersion,
            separation (+inf if nothing is dropped), largest_weight (of its attention weights); for models with
            hashes or clusters recall (of the k largest scores); and dispersion_kK, separation_kK, mass_kK (share
            of the weight on the K largest) for each counterfactual K.
        loads: one row per key: sample, layer, head, key, load, and load_kK.
        history: one row per epoch of each training run.
        non_finite: one row per sample, layer and head with scores that are NaN or infinite, and how many.
        provenance: versions, device, dtype, seed, command.
        tables: further ones by name; omitted ones are empty.

    Raises:
        TypeError: if a table has an unknown name.
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
        unknown = [name for name in tables if name not in optional_tables()]
        if unknown:
            raise TypeError(
                f"Tables of measurements are {', '.join([*TABLES, *optional_tables()])}. Got {unknown[0]!r}."
            )
        missing = {name: value for name, value in DEFAULTS.items() if name not in models}
        self.models = models.assign(**missing) if missing else models
        self.queries, self.loads, self.history, self.non_finite = queries, loads, history, non_finite
        self.provenance = {} if provenance is None else provenance
        self._tables = tables

    def __getattr__(self, name: str) -> pd.DataFrame:
        """Return an optional table, empty if it was not measured."""
        if name.startswith("_") or name not in optional_tables():
            raise AttributeError(f"{type(self).__name__} has no table {name!r}")
        if name not in self._tables:
            self._tables[name] = optional_tables()[name].empty()
        return self._tables[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *optional_tables()]

    def __repr__(self) -> str:
        tables = {name: getattr(self, name) for name in (*TABLES, *optional_tables())}
        measured = [f"{name} ({len(table):,} rows)" for name, table in tables.items() if len(table)]
        some = counted(len(self.models), "model")
        return f"Measurements of {some}: {', '.join(measured)}"

    def replace(self, provenance: dict[str, Any] | None = None, /, **tables: pd.DataFrame) -> Self:
        """Return these measurements with some tables replaced or added.

        Args:
            provenance: replaces the current one; None keeps it.
            tables: by name.
        """
        known = {name: getattr(self, name) for name in TABLES} | self._tables | tables
        return type(self)(**known, provenance=self.provenance if provenance is None else provenance)

    @classmethod
    def concat(cls, parts: Iterable[Self]) -> Self:
        """Join the measurements of several models.

        Args:
            parts: at least one.

        Returns:
            Their tables concatenated, with the entries of the provenance on which they agree.

        Raises:
            InputError: if there is none, or two have a model with the same path.
        """
        parts = list(parts)
        if not parts:
            raise InputError("There are no measurements to join.")
        paths = [path for part in parts for path in part.models["model"]]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise InputError(f"{twice[0]} is named twice.")
        tables = {name: _joined([getattr(part, name) for part in parts]) for name in (*TABLES, *optional_tables())}
        first, *others = (part.provenance for part in parts)
        shared = {
            name: value
            for name, value in first.items()
            if all(name in other and other[name] == value for other in others)
        }
        return cls(**tables, provenance=shared)

    def save(self, folder: Path | str) -> None:
        """Write one parquet file per measured table, ``provenance.json``, and the ``SHA256SUMS`` of all.

        Args:
            folder: made if absent.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMS).unlink(missing_ok=True)
        for name in GONE:
            (folder / f"{name}.parquet").unlink(missing_ok=True)
        for name in (*TABLES, *optional_tables()):
            file, table = folder / f"{name}.parquet", getattr(self, name)
            if name not in TABLES and table.empty:
                file.unlink(missing_ok=True)
            else:
                table.to_parquet(file, index=False)
        (folder / "provenance.json").write_text(json.dumps(self.provenance, indent=1) + "\n", encoding="utf-8")
        write_sums(folder, _files(folder))

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read what :meth:`save` wrote.

        Args:
            folder: a folder written by :meth:`save`.

        Returns:
            The measurements.

        Raises:
            InputError: if a file is missing or damaged (differs from ``SHA256SUMS``, if present), or a column is
                missing or has another type.
        """
        folder = Path(folder)
        check_sums(folder, _files(folder))
        try:
            tables = {name: read_parquet(folder / f"{name}.parquet") for name in TABLES}
            for name in optional_tables():
                file = folder / f"{name}.parquet"
                tables[name] = read_parquet(file) if file.exists() else optional_tables()[name].empty()
            provenance = read_json(folder / "provenance.json")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{folder} does not hold saved measurements ({str(error).splitlines()[0]}). "
                "Make them with: semdiag report --keep-queries."
            ) from None
        for name, columns in LATER.items():
            absent = {column: value for column, value in columns.items() if column not in tables[name]}
            tables[name] = tables[name].assign(**absent)
        for table in (*CORE, *optional_tables().values()):
            table.check(tables[table.name], str(folder / f"{table.name}.parquet"))
        _check_together(folder, tables, provenance)
        tables["models"] = _with_shares(tables, provenance, str(folder / "models.parquet"))
        return cls(**tables, provenance=provenance)

    def of(self, model: str) -> Self:
        """Return the measurements of one model.

        Args:
            model: a value of the column ``model``.
        """
        tables = {name: getattr(self, name) for name in (*TABLES, *optional_tables())}
        own = {name: rows_of(table, model) for name, table in tables.items()}
        return type(self)(**own, provenance=self.provenance)

    def _repr_html_(self) -> str:
        columns = ["layer", "head", "queries", "mean", "p50", "p95", "p100"]
        parts = []
        for row in self.models.itertuples():
            table = layer_table(self.queries[self.queries["model"] == row.model], "dispersion")
            title = f"Semantic dispersion (nats), {row.task} {row.attention}: {row.model}"
            parts.append(
                f"<p>{escape(title)}</p>{table[columns].to_html(index=False, float_format='{:.3g}'.format)}"
            )
        return "".join(parts)


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    filled = [table for table in tables if len(table)] or tables[:1]
    return pd.concat(filled, ignore_index=True)


def _files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that a version of :meth:`Measurements.save` wrote."""
    names = (*(f"{name}.parquet" for name in (*TABLES, *optional_tables(), *GONE)), "provenance.json")
    return [name for name in names if (folder / name).exists()]


def _with_shares(tables: dict[str, pd.DataFrame], provenance: dict[str, Any], where: str) -> pd.DataFrame:
    """Return the models with all of their shares."""
    models = tables["models"]
    missing = {name: DEFAULTS[name] for name in SHARES.columns if name not in models}
    filled = models.assign(**missing)
    SHARES.check(filled, where)
    if "share_kept" not in missing:
        return filled
    if "queries" in provenance:
        return filled.assign(drawn=np.where(filled["share"] < 1, provenance["queries"], 0))
    return filled.assign(share=1.0, share_kept=filled["share"])


def _check_together(folder: Path, tables: dict[str, pd.DataFrame], provenance: Any) -> None:
    """Refuse tables that contradict each other."""
    models = tables["models"]["model"]
    if not isinstance(provenance, dict):
        raise InputError(f"{folder / 'provenance.json'} must hold a JSON object.")
    if not len(models) or models.isna().any() or models.duplicated().any():
        raise InputError(f"{folder / 'models.parquet'} must list every model once, and at least one.")
    for name, table in tables.items():
        if not table["model"].isin(models).all():
            raise InputError(f"{folder / name}.parquet names a model that models.parquet does not list.")
