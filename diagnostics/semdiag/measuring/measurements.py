"""Measurements: tidy tables, saved and loaded, from which everything else is derived."""

import json
from collections.abc import Collection, Iterable
from html import escape
from pathlib import Path
from typing import Any, Self

import pandas as pd

from semdiag.measuring.percentiles import percentile_rows
from semdiag.measuring.probe import EVERYWHERE, optional_tables
from semdiag.measuring.table import CORE, DEFAULTS, TABLES, read_parquet, rows_of
from semdiag.measuring.words import counted
from semdiag_files import MEBIBYTE, InputError, read_bytes, read_json
from semdiag_models import sha256

SUMS = "SHA256SUMS"


def write_sums(folder: Path, names: Collection[str]) -> None:
    """Write the SHA-256 of files to ``SHA256SUMS`` beside them; ``sha256sum -c`` can check it."""
    lines = [f"{sha256(folder / name)}  {name}\n" for name in sorted(names)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _check_sums(folder: Path, names: Collection[str]) -> None:
    """Refuse files that differ from those of :func:`write_sums`; without its file, check nothing."""
    if not (folder / SUMS).exists():
        return
    lines = read_bytes(folder / SUMS, MEBIBYTE).decode("utf-8", errors="replace").splitlines()
    recorded = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in sorted({*recorded, *names}):  # also tables of another version, which this one does not read
        here = Path(name).name == name and (folder / name).is_file()
        if not here or name not in recorded or sha256(folder / name) != recorded[name]:
            raise InputError(
                f"{folder / name} differs from what {SUMS} beside it recorded: it is damaged, missing or changed. "
                f"Restore it from a copy, or remove {SUMS} if the change is intended."
            )


class Measurements:
    """All measurements of one or several models.

    Every table is an attribute and has the column ``model`` (the path as the user named it). Layers, heads and
    positions count from 0; scores are in nats. The first five tables always exist; the others, described in
    :func:`~semdiag.measuring.probe.optional_tables`, are empty if they were not measured.

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
        tables: further tables by name; an unknown name is a TypeError.
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
        more = tables.keys() - {table.name for table in EVERYWHERE}
        unknown = sorted(more - optional_tables().keys()) if more else []  # questions are loaded when first needed
        if unknown:
            raise TypeError(
                f"Tables of measurements are {', '.join([*TABLES, *optional_tables()])}. Got {unknown[0]!r}."
            )
        self.models = models.assign(**{name: x for name, x in DEFAULTS.items() if name not in models})
        self.queries, self.loads, self.history, self.non_finite = queries, loads, history, non_finite
        self.provenance = {} if provenance is None else provenance
        self._tables = tables

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name.startswith("_") or name not in optional_tables():
            raise AttributeError(f"{type(self).__name__} has no table {name!r}")
        if name not in self._tables:
            self._tables[name] = optional_tables()[name].empty()
        return self._tables[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *optional_tables()]

    def __repr__(self) -> str:
        tables = {name: getattr(self, name) for name in (*TABLES, *optional_tables())}
        measured = [f"{name} ({counted(len(table), 'row')})" for name, table in tables.items() if len(table)]
        return f"Measurements of {counted(len(self.models), 'model')}: {', '.join(measured)}"

    def replace(self, provenance: dict[str, Any] | None = None, /, **tables: pd.DataFrame) -> Self:
        """Return these measurements with some tables, or the provenance, replaced or added."""
        known = {name: getattr(self, name) for name in TABLES} | self._tables | tables
        return type(self)(**known, provenance=self.provenance if provenance is None else provenance)

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
        tables = {}
        for name in (*TABLES, *optional_tables()):
            several = [getattr(part, name) for part in parts]
            filled = [table for table in several if len(table)] or several[:1]
            tables[name] = pd.concat(filled, ignore_index=True)
        first, *others = (part.provenance for part in parts)
        shared = {n: x for n, x in first.items() if all(n in other and other[n] == x for other in others)}
        return cls(**tables, provenance=shared)

    def save(self, folder: Path | str) -> None:
        """Write one parquet file per measured table, ``provenance.json``, and the ``SHA256SUMS`` of all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMS).unlink(missing_ok=True)
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
        """Read what :meth:`save` wrote; files and columns that are missing, damaged or wrong are an InputError."""
        folder = Path(folder)
        _check_sums(folder, _files(folder))
        try:
            tables = {name: read_parquet(folder / f"{name}.parquet") for name in TABLES}
            for name, declared in optional_tables().items():
                file = folder / f"{name}.parquet"
                tables[name] = read_parquet(file) if file.exists() else declared.empty()
            provenance = read_json(folder / "provenance.json")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{folder} does not hold saved measurements ({str(error).splitlines()[0]}). "
                "Make them with: semdiag report --keep-queries."
            ) from None
        for table in (*CORE, *optional_tables().values()):
            table.check(tables[table.name], str(folder / f"{table.name}.parquet"))
        _check_together(folder, tables, provenance)
        return cls(**tables, provenance=provenance)

    def of(self, model: str) -> Self:
        """Return the measurements of one model, a value of the column ``model``."""
        tables = {name: getattr(self, name) for name in (*TABLES, *optional_tables())}
        own = {name: rows_of(table, model) for name, table in tables.items()}
        return type(self)(**own, provenance=self.provenance)

    def _repr_html_(self) -> str:
        columns = ["layer", "head", "queries", "mean", "p50", "p95", "p100"]
        text = ""
        for row in self.models.itertuples():
            rows = self.queries[self.queries["model"] == row.model]
            table = percentile_rows(rows, "dispersion", "layer", "head").sort_values(["layer", "head"])
            text += f"<p>{escape(f'Semantic dispersion (nats), {row.task} {row.attention}: {row.model}')}</p>"
            text += table[columns].to_html(index=False, float_format="{:.3g}".format)
        return text


def _files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that a version of :meth:`Measurements.save` wrote."""
    names = (*(f"{name}.parquet" for name in (*TABLES, *optional_tables())), "provenance.json")
    return [name for name in names if (folder / name).exists()]


def _check_together(folder: Path, tables: dict[str, pd.DataFrame], provenance: Any) -> None:
    models = tables["models"]["model"]
    if not isinstance(provenance, dict):
        raise InputError(f"{folder / 'provenance.json'} must hold a JSON object.")
    if not len(models) or models.isna().any() or models.duplicated().any():
        raise InputError(f"{folder / 'models.parquet'} must list every model once, and at least one.")
    for name, table in tables.items():
        if not table["model"].isin(models).all():
            raise InputError(f"{folder / name}.parquet names a model that models.parquet does not list.")
